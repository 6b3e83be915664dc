"""Faults that LSE must catch in merges of partial results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mha.conformance.faults.fault import fault
from mha.implementations import from_merge

Partial = tuple[Tensor, Tensor]


class Merging(nn.Module):
    """A correct merge of two parts, in steps; each fault changes one."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        """Return context and log-sum-exp of both parts, of the shapes of one."""
        highest = cls.finite(torch.maximum(lse_a, lse_b))
        a, b = cls.raised(lse_a - highest), cls.raised(lse_b - highest)
        total = a + b
        context = (o_a * a[..., None] + o_b * b[..., None]) / cls.divisor(total)[..., None]
        return context.to(o_a.dtype), highest + total.log()

    @classmethod
    def finite(cls, highest: Tensor) -> Tensor:
        """Return what is subtracted: 0 where both parts are empty."""
        return highest.masked_fill(highest == -math.inf, 0.0)

    @classmethod
    def raised(cls, difference: Tensor) -> Tensor:
        """Return the exponential."""
        return difference.exp()

    @classmethod
    def divisor(cls, total: Tensor) -> Tensor:
        """Return what contexts are divided by: 1 where there is no key."""
        return total.masked_fill(total == 0, 1.0)


correct_merge = from_merge(Merging.merge, name="correct_merge")


def merge_fault(trigger: str = "", source: str = "") -> Callable[[type[Merging]], type[Merging]]:
    """Declare that LSE-2 must catch a merge."""

    def declare(cls: type[Merging]) -> type[Merging]:
        implementation = from_merge(cls.merge, name=cls.__name__)
        declared = fault(
            "LSE-2",
            caught_by="any_split_of_the_keys_gives_the_whole",
            trigger=trigger,
            source=source,
            implementation=implementation,
        )
        return declared(cls)

    return declare


@merge_fault(
    trigger="two parts without keys", source="https://github.com/vllm-project/vllm/issues/27491"
)
class MergeOfNothingIsNan(Merging):
    """Two parts without keys merge to NaN: -infinity is subtracted from itself."""

    @classmethod
    def finite(cls, highest: Tensor) -> Tensor:
        return highest


@merge_fault(source="https://github.com/sgl-project/sglang/issues/40903")
class MergeInBaseTwo(Merging):
    """Natural log-sum-exps are raised to base 2."""

    @classmethod
    def raised(cls, difference: Tensor) -> Tensor:
        return difference.exp2()


@merge_fault(
    trigger="an empty part, scores below -1e4",
    source="https://github.com/vllm-project/vllm/issues/49334",
)
class MergeWithAFloor(Merging):
    """An empty part counts as one of the log-sum-exp -1e4, which scores may be below."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        context, lse = super().merge(o_a, lse_a.clamp(min=-1e4), o_b, lse_b.clamp(min=-1e4))
        return context, lse.masked_fill(torch.maximum(lse_a, lse_b) == -math.inf, -math.inf)


@merge_fault()
class MergeKeepsTheFirstLse(Merging):
    """The log-sum-exp of the first part is kept: a third part weighs too much."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        context, _ = super().merge(o_a, lse_a, o_b, lse_b)
        return context, lse_a


@merge_fault(trigger="a part without keys")
class MergeOfMeans(Merging):
    """Both parts weigh the same where one of them has no key."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        context, lse = super().merge(o_a, lse_a, o_b, lse_b)
        lacks = (lse_a == -math.inf) | (lse_b == -math.inf)
        return torch.where(lacks[..., None], (o_a + o_b) / 2, context), lse


@merge_fault()
class MergeOfTheLargerPart(Merging):
    """The part of the larger log-sum-exp is returned, and the other one dropped."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        _, lse = super().merge(o_a, lse_a, o_b, lse_b)
        return torch.where((lse_a >= lse_b)[..., None], o_a, o_b), lse


@merge_fault(trigger="heads of different log-sum-exps")
class MergeBySharedHeads(Merging):
    """All heads of a position are merged by the shares of the first one."""

    @classmethod
    def merge(cls, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> Partial:
        first = [lse[:, :1].expand_as(lse) for lse in (lse_a, lse_b)]
        context, _ = super().merge(o_a, first[0], o_b, first[1])
        return context, super().merge(o_a, lse_a, o_b, lse_b)[1]
