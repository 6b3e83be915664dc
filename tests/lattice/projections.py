"""The source of the projections: their layers, and q, k and v (B, H, L, d_k) from the inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lattice.axes import FUSED, Point
from lattice.words import LAYER_NAMES

Path = str | tuple[str, str] | None


@dataclass
class Projections:
    """The source of the projections of a class.

    before: classes that it needs. init: lines of the constructor. split: lines of `forward` that
    set q, k and v from the inputs {q}, {k} and {v}. merge: lines that set `output` from `context`,
    (B, H, L, d_k). paths: the argument `parameters` of `from_module`.
    """

    paths: dict[str, Path]
    before: list[str] = field(default_factory=list)
    init: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    merge: list[str] = field(default_factory=list)


CONV1D = '''\
class Conv1D(nn.Module):
    """A linear layer whose weight is transposed, as in GPT-2."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        x = x @ self.weight
        return x if self.bias is None else x + self.bias
'''
HEAD = """\
class Head(nn.Module):
    def __init__(self, d_model, head_dim{option}):
        super().__init__()
        self.q = nn.Linear(d_model, head_dim{q})
        self.k = nn.Linear(d_model, head_dim{k})
        self.v = nn.Linear(d_model, head_dim{v})

    def forward(self, query, key, value):
        return self.q(query), self.k(key), self.v(value)
"""
MERGED = "context = context.transpose(1, 2).reshape(B, L, {inner})"


def projections_of(point: Point) -> Projections:
    """Return the source of the projections of a point."""
    made = MAKERS.get(point.projection, _layers)(point)
    if point.over == "width":
        made.split = [_normed_as_one(line) for line in made.split]
    if point.norm_weight != "none" and point.norm != "none":
        made.paths |= {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight"}
    if point.heads == "grouped":
        made.split += [
            "k = k.repeat_interleave(self.n_heads // self.n_kv_heads, 1)",
            "v = v.repeat_interleave(self.n_heads // self.n_kv_heads, 1)",
        ]
    return made


def _normed_as_one(line: str) -> str:
    """Norm all heads of query or key before they are split."""
    return re.sub(r"(self\.[\w.\[\]]+\(\{([qk])\}\))", r"self.\2_norm(\1)", line)


def widths_of(point: Point) -> tuple[str, str]:
    """Return the code of the widths of all heads of queries, and of keys."""
    return _inner(point), _kv(point)[1]


def bias_of(point: Point, role: str) -> str:
    """Return the code of whether a projection has a bias."""
    if point.bias in ("all", "option", "none"):
        return {"all": "True", "option": "bias", "none": "False"}[point.bias]
    return str(role in point.bias)


def _bias(point: Point, role: str) -> str:
    """Return the argument `bias` of a layer, empty where the default will do."""
    code = bias_of(point, role)
    return {"True": "", "False": ", bias=False"}.get(code, f", bias={code}")


def _inner(point: Point) -> str:
    return "inner" if point.heads == "wide" else "d_model"


def _kv(point: Point) -> tuple[str, str]:
    """Return the number of key/value heads, and their width together."""
    if point.heads == "grouped":
        return "self.n_kv_heads", "n_kv_heads * self.head_dim"
    return "self.n_heads", _inner(point)


def _merged(point: Point) -> str:
    return MERGED.format(inner="self.n_heads * self.head_dim")


def _output(point: Point, made: Projections, name: str) -> None:
    made.init.append(f"self.{name} = nn.Linear({_inner(point)}, d_model{_bias(point, 'o')})")
    made.merge += [_merged(point), f"output = self.{name}(context)"]
    made.paths["w_o"] = name


def _split(role: str, of: str, heads: str) -> str:
    length = "L" if role == "q" else "S"
    return f"{role} = {of}.view(B, {length}, {heads}, self.head_dim).transpose(1, 2)"


def _layers(point: Point) -> Projections:
    names = LAYER_NAMES[point.projection]
    made = Projections({f"w_{role}": name for role, name in zip("qkvo", names, strict=True)})
    kv_heads, kv_width = _kv(point)
    for role, name in zip("qkv", names, strict=False):
        width, heads = (_inner(point), "self.n_heads") if role == "q" else (kv_width, kv_heads)
        made.init.append(f"self.{name} = nn.Linear(d_model, {width}{_bias(point, role)})")
        made.split.append(_split(role, f"self.{name}({{{role}}})", heads))
    _output(point, made, names[3])
    return made


def _linears(point: Point) -> Projections:
    made = Projections({f"w_{role}": f"linears.{index}" for index, role in enumerate("qkvo")})
    made.init.append(
        f"self.linears = nn.ModuleList([nn.Linear(d_model, d_model{_bias(point, 'q')}) for _ in"
        " range(4)])"
    )
    made.split += [
        _split(role, f"self.linears[{index}]({{{role}}})", "self.n_heads")
        for index, role in enumerate("qkv")
    ]
    made.merge += [_merged(point), "output = self.linears[3](context)"]
    return made


STACKED = {
    "qkv": ("qkv", "view(B, L, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)"),
    "qkv_by_head": ("Wqkv", "view(B, L, self.n_heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)"),
    "qkv_interleaved": (
        "to_qkv",
        "view(B, L, self.n_heads, self.head_dim, 3).permute(4, 0, 2, 1, 3)",
    ),
}
STACKED_PATTERN = {
    "qkv_by_head": "(r h e) d -> (h r e) d",
    "qkv_interleaved": "(r h e) d -> (h e r) d",
}


def _qkv(point: Point) -> Projections:
    name, split = STACKED[point.projection]
    pattern = STACKED_PATTERN.get(point.projection)
    made = Projections({"w_qkv": (name, pattern) if pattern else name})
    if point.bias == "qvo":
        made.paths = {"w_qkv": f"{name}.weight", "b_q": "q_bias", "b_v": "v_bias"}
        made.init += [
            f"self.{name} = nn.Linear(d_model, 3 * {_inner(point)}, bias=False)",
            f"self.q_bias = nn.Parameter(torch.zeros({_inner(point)}))",
            f"self.v_bias = nn.Parameter(torch.zeros({_inner(point)}))",
        ]
        made.split.append(
            "b_qkv = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])"
        )
        made.split.append(f"q, k, v = F.linear({{q}}, self.{name}.weight, b_qkv).{split}")
    else:
        made.init.append(
            f"self.{name} = nn.Linear(d_model, 3 * {_inner(point)}{_bias(point, 'q')})"
        )
        made.split.append(f"q, k, v = self.{name}({{q}}).{split}")
    _output(point, made, "proj")
    return made


def _q_and_kv(point: Point) -> Projections:
    by_head = point.projection == "kv_by_head"
    made = Projections(
        {"w_q": "to_q", "w_kv": ("to_kv", "(r h e) d -> (h r e) d") if by_head else "to_kv"}
    )
    kv_heads, kv_width = _kv(point)
    made.init += [
        f"self.to_q = nn.Linear(d_model, {_inner(point)}{_bias(point, 'q')})",
        f"self.to_kv = nn.Linear(d_model, 2 * {kv_width}{_bias(point, 'k')})",
    ]
    axes = (
        f"{kv_heads}, 2, self.head_dim).permute(3, 0, 2, 1, 4)"
        if by_head
        else (f"2, {kv_heads}, self.head_dim).permute(2, 0, 3, 1, 4)")
    )
    made.split += [
        _split("q", "self.to_q({q})", "self.n_heads"),
        f"k, v = self.to_kv({{k}}).view(B, S, {axes}",
    ]
    _output(point, made, "to_out")
    return made


def _heads(point: Point) -> Projections:
    made = Projections({f"w_{role}": f"heads.*.{role}" for role in "qkv"})
    option = ", bias=True" if point.bias == "option" else ""
    biases = {role: _bias(point, role) for role in "qkv"}
    made.before.append(HEAD.format(option=option, **biases))
    given = ", bias" if option else ""
    made.init.append(
        f"self.heads = nn.ModuleList([Head(d_model, self.head_dim{given}) for _ in"
        " range(self.n_heads)])"
    )
    made.split += [
        "parts = [head({q}, {k}, {v}) for head in self.heads]",
        "q, k, v = (torch.stack(part, 1) for part in zip(*parts))",
    ]
    _output(point, made, "out")
    return made


def _role_lists(point: Point) -> Projections:
    names = {"q": "queries", "k": "keys", "v": "values"}
    made = Projections({f"w_{role}": name for role, name in names.items()})
    for role, name in names.items():
        layer = f"nn.Linear(d_model, self.head_dim{_bias(point, role)})"
        made.init.append(f"self.{name} = nn.ModuleList([{layer} for _ in range(self.n_heads)])")
        made.split.append(f"{role} = torch.stack([layer({{{role}}}) for layer in self.{name}], 1)")
    _output(point, made, "unify_heads")
    return made


def _parameter_bias(point: Point, made: Projections, role: str, name: str, shape: str) -> list[str]:
    """Make a bias that is a parameter; return the lines that add it to the variable of its role."""
    code, result = bias_of(point, role), "output" if role == "o" else role
    if code == "False":
        return []
    made.init.append(
        f"self.{name} ="
        f" nn.Parameter(torch.zeros({shape})){' if bias else None' if code == 'bias' else ''}"
    )
    made.paths[f"b_{role}"] = name
    added = f"{result} = {result} + self.{name}"
    return [f"if self.{name} is not None:", f"    {added}"] if code == "bias" else [added]


def _matrices(point: Point) -> Projections:
    made = Projections({})
    for role in "qkv":
        made.init.append(
            f"self.W_{role} = nn.Parameter(torch.randn(d_model, {_inner(point)}) / d_model**0.5)"
        )
        made.paths[f"w_{role}"] = (f"W_{role}", "o i -> i o")
        made.split.append(f"{role} = {{{role}}} @ self.W_{role}")
        made.split += _parameter_bias(point, made, role, f"b_{role}", _inner(point))
        made.split.append(_split(role, role, "self.n_heads"))
    made.init.append(
        f"self.W_o = nn.Parameter(torch.randn({_inner(point)}, d_model) / d_model**0.5)"
    )
    made.paths["w_o"] = ("W_o", "o i -> i o")
    made.merge += [
        _merged(point),
        "output = context @ self.W_o",
        *_parameter_bias(point, made, "o", "b_o", "d_model"),
    ]
    return made


def _tensors(point: Point) -> Projections:
    made = Projections({})
    for role in "qkv":
        name = f"W_{role.upper()}"
        made.init.append(
            f"self.{name} = nn.Parameter(torch.randn(n_heads, d_model, self.head_dim) /"
            " d_model**0.5)"
        )
        made.paths[f"w_{role}"] = (name, "(h e) d -> h d e")
        made.split.append(f'{role} = torch.einsum("bld,hde->bhle", {{{role}}}, self.{name})')
        lines = _parameter_bias(point, made, role, f"b_{role.upper()}", "n_heads, 1, self.head_dim")
        if lines:
            made.paths[f"b_{role}"] = (f"b_{role.upper()}", "(h e) -> h 1 e")
        made.split += lines
    made.init.append(
        "self.W_O = nn.Parameter(torch.randn(n_heads, self.head_dim, d_model) / d_model**0.5)"
    )
    made.paths["w_o"] = ("W_O", "d (h e) -> h e d")
    made.merge.append('output = torch.einsum("bhle,hed->bld", context, self.W_O)')
    made.merge += _parameter_bias(point, made, "o", "b_O", "d_model")
    return made


def _conv1d(point: Point) -> Projections:
    bias = _bias(point, "q")
    made = Projections(
        {"w_qkv": ("c_attn", "o i -> i o"), "w_o": ("c_proj", "o i -> i o")}, [CONV1D]
    )
    made.init += [
        f"self.c_attn = Conv1D(d_model, 3 * d_model{bias})",
        f"self.c_proj = Conv1D(d_model, d_model{bias})",
    ]
    made.split.append("q, k, v = self.c_attn({q}).chunk(3, -1)")
    made.split += [_split(role, role, "self.n_heads").replace("S", "L") for role in "qkv"]
    made.merge += [_merged(point), "output = self.c_proj(context)"]
    return made


def _in_proj(point: Point) -> Projections:
    made = Projections({"w_qkv": "in_proj_weight"})
    made.init.append(
        "self.in_proj_weight = nn.Parameter(torch.randn(3 * d_model, d_model) / d_model**0.5)"
    )
    code = bias_of(point, "q")
    given = ""
    made.split.append("w_q, w_k, w_v = self.in_proj_weight.chunk(3)")
    if code != "False":
        value = "nn.Parameter(torch.zeros(3 * d_model))"
        made.init.append(
            f"self.in_proj_bias = {value}{' if bias else None' if code == 'bias' else ''}"
        )
        made.paths["b_qkv"] = "in_proj_bias"
        if code == "bias":
            made.split += ["b_q = b_k = b_v = None", "if self.in_proj_bias is not None:"]
            made.split.append("    b_q, b_k, b_v = self.in_proj_bias.chunk(3)")
        else:
            made.split.append("b_q, b_k, b_v = self.in_proj_bias.chunk(3)")
        given = ", b_{}"
    for role in "qkv":
        made.split.append(
            _split(role, f"F.linear({{{role}}}, w_{role}{given.format(role)})", "self.n_heads")
        )
    _output(point, made, "out_proj")
    return made


MAKERS: dict[str, Callable[[Point], Projections]] = {
    "linears": _linears,
    "qkv": _qkv,
    "qkv_by_head": _qkv,
    "qkv_interleaved": _qkv,
    "q_kv": _q_and_kv,
    "kv_by_head": _q_and_kv,
    "heads": _heads,
    "role_lists": _role_lists,
    "matrices": _matrices,
    "tensors": _tensors,
    "conv1d": _conv1d,
    "in_proj": _in_proj,
}
assert set(FUSED) <= set(MAKERS)
