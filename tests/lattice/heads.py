"""The source of what becomes of q and k: norms, rotations, and decoding, which continues these."""

from __future__ import annotations

from lattice.axes import Point
from lattice.core import scale_lines, score_line
from lattice.projections import Projections, widths_of

PARTS = {"whole": 1, "half": 2, "quarter": 4}
# Each column of a pair, from tables with a number for each pair.
TURNED = "first * cos {0} second * sin, second * cos {1} first * sin"
TURN_HALVES = '''\
def rotate(x, cos, sin):
    """Turn each column of the first half with one of the second; cos, sin: of each pair."""
    first, second = x.chunk(2, -1)
    return torch.cat([{turned}], -1)
'''
TURN_NEIGHBOURS = '''\
def rotate(x, cos, sin):
    """Turn neighbouring columns; cos, sin: of each pair."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([{turned}], -1).flatten(-2)
'''
TURN_COMPLEX = '''\
def rotate(x, freqs):
    """Turn neighbouring columns, as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs).flatten(-2)
'''
# From tables with a number for each column.
ROTATE_HALF = '''\
def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate(x, cos, sin):
    """Turn each column of the first half with one of the second."""
    return x * cos {sign} rotate_half(x) * sin
'''
ROTATE_EVERY_TWO = '''\
def rotate_every_two(x):
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def rotate(x, cos, sin):
    """Turn neighbouring columns."""
    return x * cos + rotate_every_two(x) * sin
'''
RMS_NORM = '''\
class RMSNorm(nn.Module):
    """Divides by the root mean square, and multiplies by {words}."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.{initial}(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * {weight}
'''


def head_parts(point: Point) -> list[str]:
    """Return the functions and classes that norms and rotations need."""
    parts = []
    if point.norm == "rms" and point.norm_weight == "scale" and point.eps != "dtype":
        parts.append(RMS_NORM.format(words="a weight", initial="ones", weight="self.weight"))
    if point.norm_weight == "offset":
        weight = "(1 + self.weight)"
        parts.append(RMS_NORM.format(words="1 + weight", initial="zeros", weight=weight))
    if point.rotary != "none":
        parts.append(_rotate(point))
    return parts


def _rotate(point: Point) -> str:
    backward = point.rotary == "half_backward"
    if point.tables in ("cos_sin", "pair"):
        if point.rotary == "interleaved":
            return ROTATE_EVERY_TWO
        return ROTATE_HALF.format(sign="-" if backward else "+")
    turned = TURNED.format(*("+-" if backward else "-+"))
    made = {"interleaved": TURN_NEIGHBOURS, "complex": TURN_COMPLEX}.get(point.rotary, TURN_HALVES)
    return made.format(turned=turned)


def head_parameters(point: Point) -> list[str]:
    """Return the parameters of the constructor."""
    names = []
    if point.base == "option":
        names.append("rope_theta=500000.0")
    if point.eps == "option":
        names.append("norm_eps=1e-5")
    if point.window == "built_count":
        names.append("sliding_window=None")
    if point.window == "built_left":
        names.append("window_left=-1")
    return names


def head_state(point: Point) -> list[str]:
    """Return the lines of the constructor."""
    lines = []
    if point.rotary != "none":
        lines += _rotary_state(point)
    if point.norm != "none" and point.norm_weight != "none":
        lines += _norm_state(point)
    if point.norm_weight == "none" and point.eps == "option":
        lines.append("self.norm_eps = norm_eps")
    if point.window == "built_count":
        lines.append("self.sliding_window = sliding_window")
    if point.window == "built_left":
        lines.append("self.window_left = window_left")
    return lines


def _rotary_state(point: Point) -> list[str]:
    parts = PARTS[point.part]
    lines = [
        f"if self.head_dim % {2 * parts}:",
        f'    raise ValueError(f"the width of a head must be a multiple of {2 * parts}")',
        f"self.rotary_dim = self.head_dim{f' // {parts}' if parts > 1 else ''}",
    ]
    if point.tables in ("cos_sin", "pair", "freqs"):
        return lines
    theta = "rope_theta" if point.base == "option" else "10000.0"
    lines.append(f"self.rope_theta = {theta}")
    if point.tables in ("inv_freq", "buffer"):
        lines += [
            "exponents = torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim",
            "inv_freq = 1.0 / self.rope_theta**exponents",
        ]
    if point.tables == "inv_freq":
        lines.append('self.register_buffer("inv_freq", inv_freq, persistent=False)')
    if point.tables == "buffer":
        lines.append("angles = torch.outer(torch.arange(max_len).float(), inv_freq)")
        if point.rotary == "complex":
            lines.append("freqs_cis = torch.polar(torch.ones_like(angles), angles)")
            lines.append('self.register_buffer("freqs_cis", freqs_cis, persistent=False)')
        else:
            lines.append('self.register_buffer("cos", angles.cos(), persistent=False)')
            lines.append('self.register_buffer("sin", angles.sin(), persistent=False)')
    return lines


def _norm_state(point: Point) -> list[str]:
    eps = {"option": "norm_eps", "dtype": ""}.get(point.eps, point.eps)
    lines = []
    for role, width in zip("qk", widths_of(point), strict=True):
        width = "self.head_dim" if point.over == "head" else width
        if point.norm == "layer":
            made = f"nn.LayerNorm({width}, eps={eps})"
        elif point.eps == "dtype":
            made = f"nn.RMSNorm({width})"
        else:
            made = f"RMSNorm({width}, {eps})"
        lines.append(f"self.{role}_norm = {made}")
    return lines


def head_inputs(point: Point) -> list[str]:
    """Return the parameters of `forward` after its inputs."""
    return {
        "cos_sin": ["cos", "sin"],
        "pair": ["position_embeddings"],
        "freqs": ["freqs_cis"],
        "places": ["position_ids"],
    }.get(point.tables, [])


def head_lines(point: Point, start: str = "") -> list[str]:
    """Return the lines that norm and rotate q and k.

    start: the first position, if it is not 0.
    """
    lines = []
    if point.rotary != "none":
        given = "".join(f", {name}" for name in [*_tables_of_calls(point), start] if name)
        lines.append(f"q, k = self.turn(q{given}), self.turn(k{given})")
        if point.tables == "pair":
            lines.insert(0, "cos, sin = (table.unsqueeze(1) for table in position_embeddings)")
    if point.norm != "none" and point.over == "head":
        line = f"q, k = {_normed(point, 'q')}, {_normed(point, 'k')}"
        lines.insert(0 if point.place == "before" else len(lines), line)
    return lines


def _tables_of_calls(point: Point) -> list[str]:
    if point.tables == "pair":
        return ["cos", "sin"]
    return head_inputs(point)


def _normed(point: Point, role: str) -> str:
    if point.norm_weight != "none":
        return f"self.{role}_norm({role})"
    function = "F.layer_norm" if point.norm == "layer" else "F.rms_norm"
    eps = {"option": ", eps=self.norm_eps", "dtype": ""}.get(point.eps, f", eps={point.eps}")
    return f"{function}({role}, (self.head_dim,){eps})"


def head_methods(point: Point, split: list[str], projections: Projections) -> list[str]:
    """Return the methods that turn heads, and that decode; split: sets q, k and v of new tokens."""
    methods = []
    if point.rotary != "none":
        methods += ["", *(f"    {line}" if line else "" for line in _turn(point))]
    if point.decode != "none":
        lines = _decode(point, split, projections)
        methods += ["", *(f"    {line}" if line else "" for line in lines)]
    return methods


def _turn(point: Point) -> list[str]:
    given = _tables_of_calls(point) or ["start=0"]
    lines = [
        f"def turn(self, x, {', '.join(given)}):",
        '    """Rotate heads (B, heads, N, width) by their positions."""',
        *(f"    {line}" for line in _table_lines(point)),
    ]
    tables = "freqs_cis" if point.rotary == "complex" else "cos, sin"
    if point.part == "whole":
        return [*lines, f"    return rotate(x, {tables})"]
    return [
        *lines,
        "    turned, kept = x[..., : self.rotary_dim], x[..., self.rotary_dim :]",
        f"    return torch.cat([rotate(turned, {tables}), kept], -1)",
    ]


def _table_lines(point: Point) -> list[str]:
    """Return the lines that set the tables of a call, unless it is given them."""
    if point.tables in ("cos_sin", "pair", "freqs"):
        return []
    if point.tables == "buffer":
        rows = "[start : start + x.shape[2]]"
        if point.rotary == "complex":
            return [f"freqs_cis = self.freqs_cis{rows}"]
        return [f"cos, sin = self.cos{rows}, self.sin{rows}"]
    lines = []
    if point.tables == "inv_freq":
        inv_freq = "self.inv_freq.to(x.dtype)"
    else:
        columns = "torch.arange(0, self.rotary_dim, 2, device=x.device).to(x.dtype)"
        lines.append(f"exponents = {columns} / self.rotary_dim")
        inv_freq = "self.rope_theta**-exponents"
    if point.tables == "places":
        lines.append(f"angles = position_ids[:, None, :, None].to(x.dtype) * {inv_freq}")
    else:
        lines.append("places = torch.arange(start, start + x.shape[2], device=x.device)")
        lines.append(f"angles = torch.outer(places.to(x.dtype), {inv_freq})")
    if point.rotary == "complex":
        return [*lines, "freqs_cis = torch.polar(torch.ones_like(angles), angles)"]
    return [*lines, "cos, sin = angles.cos(), angles.sin()"]


def _decode(point: Point, split: list[str], projections: Projections) -> list[str]:
    start = "start" if point.turns else ""
    lines = [
        "B, L, _ = query.shape",
        "S, start = L, 0 if cache is None else cache[0].shape[2]",
        *split,
        *head_lines(point, start),
        "if cache is not None:",
        "    k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)",
        "cache, S = (k, v), k.shape[2]",
        *scale_lines(point),
        score_line(point, "q @ k.transpose(-2, -1)"),
    ]
    if point.decode == "chunks":
        lines += [
            "earlier = torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L)",
            'scores = scores.masked_fill(~earlier, float("-inf"))',
        ]
    lines += ["context = scores.softmax(-1) @ v", *projections.merge, "return output, cache"]
    said = '"""Attend from new tokens to those before too; return also the new cache."""'
    return [
        "def decode(self, query, key, value, cache=None):",
        f"    {said}",
        *(f"    {line}" for line in lines),
    ]


def window_lines(point: Point, device: str) -> list[str]:
    """Return the lines that leave in `allowed` the keys of a window."""
    if point.window == "none":
        return []
    aligned = " - (S - L)" if point.causal == "flag_bottom_right" else ""
    places = f"torch.arange(S, {device}){aligned} - torch.arange(L, {device})[:, None]"
    distances = f"distances = {places}"
    if point.window == "call_pair":
        return [
            "left, right = window_size",
            distances,
            "if left >= 0:",
            "    allowed = allowed & (distances >= -left)",
            "if right >= 0:",
            "    allowed = allowed & (distances <= right)",
        ]
    if point.window == "built_left":
        name = "self.window_left"
        return [
            f"if {name} >= 0:",
            f"    {distances}",
            f"    allowed = allowed & (distances >= -{name})",
        ]
    name = "sliding_window" if point.window == "call_count" else "self.sliding_window"
    return [
        f"if {name} is not None:",
        f"    {distances}",
        f"    allowed = allowed & (distances <= 0) & (distances > -{name})",
    ]


def window_inputs(point: Point) -> list[str]:
    """Return the parameters of `forward` for a window."""
    return {"call_count": ["sliding_window=None"], "call_pair": ["window_size=(-1, -1)"]}.get(
        point.window, []
    )
