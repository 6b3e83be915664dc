"""Whether queries and keys are rotated by the tables or positions that calls are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from torch import nn

from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.adapters.tables import JOINED_LAYOUTS, OF_TABLES, ROTATION_LAYOUTS
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.changed_heads import Change, explained_by
from mha.implementations.inference.projections import Unclear
from mha.implementations.inference.rotations import (
    PART_WORDS,
    Frequencies,
    frequencies_of,
    rotations_of,
)
from mha.spec import QkNorm


def with_given_rotation(candidate: Candidate, module: nn.Module) -> Candidate:
    """Return an explained candidate with the rotation by what its calls are given, if that is one.

    Its formula was found with cosines of 1, sines of 0, and positions of 0.

    Raises Unclear for tables over a part of each head that are none of a known rotation: without
    that, they cannot be made.
    """
    meanings = {NEUTRAL_MEANING[name] for name in candidate.signature.tables}
    if not meanings or candidate.is_kernel or candidate.claimed("rotary"):
        return candidate
    # Tables are made here, by any base; only where positions are given, the class has its own.
    are_given = meanings != {"places"}
    frequencies = [Frequencies()] if are_given else frequencies_of(candidate, module)
    norms = _at_both_places(candidate.claimed("qk_norm"))
    for layout, rotary in product(
        _layouts(candidate, meanings), rotations_of(frequencies, ("forward",))
    ):
        if are_given:
            rotary = replace(rotary, tables="given")
        turned = candidate.declaring(rotation_layout=layout).claiming(rotary=rotary)
        changes = list[Change]()
        for direction, each in product((rotary, replace(rotary, direction="backward")), norms):
            changes.append(Change(direction, each))
        explained = explained_by(turned, changes, [candidate.formula])
        if explained:
            return explained
    part = candidate.trial.part
    if part != 1:
        tables = " and ".join(candidate.signature.tables)
        raise Unclear(
            f"{tables} may be of {PART_WORDS[part]} of each head, but no known rotation by that"
            " gives what it computes; pass call=..."
        )
    return candidate


def _at_both_places(norm: QkNorm | None) -> list[QkNorm | None]:
    """Return a norm that was found without a rotation, before it and after it."""
    if norm is None or norm.over == "width":
        return [norm]
    return [norm, replace(norm, before_rotary=False)]


def _layouts(candidate: Candidate, meanings: set[str]) -> Sequence[str | None]:
    """Return the layouts that the tables of a call may have."""
    if not meanings.isdisjoint(OF_TABLES):
        return ROTATION_LAYOUTS
    if "table" in meanings:
        return JOINED_LAYOUTS
    return [candidate.declared.rotation_layout]
