"""Time, memory and share of the limit against length, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from statistics import median

from mha.conformance.benchmarks.compare import Timing
from mha.conformance.reports.text import shown

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 60, 40, 70
COLORS = ("#2456b3", "#b3261e", "#1b6e3c", "#8a5a00", "#6a3fa0", "#00707a", "#a02070", "#555")
LIMITED = "share of the rate of matrix products"
# The last has a limit, and so is drawn from 0 to it; the others on a logarithmic scale.
PANELS: dict[str, Callable[[Timing], float]] = {
    "time in ms": lambda timing: 1e3 * median(timing.seconds),
    "peak memory in MiB": lambda timing: timing.memory / 2**20,
    LIMITED: lambda timing: timing.share,
}


def to_svg(timings: Sequence[Timing]) -> str:
    """Return a panel for each of `PANELS`, lengths across; each implementation has a colour and a mark of its own."""
    found = [timing for timing in timings if not timing.wrong]
    names = list(dict.fromkeys(timing.implementation for timing in found))
    width, below = LEFT + len(PANELS) * (WIDTH + GAP), TOP + HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {below + 20 * len(names)}" role="img" '
        'aria-label="Time, memory and share of the limit against length" font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="#fff"/>'
    ]
    if not found:
        return f'{parts[0]}<text x="{LEFT}" y="{TOP}">Nothing was timed.</text></svg>\n'
    for number, title in enumerate(PANELS):
        parts += _panel(found, names, title, LEFT + number * (WIDTH + GAP))
    for number, name in enumerate(names):
        y = below + 20 * number
        parts.append(f'<path d="M{LEFT} {y}h30" stroke="{COLORS[number % len(COLORS)]}" stroke-width="2"/>')
        parts.append(f'{_mark(number, LEFT + 15, y)}<text x="{LEFT + 40}" y="{y + 4}">{escape(shown(name))}</text>')
    return "".join(parts) + "</svg>\n"


def _panel(found: Sequence[Timing], names: Sequence[str], title: str, left: int) -> list[str]:
    value, lengths = PANELS[title], sorted({timing.work.case.S for timing in found})
    ticks, place = _scale(title, [value(timing) for timing in found])
    reach = max(log10(lengths[-1] / lengths[0]), 1e-9)

    def across(length: int) -> float:
        return left + WIDTH * log10(length / lengths[0]) / reach

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{title}, against length</text>']
    for number, told in ticks:
        y = TOP + HEIGHT * (1 - place(number))
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{told}</text>')
    for length in lengths:
        parts.append(f'<text x="{across(length):.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{length}</text>')
    for number, name in enumerate(names):
        own = sorted((t for t in found if t.implementation == name), key=lambda timing: timing.work.case.S)
        points = [(across(timing.work.case.S), TOP + HEIGHT * (1 - place(value(timing)))) for timing in own]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        color = COLORS[number % len(COLORS)]
        parts.append(f'<path d="M{line}" stroke="{color}" stroke-width="2" fill="none"/>')
        parts += [_mark(number, x, y) for x, y in points]
    return parts


def _scale(title: str, values: Sequence[float]) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Return what is written on the axis, and where a value is on it, from 0 to 1."""
    if title == LIMITED:
        high = max(1.0, *values)
        return [(share / 4, f"{share / 4:.0%}") for share in range(5)], lambda value: value / high
    logs = [log10(max(value, 1e-6)) for value in values]
    low, high = floor(min(logs)), max(ceil(max(logs)), floor(min(logs)) + 1)
    ticks = [(10.0**power, f"{10.0**power:,.10g}") for power in range(low, high + 1)]
    return ticks, lambda value: (log10(max(value, 1e-6)) - low) / (high - low)


def _mark(number: int, x: float, y: float) -> str:
    """Return a mark at a place; colour alone tells nothing."""
    color, shape = COLORS[number % len(COLORS)], number % 4
    at = f"{x:.1f} {y:.1f}"
    shapes = ("m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m-5 0l5 -5l5 5l-5 5z", "m-5 -1h10v3h-10z")
    return f'<path d="M{at}{shapes[shape]}" fill="{color}"/>'
