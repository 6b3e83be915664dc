"""What a module does with a query that has no key to attend to, found by trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import influence, is_output
from mha.implementations.inference.probes import GENERAL, Probe, heads_of, is_close
from mha.spec import causal_mask
from mha.spec.claims import EmptyRow

# Longer than the tiles of most kernels, and a multiple of them.
TILED = 512


def find_empty_row(candidate: Candidate) -> Candidate:
    """Claim the policy for empty rows that a trial run shows, not in float64.

    Where it shows none, nothing is claimed.
    """
    if candidate.more_by_mask:
        return candidate
    tried = candidate
    if candidate.trial.dtype == torch.float64:
        tried = candidate.trying(dtype=torch.float32)
    policy = policy_of(tried)
    if candidate.declared.mask == "additive" and policy == "nan":
        # Callers of such code pass the lowest number, which leaves no row without a number.
        lowest = policy_of(tried.declaring(masked_number="lowest"))
        if lowest in ("zeros", "uniform") and _only_empty_rows_are_nan(tried):
            candidate, policy = candidate.declaring(masked_number="lowest"), lowest
    if policy and policy != "zeros":
        candidate = candidate.claiming(empty_row=policy)
    return replace(candidate, empty_row=policy)


def _only_empty_rows_are_nan(candidate: Candidate) -> bool:
    """Return whether -infinity leaves a number in long rows of which only the last key is allowed.

    Code that takes the keys in tiles may divide by zero in the first tile, which is a fault of its
    own.
    """
    long = replace(candidate.probes[0], queries=TILED, keys=TILED)
    mask = (torch.arange(TILED) == TILED - 1).expand(long.batch, long.n_heads, TILED, TILED)
    result = candidate.call(long.inputs, mask=mask, is_causal=candidate.plainly_causal)
    if result is None or not isinstance(result.output, Tensor):  # such rows may be too long for it
        return True
    # Where it is always causal, only the last query has a key.
    return not bool(result.output[:, -1].isnan().any())


def policy_of(candidate: Candidate) -> EmptyRow | None:
    """Return the policy of the rows that a mask, or the causal flag, leaves without a key, if any.

    It may depend on the dtype: a fill with the least number of float32 is -infinity where it is
    cast down.
    """
    policies = {policy_shown(candidate, *trial) for trial in trials(candidate)}
    return policies.pop() if len(policies) == 1 else None


def policy_shown(
    candidate: Candidate, probe: Probe, emptied: Tensor, options: dict[str, Any]
) -> EmptyRow | None:
    """Return the policy that a call shows whose emptied rows, boolean (B, L), have no key."""
    result = candidate.call(probe.inputs, **options)
    if result is None:
        return "error"
    if not is_output(result, probe.inputs[0]):
        return None
    if bool(result.output[emptied].isnan().all()):
        return "nan"
    if candidate.explained:
        return _explained_policy(candidate, result.output, emptied, probe.inputs[2])
    read = influence(candidate, probe.inputs, **options)
    if read is None:
        return None
    return "uniform" if bool(read[emptied].all()) else "zeros"


def trials(candidate: Candidate) -> Iterator[tuple[Probe, Tensor, dict[str, Any]]]:
    """Yield probes, their rows left without a key as a boolean (B, L), and options of the call."""
    if candidate.declared.mask:
        yield from _trials_with_masks(candidate)
    elif candidate.claims.get("causal") == "bottom_right":
        # With more queries than keys, the causal flag leaves the first ones without a key.
        probe = candidate.trying(special=GENERAL).probes[1]
        without_key = torch.arange(probe.queries) < probe.queries - probe.keys
        yield probe, without_key.expand(probe.batch, -1), {"is_causal": True}


def _trials_with_masks(candidate: Candidate) -> Iterator[tuple[Probe, Tensor, dict[str, Any]]]:
    probe, causal, plainly = candidate.probes[0], candidate.formula.causal, candidate.plainly_causal
    mask, emptied = _mask_with_empty_rows(candidate, probe)
    yield probe, emptied, {"mask": mask, "is_causal": plainly}
    if causal is None or candidate.declared.masks.counts_keys:
        return
    # Of the first row, the mask hides what is not later, as padding on the left does.
    seen = causal_mask(mask.shape[2], mask.shape[3], causal)[0]
    first = (torch.arange(mask.shape[2]) == 0).expand(len(mask), -1)
    if bool(seen.any()) and not bool(seen.all()):
        yield probe, first, {"mask": (~seen).expand_as(mask), "is_causal": plainly}


def _explained_policy(
    candidate: Candidate, output: Tensor, emptied: Tensor, value: Tensor
) -> EmptyRow | None:
    """Return the policy whose contexts give the emptied rows, boolean (B, L), of an output."""
    # With the heads side by side.
    values = (
        heads_of(value, candidate.weights, "v", candidate.config.n_heads).transpose(1, 2).flatten(2)
    )
    contexts: dict[EmptyRow, Tensor] = {"zeros": values * 0, "uniform": values}
    for policy, of_policy in contexts.items():
        expected = projected(candidate, of_policy.mean(1, keepdim=True)).expand_as(output)[emptied]
        if is_close(output[emptied], expected):
            return policy
    return None


def _mask_with_empty_rows(candidate: Candidate, probe: Probe) -> tuple[Tensor, Tensor]:
    """Return a mask (B, H, L, S) that leaves some rows without a key, and which, boolean (B, L)."""
    if candidate.claimed("per_item_mask"):
        axes, item, query = "bs", slice(0, 1), slice(None)
    elif candidate.claimed("per_query_mask"):
        axes, item, query = "ls", slice(None), slice(0, 1)
    else:
        axes, item, query = "s", slice(None), slice(None)
    mask = candidate.mask_of(probe, axes)
    emptied = torch.zeros(mask.shape[0], mask.shape[2], dtype=torch.bool)
    emptied[item, query] = True
    return mask & ~emptied[:, None, :, None], emptied


def projected(candidate: Candidate, context: Tensor) -> Tensor:
    """Return the output of a context, both (B, N, width)."""
    if not candidate.formula.projected:
        return context
    weights = candidate.weights
    return F.linear(context, weights.w_o, weights.b_o)
