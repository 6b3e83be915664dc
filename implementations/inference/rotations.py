"""The rotations that a module may have, by its numbers, its tensors and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor, nn

from mha.implementations.adapters.construction import parameters_of
from mha.implementations.adapters.names import words_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.plainer import is_factor
from mha.spec import Rotary

# Of known models, beside those that a module's own numbers tell.
BASES = (10000.0, 500000.0, 1000000.0)
BASE_WORDS = {"base", "theta"}
PARTS = (1.0, 0.5, 0.25)
PART_WORDS = {0.5: "half", 0.25: "a quarter"}
# A base that is not stretched has no more digits than these.
DIGITS_OF_BASE = 2
# What bases are stretched by: multiples of a half, as near as four digits of a base tell.
STRETCH_STEP, LARGEST_STRETCH = 0.5, 16.0
# Of what tables in single precision tell.
ROUGHLY = 1e-3


class Frequencies(NamedTuple):
    """Of a rotation; see `Rotary`."""

    base: float = BASES[0]
    factor: float = 1.0
    stretch: float = 1.0


def rotations_of(
    frequencies: Iterable[Frequencies], directions: Sequence[str] = ("forward", "backward")
) -> list[Rotary]:
    """Return the rotations to try, the usual ones first."""
    found = list[Rotary]()
    kinds = product(directions, PARTS, frequencies, ("half", "interleaved"))
    for direction, part, (base, factor, stretch), pairs in kinds:
        found.append(
            Rotary(base, pairs, part, direction=direction, factor=factor, stretch=stretch)  # type: ignore[arg-type]  # words of it
        )
    return found


def frequencies_of(candidate: Candidate, module: nn.Module) -> list[Frequencies]:
    """Return the frequencies to try, those of a stretched base before the same of another base.

    Stretched by a number, the base depends on the width of a head, and a base that is found in a
    table is only that of the module of the trial runs.
    """
    bases = bases_of(module)
    found = list[Frequencies]()
    for base in bases:
        for usual, stretch in _stretched(base, candidate.config.head_dim):
            found.append(Frequencies(usual, stretch=stretch))
    found += [Frequencies(base) for base in bases]
    for factor, base in product(_factors_of(candidate, module), bases):
        found += [Frequencies(base, factor=factor), Frequencies(base, stretch=factor)]
    return found


def _stretched(base: float, head_dim: int) -> Iterator[tuple[float, float]]:
    """Yield each usual base that may have been stretched to another one, and by how much.

    head_dim: the width of a head, all of which is rotated.
    """
    digits = f"{base:.4g}".replace(".", "").partition("e")[0].strip("0")
    if len(digits) <= DIGITS_OF_BASE or head_dim <= 2:
        return
    for usual in BASES:
        stretch = (base / usual) ** ((head_dim - 2) / head_dim)
        nearest = round(stretch / STRETCH_STEP) * STRETCH_STEP
        is_near = math.isclose(stretch, nearest, rel_tol=ROUGHLY)
        if is_near and 1 < nearest <= LARGEST_STRETCH:
            yield usual, nearest


def _factors_of(candidate: Candidate, module: nn.Module) -> list[float]:
    """Return what angles may be divided by, or a base be stretched by, other than 1."""
    named = dict[str, object]()
    for name, parameter in parameters_of(candidate.declared.constructor).items():
        named[name] = parameter.default
    found = dict[float, None]()
    for part in module.modules():
        for name, value in [*named.items(), *vars(part).items()]:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value > 0 and is_factor(name, {*words_of(name)}):
                found[float(value)] = None
        for _, buffer in part.named_buffers(recurse=False):
            found[_factor_in(buffer)] = None
    return [factor for factor in found if factor != 1]


def bases_of(module: nn.Module) -> list[float]:
    """Return the bases to try: those that the numbers and tensors of a module tell come first."""
    found = dict[float, None]()
    for part in module.modules():
        for name, value in [*vars(part).items(), *part.named_buffers(recurse=False)]:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and BASE_WORDS & {*words_of(name)} and value > 1:
                found[float(value)] = None
            elif isinstance(value, Tensor):
                base = _base_in(value)
                if base is not None:
                    found[base] = None
    return [*found, *(base for base in BASES if base not in found)]


def _base_in(x: Tensor) -> float | None:
    """Return the base of frequencies, (r / 2,), or of angles of positions in complex numbers."""
    numbers = _frequencies_in(x)
    if numbers is None:
        return None
    # f_1 / f_0 = base^(-2 / r), for r / 2 frequencies
    base = float(numbers[1] / numbers[0]) ** -len(numbers)
    if not 1 < base < 1e12:
        return None
    digits = 10.0 ** math.floor(math.log10(base))
    nearest = round(base / digits * 1000) / 1000 * digits  # tables are in single precision
    return nearest if math.isclose(base, nearest, rel_tol=ROUGHLY) else base


def _factor_in(x: Tensor) -> float:
    """Return what frequencies are divided by, of which the first one is 1 otherwise; or else 1."""
    numbers = _frequencies_in(x)
    if numbers is None:
        return 1.0
    return round(1 / float(numbers[0]), 3)


def _frequencies_in(x: Tensor) -> Tensor | None:
    """Return falling frequencies (r / 2,) from a tensor of them, or of complex numbers.

    None unless the first one is 1, or they are a geometric sequence from a smaller one.
    """
    x = x.detach().cpu()
    if x.is_complex() and x.ndim == 2 and len(x) > 1:
        x = x[1].angle()
    if not x.is_floating_point() or x.ndim != 1 or len(x) < 2:
        return None
    numbers = x.double()
    first, ratios = float(numbers[0]), numbers[1:] / numbers[:-1]
    if not 0 < float(ratios[0]) < 1:
        return None
    if abs(first - 1) <= ROUGHLY:
        return numbers
    is_geometric = bool(((ratios / ratios[0] - 1).abs() <= ROUGHLY).all())
    return numbers if is_geometric and 0 < first < 1 and len(numbers) > 2 else None


def words_of_rotary(rotary: Rotary) -> str:
    """Return a rotation in words.

    >>> words_of_rotary(Rotary(part=0.5))
    'rotary, half-split, base 10000, half of each head'
    """
    said = ["rotary", "half-split" if rotary.pairs == "half" else "interleaved"]
    if rotary.tables == "given":
        said.append("by what each call is given")
    else:
        said.append(f"base {rotary.base:g}" if rotary.base >= 1e6 else f"base {rotary.base:.10g}")
        if rotary.stretch != 1:
            said.append(f"stretched by {rotary.stretch:g}^(r / (r - 2))")
        if rotary.factor != 1:
            said.append(f"angles divided by {rotary.factor:g}")
    if rotary.part != 1:
        said.append(f"{PART_WORDS.get(rotary.part, rotary.part)} of each head")
    if rotary.direction == "backward":
        said.append("turned the other way")
    return ", ".join(said)
