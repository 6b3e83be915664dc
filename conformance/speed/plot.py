"""Time, memory and share of the limit against length, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log10
from statistics import median

from mha.conformance.speed.compare import Timing

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 60, 40, 70
COLORS = ("#2456b3", "#b3261e", "#1b6e3c", "#8a5a00", "#6a3fa0", "#00707a", "#a02070", "#555")
PANELS: dict[str, tuple[str, Callable[[Timing], float]]] = {
    "time": ("milliseconds", lambda timing: 1e3 * median(timing.seconds)),
    "peak memory": ("MiB", lambda timing: timing.memory / 2**20),
    "share of the rate of matrix products": ("", lambda timing: timing.share),
}


def to_svg(timings: Sequence[Timing]) -> str:
    """Return a panel for each of `PANELS`, lengths across; each implementation has a colour and a mark of its own."""
    found = [timing for timing in timings if not timing.wrong]
    names = list(dict.fromkeys(timing.implementation for timing in found))
    width, below = LEFT + len(PANELS) * (WIDTH + GAP), TOP + HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {below + 20 * len(names)}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, (title, (unit, value)) in enumerate(PANELS.items()):
        parts += _panel(found, names, title, unit, value, LEFT + number * (WIDTH + GAP))
    for number, name in enumerate(names):
        y = below + 20 * number
        parts.append(f'<path d="M{LEFT} {y}h30" stroke="{COLORS[number % len(COLORS)]}" stroke-width="2"/>')
        parts.append(f'{_mark(number, LEFT + 15, y)}<text x="{LEFT + 40}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts) + "</svg>\n"


def _panel(
    found: Sequence[Timing], names: Sequence[str], title: str, unit: str, value: Callable[[Timing], float], left: int
) -> list[str]:
    lengths = sorted({timing.work.case.S for timing in found})
    values = [max(value(timing), 1e-6) for timing in found]
    low, high = log10(min(values)), log10(max(values))
    spread = max(high - low, 1e-9)
    reach = max(log10(lengths[-1] / lengths[0]), 1e-9)

    def place(length: int, number: float) -> tuple[float, float]:
        across = WIDTH * log10(length / lengths[0]) / reach
        return left + across, TOP + HEIGHT * (1 - (log10(max(number, 1e-6)) - low) / spread)

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{title}</text>']
    parts.append(f'<path d="M{left} {TOP}v{HEIGHT}h{WIDTH}" stroke="#999" fill="none"/>')
    for number in (10**low, 10**high):
        told = f"{number:.3g} {unit}".strip()
        parts.append(f'<text x="{left - 5}" y="{place(lengths[0], number)[1] + 4:.0f}" text-anchor="end">{told}</text>')
    for length in lengths:
        x = place(length, 10**low)[0]
        parts.append(f'<text x="{x:.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{length}</text>')
    for number, name in enumerate(names):
        own = sorted((t for t in found if t.implementation == name), key=lambda timing: timing.work.case.S)
        points = [place(timing.work.case.S, value(timing)) for timing in own]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        color = COLORS[number % len(COLORS)]
        parts.append(f'<path d="M{line}" stroke="{color}" stroke-width="2" fill="none"/>')
        parts += [_mark(number, x, y) for x, y in points]
    return parts


def _mark(number: int, x: float, y: float) -> str:
    """Return a mark at a place; colour alone tells nothing."""
    color, shape = COLORS[number % len(COLORS)], number % 4
    at = f"{x:.1f} {y:.1f}"
    shapes = ("m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m-5 0l5 -5l5 5l-5 5z", "m-5 -1h10v3h-10z")
    return f'<path d="M{at}{shapes[shape]}" fill="{color}"/>'
