"""Whether a module that takes an optional memory computes self-attention without it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.masks import fits
from mha.implementations.inference.nearest import find_formula, outputs_of
from mha.implementations.inference.probes import is_close
from mha.implementations.inference.projections import not_loaded
from mha.implementations.inference.scope import depends_on_order


def find_self_attention(candidate: Candidate, module: nn.Module) -> None:
    """Leave the memory out of self-attention, unless calls without it may be meant to compute something else."""
    if not candidate.may_leave_out_memory or not candidate.explained:
        return
    alone = replace(candidate, claims=candidate.claims | {"cross_attention": False})
    candidate.memory_required = _is_something_else(alone, module) or not _takes_its_masks(candidate, alone)


def _is_something_else(alone: Candidate, module: nn.Module) -> bool:
    """Return whether calls without a memory raise, or seem to compute something else, such as causal attention.

    Where they only differ from the formula, they are judged, and fail.
    """
    outputs = outputs_of(alone, is_causal=bool(alone.formula.causal))
    if len(outputs) < len(alone.probes):
        return True
    expected = [alone.formula(probe.inputs, alone.weights, None) for probe in alone.probes]
    if all(map(is_close, outputs, expected)):
        return False
    other = replace(alone)
    is_causal = find_formula(other, outputs) and bool(other.formula.causal)
    return is_causal or bool(not_loaded(module, alone.parameters)) or depends_on_order(alone)


def _takes_its_masks(candidate: Candidate, alone: Candidate) -> bool:
    """Return whether masks count without a memory as they do with it, or have a name that says that they should."""
    if candidate.mask is None:
        return True
    name, same_name = candidate.signature.mask, alone.signature.mask
    is_one = name == same_name and not (candidate.signature.guesses_mask or candidate.padding or candidate.assumed)
    return is_one or all(fits(alone, probe) for probe in alone.probes)
