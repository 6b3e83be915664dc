"""The source of the core: `context` (B, H, L, d_k) and `weights`, from q, k, v and masks."""

from __future__ import annotations

from dataclasses import dataclass

from lattice.axes import Point

FILLS = {
    "lowest": "torch.finfo(scores.dtype).min",
    "lowest_times": "torch.finfo(scores.dtype).min",
    "1e9": "-1e9",
    "1e9_times": "-1e9",
}


@dataclass(frozen=True)
class Masking:
    """What masks the scores in `forward`: the variables `allowed` (boolean) and `bias` (added).

    Each is "absent", "optional" (it may be None) or "present".
    """

    allowed: str
    bias: str

    @property
    def names(self) -> list[str]:
        """The variables that are there."""
        return [name for name in ("allowed", "bias") if getattr(self, name) != "absent"]


def _guarded(state: str, name: str, lines: list[str]) -> list[str]:
    """Put lines behind a condition where a variable may be None."""
    return (
        [f"if {name} is not None:", *(f"    {line}" for line in lines)]
        if state == "optional"
        else lines
    )


def weigh_lines(point: Point, masking: Masking) -> list[str]:
    """Return the lines that make `weights` of `scores`."""
    lines = []
    if point.softmax == "float32":
        lines.append("scores = scores.float()")
    if masking.bias != "absent":
        lines += _guarded(masking.bias, "bias", ["scores = scores + bias"])
    if masking.allowed != "absent":
        fill = FILLS.get(point.fill, 'float("-inf")')
        lines += _guarded(
            masking.allowed, "allowed", [f"scores = scores.masked_fill(~allowed, {fill})"]
        )
    if point.fill in ("rescued", "spread", "nan"):
        lines.append(
            'empty = (scores == float("-inf")).all(-1, keepdim=True)  # rows without a key'
        )
        lines.append("scores = scores.masked_fill(empty, 0.0)")
    if point.core == "logsumexp":
        lines.append("weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()")
    else:
        lines.append("weights = scores.softmax(-1)")
    if point.fill in ("rescued", "nan"):
        lines.append("weights = weights.masked_fill(empty, 0.0)")
    if point.fill in ("lowest_times", "1e9_times"):
        lines += _guarded(masking.allowed, "allowed", ["weights = weights * allowed"])
    return [*lines, "return weights.to(dtype)" if point.softmax == "float32" else "return weights"]


def attend_lines(point: Point, masking: Masking) -> list[str]:
    """Return the lines of `forward` that set `context` and `weights`."""
    lines = scale_lines(point)
    if point.core == "sdpa":
        return lines + _sdpa(point, masking)
    if point.fill == "raises":
        lines += _refuse_empty(masking)
    lines += {"loop": _loop, "chunked": _chunked}.get(point.core, _whole)(point, masking)
    if point.fill == "nan":
        lines += _guarded(
            masking.allowed,
            "allowed",
            [
                "empty = ~allowed.any(-1, keepdim=True)",
                'context = context.masked_fill(empty, float("nan"))  # nothing to attend to',
                'weights = weights.masked_fill(empty, float("nan"))',
            ],
        )
    return lines


def _refuse_empty(masking: Masking) -> list[str]:
    """Return the lines that raise for a row without a key."""
    seen = {"allowed": "allowed", "bias": '(bias != float("-inf"))'}
    raises = '    raise ValueError("a query has no key to attend to")'
    if len(masking.names) == 1:
        (name,) = masking.names
        return _guarded(
            getattr(masking, name), name, [f"if not {seen[name]}.any(-1).all():", raises]
        )
    lines = ["seen = torch.ones(L, S, dtype=torch.bool, device=q.device)"]
    for name in masking.names:
        lines += _guarded(getattr(masking, name), name, [f"seen = seen & {seen[name]}"])
    return [*lines, "if not seen.any(-1).all():", raises]


def scale_lines(point: Point) -> list[str]:
    """Return the lines that scale q and k before their product."""
    if point.scale == "query":
        return ["q = q * self.head_dim**-0.5"]
    if point.scale == "both":
        return ["q, k = q * self.head_dim**-0.25, k * self.head_dim**-0.25"]
    return []


def score_line(point: Point, product: str) -> str:
    """Return the line that makes the scores of a product."""
    product = (
        f"({product})" if " @ " in product and point.scale in ("divided", "multiplied") else product
    )
    scaled = {
        "divided": f"{product} / math.sqrt(self.head_dim)",
        "multiplied": f"{product} * self.scale",
    }
    return f"scores = {scaled.get(point.scale, product)}"


def _weigh(point: Point, arguments: list[str]) -> str:
    dtype = []
    if point.softmax == "float32":
        dtype.append("q.dtype")
    return f"self.weigh({', '.join(['scores', *arguments, *dtype])})"


def _dropped(point: Point, weights: str = "weights") -> str:
    return f"self.dropout({weights})" if point.dropout in ("weights", "both") else weights


def _whole(point: Point, masking: Masking) -> list[str]:
    """Return the lines of all heads and queries at once."""
    weights = f"weights = {_weigh(point, masking.names)}"
    if point.core in ("bmm", "baddbmm"):
        return [
            *FLAT,
            *_flat_scores(point),
            "scores = scores.view(B, self.n_heads, L, S)",
            weights,
            *_flat_context(point),
        ]
    if point.core == "einsum":
        product, context = (
            'torch.einsum("bhid,bhjd->bhij", q, k)',
            f'torch.einsum("bhij,bhjd->bhid", {_dropped(point)}, v)',
        )
    else:
        product, context = "q @ k.transpose(-2, -1)", f"{_dropped(point)} @ v"
    return [score_line(point, product), weights, f"context = {context}"]


# q, k and v with batch and heads as one axis.
FLAT = [
    "q = q.reshape(B * self.n_heads, L, self.head_dim)",
    "k = k.reshape(B * self.n_heads, S, self.head_dim)",
    "v = v.reshape(B * self.n_heads, S, self.head_dim)",
]


def _flat_scores(point: Point) -> list[str]:
    if point.core == "bmm":
        return [score_line(point, "torch.bmm(q, k.transpose(1, 2))")]
    alphas = {"divided": ", alpha=1 / math.sqrt(self.head_dim)", "multiplied": ", alpha=self.scale"}
    return [
        "blank = torch.empty(B * self.n_heads, L, S, dtype=q.dtype, device=q.device)",
        f"scores = torch.baddbmm(blank, q, k.transpose(1, 2), beta=0{alphas.get(point.scale, '')})",
    ]


def _flat_context(point: Point) -> list[str]:
    return [
        f"context = torch.bmm({_dropped(point)}.flatten(0, 1), v)",
        "context = context.view(B, self.n_heads, L, self.head_dim)",
    ]


def _in_parts(
    point: Point, masking: Masking, loop: list[str], index: str, joined: str
) -> list[str]:
    """Return the lines that take the scores in parts.

    loop: its first lines. index: of a part of the scores. joined: the function and the axis that
    join the parts.
    """
    expand, parts = [], []
    for name in masking.names:
        state = getattr(masking, name)
        expand += _guarded(state, name, [f"{name} = {name}.expand(B, self.n_heads, L, S)"])
        part = f"{name}[{index}]"
        parts.append(f"None if {name} is None else {part}" if state == "optional" else part)
    keys = ":, head" if "head" in index else ":"
    rows = index if "head" in index else index.removesuffix(", :")
    product = f"q[{rows}] @ k[{keys}].transpose(-2, -1)".replace("[:]", "")
    function, axis = joined.split()
    return [
        *expand,
        "contexts, weights = [], []",
        *loop,
        f"    {score_line(point, product)}",
        f"    weights.append({_weigh(point, parts)})",
        f"    contexts.append({_dropped(point, 'weights[-1]')} @ v[{keys}])".replace("[:]", ""),
        f"context, weights = torch.{function}(contexts, {axis}), torch.{function}(weights, {axis})",
    ]


def _loop(point: Point, masking: Masking) -> list[str]:
    return _in_parts(point, masking, ["for head in range(self.n_heads):"], ":, head", "stack 1")


def _chunked(point: Point, masking: Masking) -> list[str]:
    loop = [
        "for start in range(0, max(L, 1), 16):  # 16 queries at a time",
        "    rows = slice(start, start + 16)",
    ]
    return _in_parts(point, masking, loop, ":, :, rows", "cat 2")


def _sdpa(point: Point, masking: Masking) -> list[str]:
    """Return the call of the kernel of torch, which takes one mask."""
    lines = _one_mask(masking) if len(masking.names) == 2 else []
    options = []
    if masking.names:
        options.append(f"attn_mask={masking.names[-1]}")
    if point.dropout in ("weights", "both"):
        options.append("dropout_p=self.dropout.p if self.training else 0.0")
    scale = {"query": "1.0", "both": "1.0", "unscaled": "1.0", "multiplied": "self.scale"}.get(
        point.scale
    )
    if scale:
        options.append(f"scale={scale}")
    return [
        *lines,
        f"context = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *options])})",
    ]


def _one_mask(masking: Masking) -> list[str]:
    """Return the lines that hide in `bias` what `allowed` hides."""
    blank = "bias = torch.zeros(L, S, dtype=q.dtype, device=q.device) if bias is None else bias"
    lines = [blank, 'bias = bias.masked_fill(~allowed, float("-inf"))']
    return _guarded(masking.allowed, "allowed", lines)
