"""What masks of one format do to the outputs, and whether that is what they should do."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import is_output
from mha.implementations.inference.probes import CONVENTIONS, SHAPES, Probe, additive, is_close
from mha.spec import Claims, MaskConvention

# Of an output, when a value that it reads is changed by 1: far above rounding in float64.
READ = 1e-9


def with_convention(masked: Candidate, convention: MaskConvention) -> Candidate:
    """Return a format of masks with a convention, and the claims that masks of it can have."""
    tried = masked.declaring(mask=convention)
    return tried.claiming(**tried.declared.masks.limits(Claims()))


def fitting_conventions(masked: Candidate) -> list[MaskConvention]:
    """Return the conventions under which masks of a format have their effect on both probes."""
    fitting = []
    for convention in conventions_of(masked):
        tried = with_convention(masked, convention)
        if tried.passes(fits):
            fitting.append(convention)
    return fitting


def conventions_of(masked: Candidate) -> list[MaskConvention]:
    """Return the conventions that a format may have: ones and zeros are not added to the scores."""
    if masked.declared.mask_numbers:
        return ["keep", "drop"]
    return list(CONVENTIONS)


def fits(tried: Candidate, probe: Probe) -> bool:
    """Return whether masks that differ along the axes of its shape have their effect on a probe."""
    axes = SHAPES[tried.declared.mask_shape]
    masks = [tried.mask_of(probe, axes), *broadcast_masks(tried, probe)]
    is_of_one_kind = tried.declared.padding and "b" not in axes
    if tried.declared.mask == "additive" and tried.explained and not is_of_one_kind:
        tried = tried.claiming(masks={"bool", "float"})
        masks.append(additive(masks[0]))
    effect = _gives_formula if tried.explained else _hides_keys
    return all(effect(tried, probe, mask) for mask in masks)


def broadcast_masks(tried: Candidate, probe: Probe) -> list[Tensor]:
    """Return masks of a format that has no shape of its own that have axes of length 1.

    Beside them, a mask of padding has an argument of its own.
    """
    masks = []
    if tried.declared.mask_shape is None or tried.declared.padding:
        masks.append(tried.mask_of(probe, "bs")[:, :1, :1])
    if tried.declared.mask_shape is None:
        masks.append(tried.mask_of(probe, "ls")[:1, :1])
    return masks


def _gives_formula(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    result = tried.call(probe.inputs, mask=mask)
    if result is None:
        return False
    return is_close(result.output, tried.formula(probe.inputs, tried.weights, mask))


def _hides_keys(tried: Candidate, probe: Probe, mask: Tensor) -> bool:
    """Return whether each query reads the allowed keys only, for an unknown formula.

    Each value is changed in turn. In self-attention that changes the query at this position as
    well, so its own output shows nothing.
    """
    query, key, value = probe.inputs
    base = tried.call(probe.inputs, mask=mask)
    if not is_output(base, query):
        return False
    assert base
    allowed = mask.expand(len(query), -1, query.shape[1], -1)
    for position in range(key.shape[1]):
        shifted = value.clone()
        shifted[:, position] += 1.0
        inputs = {
            True: (query, key, shifted),
            "memory": (query, shifted, shifted),
            False: (shifted, shifted, shifted),
        }[tried.cross_attention]
        changed = tried.call(inputs, mask=mask)
        if changed is None:
            return False
        reads = ((changed.output - base.output).abs() > READ).any(-1)
        expected = allowed[..., position].any(1)
        other = torch.arange(query.shape[1]) != position
        if tried.cross_attention:
            other = torch.ones_like(other)
        if bool((reads != expected)[:, other].any()):
            return False
    return True


def takes_pairs(masked: Candidate) -> bool:
    """Return whether boolean masks of pairs of a query and a key can be given in a format."""
    if "l" not in SHAPES[masked.declared.mask_shape] or masked.declared.mask_numbers:
        return False
    tried, probe = masked.declaring(mask="keep"), masked.probes[0]
    result = tried.call(probe.inputs, mask=tried.mask_of(probe, "ls"))
    return is_output(result, probe.inputs[0])


def hides_queries(masked: Candidate) -> bool:
    """Return whether padding masks of a format hide keys as they should, and queries as well.

    The contract has no such mask. A query and the key at its position are only the same in
    self-attention.
    """
    declared = masked.declared
    is_padding = SHAPES[declared.mask_shape] == "bs" and not declared.padding
    if not is_padding or masked.cross_attention or not masked.explained:
        return False
    for convention in CONVENTIONS[:2]:
        if with_convention(masked, convention).passes(_hides_both):
            return True
    return False


def _hides_both(tried: Candidate, probe: Probe) -> bool:
    """Return whether a mask of keys hides them, and what it gives the queries of padding.

    They get one output, or that without a mask.
    """
    mask = tried.mask_of(probe, "bs")
    result = tried.call(probe.inputs, mask=mask)
    if not is_output(result, probe.inputs[0]):
        return False
    assert result
    output, kept = result.output, mask[:, 0, 0]
    expected = tried.formula(probe.inputs, tried.weights, mask)
    if not is_close(output[kept], expected[kept]) or is_close(output[~kept], expected[~kept]):
        return False
    if not bool(output.isfinite().all()):
        return False
    padding = [item[hidden] for item, hidden in zip(output, ~kept, strict=True)]
    if all(is_close(rows, rows[:1].expand_as(rows)) for rows in padding):
        return True
    unmasked = tried.formula(probe.inputs, tried.weights, None)
    return is_close(output[~kept], unmasked[~kept])
