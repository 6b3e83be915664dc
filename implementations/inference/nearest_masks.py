"""The format of masks that is nearest to what a module does with them, where none explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.mask_effects import (
    broadcast_masks,
    conventions_of,
    with_convention,
)
from mha.implementations.inference.nearest_projections import agree, influence, is_output
from mha.implementations.inference.probes import SHAPES, Probe, changed, share_close
from mha.spec import MaskConvention, Output

# A format explains nothing that explains fewer of the queries under masks, or of whose reads fewer
# are allowed.
LEAST_EXPLAINED, LEAST_READ = 0.05, 0.75
# Boolean masks are meant to count where they explain so much: added as ones, they explain only the
# rows of which they hide nothing.
MEANT = 0.5


class Format(NamedTuple):
    """A format of masks, and the conventions under which it is read.

    assumed: why it is assumed, if it does not explain all that masks do.
    ignored: whether its masks have no effect.
    """

    candidate: Candidate
    conventions: list[MaskConvention]
    assumed: str = ""
    ignored: bool = False


@dataclass(frozen=True)
class Effect:
    """What masks of one format do, if none of them raises.

    neutral: a mask that hides nothing changes nothing.
    ignored: nor does any other one of padding, or at all, without padding of its own.
    shared, per_item: the share of the rows that the formula gives under masks that all items share,
        and under others, if the format has these.
    read: the share of the allowed keys in what the outputs depend on; 0 if the formula gives some
        rows.
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


def nearest_format(formats: Sequence[Candidate], *, partly: bool = False) -> Format | None:
    """Return the format of masks that is nearest to what they do, the first one of several.

    formats: the most general first.
    partly: require that it explains masks that all items share, and those of some items.
    None if each of them raises, or explains nothing.
    """
    if not formats:
        return None
    plain = formats[0].declaring(mask_shape=None, mask_numbers=False, padding=None)
    unmasked = [plain.call(probe.inputs) for probe in plain.probes]
    best, best_level = None, (False, -1.0)
    for each in formats:
        effects = _effects(each, unmasked)
        conventions = _nearest(effects)
        if not conventions or not _is_near(effects[conventions[0]], partly=partly):
            continue
        effect = effects[conventions[0]]
        level = _level(each, effect)
        # Among equals, the more general one is right, though it may explain less.
        if level > best_level:
            best = Format(each, conventions, _evidence(each, effect), effect.ignored)
            best_level = level
    return best


def with_nearest_booleans(exact: Format) -> Format | None:
    """Return a format of added masks with the meaning of boolean ones, if most of these have one.

    None if the format is another one, or boolean masks count exactly, or mean nothing.

    exact: a format that explains what masks do.
    """
    if exact.conventions != ["additive"] or not exact.candidate.explained:
        return None
    plain = exact.candidate.declaring(mask_shape=None, mask_numbers=False, padding=None)
    unmasked = [plain.call(probe.inputs) for probe in plain.probes]
    # Masks of padding that have an argument of their own tell nothing of this one.
    effects = _effects(exact.candidate.declaring(padding=None), unmasked)
    effects.pop("additive", None)
    nearest = _nearest(effects)
    if not nearest or effects[nearest[0]].explained < MEANT:
        return None
    share = effects[nearest[0]].explained
    why = f"assumed: it explains {share:.0%} of the queries under boolean masks, all under others"
    return Format(exact.candidate, [*nearest, "additive"], why)


def _level(masked: Candidate, effect: Effect) -> tuple[bool, float]:
    """Return how near a format comes."""
    if masked.explained:
        return effect.neutral, float(effect.per_item > 0)
    return effect.neutral, round(effect.read, 1)


def _evidence(masked: Candidate, effect: Effect) -> str:
    if effect.ignored and masked.declared.padding:
        return "assumed: the padding mask has no effect"
    if effect.ignored:
        return "assumed: masks have no effect; if that is meant, declare mask=None"
    if effect.explained:
        return f"assumed: it explains {effect.explained:.0%} of the queries under masks"
    return f"assumed: {effect.read:.0%} of what the output depends on is allowed by the mask"


def _nearest(effects: Mapping[MaskConvention, Effect]) -> list[MaskConvention]:
    """Return the first convention that comes nearest, and "additive" if it is as near."""
    if not effects:
        return []

    def nearness(name: MaskConvention) -> tuple[bool, float, float]:
        return effects[name].neutral, effects[name].explained, effects[name].read

    best = max(effects, key=nearness)
    if best != "additive" and effects.get("additive") == effects[best]:
        return [best, "additive"]
    return [best]


def _is_near(effect: Effect, *, partly: bool) -> bool:
    """Return whether a format explains anything, or as much as `nearest_format` requires."""
    if partly:
        return effect.shared == 1.0 and (effect.per_item > 0 or effect.ignored)
    return effect.neutral or effect.explained >= LEAST_EXPLAINED or effect.read >= LEAST_READ


def _effects(masked: Candidate, unmasked: Sequence[Output | None]) -> dict[MaskConvention, Effect]:
    """Return the effect of masks under each convention under which none raises, the likely first.

    unmasked: the output of each probe without a mask.
    """
    conventions = conventions_of(masked)
    if "pad" in (masked.signature.mask or ""):
        conventions.sort(key=lambda convention: convention != "drop")
    effects = {}
    for convention in conventions:
        effect = _effect(with_convention(masked, convention), unmasked)
        if effect:
            effects[convention] = effect
    return effects


def _effect(tried: Candidate, unmasked: Sequence[Output | None]) -> Effect | None:
    """Return the effect of masks, or None if one raises or hides the queries of its rows."""
    neutral, ignored = True, True
    shares: dict[bool, list[float]] = {True: [], False: []}  # by whether all items share the mask
    for probe, base in zip(tried.probes, unmasked, strict=True):
        for mask in _masks(tried, probe):
            result = tried.call(probe.inputs, mask=mask)
            if result is None or base is None or not _hides_keys(result, base):
                return None
            if _is_of_interest(tried, mask):
                ignored &= agree(result, base)
            shares[_is_shared(mask)].append(_share_explained(tried, probe, mask, result))
        opened = torch.ones(1, 1, 1, probe.lengths[1], dtype=torch.bool)
        neutral &= agree(tried.call(probe.inputs, mask=opened), base)
    shared, per_item = _mean(shares[True]), _mean(shares[False] or shares[True])
    read = 0.0
    if not (ignored or shared or per_item):
        read = _share_read(tried)
    return Effect(neutral, ignored, shared, per_item, read)


def _is_of_interest(tried: Candidate, mask: Tensor) -> bool:
    """Return whether a mask is one of padding, where that has an argument of its own."""
    return not tried.declared.padding or mask.shape[1:3] == (1, 1)


def _is_shared(mask: Tensor) -> bool:
    """Return whether all items share a mask."""
    return torch.equal(mask, mask[:1].expand_as(mask))


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / max(len(shares), 1)


def _hides_keys(result: Output, base: Output) -> bool:
    """Return whether a mask may be one of keys, by an output with it, and one without it.

    One of queries leaves some of them as they are, and gives all others one output.
    """
    if not isinstance(base.output, Tensor) or not is_output(result, base.output):
        return False
    rows = changed(result.output, base.output).any(-1) & ~result.output.isnan().any(-1)
    masked = result.output[rows]
    if not 1 < len(masked) < rows.numel():
        return True
    return bool(changed(masked, masked[:1].expand_as(masked)).any())


def _share_explained(tried: Candidate, probe: Probe, mask: Tensor, result: Output) -> float:
    """Return the share of the rows of a result that the formula gives; 0 if none is known."""
    if not tried.explained:
        return 0.0
    return share_close(result.output, tried.formula(probe.inputs, tried.weights, mask))


def _masks(tried: Candidate, probe: Probe) -> list[Tensor]:
    """Return masks that differ along all axes of a format, then along fewer of them."""
    axes = SHAPES[tried.declared.mask_shape]
    masks = {}
    for among in (axes, "bls", "bs", "ls", "s"):
        fewer = "".join(axis for axis in axes if axis in among)
        masks[fewer] = tried.mask_of(probe, fewer)
    return [*masks.values(), *broadcast_masks(tried, probe)]


def _share_read(tried: Candidate) -> float:
    """Return the share of the allowed keys in what the outputs depend on."""
    probe = tried.probes[0]
    mask = _masks(tried, probe)[0]
    read = influence(tried, probe.inputs, mask=mask)
    if read is None or not read.sum():
        return 0.0
    return float((read * mask.any(1)).sum() / read.sum())
