"""The convention and the shape of a module's masks, found by what masks do to its outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe, additive, is_close, probes
from mha.implementations.inference.projections import Unclear
from mha.spec import MaskConvention

# The shapes of masks to try, the most general first, each with the axes along which such a mask may differ.
SHAPES: dict[str | None, str] = {
    None: "bhls",
    "b h l s": "bhls",
    "(b h) l s": "bhls",
    "b 1 l s": "bls",
    "b l s": "bls",
    "l s b": "bls",
    "b 1 1 s": "bs",
    "b 1 s": "bs",
    "b s": "bs",
    "s b": "bs",
    "l s": "ls",
}
CONVENTIONS: tuple[MaskConvention, ...] = ("keep", "drop", "additive")
CLAIM_OF_AXIS = {"b": "per_item_mask", "h": "per_head_mask", "l": "per_query_mask"}


def find_mask(candidate: Candidate) -> None:
    """Set the convention, shape and claims of masks; raises Unclear if no convention and shape fit."""
    name = candidate.signature.mask
    if name is None:
        candidate.claims["masks"] = ()
        return
    for numbers, (shape, axes) in product((False, True), SHAPES.items()):
        fitting = _fitting_conventions(candidate, shape, axes, numbers)
        if fitting:
            candidate.mask, candidate.mask_shape, candidate.mask_numbers = fitting[0], shape, numbers
            candidate.claims |= {"masks": {"bool", "float"}} if "additive" in fitting else {}
            candidate.claims |= {claim: False for axis, claim in CLAIM_OF_AXIS.items() if axis not in axes}
            return
    unexplained = "" if candidate.explained else "; without a mask, its output matches no known formula either"
    raise Unclear(
        f"with a mask of a common shape as {name!r}, its output matches no convention{unexplained}; pass mask='keep', "
        "'drop' or 'additive', and mask_shape=..., or mask=None to judge it without masks"
    )


def _fitting_conventions(candidate: Candidate, shape: str | None, axes: str, numbers: bool) -> list[MaskConvention]:
    """Return the conventions under which masks of a shape have their effect on both probes."""
    fitting = []
    for convention in CONVENTIONS[:2] if numbers else CONVENTIONS:
        tried = replace(candidate, mask=convention, mask_shape=shape, mask_numbers=numbers)
        if all(_fits(tried, probe, axes) for probe in probes(self_attention=candidate.self_attention)):
            fitting.append(convention)
    return fitting


def _fits(tried: Candidate, probe: Probe, axes: str) -> bool:
    """Return whether masks that differ along some axes have their effect on a probe."""
    causal = tried.formula.causal
    masks = [probe.mask(axes, causal=causal)]
    if tried.mask_shape is None:
        masks += [probe.mask("bs", causal=causal)[:, :1, :1], probe.mask("ls", causal=causal)[:1, :1]]
    if tried.mask == "additive" and tried.explained:
        masks.append(additive(masks[0]))
    effect = _gives_formula if tried.explained else _hides_keys
    return all(effect(tried, probe, mask) for mask in masks)


def _gives_formula(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    result = tried.call(probe.inputs, mask=mask)
    return result is not None and is_close(result.output, tried.formula(probe.inputs, tried.weights, mask))


def _hides_keys(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    """Return whether each query reads the allowed keys and no others, for a module whose formula is unknown.

    Each value is changed in turn. In self-attention that changes the query at this position as well, so its own output
    shows nothing.
    """
    query, key, value = probe.inputs
    base, allowed = tried.call(probe.inputs, mask=mask), mask.expand(len(query), -1, query.shape[1], -1)
    if base is None or not isinstance(base.output, Tensor) or base.output.shape != query.shape:
        return False
    for position in range(key.shape[1]):
        shifted = value.clone()
        shifted[:, position] += 1.0
        changed = tried.call((shifted,) * 3 if tried.self_attention else (query, key, shifted), mask=mask)
        if changed is None:
            return False
        reads = ((changed.output - base.output).abs() > 1e-9).any(-1)
        expected = allowed[..., position].any(1)
        own = (torch.arange(query.shape[1]) == position) & tried.self_attention
        if bool((reads != expected)[:, ~own].any()):
            return False
    return True
