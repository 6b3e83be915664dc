"""The format of masks that is nearest to what a module does with them, where no format explains all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest import agree, influence
from mha.implementations.inference.probes import CONVENTIONS, SHAPES, Probe, share_close
from mha.spec import Claims, MaskConvention, Output


@dataclass(frozen=True)
class Effect:
    """What masks of one format do, if none of them raises.

    neutral: a mask that hides nothing changes nothing. ignored: nor does any other. explained: the share of the rows
    that the formula gives. per_item: the same, of masks that differ between items, if the format has these. read: the
    share of the allowed keys in what the outputs depend on; 0 if the formula gives some rows.
    """

    neutral: bool
    ignored: bool
    explained: float
    per_item: float
    read: float

    def __str__(self) -> str:
        if self.ignored:
            return "assumed: masks have no effect"
        if self.explained:
            return f"assumed: it explains {self.explained:.0%} of the queries under masks"
        return f"assumed: {self.read:.0%} of what the output depends on is allowed by the mask"


def nearest_format(
    formats: Sequence[Candidate], *, partly: bool = False
) -> tuple[Candidate, list[MaskConvention]] | None:
    """Return the format of masks that is nearest to what they do, the first one of several, and its conventions.

    formats: the most general first. partly: require that it explains masks of an item, or that padding has no effect.
    None if each of them raises.
    """
    best: tuple[Candidate, list[MaskConvention]] | None = None
    best_level: tuple[bool, float] = (False, -1.0)
    plain = [replace(each, mask_shape=None, mask_numbers=False, padding=None) for each in formats[:1]]
    unmasked = [each.call(probe.inputs) for each in plain for probe in each.probes]
    for each in formats:
        effects = _effects(each, unmasked)
        if not effects:
            continue
        convention = max(effects, key=lambda name: (effects[name].neutral, effects[name].explained, effects[name].read))
        effect = effects[convention]
        if partly and not (effect.per_item or (each.padding and effect.ignored)):
            continue
        level = effect.neutral, float(effect.per_item > 0) if each.explained else round(effect.read, 1)
        if level > best_level:
            also = [name for name, other in effects.items() if name == "additive" != convention and other == effect]
            best_level, best = level, (replace(each, assumed=str(effect)), [convention, *also])
    return best


def _effects(masked: Candidate, unmasked: Sequence[Output | None]) -> dict[MaskConvention, Effect]:
    """Return the effect of masks under each convention under which none raises, the most likely one first.

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
    neutral, ignored, shares, per_item = True, True, [], []
    for probe, base in zip(tried.probes, unmasked, strict=True):
        for mask in _masks(tried, probe):
            result = tried.call(probe.inputs, mask=mask)
            if not (base and result and isinstance(result.output, Tensor)) or result.output.shape != base.output.shape:
                return None
            ignored &= agree(result, base)
            share = share_close(result.output, tried.formula(probe.inputs, tried.weights, mask))
            shares.append(share if tried.explained else 0.0)
            if not torch.equal(mask, mask[:1].expand_as(mask)):
                per_item.append(shares[-1])
        opened = torch.ones(1, 1, 1, probe.mask("s", causal=False).shape[-1], dtype=torch.bool)
        neutral &= agree(tried.call(probe.inputs, mask=opened), base)
    explained = sum(shares) / len(shares)
    of_items = sum(per_item) / len(per_item) if per_item else explained
    return Effect(neutral, ignored, explained, of_items, 0.0 if ignored or explained else _share_read(tried))


def _masks(tried: Candidate, probe: Probe) -> list[Tensor]:
    """Return masks that differ along all axes of a format, then along fewer of them."""
    axes, causal = SHAPES[tried.mask_shape], tried.formula.causal
    fewer = ["".join(axis for axis in axes if axis in among) for among in (axes, "bls", "bs", "ls", "s")]
    masks = [probe.mask(each, causal=causal) for each in dict.fromkeys(fewer)]
    if tried.mask_shape is None or tried.padding:
        masks.append(probe.mask("bs", causal=causal)[:, :1, :1])
    if tried.mask_shape is None:
        masks.append(probe.mask("ls", causal=causal)[:1, :1])
    return masks


def _share_read(tried: Candidate) -> float:
    """Return the share of the allowed keys in what the outputs depend on."""
    probe = tried.probes[0]
    mask = _masks(tried, probe)[0]
    read = influence(tried, probe.inputs, mask=mask)
    if read is None or not read.sum():
        return 0.0
    return float((read * mask.any(1)).sum() / read.sum())
