"""The format of masks that is nearest to what a module does with them, where no format explains all
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import agree, influence
from mha.implementations.inference.probes import CONVENTIONS, SHAPES, Probe, changed, share_close
from mha.spec import Claims, MaskConvention, Output

# A format explains nothing that explains fewer of the queries under masks, or of whose reads fewer
# are allowed.
LEAST_EXPLAINED, LEAST_READ = 0.05, 0.75


@dataclass(frozen=True)
class Effect:
    """What masks of one format do, if none of them raises.

    neutral: a mask that hides nothing changes nothing. ignored: nor does any other one of padding,
    or at all, without padding of its own. shared, per_item: the share of the rows that the formula
    gives under masks that all items share, and under others, if the format has these. read: the
    share of the allowed keys in what the outputs depend on; 0 if the formula gives some rows.
    """

    neutral: bool
    ignored: bool
    shared: float
    per_item: float
    read: float

    @property
    def explained(self) -> float:
        """The share of the rows that the formula gives."""
        return (self.shared + self.per_item) / 2


def nearest_format(
    formats: Sequence[Candidate], *, partly: bool = False
) -> tuple[Candidate, list[MaskConvention]] | None:
    """Return the format of masks that is nearest to what they do, the first one of several, and its
    conventions.

    formats: the most general first. partly: require that it explains masks that all items share,
    and those of some items. None if each of them raises, or explains nothing.
    """
    plain = [
        replace(each, mask_shape=None, mask_numbers=False, padding=None) for each in formats[:1]
    ]
    unmasked = [each.call(probe.inputs) for each in plain for probe in each.probes]
    best: tuple[tuple[bool, float], Candidate, list[MaskConvention]] | None = None
    for each in formats:
        effects = _effects(each, unmasked)
        conventions = _nearest(effects)
        if not conventions or not _is_near(effects[conventions[0]], partly):
            continue
        level, evidence = (
            _level(each, effects[conventions[0]]),
            _evidence(each, effects[conventions[0]]),
        )
        if (
            best is None or level > best[0]
        ):  # among equals, the more general one is right, though it may explain less
            best = (
                level,
                replace(each, assumed=evidence, ignored=effects[conventions[0]].ignored),
                conventions,
            )
    return best[1:] if best else None


def _level(masked: Candidate, effect: Effect) -> tuple[bool, float]:
    return effect.neutral, float(effect.per_item > 0) if masked.explained else round(effect.read, 1)


def _evidence(masked: Candidate, effect: Effect) -> str:
    if effect.ignored:
        meant = "" if masked.padding else "; if that is meant, declare mask=None"
        return (
            f"assumed: {'the padding mask has' if masked.padding else 'masks have'} no"
            f" effect{meant}"
        )
    if effect.explained:
        return f"assumed: it explains {effect.explained:.0%} of the queries under masks"
    return f"assumed: {effect.read:.0%} of what the output depends on is allowed by the mask"


def _nearest(effects: Mapping[MaskConvention, Effect]) -> list[MaskConvention]:
    """Return the first convention under which masks come nearest to their effect, and "additive" if
    it is as near.
    """
    if not effects:
        return []
    best = max(
        effects,
        key=lambda name: (effects[name].neutral, effects[name].explained, effects[name].read),
    )
    also: list[MaskConvention] = ["additive"] if effects.get("additive") == effects[best] else []
    return list(dict.fromkeys([best, *also]))


def _is_near(effect: Effect, partly: bool) -> bool:
    """Return whether a format explains anything, or as much as `nearest_format` requires."""
    if not partly:
        return effect.neutral or effect.explained >= LEAST_EXPLAINED or effect.read >= LEAST_READ
    return effect.shared == 1.0 and (effect.per_item > 0 or effect.ignored)


def _effects(masked: Candidate, unmasked: Sequence[Output | None]) -> dict[MaskConvention, Effect]:
    """Return the effect of masks under each convention under which none raises, the most likely one
    first.

    unmasked: the output of each probe without a mask.
    """
    conventions = list(CONVENTIONS[:2] if masked.mask_numbers else CONVENTIONS)
    if "pad" in (masked.signature.mask or ""):
        conventions.sort(key=lambda convention: convention != "drop")
    effects = {}
    for convention in conventions:
        tried = replace(masked, mask=convention)
        tried.claims = masked.claims | tried.masks.limits(Claims())
        if effect := _effect(tried, unmasked):
            effects[convention] = effect
    return effects


def _effect(tried: Candidate, unmasked: Sequence[Output | None]) -> Effect | None:
    neutral, ignored = True, True
    shares: dict[bool, list[float]] = {True: [], False: []}  # by whether all items share the mask
    for probe, base in zip(tried.probes, unmasked, strict=True):
        for mask in _masks(tried, probe):
            result = tried.call(probe.inputs, mask=mask)
            if not _have_one_shape(result, base) or _is_of_queries(result, base):
                return None
            if not tried.padding or mask.shape[1:3] == (1, 1):
                ignored &= agree(result, base)
            shares[torch.equal(mask, mask[:1].expand_as(mask))].append(
                _share_explained(tried, probe, mask, result)
            )
        opened = torch.ones(1, 1, 1, probe.inputs[1].shape[1], dtype=torch.bool)
        neutral &= agree(tried.call(probe.inputs, mask=opened), base)
    shared, per_item = (
        sum(each) / max(len(each), 1) for each in (shares[True], shares[False] or shares[True])
    )
    return Effect(
        neutral,
        ignored,
        shared,
        per_item,
        0.0 if ignored or shared or per_item else _share_read(tried),
    )


def _have_one_shape(result: Output | None, other: Output | None) -> bool:
    outputs = [
        each.output
        for each in (result, other)
        if each is not None and isinstance(each.output, Tensor)
    ]
    return len(outputs) == 2 and outputs[0].shape == outputs[1].shape


def _is_of_queries(result: Output | None, base: Output | None) -> bool:
    """Return whether a mask leaves some queries as they are, and gives all others one and the same
    output.
    """
    assert result is not None
    assert base is not None
    rows = changed(result.output, base.output).any(-1) & ~result.output.isnan().any(-1)
    masked = result.output[rows]
    return (
        1 < len(masked) < rows.numel() and not changed(masked, masked[:1].expand_as(masked)).any()
    )


def _share_explained(tried: Candidate, probe: Probe, mask: Tensor, result: Output | None) -> float:
    """Return the share of the rows of a result that the formula gives; 0 if none is known."""
    if result is None or not tried.explained:
        return 0.0
    return share_close(result.output, tried.formula(probe.inputs, tried.weights, mask))


def _masks(tried: Candidate, probe: Probe) -> list[Tensor]:
    """Return masks that differ along all axes of a format, then along fewer of them."""
    axes = SHAPES[tried.mask_shape]
    fewer = [
        "".join(axis for axis in axes if axis in among) for among in (axes, "bls", "bs", "ls", "s")
    ]
    masks = [tried.mask_of(probe, each) for each in dict.fromkeys(fewer)]
    if tried.mask_shape is None or tried.padding:
        masks.append(tried.mask_of(probe, "bs")[:, :1, :1])
    if tried.mask_shape is None:
        masks.append(tried.mask_of(probe, "ls")[:1, :1])
    return masks


def _share_read(tried: Candidate) -> float:
    """Return the share of the allowed keys in what the outputs depend on."""
    probe = tried.probes[0]
    mask = _masks(tried, probe)[0]
    read = influence(tried, probe.inputs, mask=mask)
    if read is None or not read.sum():
        return 0.0
    return float((read * mask.any(1)).sum() / read.sum())
