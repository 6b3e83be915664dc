"""Time, memory and share of the machine's rate against sequence length, as an SVG picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import chain
from math import ceil, floor, log10
from statistics import median

from mha.conformance.benchmarks.compare import Timing
from mha.conformance.reports.text import visible_name

# In pixels: of a panel, the margins before the first, and the space between two.
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 60, 40, 70
COLORS = ("#2456b3", "#b3261e", "#1b6e3c", "#8a5a00", "#6a3fa0", "#00707a", "#a02070", "#555")
# Of the marks, so that lines differ in more than colour.
SHAPES = ("m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m-5 0l5 -5l5 5l-5 5z", "m-5 -1h10v3h-10z")
TITLE = "Time, memory and share of the machine's rate against sequence length"
SHARE = "share of the rate of matrix products"
# The share is drawn on a linear scale from 0, the others on a logarithmic one.
PANELS: dict[str, Callable[[Timing], float]] = {
    "time in ms": lambda timing: 1e3 * median(timing.seconds),
    "peak memory in MiB": lambda timing: timing.memory / 2**20,
    SHARE: lambda timing: timing.share,
}


def to_svg(timings: Sequence[Timing]) -> str:
    """Return a picture with `PANELS` side by side; implementations differ in colour and mark."""
    timed: dict[str, list[Timing]] = {}
    for timing in timings:
        if not timing.skip_reason:
            timed.setdefault(timing.implementation, []).append(timing)
    width, bottom = LEFT + len(PANELS) * (WIDTH + GAP), TOP + HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 20 * len(timed)}"'
        f' role="img" aria-label="{escape(TITLE)}" font-family="sans-serif" font-size="12"><rect'
        ' width="100%" height="100%" fill="#fff"/>'
    ]
    if not timed:
        return f'{parts[0]}<text x="{LEFT}" y="{TOP}">Nothing was timed.</text></svg>\n'
    for number, title in enumerate(PANELS):
        parts += _panel(list(timed.values()), title, LEFT + number * (WIDTH + GAP))
    for number, name in enumerate(timed):
        y = bottom + 20 * number
        label = escape(visible_name(name))
        parts.append(f'<path d="M{LEFT} {y}h30" stroke="{_color(number)}" stroke-width="2"/>')
        parts.append(
            f'{_mark(number, LEFT + 15, y)}<text x="{LEFT + 40}" y="{y + 4}">{label}</text>'
        )
    return "".join(parts) + "</svg>\n"


def _length(timing: Timing) -> int:
    return timing.workload.case.S


def _panel(timed: Sequence[Sequence[Timing]], title: str, left: int) -> list[str]:
    """Return the elements of a panel; timed: by implementation. left: its edge, in pixels."""
    value, timings = PANELS[title], list(chain.from_iterable(timed))
    lengths = sorted(set(map(_length, timings)))
    ticks, height = _scale(title, list(map(value, timings)))
    decades = max(log10(lengths[-1] / lengths[0]), 1e-9)

    def across(length: int) -> float:
        return left + WIDTH * log10(length / lengths[0]) / decades

    def up(number: float) -> float:
        return TOP + HEIGHT * (1 - height(number))

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{title}, against length</text>']
    for number, label in ticks:
        parts.append(f'<path d="M{left} {up(number):.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{up(number) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for length in lengths:
        parts.append(
            f'<text x="{across(length):.0f}" y="{TOP + HEIGHT + 18}"'
            f' text-anchor="middle">{length}</text>'
        )
    for place, own in enumerate(timed):
        points = [(across(_length(each)), up(value(each))) for each in sorted(own, key=_length)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{line}" stroke="{_color(place)}" stroke-width="2" fill="none"/>')
        parts += [_mark(place, x, y) for x, y in points]
    return parts


def _scale(
    title: str, values: Sequence[float]
) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Return the ticks of an axis with their labels, and a function from a value to its height."""
    if title == SHARE:
        high = max(1.0, *values)
        quarters = [(quarter / 4, f"{quarter / 4:.0%}") for quarter in range(5)]
        return quarters, lambda value: value / high
    logs = [log10(max(value, 1e-6)) for value in values]
    low, top = floor(min(logs)), max(ceil(max(logs)), floor(min(logs)) + 1)
    ticks = [(10.0**power, f"{10.0**power:,.10g}") for power in range(low, top + 1)]
    return ticks, lambda value: (log10(max(value, 1e-6)) - low) / (top - low)


def _mark(number: int, x: float, y: float) -> str:
    """Return the mark of an implementation at a point."""
    return f'<path d="M{x:.1f} {y:.1f}{SHAPES[number % len(SHAPES)]}" fill="{_color(number)}"/>'


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
