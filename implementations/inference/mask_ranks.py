"""Masks with other numbers of dimensions, and of integers, found by their effect."""

from __future__ import annotations

from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import agree
from mha.implementations.inference.probes import SHAPES, additive
from mha.spec.masks import INTEGERS


def find_ranks(candidate: Candidate) -> Candidate:
    """Claim the numbers of dimensions with which masks have the same effect as with four.

    Beside a padding mask, boolean ones are split and have four: only masks of numbers are handed on
    as they are. Of these, other numbers are those that raise: one with another effect is judged,
    and fails.
    """
    has_padding = candidate.declared.padding is not None
    takes_numbers = "float" in candidate.claims.get("masks", ())
    if candidate.declared.mask_shape is not None or (has_padding and not takes_numbers):
        return candidate
    probe = candidate.probes[0]
    of_heads, mask = candidate.mask_of(probe, "hls")[:1], candidate.mask_of(probe, "ls")[:1, :1]
    if has_padding:
        of_heads, mask = additive(of_heads), additive(mask)
    row = mask[:, :, :1]
    # By its number of dimensions, a mask and the same with four.
    forms = {3: (of_heads[0], of_heads), 2: (mask[0, 0], mask), 1: (row[0, 0, 0], row)}
    ranks = {4} | {rank for rank, masks in forms.items() if _counts_as(candidate, *masks)}
    if len(ranks) == 4:
        return candidate
    return candidate.claiming(mask_ranks=ranks)


def _counts_as(candidate: Candidate, mask: Tensor, expanded: Tensor) -> bool:
    """Return whether a mask has the effect of the expanded one.

    Beside a padding mask, it only has to be taken.
    """
    inputs = candidate.probes[0].inputs
    result = candidate.call(inputs, mask=mask)
    if candidate.declared.padding:
        return result is not None
    return agree(result, candidate.call(inputs, mask=expanded))


def find_integers(candidate: Candidate) -> Candidate:
    """Claim masks of integers, if 1 and 0 count as True and False in them."""
    declared = candidate.declared
    other_forms = declared.padding or declared.mask_numbers or declared.mask == "additive"
    if candidate.assumed or other_forms:
        return candidate
    masks = {*candidate.claims.get("masks", {"bool"}), "int"}
    tried, probe = candidate.claiming(masks=masks), candidate.probes[0]
    mask = candidate.mask_of(probe, SHAPES[declared.mask_shape])
    expected = candidate.call(probe.inputs, mask=mask)
    for dtype in INTEGERS:
        if not agree(tried.call(probe.inputs, mask=mask.to(dtype)), expected):
            return candidate
    return tried
