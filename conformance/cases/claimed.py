"""What is claimed of the levels of a domain: masks, inputs, sizes, variants, options of a call."""

from __future__ import annotations

from typing import Any, TypeVar

from mha.conformance.cases.case import BUILT_IN, OF_ITEMS
from mha.conformance.cases.mask_kinds import EXTENTS, GROUPS, OF_NUMBERS
from mha.conformance.cases.variants import VARIANTS
from mha.spec import Claims
from mha.spec.claims import smallest_from
from mha.spec.scores import Bounds

# All except "self" are cross-attention.
INPUTS = ("cross", "self", "memory", "query_key")
# The inputs that may stand in for those of a domain, nearest first, by the claim of
# cross-attention.
CLAIMED_INPUTS: dict[bool | str, tuple[str, ...]] = {
    True: INPUTS,
    "memory": ("memory", "self"),
    False: ("self",),
}

Level = TypeVar("Level")


def if_claimed(levels: tuple[Level, ...], claim: object, without: Level) -> tuple[Level, ...]:
    """Return the levels if their claim is made, and otherwise only the one that needs none.

    without: the level that needs no claim, which need not be among them.

    >>> if_claimed((None, 2.0), None, None), if_claimed((2.0,), None, None)
    ((None,), ())
    """
    if claim:
        return levels
    return (without,) if without in levels else ()


def claimed_inputs(kinds: tuple[str, ...], claims: Claims) -> tuple[str, ...]:
    """Return the claimed kinds of inputs, or the nearest one."""
    if claims.cross_attention is True:
        return kinds
    claimed = CLAIMED_INPUTS[claims.cross_attention]
    return tuple(kind for kind in kinds if kind in claimed) or claimed[:1]


def claimed_ranks(ranks: tuple[int, ...], claims: Claims) -> tuple[int, ...]:
    """Return the claimed numbers of ranks, or the least one above 1 where none of them is."""
    usual = tuple(each for each in ranks if not each or each in claims.world_sizes)
    if usual or ranks == (1,):
        return usual
    several = sorted(size for size in claims.world_sizes if size > 1)
    return tuple(several[:1])


def sorted_biases(claims: Claims) -> list[bool | str]:
    """Return the claimed values of `Config.bias`: True first, False last."""
    return sorted(claims.bias, key=lambda bias: (bias is False, bias is not True, str(bias)))


def claimed_biases(levels: tuple[bool | str, ...], claims: Claims) -> tuple[bool | str, ...]:
    """Return the claimed values of `Config.bias`, those with the most biases first.

    levels: those of a domain: False, True for any bias, or the projection that must have one.

    >>> claimed_biases((True, False), Claims(bias={"qv", False}))
    ('qv', False)
    """
    kept = list[bool | str]()
    for level in levels:
        for claimed in sorted_biases(claims):
            if isinstance(level, bool):
                fits = bool(claimed) is level
            else:
                fits = claimed is True or (isinstance(claimed, str) and level in claimed)
            if fits and claimed not in kept:
                kept.append(claimed)
    return tuple(kept)


def claimed_axes(claims: Claims) -> str:
    """Return the axes of (B, H, L, S) along which masks may differ.

    S is not one if each mask is a prefix of the keys.
    """
    differs = {"B": claims.per_item_mask, "H": claims.per_head_mask, "L": claims.per_query_mask}
    differs["S"] = not claims.prefix_masks
    return "".join(axis for axis, claimed in differs.items() if claimed)


def fit_sizes(row: dict[str, Any], claims: Claims) -> dict[str, Any]:
    """Replace sizes that are not claimed by the next larger ones that are, or by the largest.

    Where all heads share one key and value, the row gets the number of key heads.

    row: the fields of a case.

    >>> from mha.spec.claims import Sizes
    >>> sizes = Sizes(head_dims={64}, length_multiple=16)
    >>> fit_sizes({"n_heads": 3, "head_dim": 16, "L": 5, "S": 40}, Claims(sizes=sizes))
    {'n_heads': 3, 'head_dim': 64, 'L': 16, 'S': 48}
    """
    sizes, fitted = claims.sizes, dict(row)
    if claims.multi_query:
        fitted["n_kv_heads"] = 1
    if sizes.n_heads is not None:
        fitted["n_heads"] = smallest_from(sizes.n_heads, row["n_heads"])
    fitted["head_dim"] = sizes.fit_head_dim(max(row["head_dim"], least_head_dim(claims)))
    multiple = sizes.length_multiple
    for name in ("L", "S"):
        fitted[name] = -(-row[name] // multiple) * multiple
        if sizes.max_length is not None:
            fitted[name] = min(fitted[name], sizes.max_length // multiple * multiple)
    return fitted


def least_head_dim(claims: Claims) -> int:
    """Return the least width of a head of which a layer norm leaves more than signs.

    >>> from mha.spec import QkNorm
    >>> least_head_dim(Claims()), least_head_dim(Claims(qk_norm=QkNorm("layer")))
    (1, 3)
    """
    norm = claims.qk_norm
    return 3 if norm is not None and norm.kind == "layer" else 1


def claimed_variants(names: tuple[str, ...], claims: Claims) -> tuple[str, ...]:
    """Return the claimed variants."""
    kept = list[str]()
    for name in names:
        if name == "plain" or getattr(claims, VARIANTS[name].claim):
            kept.append(name)
    return tuple(kept)


def claimed_scales(scales: tuple[float | None, ...], claims: Claims) -> tuple[float | None, ...]:
    """Return the claimed explicit scales."""
    claimed = claims.scores.scale
    if claimed == "any":
        return scales
    kept = list[float | None]()
    for scale in scales:
        if scale is None or (claimed == "positive" and scale > 0):
            kept.append(scale)
    return tuple(kept)


def claimed_windows(
    windows: tuple[Bounds | None, ...], claims: Claims
) -> tuple[Bounds | None, ...]:
    """Return the windows that the claimed form can say, nearest to these ones."""
    declared, kept = claims.scores.window, list[Bounds | None]()
    for window in windows:
        if window is None:
            kept.append(None)
        elif declared is not None:
            kept.append(declared.nearest(window))
    return tuple(dict.fromkeys(kept))


def claimed_lengths(kinds: tuple[str, ...], claims: Claims) -> tuple[str, ...]:
    """Return the claimed kinds of lengths."""
    if claims.packed is not None:  # each item is as long as its sequence
        return kinds
    claimed = {None: ("none",), "keys": ("none", "keys")}.get(claims.lengths, kinds)
    return tuple(kind for kind in kinds if kind in claimed)


def claimed_slopes(kinds: tuple[str, ...], claims: Claims) -> tuple[str, ...]:
    """Return the claimed kinds of slopes; those that are built in take the place of all others."""
    declared, kept = claims.scores.alibi, list[str]()
    for kind in kinds:
        if kind == "none":
            kept.append(kind)
        elif declared and declared.built_in:
            kept.append(BUILT_IN)
        elif declared and (kind != OF_ITEMS or declared.per_item):
            kept.append(kind)
    return tuple(dict.fromkeys(kept))


def claimed_masks(kinds: tuple[str, ...], claims: Claims) -> tuple[str, ...]:
    """Return the claimed kinds of mask, and of each group without one the nearest kind.

    >>> claimed_masks(("none", "queries", "heads"), Claims(per_head_mask=False))
    ('none', 'queries')
    """
    kept = [kind for kind in kinds if kind == "none" or takes_mask(claims, kind)]
    for group in GROUPS:
        if set(group).isdisjoint(kept):
            nearest = _nearest([kind for kind in kinds if kind in group], claims)
            if nearest:
                kept.append(nearest)
    return tuple(sorted(kept, key=kinds.index))


def _nearest(kinds: list[str], claims: Claims) -> str:
    """Return the kind that differs along the most claimed axes, or "" if none is claimed."""
    if not claims.masks:
        return ""
    if "float" not in claims.masks:
        kinds = [kind for kind in kinds if kind not in OF_NUMBERS]
    claimed = set(claimed_axes(claims))
    return max(kinds, key=lambda kind: len(set(EXTENTS[kind]) & claimed), default="")


def takes_mask(claims: Claims, kind: str) -> bool:
    """Return whether a kind of mask is claimed: its form, and every axis along which it differs."""
    form = "float" if kind in OF_NUMBERS else "bool"
    return form in claims.masks and set(EXTENTS[kind]) <= set(axes_for(kind, claims))


def axes_for(kind: str, claims: Claims) -> str:
    """Return the axes along which masks of a kind may differ.

    These are not items and queries at once, unless that is claimed.
    """
    axes = claimed_axes(claims)
    if {"B", "L"} <= set(EXTENTS[kind]) and not claims.joint_masks:
        return axes.replace("B", "")
    return axes


def mask_form(kind: str, claims: Claims) -> dict[str, Any]:
    """Return the fields of a case that give a kind of mask its claimed form.

    There are none where it has that form by itself.
    """
    if kind == "none":
        return {}
    fields: dict[str, Any] = {}
    claimed = axes_for(kind, claims)
    if not set(EXTENTS[kind]) <= set(claimed):
        fields["mask_axes"] = claimed
    if "bool" not in claims.masks and kind not in OF_NUMBERS:
        fields["additive"] = True
    return fields
