"""Plain classes with one defect each, their diagnoses, and the clauses that then fail."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.conformance.faults.base import Correct
from mha.implementations.formula import with_mask
from mha.spec import Options


class ConstantScale(Correct):
    """The scale is that of heads of width 64, whatever they are."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / 8


class DoubledScale(Correct):
    """The scores are twice what they should be."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return 2 * super().score(q, k)


class InvertedTriangle(Correct):
    """What is masked is passed as what is allowed."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options.change(is_causal=False), q, k)
        return (
            allowed & torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
            if options.is_causal
            else allowed
        )


class TriangleOffByOne(Correct):
    """The diagonal of the causal mask is one too high."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options.change(is_causal=False), q, k)
        return (
            allowed & torch.ones(q.shape[2], k.shape[2]).tril(1).bool()
            if options.is_causal
            else allowed
        )


class MaskIgnored(Correct):
    """The mask is not read."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(options.change(mask=None), q, k)


class MaskIgnoredUnderCausal(Correct):
    """The mask is not read where the causal flag is set."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(options.change(mask=None if options.is_causal else options.mask), q, k)


class CausalDroppedBesideMask(Correct):
    """The causal flag is not read where there is a mask."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(
            options.change(is_causal=options.is_causal and options.mask is None), q, k
        )


class MaskAndTriangleInverted(Correct):
    """Both masks say what is masked, and are passed as what is allowed."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed = super().allow(options, q, k)
        return allowed if options.mask is None and not options.is_causal else ~allowed


class AlwaysCausal(Correct):
    """The causal mask is there without the flag too, unless there is a mask."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(
            options.change(is_causal=options.is_causal or options.mask is None), q, k
        )


class _OtherMask(Correct):
    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        changed = with_mask(
            options, lambda mask: self.change(mask.expand(*q.shape[:3], k.shape[2]))
        )
        return super().allow(changed, q, k)

    def change(self, mask: Tensor) -> Tensor:
        raise NotImplementedError


class MaskAsLength(_OtherMask):
    """The True entries of a row are counted, and so many of the first keys are seen."""

    def change(self, mask: Tensor) -> Tensor:
        return torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True)


class MaskRepeated(_OtherMask):
    """The mask is repeated as (heads, items), and the scores are (items, heads)."""

    def change(self, mask: Tensor) -> Tensor:
        return mask.transpose(0, 1).reshape(mask.shape)


class MaskInterleaved(_OtherMask):
    """The mask is repeated as (items, heads), and the scores are (heads, items)."""

    def change(self, mask: Tensor) -> Tensor:
        items, heads = mask.shape[:2]
        return mask.flatten(0, 1).unflatten(0, (heads, items)).transpose(0, 1)


class MaskOfHeadForOneQuery(Correct):
    """For one query, a mask for all heads is read at item + head, and allows beyond its end."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        items, heads, queries = q.shape[:3]
        mask = options.mask
        if mask is not None and queries == 1 and mask.ndim == 4 and mask.shape[1] == 1:
            flat = torch.cat([mask[:, 0], mask.new_ones(heads, *mask.shape[2:])])
            first = (
                torch.arange(items) if len(mask) == items else torch.zeros(items, dtype=torch.long)
            )
            options = options.change(mask=flat[first[:, None] + torch.arange(heads)])
        return super().allow(options, q, k)


class KeysCutAtQueries(Correct):
    """Only the first L keys are seen."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        return super().allow(options, q, k) & (torch.arange(k.shape[2]) < q.shape[2])


class ZerosAppended(Correct):
    """Scores of zero fill the last tile of 16 keys, and are not masked."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        added = -scores.shape[-1] % 16
        masked = torch.nn.functional.pad(scores.masked_fill(~allowed, -torch.inf), (0, added))
        return masked.softmax(-1)[..., : scores.shape[-1]]


class FilledWithTenThousand(Correct):
    """Masked scores get -1e4."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = scores.masked_fill(~allowed, -1e4).softmax(-1)
        return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


class MaskOfNextItem(_OtherMask):
    """The mask of the next item counts: no defect of the catalogue."""

    def change(self, mask: Tensor) -> Tensor:
        return mask.roll(1, 0)


# What each is diagnosed as, and clauses that fail in consequence: of answers, gradients and calls
# that are compared.
PLANTED: dict[type, tuple[str, tuple[str, ...]]] = {
    ConstantScale: (
        "the scores are scaled by 0.125 = 1/sqrt(64), whatever d_k is",
        ("SMX-6", "HED-1", "EQV-6"),
    ),
    DoubledScale: ("the scores are 2 times what they should be", ("SMX-6", "HED-1")),
    InvertedTriangle: (
        "the causal mask is inverted: a query sees only the keys after it",
        ("CAU-1", "STA-3"),
    ),
    TriangleOffByOne: (
        "the causal mask is off by one: a query sees one key too many",
        ("CAU-1", "CAU-3", "GRD-5"),
    ),
    MaskIgnored: ("the mask is ignored", ("MSK-1", "MSK-9", "GRD-5", "STA-3")),
    MaskIgnoredUnderCausal: (
        "the mask is ignored, with a causal flag",
        ("CAU-4", "HED-1", "STA-3"),
    ),
    CausalDroppedBesideMask: (
        "the causal flag is ignored, with a mask",
        ("CAU-4", "HED-1", "STA-3"),
    ),
    MaskAndTriangleInverted: (
        (
            "the masks are read the other way round: what mask and causal flag allow together is"
            " masked"
        ),
        ("MSK-1", "CAU-1"),
    ),
    AlwaysCausal: ("later keys are masked without a causal flag, without a mask", ("HED-1",)),
    MaskAsLength: (
        (
            "the mask is read as a length: its True entries are counted, and as many of the first"
            " keys seen"
        ),
        ("MSK-1", "HED-1", "STA-3"),
    ),
    MaskRepeated: (
        "the mask is laid out (heads, items), but read as (items, heads)",
        ("MSK-6", "HED-1"),
    ),
    MaskInterleaved: (
        "the mask is laid out (items, heads), but read as (heads, items)",
        ("MSK-6", "HED-1"),
    ),
    MaskOfHeadForOneQuery: (
        "a mask for all heads is indexed by the head, as if there were one for each, where L = 1",
        ("MSK-1", "NUM-1"),
    ),
    KeysCutAtQueries: (
        "only the first L keys count, with L the number of queries",
        ("HED-1", "EQV-3"),
    ),
    ZerosAppended: ("zeros that fill the last tile of 16 keys are not masked", ("SMX-1", "HED-1")),
    FilledWithTenThousand: (
        "masked scores get a finite number, which is not low enough",
        ("MSK-1",),
    ),
}
