"""What a module does with a query that has no key to attend to, found by trial."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest import CHANGED, influence
from mha.implementations.inference.probes import Probe, is_close
from mha.spec.claims import EmptyRow


def find_empty_row(candidate: Candidate) -> None:
    """Claim the policy for empty rows that a trial run shows; where it shows none of them, claim nothing."""
    by_the_flag = candidate.claims.get("causal") == "bottom_right"
    policy = _policy(candidate) if candidate.mask or by_the_flag else None
    if policy and policy != "zeros":
        candidate.claims["empty_row"] = policy


def _policy(candidate: Candidate) -> EmptyRow | None:
    """Return the policy of the rows that a mask leaves without a key."""
    options: dict[str, Any] = {"is_causal": bool(candidate.formula.causal or not candidate.mask)}
    if candidate.mask:
        probe = candidate.probes[0]
        options["mask"], emptied = _mask_with_empty_rows(candidate, probe)
    else:  # with more queries than keys, the causal flag leaves the first ones without a key
        probe = candidate.probes[1]
        emptied = (torch.arange(probe.queries) < probe.queries - probe.keys).expand(probe.batch, -1)
    result = candidate.call(probe.inputs, **options)
    if result is None:
        return "error"
    query, _, value = probe.inputs
    if not isinstance(result.output, Tensor) or result.output.shape != query.shape:
        return None
    rows = result.output[emptied]
    if bool(rows.isnan().all()):
        return "nan"
    if not candidate.explained:
        read = influence(candidate, probe.inputs, **options)
        return None if read is None else "uniform" if bool((read[emptied] > CHANGED).all()) else "zeros"
    values = _values(candidate, value)
    contexts: dict[EmptyRow, Tensor] = {"zeros": values * 0, "uniform": values}
    for policy, of_policy in contexts.items():
        expected = _output(candidate, of_policy.mean(1, keepdim=True)).expand_as(query)[emptied]
        if is_close(rows, expected):
            return policy
    return None


def _mask_with_empty_rows(candidate: Candidate, probe: Probe) -> tuple[Tensor, Tensor]:
    """Return a mask (B, H, L, S) that leaves some rows without a key, and which, boolean (B, L)."""
    per_item, per_query = (candidate.claims.get(f"per_{axis}_mask", True) for axis in ("item", "query"))
    mask = probe.mask("bs" if per_item else "ls" if per_query else "s", causal=candidate.formula.causal)
    emptied = torch.zeros(mask.shape[0], mask.shape[2], dtype=torch.bool)
    emptied[0 if per_item else slice(None), 0 if per_query and not per_item else slice(None)] = True
    return mask & ~emptied[:, None, :, None], emptied


def _values(candidate: Candidate, value: Tensor) -> Tensor:
    """Return the projected values (B, S, heads side by side)."""
    return F.linear(value, candidate.weights.w_v, candidate.weights.b_v)


def _output(candidate: Candidate, context: Tensor) -> Tensor:
    """Return the output of a context, both (B, N, width)."""
    weights = candidate.weights
    return F.linear(context, weights.w_o, weights.b_o) if candidate.formula.projected else context
