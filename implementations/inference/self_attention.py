"""Whether a module that takes an optional memory computes the same self-attention without it."""

from __future__ import annotations

from functools import partial

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.dropout import PROBABILITY, dropped
from mha.implementations.inference.empty_rows import policy_of
from mha.implementations.inference.mask_effects import fits
from mha.implementations.inference.probes import Probe, is_close
from mha.implementations.inference.weights import holds_weights
from mha.spec import causal_mask


def find_self_attention(candidate: Candidate) -> Candidate:
    """Leave the memory out of self-attention, if calls without it give the same.

    So must their masks and claims.
    """
    may_be_left_out = candidate.declared.may_leave_out_memory
    if not may_be_left_out or not candidate.explained or candidate.assumed:
        return candidate
    alone = candidate.claiming(cross_attention=False)
    for check in (_computes_formula, _takes_masks, _is_causal, _keeps_claims):
        if not check(candidate, alone):
            return candidate
    return candidate.declaring(memory_optional=True)


def _computes_formula(candidate: Candidate, alone: Candidate) -> bool:
    del candidate
    return alone.passes(partial(_gives, causal=alone.plainly_causal))


def _takes_masks(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether masks count as they do with a memory, and rows without a key get the same."""
    if candidate.declared.mask is None:
        return True
    return alone.passes(fits) and policy_of(alone) == candidate.empty_row


def _is_causal(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether the causal flag counts, if there is one that is claimed."""
    del candidate
    is_claimed = alone.claimed("causal") is not None and not alone.formula.causal
    if not (is_claimed and alone.signature.is_causal):
        return True
    return _gives(alone, alone.probes[0], causal=True)


def _gives(alone: Candidate, probe: Probe, *, causal: bool) -> bool:
    """Return whether a call gives the formula's output on a probe."""
    result = alone.call(probe.inputs, is_causal=causal)
    mask = None
    if causal and not alone.formula.causal:
        mask = causal_mask(probe.queries, probe.queries, "top_left")[None, None]
    expected = alone.formula(probe.inputs, alone.weights, mask)
    return result is not None and is_close(result.output, expected)


def _keeps_claims(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether weights are returned, and dropped, as they are with a memory."""
    kind = candidate.claimed("dropout")
    changes = {**alone.trial.changes, "dropout": PROBABILITY}
    if kind and dropped(alone.trying(changes=changes)) != kind:
        return False
    probe = alone.probes[0]
    shape = (probe.batch, probe.n_heads, probe.queries, probe.queries)
    return not candidate.claimed("returns_weights") or holds_weights(alone, shape)
