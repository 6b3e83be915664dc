"""What is claimed of the levels of a domain: masks, sizes, variants, and what a call says about the
scores.
"""

from __future__ import annotations

from typing import Any

from mha.conformance.cases.mask_kinds import EXTENTS, OF_NUMBERS
from mha.conformance.cases.variants import VARIANTS
from mha.spec import Claims
from mha.spec.claims import smallest_from
from mha.spec.scores import Bounds


def sorted_biases(claims: Claims) -> list[bool | str]:
    """Return the claimed values of `Config.bias`: True first, False last."""
    return sorted(claims.bias, key=lambda bias: (bias is False, bias is not True, str(bias)))


def claimed_axes(claims: Claims) -> str:
    """Return the axes of (B, H, L, S) along which masks may differ; without S if each is a prefix
    of the keys.
    """
    differs = {"B": claims.per_item_mask, "H": claims.per_head_mask, "L": claims.per_query_mask}
    differs["S"] = not claims.prefix_masks
    return "".join(axis for axis, claimed in differs.items() if claimed)


def fit_sizes(row: dict[str, Any], claims: Claims) -> dict[str, Any]:
    """Replace sizes that are not claimed by the next larger ones that are, or by the largest.

    row: the fields of a case. Where all heads share one key and value, it gets the number of key
    heads.

    >>> from mha.spec.claims import Sizes
    >>> sizes = Sizes(head_dims={64}, length_multiple=16)
    >>> fit_sizes({"n_heads": 3, "head_dim": 16, "L": 5, "S": 40}, Claims(sizes=sizes))
    {'n_heads': 3, 'head_dim': 64, 'L': 16, 'S': 48}
    """
    sizes, fitted = claims.sizes, dict(row) | ({"n_kv_heads": 1} if claims.multi_query else {})
    if sizes.n_heads is not None:
        fitted["n_heads"] = smallest_from(sizes.n_heads, row["n_heads"])
    fitted["head_dim"] = sizes.fit_head_dim(row["head_dim"])
    multiple = sizes.length_multiple
    longest = None if sizes.max_length is None else sizes.max_length // multiple * multiple
    for name in ("L", "S"):
        length = -(-row[name] // multiple) * multiple
        fitted[name] = length if longest is None else min(length, longest)
    return fitted


def takes_variant(claims: Claims, name: str) -> bool:
    """Return whether a variant is claimed."""
    return name == "plain" or bool(getattr(claims, VARIANTS[name].claim))


def takes_scale(claims: Claims, scale: float | None) -> bool:
    """Return whether an explicit scale is claimed."""
    return (
        scale is None
        or claims.scores.scale == "any"
        or (claims.scores.scale == "positive" and scale > 0)
    )


def claimed_windows(
    claims: Claims, windows: tuple[Bounds | None, ...]
) -> tuple[Bounds | None, ...]:
    """Return the windows that the claimed form can say, nearest to these ones."""
    declared = claims.scores.window
    nearest = (
        None if window is None or declared is None else declared.nearest(window)
        for window in windows
    )
    kept = (
        each for each, window in zip(nearest, windows, strict=True) if window is None or declared
    )
    return tuple(dict.fromkeys(kept))


def takes_mask(claims: Claims, kind: str) -> bool:
    """Return whether a kind of mask is claimed: its form, and every axis along which it differs."""
    form = "float" if kind in OF_NUMBERS else "bool"
    return form in claims.masks and set(EXTENTS[kind]) <= set(axes_for(kind, claims))


def axes_for(kind: str, claims: Claims) -> str:
    """Return the axes along which masks of a kind may differ: not items and queries at once, unless
    that is claimed.
    """
    joint = {"B", "L"} <= set(EXTENTS[kind])
    return claimed_axes(claims).replace("B", "" if joint and not claims.joint_masks else "B")


def mask_form(kind: str, claims: Claims) -> dict[str, Any]:
    """Return the fields of a case that give a kind of mask its claimed form, where it has another
    by itself.
    """
    if kind == "none":
        return {}
    claimed = axes_for(kind, claims)
    axes = {} if set(EXTENTS[kind]) <= set(claimed) else {"mask_axes": claimed}
    return axes | (
        {"additive": True} if "bool" not in claims.masks and kind not in OF_NUMBERS else {}
    )
