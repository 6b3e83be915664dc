"""What a module does with a query that has no key to attend to, found by trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import influence
from mha.implementations.inference.probes import CONFIG, GENERAL, Probe, heads_of, is_close
from mha.spec import causal_mask
from mha.spec.claims import EmptyRow

# Longer than the tiles of most kernels, and a multiple of them.
TILED = 512


def find_empty_row(candidate: Candidate) -> None:
    """Claim the policy for empty rows that a trial run shows, not in float64; where it shows none,
    claim nothing.
    """
    if candidate.hides_queries:
        return
    is_double = candidate.dtype == torch.float64
    tried = replace(candidate, dtype=torch.float32) if is_double else candidate
    candidate.empty_row = policy_of(tried)
    if candidate.mask == "additive" and candidate.empty_row == "nan":
        # Callers of such code pass the lowest number, which leaves no row without a number.
        lowest = policy_of(replace(tried, masked_number="lowest"))
        if lowest in ("zeros", "uniform") and _only_empty_rows_are_nan(tried):
            candidate.masked_number, candidate.empty_row = "lowest", lowest
    if candidate.empty_row and candidate.empty_row != "zeros":
        candidate.claims["empty_row"] = candidate.empty_row


def _only_empty_rows_are_nan(candidate: Candidate) -> bool:
    """Return whether -infinity leaves a number in long rows whose last key alone is allowed.

    Code that takes the keys in tiles may divide by zero in the first tile, which is a fault of its
    own.
    """
    long = replace(candidate.probes[0], queries=TILED, keys=TILED)
    mask = (torch.arange(TILED) == TILED - 1).expand(long.batch, CONFIG.n_heads, TILED, TILED)
    result = candidate.call(long.inputs, mask=mask, is_causal=candidate.plainly_causal)
    if result is None or not isinstance(result.output, Tensor):  # such rows may be too long for it
        return True
    # Where it is always causal, the last query alone has a key.
    return not bool(result.output[:, -1].isnan().any())


def policy_of(candidate: Candidate) -> EmptyRow | None:
    """Return the policy of the rows that a mask, or the causal flag, leaves without a key; None if
    there is none.

    It may depend on the dtype: a fill with the least number of float32 is -infinity where it is
    cast down.
    """
    policies = {_policy(candidate, *trial) for trial in trials(candidate)}
    return policies.pop() if len(policies) == 1 else None


def _policy(
    candidate: Candidate, probe: Probe, emptied: Tensor, options: dict[str, Any]
) -> EmptyRow | None:
    """Return the policy that a call shows whose emptied rows, boolean (B, L), have no key."""
    result = candidate.call(probe.inputs, **options)
    if result is None:
        return "error"
    output = result.output
    if not isinstance(output, Tensor) or output.shape != probe.inputs[0].shape:
        return None
    if bool(output[emptied].isnan().all()):
        return "nan"
    if candidate.explained:
        return _explained_policy(candidate, output, emptied, probe.inputs[2])
    read = influence(candidate, probe.inputs, **options)
    return None if read is None else "uniform" if bool(read[emptied].all()) else "zeros"


def trials(candidate: Candidate) -> Iterator[tuple[Probe, Tensor, dict[str, Any]]]:
    """Yield probes, which of their rows are left without a key, boolean (B, L), and the options of
    the call.
    """
    if candidate.mask:
        probe, causal = candidate.probes[0], candidate.formula.causal
        mask, emptied = _mask_with_empty_rows(candidate, probe)
        yield probe, emptied, {"mask": mask, "is_causal": candidate.plainly_causal}
        if causal and not candidate.masks.counts_keys:
            # Of the first row, the mask hides what is not later, as padding on the left does.
            seen = causal_mask(mask.shape[2], mask.shape[3], causal)[0]
            first = (torch.arange(mask.shape[2]) == 0).expand(len(mask), -1)
            if bool(seen.any()) and not bool(seen.all()):
                yield (
                    probe,
                    first,
                    {"mask": (~seen).expand_as(mask), "is_causal": candidate.plainly_causal},
                )
        return
    if candidate.claims.get("causal") != "bottom_right":
        return
    # With more queries than keys, the causal flag leaves the first ones without a key.
    _, probe = replace(candidate, special=GENERAL).probes
    emptied = (torch.arange(probe.queries) < probe.queries - probe.keys).expand(probe.batch, -1)
    yield probe, emptied, {"is_causal": True}


def _explained_policy(
    candidate: Candidate, output: Tensor, emptied: Tensor, value: Tensor
) -> EmptyRow | None:
    """Return the policy whose contexts give the emptied rows, boolean (B, L), of an output (B, L,
    D).
    """
    values = _values(candidate, value)
    contexts: dict[EmptyRow, Tensor] = {"zeros": values * 0, "uniform": values}
    for policy, of_policy in contexts.items():
        expected = _output(candidate, of_policy.mean(1, keepdim=True)).expand_as(output)[emptied]
        if is_close(output[emptied], expected):
            return policy
    return None


def _mask_with_empty_rows(candidate: Candidate, probe: Probe) -> tuple[Tensor, Tensor]:
    """Return a mask (B, H, L, S) that leaves some rows without a key, and which, boolean (B, L)."""
    per_item, per_query = (
        candidate.claims.get(f"per_{axis}_mask", True) for axis in ("item", "query")
    )
    mask = candidate.mask_of(probe, "bs" if per_item else "ls" if per_query else "s")
    emptied = torch.zeros(mask.shape[0], mask.shape[2], dtype=torch.bool)
    emptied[0 if per_item else slice(None), 0 if per_query and not per_item else slice(None)] = True
    return mask & ~emptied[:, None, :, None], emptied


def _values(candidate: Candidate, value: Tensor) -> Tensor:
    """Return the projected values (B, S, heads side by side)."""
    return heads_of(value, candidate.weights, "v").transpose(1, 2).flatten(2)


def _output(candidate: Candidate, context: Tensor) -> Tensor:
    """Return the output of a context, both (B, N, width)."""
    weights = candidate.weights
    return F.linear(context, weights.w_o, weights.b_o) if candidate.formula.projected else context
