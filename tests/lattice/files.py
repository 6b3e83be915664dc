"""Classes of the lattice as files, understood by inference, or by the line that declares them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lattice.axes import Point
from lattice.expected import NOT_INFERRED, claims_of, declaration_of
from lattice.source import source_of, target_name
from mha.implementations import ImplementationError, Resolved, resolve
from mha.spec import Claims

IMPORTS = """

from mha.implementations import from_module
from mha.spec import Claims, QkNorm, Rotary, Rounding, Scores, Sizes, Window

"""


def write(folder: Path, name: str, point: Point, source: str = "") -> Path:
    """Write the file of a point, with its declaration; source: instead of its own."""
    path = folder / f"lattice_{name}.py"
    path.write_text(f"{source or source_of(point)}{IMPORTS}{declaration_of(point)}\n")
    return path


def declared(path: Path) -> Resolved:
    """Return what the line at the end of a file declares."""
    return resolve(f"{path}:implementation")[0]


def inferred(path: Path, point: Point) -> Resolved | None:
    """Return the class of a file as it is inferred; None if it needs a declaration."""
    try:
        return resolve(f"{path}:{target_name(point)}")[0]
    except ImplementationError as error:
        if "needs a declaration" not in str(error):
            raise
        return None


def understood(path: Path, point: Point, *, plain: bool) -> Resolved:
    """Return what is judged of a file.

    plain: take the class as it is inferred, if it is, and if its formula is the contract's.
    """
    found = inferred(path, point) if plain and point.scale != "unscaled" else None
    return found or declared(path)


def reading(resolved: Resolved) -> tuple[object, ...]:
    """Return how a class is read, except for what a fault may hide without being hidden itself.

    That is the convention of masks that are ignored, and a width of heads of its own, which is
    claimed only where the formula holds with it: scores that are rounded may be near enough with
    one width, and not with another.
    """
    found: Any = resolved.implementation
    claims, masks = found.claims, found.call.masks
    about_masks = (
        claims.per_item_mask,
        claims.per_head_mask,
        claims.per_query_mask,
        masks.shape,
        bool(masks.padding),
    )
    about_calls = claims.cross_attention, claims.always_causal, claims.causal, claims.bias
    return found.parameters, found.layout, *about_masks, *about_calls


def misunderstood(path: Path, point: Point) -> dict[str, tuple[object, object]]:
    """Return the claims that inference gets wrong: what it says, and what is right."""
    plain = inferred(path, point)
    if plain is None:
        return {}
    found = _with_norm_first(plain.implementation.claims)
    expected = _with_norm_first(Claims(**claims_of(point)))
    names = (field.name for field in fields(Claims) if field.name not in NOT_INFERRED)
    pairs = {name: (getattr(found, name), getattr(expected, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _with_norm_first(claims: Claims) -> Claims:
    """Return claims whose norm comes before a rotation, where that is the same as after it."""
    norm = claims.qk_norm
    if norm is None or norm.kind == "layer" or norm.weight is not None:
        return claims
    return replace(claims, qk_norm=replace(norm, before_rotary=True))
