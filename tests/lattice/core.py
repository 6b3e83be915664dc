"""The source of the attention core: `context`, (B, H, L, d_k), and `weights` from q, k, v and what masks them."""

from __future__ import annotations

from dataclasses import dataclass

from lattice.axes import FINITE, Point

FILLS = {
    "lowest": "torch.finfo(scores.dtype).min",
    "lowest_times": "torch.finfo(scores.dtype).min",
    "1e9": "-1e9",
    "1e9_times": "-1e9",
}


@dataclass(frozen=True)
class Masking:
    """What masks the scores in `forward`: the variables `allowed` (boolean) and `bias` (added), each of which is
    "absent", "optional" (it may be None) or "present".
    """

    allowed: str
    bias: str

    @property
    def names(self) -> list[str]:
        """The variables that are there."""
        return [name for name in ("allowed", "bias") if getattr(self, name) != "absent"]


def _guarded(state: str, name: str, lines: list[str]) -> list[str]:
    """Put lines behind a condition where a variable may be None."""
    return [f"if {name} is not None:", *(f"    {line}" for line in lines)] if state == "optional" else lines


def weigh_lines(point: Point, masking: Masking) -> list[str]:
    """Return the lines that make `weights` of `scores`."""
    lines, single = [], point.softmax == "float32"
    if single:
        lines.append("scores = scores.float()")
    if masking.bias != "absent":
        lines += _guarded(masking.bias, "bias", ["scores = scores + bias"])
    fill = FILLS.get(point.fill, 'float("-inf")')
    if masking.allowed != "absent":
        lines += _guarded(masking.allowed, "allowed", [f"scores = scores.masked_fill(~allowed, {fill})"])
    saved = point.fill in ("rescued", "spread", "nan")
    if saved:
        lines.append('empty = (scores == float("-inf")).all(-1, keepdim=True)  # rows without a key')
        lines.append("scores = scores.masked_fill(empty, 0.0)")
    if point.core == "logsumexp":
        lines.append("weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()")
    else:
        lines.append("weights = scores.softmax(-1)")
    if point.fill in ("rescued", "nan"):
        lines.append("weights = weights.masked_fill(empty, 0.0)")
    if point.fill in ("lowest_times", "1e9_times"):
        lines += _guarded(masking.allowed, "allowed", ["weights = weights * allowed"])
    return [*lines, "return weights.to(dtype)" if single else "return weights"]


def attend_lines(point: Point, masking: Masking) -> list[str]:
    """Return the lines of `forward` that set `context` and `weights`."""
    lines = _scaled(point)
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
    lines = ["seen = torch.ones(L, S, dtype=torch.bool, device=q.device)"]
    if masking.allowed != "absent":
        lines += _guarded(masking.allowed, "allowed", ["seen = seen & allowed"])
    if masking.bias != "absent":
        lines += _guarded(masking.bias, "bias", ['seen = seen & (bias != float("-inf"))'])
    return [*lines, "if not seen.any(-1).all():", '    raise ValueError("a query has no key to attend to")']


def _scaled(point: Point) -> list[str]:
    if point.scale == "query":
        return ["q = q * self.head_dim**-0.5"]
    if point.scale == "both":
        return ["q, k = q * self.head_dim**-0.25, k * self.head_dim**-0.25"]
    return []


def _scale(point: Point, product: str) -> str:
    if point.scale == "divided":
        return f"{product} / math.sqrt(self.head_dim)"
    return f"{product} * self.scale" if point.scale == "multiplied" else product


def _weigh(point: Point, masking: Masking, names: list[str] | None = None) -> str:
    return f"self.weigh({', '.join(['scores', *(names or masking.names), *(['q.dtype'] if point.softmax == 'float32' else [])])})"


def _dropped(point: Point) -> str:
    return "self.dropout(weights)" if point.dropout in ("weights", "both") else "weights"


def _whole(point: Point, masking: Masking) -> list[str]:
    used = _dropped(point)
    flat = [f"q.reshape(B * self.n_heads, L, self.head_dim)", "k.reshape(B * self.n_heads, S, self.head_dim)"]
    value = "v.reshape(B * self.n_heads, S, self.head_dim)"
    if point.core == "einsum":
        scores = ["scores = " + _scale(point, 'torch.einsum("bhid,bhjd->bhij", q, k)')]
        context = f'context = torch.einsum("bhij,bhjd->bhid", {used}, v)'
    elif point.core == "bmm":
        product = f"torch.bmm({flat[0]}, {flat[1]}.transpose(1, 2))"
        scores = [f"scores = {_scale(point, product)}", "scores = scores.view(B, self.n_heads, L, S)"]
        context = f"context = torch.bmm({used}.flatten(0, 1), {value}).view(B, self.n_heads, L, self.head_dim)"
    elif point.core == "baddbmm":
        alpha = {"divided": ", alpha=1 / math.sqrt(self.head_dim)", "multiplied": ", alpha=self.scale"}.get(point.scale, "")
        scores = [
            "blank = torch.empty(B * self.n_heads, L, S, dtype=q.dtype, device=q.device)",
            f"scores = torch.baddbmm(blank, {flat[0]}, {flat[1]}.mT, beta=0{alpha})",
            "scores = scores.view(B, self.n_heads, L, S)",
        ]
        context = f"context = torch.bmm({used}.flatten(0, 1), {value}).view(B, self.n_heads, L, self.head_dim)"
    else:
        product = "q @ k.transpose(-2, -1)" if point.scale in ("query", "both", "unscaled") else "(q @ k.transpose(-2, -1))"
        scores, context = [f"scores = {_scale(point, product)}"], f"context = {used} @ v"
    return [*scores, f"weights = {_weigh(point, masking)}", context]


def _parts(masking: Masking, index: str) -> tuple[list[str], list[str], list[str]]:
    """Return the lines that expand what masks the scores, those that take a part of it, and the names of the part."""
    expand, take, names = [], [], []
    for name in masking.names:
        state = getattr(masking, name)
        expand += _guarded(state, name, [f"{name} = {name}.expand(B, self.n_heads, L, S)"])
        part = f"{name}[{index}]"
        names.append(f"None if {name} is None else {part}" if state == "optional" else part)
    return expand, take, names


def _loop(point: Point, masking: Masking) -> list[str]:
    expand, _, names = _parts(masking, ":, head")
    return [
        *expand,
        "contexts, weights = [], []",
        "for head in range(self.n_heads):",
        f"    scores = {_scale(point, 'q[:, head] @ k[:, head].mT' if point.scale in ('query', 'both', 'unscaled') else '(q[:, head] @ k[:, head].mT)')}",
        f"    weights.append({_weigh(point, masking, names)})",
        f"    contexts.append({_dropped(point).replace('weights', 'weights[-1]')} @ v[:, head])",
        "context, weights = torch.stack(contexts, 1), torch.stack(weights, 1)",
    ]


def _chunked(point: Point, masking: Masking) -> list[str]:
    expand, _, names = _parts(masking, ":, :, rows")
    return [
        *expand,
        "contexts, weights = [], []",
        "for start in range(0, max(L, 1), 16):  # 16 queries at a time",
        "    rows = slice(start, start + 16)",
        f"    scores = {_scale(point, 'q[:, :, rows] @ k.mT' if point.scale in ('query', 'both', 'unscaled') else '(q[:, :, rows] @ k.mT)')}",
        f"    weights.append({_weigh(point, masking, names)})",
        f"    contexts.append({_dropped(point).replace('weights', 'weights[-1]')} @ v)",
        "context, weights = torch.cat(contexts, 2), torch.cat(weights, 2)",
    ]


def _sdpa(point: Point, masking: Masking) -> list[str]:
    options, lines, mask = [], [], None
    if masking.allowed != "absent" and masking.bias != "absent":
        lines += ["if bias is None:", "    bias = torch.zeros(B, 1, L, S, dtype=q.dtype, device=q.device)"]
        hidden = ['bias = bias.masked_fill(~allowed, float("-inf"))']
        lines = [*lines, *hidden] if masking.allowed == "present" else [
            "if allowed is not None:",
            "    bias = torch.zeros(L, S, dtype=q.dtype, device=q.device) if bias is None else bias",
            *(f"    {line}" for line in hidden),
        ]
        mask = "bias"
    else:
        mask = masking.names[0] if masking.names else None
    if mask:
        options.append(f"attn_mask={mask}")
    if point.dropout in ("weights", "both"):
        options.append("dropout_p=self.dropout.p if self.training else 0.0")
    scale = {"query": "1.0", "both": "1.0", "unscaled": "1.0", "multiplied": "self.scale"}.get(point.scale)
    options += [f"scale={scale}"] if scale else []
    return [*lines, f"context = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *options])})"]


def is_finite(point: Point) -> bool:
    """Return whether masked scores are set to a finite number."""
    return point.fill in FINITE
