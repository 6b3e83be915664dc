"""The convention and the shape of a module's masks, found by what masks do to its outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mha.implementations.adapters.calling import signature_of
from mha.implementations.adapters.masks import PaddingConvention
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe, additive, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import Claims, MaskConvention

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


def find_mask(candidate: Candidate) -> None:
    """Set the convention, shape and claims of masks; raises Unclear if no convention and shape fit."""
    name = candidate.signature.mask
    if name is None:
        candidate.claims["masks"] = ()
        return
    separate = signature_of(candidate.forward_parameters, padding=True)
    paddings: tuple[PaddingConvention, ...] = ("drop", "keep") if separate.padding and separate.mask else ()
    for padding in (*paddings, None):
        if _find_format(candidate, padding):
            return
    unexplained = "" if candidate.explained else "; without a mask, its output matches no known formula either"
    raise Unclear(
        f"with a mask of a common shape as {name!r}, its output matches no convention{unexplained}; pass mask='keep', "
        "'drop' or 'additive', and mask_shape=..., or mask=None to judge it without masks"
    )


def _find_format(candidate: Candidate, padding: PaddingConvention | None) -> bool:
    """Set the format and the claims of masks, and return whether one fits; padding: how a separate mask of keys is."""
    for numbers, shape in product((False, True), SHAPES):
        tried = replace(candidate, mask_shape=shape, mask_numbers=numbers, padding=padding)
        fitting = _fitting_conventions(tried)
        if fitting:
            candidate.mask, candidate.mask_shape = fitting[0], shape
            candidate.mask_numbers, candidate.padding = numbers, padding
            candidate.claims |= {"masks": {"bool", "float"}} if "additive" in fitting else {}
            candidate.claims |= candidate.masks.limits(Claims(masks=candidate.claims.get("masks", {"bool"})))
            _find_ranks(candidate)
            return True
    return False


def _find_ranks(candidate: Candidate) -> None:
    """Claim the numbers of dimensions with which masks have their effect, where they need not be four."""
    if candidate.mask_shape is not None or candidate.padding or not candidate.explained:
        return
    probe = candidate.probes[0]
    mask = probe.mask("ls", causal=candidate.formula.causal)[:1, :1]
    forms = {4: mask, 3: mask[0], 2: mask[0, 0], 1: mask[0, 0, 0]}
    ranks = {rank for rank, form in forms.items() if rank == 4 or _gives_formula(candidate, probe, form)}
    candidate.claims |= {} if ranks == set(forms) else {"mask_ranks": ranks}


def _fitting_conventions(candidate: Candidate) -> list[MaskConvention]:
    """Return the conventions under which masks of its shape have their effect on both probes."""
    fitting = []
    for convention in CONVENTIONS[:2] if candidate.mask_numbers else CONVENTIONS:
        tried = replace(candidate, mask=convention)
        tried.claims = candidate.claims | tried.masks.limits(Claims())
        if all(_fits(tried, probe) for probe in candidate.probes):
            fitting.append(convention)
    return fitting


def _fits(tried: Candidate, probe: Probe) -> bool:
    """Return whether masks that differ along the axes of its shape have their effect on a probe."""
    axes, causal = SHAPES[tried.mask_shape], tried.formula.causal
    masks = [probe.mask(axes, causal=causal)]
    if tried.mask_shape is None or tried.padding:
        masks.append(probe.mask("bs", causal=causal)[:, :1, :1])
    if tried.mask_shape is None:
        masks.append(probe.mask("ls", causal=causal)[:1, :1])
    takes_numbers = tried.mask == "additive" and not (tried.padding and "b" not in axes)
    if takes_numbers and tried.explained:
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
        others = {True: (query, key), "memory": (query, shifted), False: (shifted, shifted)}[tried.cross_attention]
        changed = tried.call((*others, shifted), mask=mask)
        if changed is None:
            return False
        reads = ((changed.output - base.output).abs() > 1e-9).any(-1)
        expected = allowed[..., position].any(1)
        own = (torch.arange(query.shape[1]) == position) & (not tried.cross_attention)
        if bool((reads != expected)[:, ~own].any()):
            return False
    return True
