"""The source of a class of the lattice: the conventions of a point, as a readable file."""

from __future__ import annotations

from lattice.axes import CAUSAL_ALWAYS, CONFIGS, Point
from lattice.core import Masking, attend_lines, weigh_lines
from lattice.heads import (
    head_inputs,
    head_lines,
    head_methods,
    head_parameters,
    head_parts,
    head_state,
    window_inputs,
    window_lines,
)
from lattice.projections import Projections, projections_of
from lattice.words import INPUT_NAMES, mask_name, padding_name, words_of

IMPORTS = """\
import math

import torch
import torch.nn.functional as F
from torch import nn
"""
CHECK_MASK = '''\
def check_mask(mask, shape):
    """Raise unless a mask can be broadcast to the shape of the scores."""
    if mask.dim() {ranks} or any(m not in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1])):
        raise ValueError(f"mask {{tuple(mask.shape)}} cannot be broadcast to {{tuple(shape)}}")
'''
# What is wrong with the number of dimensions of a mask that is broadcast.
RANKS = {"broadcast": "> 4", "rank 4": "!= 4"}
CLASS_NAME = "Attention"
# The shapes of masks by name, and how each becomes (B, H, L, S).
SHAPES = {
    "b s": ("(B, S)", "{}[:, None, None]"),
    "l s": ("(L, S)", "{}"),
    "b l s": ("(B, L, S)", "{}[:, None]"),
    "b 1 1 s": ("(B, 1, 1, S)", "{}"),
    "b 1 l s": ("(B, 1, L, S)", "{}"),
    "(b h) l s": ("(B * self.n_heads, L, S)", "{}.view(B, self.n_heads, L, S)"),
    "b h l s": ("(B, self.n_heads, L, S)", "{}"),
    "l s b": ("(L, S, B)", "{}.permute(2, 0, 1)[:, None]"),
}


def source_of(point: Point) -> str:
    """Return the source of the file of a point, with the class `Attention`."""
    projections, masking = projections_of(point), masking_of(point)
    parts = [IMPORTS]
    if point.causal == "constructor":
        parts[0] = parts[0].replace("import math\n", "import math\nfrom functools import partial\n")
    if point.mask != "none" and point.shape in RANKS:
        parts.append(CHECK_MASK.format(ranks=RANKS[point.shape]))
    parts += projections.before + head_parts(point)
    parts.append(_class(point, projections, masking))
    text = "\n\n".join(parts).rstrip("\n") + "\n"
    if point.causal == "constructor":
        text += f"\n\nCausal = partial({CLASS_NAME}, causal=True)\n"
    if "math." not in text:
        text = text.replace("import math\n", "", 1).lstrip("\n")
    return text if "F." in text else text.replace("import torch.nn.functional as F\n", "")


def target_name(point: Point) -> str:
    """Return the name of what is judged in the file."""
    return "Causal" if point.causal == "constructor" else CLASS_NAME


def masking_of(point: Point) -> Masking:
    """Return what masks the scores."""
    sources = (
        (point.mask not in ("none", "additive"))
        + (point.padding != "none")
        + (point.causal != "none")
        + (point.window != "none")
    )
    always = point.causal in CAUSAL_ALWAYS or (
        sources > 0 and point.fill == "nan"
    )  # S = 0 is empty too
    always = always or point.window != "none"
    allowed = "absent"
    if sources:
        allowed = "present" if sources > 1 or always else "optional"
    return Masking(allowed, "optional" if point.mask == "additive" else "absent")


def _indent(lines: list[str], by: int) -> str:
    return "\n".join(" " * by + line if line else "" for line in lines)


def _class(point: Point, projections: Projections, masking: Masking) -> str:
    inputs = _inputs(point)
    named = dict(zip("qkv", INPUT_NAMES[point.inputs], strict=True))
    split = [line.format(**named) if "{" in line else line for line in projections.split]
    body = [
        *_fetched(point),
        *_transposed(point),
        *_checked(point),
        *_masked(point, masking),
        *split,
        *head_lines(point),
        *attend_lines(point, masking),
        *projections.merge,
        *_returned(point),
    ]
    methods = [
        f"class {CLASS_NAME}(nn.Module):",
        f"    def __init__(self, {_parameters(point)}):",
        "        super().__init__()",
        _indent([*_sizes(point), *projections.init, *_state(point)], 8),
        "",
        f"    def forward(self, {', '.join(inputs)}):",
        _indent(body, 8),
        "",
    ]
    if point.core != "sdpa":
        names = [
            "self",
            "scores",
            *masking.names,
            *(["dtype"] if point.softmax == "float32" else []),
        ]
        methods += [
            f"    def weigh({', '.join(names)}):",
            _indent(weigh_lines(point, masking), 8),
            "",
        ]
    given = dict(zip("qkv", ("query", "key", "value"), strict=True))
    split = [line.format(**given) if "{" in line else line for line in projections.split]
    methods += head_methods(point, split, projections)
    return "\n".join(methods)


def _parameters(point: Point) -> str:
    words = words_of(point)
    if point.words in CONFIGS:
        return "config"
    names = [words.d_model, words.n_heads]
    if point.words == "h_d_model":
        names.reverse()
    if point.heads == "wide":
        names.append(words.head_dim)
    if point.heads == "grouped":
        names.append(words.n_kv_heads)
    if point.tabled:
        names.append(words.max_length)
    if point.bias == "option":
        names.append(f"{words.bias}=True")
    if point.dropout != "none":
        names.append(f"{words.dropout}=0.0")
    if point.causal == "constructor":
        names.append("causal=False")
    return ", ".join([*names, *head_parameters(point)])


def _sizes(point: Point) -> list[str]:
    """Return the lines that check and keep the sizes, under one set of names."""
    words, lines = words_of(point), []
    prefix = "config." if point.words in CONFIGS else ""
    given = {"d_model": words.d_model, "n_heads": words.n_heads}
    if point.heads == "grouped":
        given["n_kv_heads"] = words.n_kv_heads
    if point.bias == "option":
        given["bias"] = words.bias
    if point.tabled:
        given["max_len"] = words.max_length
    if point.dropout != "none":
        given["dropout"] = words.dropout
    renamed = {ours: prefix + theirs for ours, theirs in given.items() if prefix + theirs != ours}
    lines += [f"{ours} = {theirs}" for ours, theirs in renamed.items()]
    if point.heads == "wide":
        lines += [
            f"if min(d_model, n_heads, {words.head_dim}) <= 0:",
            '    raise ValueError(f"sizes must be positive, not {d_model} and {n_heads}")',
            f"self.head_dim, inner = {words.head_dim}, n_heads * {words.head_dim}",
        ]
    else:
        lines += [
            "if d_model <= 0 or n_heads <= 0 or d_model % n_heads:",
            (
                '    raise ValueError(f"d_model ({d_model}) must be a positive multiple of n_heads'
                ' ({n_heads})")'
            ),
            "self.head_dim = d_model // n_heads",
        ]
    lines.append("self.d_model, self.n_heads = d_model, n_heads")
    if point.heads == "grouped":
        lines += [
            "if n_kv_heads <= 0 or n_heads % n_kv_heads:",
            (
                '    raise ValueError(f"n_heads ({n_heads}) must be a multiple of n_kv_heads'
                ' ({n_kv_heads})")'
            ),
            "self.n_kv_heads = n_kv_heads",
        ]
    return lines


def _state(point: Point) -> list[str]:
    """Return the lines of the constructor after the projections."""
    lines = []
    if point.scale == "multiplied":
        lines.append("self.scale = self.head_dim**-0.5")
    if point.dropout in ("weights", "both"):
        lines.append("self.dropout = nn.Dropout(dropout)")
    if point.dropout in ("output", "both"):
        lines.append("self.output_dropout = nn.Dropout(dropout)")
    if point.causal == "buffer":
        table = "torch.ones(max_len, max_len, dtype=torch.bool).tril()"
        lines.append(f'self.register_buffer("tril", {table}, persistent=False)')
    if point.causal == "constructor":
        lines.append("self.causal = causal")
    return lines + head_state(point)


def _inputs(point: Point) -> list[str]:
    """Return the parameters of `forward`."""
    names = list(dict.fromkeys(INPUT_NAMES[point.inputs]))
    if point.inputs == "value_key_query":
        names.reverse()
    if point.inputs == "query_key_default":
        names = ["query", "key=None", "value=None"]
    if point.inputs == "x_context":
        names = ["x", "context=None"]
    names += head_inputs(point)
    if point.mask != "none":
        names.append(f"{mask_name(point)}=None")
    if point.padding != "none":
        names.append(f"{padding_name(point)}=None")
    if point.causal.startswith("flag"):
        names.append("is_causal=False")
    names += window_inputs(point)
    return names + [f"{point.weights}=False"] * (
        point.weights in ("need_weights", "output_attentions")
    )


def _fetched(point: Point) -> list[str]:
    """Return the lines that give inputs their default."""
    if point.inputs == "x_context":
        return ["context = x if context is None else context"]
    if point.inputs == "query_key_default":
        return ["key = query if key is None else key", "value = key if value is None else value"]
    return []


def _transposed(point: Point) -> list[str]:
    if point.layout == "b l d":
        return []
    names = dict.fromkeys(INPUT_NAMES[point.inputs])
    return [f"{name} = {name}.transpose(0, 1)  # (L, B, D) -> (B, L, D)" for name in names]


def _checked(point: Point) -> list[str]:
    """Return the lines that check the shapes of the inputs, (B, L, D), and name their sizes."""
    query, key, value = INPUT_NAMES[point.inputs]
    if point.self_attention:
        return [
            f"if {query}.dim() != 3 or {query}.shape[-1] != self.d_model:",
            (
                f'    raise ValueError(f"{query} must have the width {{self.d_model}}, not'
                f' {{tuple({query}.shape)}}")'
            ),
            f"B, L, _ = {query}.shape",
            "S = L",
        ]
    same = "" if key == value else f" or {key}.shape != {value}.shape"
    return [
        f"if {query}.shape[-1] != self.d_model or {key}.shape[-1] != self.d_model{same}:",
        (
            f'    raise ValueError("{", ".join(dict.fromkeys((query, key, value)))} have shapes'
            ' that do not fit")'
        ),
        f"if {query}.shape[0] != {key}.shape[0]:",
        '    raise ValueError("the batch sizes differ")',
        f"(B, L, _), S = {query}.shape, {key}.shape[1]",
    ]


def _masked(point: Point, masking: Masking) -> list[str]:
    """Return the lines that check the masks, and set `allowed` and `bias`."""
    device = f"device={INPUT_NAMES[point.inputs][0]}.device"
    lines: list[str] = []
    joined = masking.allowed == "present"
    if point.causal in ("always", "buffer"):
        lines.append(f"allowed = {_triangle(point, device)}")
    elif joined:
        lines.append(f"allowed = torch.ones(L, S, dtype=torch.bool, {device})")
    elif masking.allowed == "optional":
        lines.append("allowed = None")
    if point.causal.startswith("flag") or point.causal == "constructor":
        flag = "self.causal" if point.causal == "constructor" else "is_causal"
        triangle = _triangle(point, device)
        lines += [f"if {flag}:", f"    allowed = {triangle}"]
    lines += window_lines(point, device)
    if masking.bias != "absent":
        lines.append("bias = None")
    if point.mask != "none":
        lines += _one_mask(point, mask_name(point), point.mask, point.shape, joined)
    if point.padding != "none":
        convention = f"numbers_{point.padding}" if point.mask == "numbers" else point.padding
        lines += _one_mask(point, padding_name(point), convention, "b s", joined)
    return lines


def _triangle(point: Point, device: str) -> str:
    if point.causal == "buffer":
        return "self.tril[:L, :S]"
    diagonal = "S - L" if point.causal == "flag_bottom_right" else ""
    return f"torch.ones(L, S, dtype=torch.bool, {device}).tril({diagonal})"


# How masks say which keys are allowed, and a comment on it.
ALLOWED = {
    "keep": ("{}", "True = attend"),
    "drop": ("~{}", "True = masked"),
    "numbers": ("{} != 0", "1 = attend, 0 = masked"),
    "numbers_keep": ("{} != 0", "1 = attend, 0 = masked"),
    "numbers_drop": ("{} == 0", "1 = masked, 0 = attend"),
}


def _one_mask(point: Point, name: str, convention: str, shape: str, joined: bool) -> list[str]:
    """Return the lines that check a mask and set `bias`, or `allowed` with what it already has."""
    query = INPUT_NAMES[point.inputs][0]
    wanted = "torch.bool" if convention in ("keep", "drop") else f"{query}.dtype"
    lines = [
        f"if {name}.dtype != {wanted}:",
        f'    raise TypeError(f"{name} has the dtype {{{name}.dtype}}")',
    ]
    if shape in RANKS:
        lines.append(f"check_mask({name}, (B, self.n_heads, L, S))")
        whole = name
    else:
        sizes, view = SHAPES[shape]
        lines.append(f"if {name}.shape != {sizes}:")
        lines.append(f'    raise ValueError(f"{name} has the shape {{tuple({name}.shape)}}")')
        whole = view.format(name)
    if convention == "additive":
        lines.append(f"bias = {whole}  # 0 or -inf, or any number")
    else:
        allowed, comment = ALLOWED[convention]
        allowed = allowed.format(whole)
        if joined:
            allowed = f"allowed & ({allowed})" if "= 0" in allowed else f"allowed & {allowed}"
        lines.append(f"allowed = {allowed}  # {comment}")
    return [f"if {name} is not None:", *(f"    {line}" for line in lines)]


def _returned(point: Point) -> list[str]:
    lines = []
    if point.dropout in ("output", "both"):
        lines.append("output = self.output_dropout(output)")
    if point.layout == "l b d":
        lines.append("output = output.transpose(0, 1)")
    if point.weights == "attribute":
        lines.append("self.attn = weights.detach()")
    if point.weights == "need_weights":
        return [*lines, "return output, weights if need_weights else None"]
    if point.weights == "output_attentions":
        return [*lines, "return (output, weights) if output_attentions else (output,)"]
    result = {
        "tuple": "output, weights",
        "mean": "output, weights.mean(1)",
    }
    return [*lines, f"return {result.get(point.weights, 'output')}"]
