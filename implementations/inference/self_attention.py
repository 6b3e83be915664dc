"""Whether a module that takes an optional memory computes the same self-attention without it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import policy_of
from mha.implementations.inference.mask_search import fits
from mha.implementations.inference.options import PROBABILITY, dropped, holds_weights
from mha.implementations.inference.probes import CONFIG, is_close
from mha.spec import causal_mask


def find_self_attention(candidate: Candidate) -> None:
    """Leave the memory out of self-attention, if calls without it give the same, with the same
    masks and claims.
    """
    if candidate.may_leave_out_memory and candidate.explained and not candidate.assumed:
        alone = replace(candidate, claims=candidate.claims | {"cross_attention": False})
        checks = (_computes_formula, _takes_masks, _is_causal, _keeps_claims)
        candidate.memory_optional = all(check(candidate, alone) for check in checks)


def _computes_formula(candidate: Candidate, alone: Candidate) -> bool:
    return all(
        _gives(alone, causal=alone.plainly_causal, place=place)
        for place in range(len(alone.probes))
    )


def _takes_masks(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether masks count as they do with a memory, and rows without a key get the same."""
    if candidate.mask is None:
        return True
    return (
        all(fits(alone, probe) for probe in alone.probes)
        and policy_of(alone) == candidate.empty_row
    )


def _is_causal(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether the causal flag counts, if there is one that is claimed."""
    is_claimed = alone.claims.get("causal", "top_left") is not None and not alone.formula.causal
    return not (is_claimed and alone.signature.is_causal) or _gives(alone, causal=True)


def _gives(alone: Candidate, *, causal: bool, place: int = 0) -> bool:
    """Return whether a call gives the formula's output on a probe."""
    inputs = alone.probes[place].inputs
    result = alone.call(inputs, is_causal=causal)
    hidden = causal and not alone.formula.causal
    mask = (
        causal_mask(inputs[0].shape[1], inputs[0].shape[1], "top_left")[None, None]
        if hidden
        else None
    )
    return result is not None and is_close(
        result.output, alone.formula(inputs, alone.weights, mask)
    )


def _keeps_claims(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether weights are returned, and dropped, as they are with a memory."""
    kind = candidate.claims.get("dropout", False)
    changes = alone.changes | {"dropout": PROBABILITY}
    if kind and dropped(replace(alone, changes=changes)) != kind:
        return False
    query: Tensor = alone.probes[0].inputs[0]
    shape = (len(query), CONFIG.n_heads, query.shape[1], query.shape[1])
    return not candidate.claims.get("returns_weights", True) or holds_weights(alone, shape)
