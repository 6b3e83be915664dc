"""The tables of a rotation that a call is given: cosines, sines or positions, in its own shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.implementations.adapters.mask_forms import Sizes
from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Rotary

# What a parameter of a call may be of a rotation, by `NEUTRAL_MEANING`.
OF_TABLES = ("cosines", "sines", "rotation")
MEANINGS = (*OF_TABLES, "table", "complex", "places")
# The shapes of tables: b (batch), l (length), and r, the columns that are rotated, or p, the pairs
# of them. The last one has them all twice, also where a pair is two columns side by side.
ROTATION_LAYOUTS = (
    "b l r",
    "l p",
    "l r",
    "1 l 1 p",
    "1 l 1 r",
    "1 1 l p",
    "1 1 l r",
    "b l p",
    "b l (2 p)",
)
# Those of one tensor for both: complex numbers, or a cosine and a sine in the place of each.
OF_REAL_PAIRS = "l p 2"
COMPLEX_LAYOUTS = ("l p", OF_REAL_PAIRS)
# Those of sines and cosines in one tensor; that of a class whose first position, of a class token,
# is not turned has no row for it.
WITHOUT_FIRST = "l-1 (sin cos)"
JOINED_LAYOUTS = ("l (sin cos)", WITHOUT_FIRST)


def tables_in(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters of a call that are given tables of a rotation, or positions.

    >>> tables_in(("x", "cos", "sin", "mask"))
    ('cos', 'sin')
    """
    return tuple(name for name in names if NEUTRAL_MEANING.get(name) in MEANINGS)


def require_tables(
    label: str, rotary: Rotary | None, names: tuple[str, ...] | None, layout: str | None
) -> None:
    """Raise ImplementationError for an unknown layout, and for tables that no parameter takes.

    names: of the parameters for them; None if the call is made by a function of its own.
    """
    known_layouts = dict.fromkeys((*ROTATION_LAYOUTS, *COMPLEX_LAYOUTS, *JOINED_LAYOUTS))
    if layout is not None and layout not in known_layouts:
        words = ", ".join(map(repr, known_layouts))
        raise ImplementationError(
            f"{label}: rotation_layout must be one of {words}, but is {layout!r}"
        )
    if rotary is None or rotary.tables != "given":
        return
    is_joined = any(NEUTRAL_MEANING[name] == "table" for name in names or ())
    if is_joined and layout not in JOINED_LAYOUTS:
        words = " or ".join(map(repr, JOINED_LAYOUTS))
        raise ImplementationError(
            f"{label}: a table of sines and cosines needs rotation_layout={words}"
        )
    if names == ():
        known = [name for name, meaning in NEUTRAL_MEANING.items() if meaning in MEANINGS]
        raise ImplementationError(
            f'{label}: claims Rotary(tables="given"), but its call has no parameter of a known'
            f" name for them ({', '.join(known)}); pass call=..., or rename it"
        )


def table_of(  # noqa: PLR0913  what a table depends on
    name: str,
    rotary: Rotary,
    layout: str,
    query: Tensor,
    sizes: Sizes,
    head_dim: int,
    start: int = 0,
) -> Any:
    """Return what a parameter of a call is given for a rotation of positions from a start on.

    name: of the parameter, which says what it is.
    layout: one of `ROTATION_LAYOUTS`, `COMPLEX_LAYOUTS` or `JOINED_LAYOUTS`; positions have a shape
        of their own.
    query: in whose dtype they are, but for complex numbers, of 32 bits at least.
    """
    batch, _, length, _ = sizes
    positions = torch.arange(start, start + length, device=query.device)
    if NEUTRAL_MEANING[name] == "places":
        return positions.expand(batch, -1)
    return _table(name, _angles(rotary, positions, head_dim), rotary, layout, query, batch)


def table_without_rotation(name: str, layout: str, query: Tensor, sizes: Sizes, width: int) -> Any:
    """Return what `table_of` does where no position is rotated: cosines of 1 and sines of 0.

    width: r, how many columns of a head would be rotated.
    """
    batch, _, length, _ = sizes
    angles = torch.zeros(length, width // 2, dtype=torch.float64, device=query.device)
    return _table(name, angles, Rotary(), layout, query, batch)


def no_rotation(name: str, query: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Return cosines of 1 or sines of 0, or both, for a parameter of this name.

    Of one element each, they are for any number of positions and any width.
    """
    cosines, sines = query.new_ones(1, 1, 1), query.new_zeros(1, 1, 1)
    meaning = NEUTRAL_MEANING[name]
    if meaning == "cosines":
        return cosines
    if meaning == "sines":
        return sines
    return cosines, sines


def _table(
    name: str, angles: Tensor, rotary: Rotary, layout: str, query: Tensor, batch: int
) -> Any:
    """Return the table, or the pair of them, that a parameter of this name is given for angles."""
    meaning = NEUTRAL_MEANING[name]
    if meaning == "complex":
        return _complex_numbers(angles.cos(), angles.sin(), query, layout)
    if meaning == "table":
        cosines, sines = (_shaped(x.to(query.dtype), rotary, "l r", batch) for x in _both(angles))
        joined = torch.cat([sines, cosines], -1)
        return joined[1:] if layout == WITHOUT_FIRST else joined
    cosines, sines = (_shaped(x.to(query.dtype), rotary, layout, batch) for x in _both(angles))
    if meaning == "cosines":
        return cosines
    return sines if meaning == "sines" else (cosines, sines)


def _complex_numbers(cosines: Tensor, sines: Tensor, query: Tensor, layout: str) -> Tensor:
    """Return a table of both, of 32 bits at least, in one of `COMPLEX_LAYOUTS`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if layout == OF_REAL_PAIRS:
        return torch.stack((cosines, sines), -1).to(wide)
    return torch.complex(cosines.to(wide), sines.to(wide))


def _both(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


def _angles(rotary: Rotary, positions: Tensor, head_dim: int) -> Tensor:
    """Return the angle of each position and pair of columns, (L, r / 2), in float64."""
    width = rotary.width(head_dim)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    frequencies = rotary.base_for(head_dim) ** -exponents / rotary.factor
    return positions.double().unsqueeze(-1) * frequencies


def _shaped(x: Tensor, rotary: Rotary, layout: str, batch: int) -> Tensor:
    """Return numbers of each position and pair, (L, r / 2), in a layout."""
    if layout.endswith("(2 p)"):
        x, layout = torch.cat([x, x], -1), layout.replace("(2 p)", "r")
    elif layout.endswith("r"):
        x = torch.cat([x, x], -1) if rotary.pairs == "half" else x.repeat_interleave(2, -1)
    *axes, _ = layout.split()
    for place, axis in enumerate(axes):
        if axis != "l":
            x = x.unsqueeze(place)
    if axes[0] == "b":
        x = x.expand(batch, *x.shape[1:])
    return x
