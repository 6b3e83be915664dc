"""Faults that DST must catch: attention sharded over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.fault import fault
from mha.conformance.faults.ranks import HeadsParallel, Part, SequenceParallel
from mha.spec import Output, positions


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class ValuesStay(SequenceParallel):
    """Keys come from every rank, and values are the rank's own each time."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        self.gathered = getattr(self, "gathered", 0) + 1  # keys first, then values
        if self.gathered % 2:
            return super().gather(x, lengths)
        return [x] * self.size


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class LastPartMissing(SequenceParallel):
    """The ring stops one step early: the keys of the last rank are never attended to."""

    def part(self, scores: Tensor, v: Tensor) -> Part:
        self.step = getattr(self, "step", -1) + 1
        last = self.size > 1 and self.step % self.size == self.size - 1
        if last:
            scores = scores - math.inf
        return super().part(scores, v)


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class MergedWithoutRescaling(SequenceParallel):
    """Parts are averaged by their sums of exponentials, though each has subtracted a maximum of its
    own.
    """

    def part(self, scores: Tensor, v: Tensor) -> Part:
        context, z = super().part(scores, v)
        return context, z - scores.amax(-1, keepdim=True).clamp(min=-1e30)


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class PartsAveraged(SequenceParallel):
    """The contexts of the ranks' parts are averaged, regardless of their sums of exponentials."""

    def part(self, scores: Tensor, v: Tensor) -> Part:
        context, z = super().part(scores, v)
        return context, z.clamp(min=0, max=0)


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class ScoresIgnored(SequenceParallel):
    """Each context is the mean of the allowed values of all ranks."""

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        return 0 * super().product(q, k)


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class HeadsRotated(HeadsParallel):
    """Each rank multiplies its heads by the columns of W_o for the heads of the next rank."""

    def place(self, name: str) -> int:
        if name == "w_o":
            return (self.rank + 1) % self.size
        return self.rank


@fault("DST-1", caught_by="sharded_output_is_the_unsharded_one")
class SummedOnTheFirstRank(HeadsParallel):
    """The sum of the outputs is on the first rank only; the others keep their part of it."""

    def add_up(self, partial: Tensor) -> Tensor:
        if self.rank == 0:
            return super().add_up(partial)
        return super().add_up(partial) * 0 + partial


class _ProductOfTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(q, first)
        return q @ k.mT

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors
        return upstream @ k, upstream.mT @ q, None


@fault(
    "DST-1", caught_by="large_calls_are_sharded_alike", trigger="more than 10,000 numbers a rank"
)
class LargeOutputWhole(SequenceParallel):
    """Each rank returns its part of a large output as often as there are ranks, as if it were the
    whole.
    """

    def forward(self, *inputs: Tensor, **options: Any) -> Output:
        output = super().forward(*inputs, **options).output
        return Output(output.repeat(1, self.size, 1) if output.numel() > 10_000 else output)


@fault("DST-2", source="https://github.com/huggingface/diffusers/issues/14265")
class BackwardOfTheFirstStep(SequenceParallel):
    """The backward pass of each step uses the keys of the first one."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        parts = super().gather(x, lengths)
        self.first = parts[0] if self.first is None else self.first
        return parts

    def forward(self, *inputs: Tensor, **options: Any) -> Output:
        self.first = None
        return super().forward(*inputs, **options)

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        first = self.repeat(self.first, q.shape[1]).detach()
        if first.shape != k.shape:
            return super().product(q, k)
        return _ProductOfTheFirst.apply(q, k, first) / math.sqrt(self.config.head_dim)


class _GatherWithoutSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        ctx.rank = mesh.get_local_rank()
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[ctx.rank], None


@fault("DST-2", caught_by="sharded_gradients_are_the_unsharded_ones")
class GatheredWithoutGradients(SequenceParallel):
    """Keys and values have gradients from their own rank's queries only, as with a plain
    `dist.all_gather`.
    """

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        padded = F.pad(x, (0, 0, 0, max(lengths) - x.shape[2]))
        every = _GatherWithoutSum.apply(padded, self.mesh)
        return [part[:, :, :length] for part, length in zip(every, lengths, strict=True)]


@fault("DST-2", caught_by="sharded_gradients_are_the_unsharded_ones")
class GradientsNotSummed(SequenceParallel):
    """The gradients of the weights are those of a rank's own part of the sequence."""

    def whole(self, name: str, grad: Tensor) -> Tensor:
        return grad


@fault("DST-2", caught_by="sharded_gradients_are_the_unsharded_ones")
class GradientsAveraged(SequenceParallel):
    """The gradients of the weights are averaged over the ranks, as for parts of a batch."""

    def whole(self, name: str, grad: Tensor) -> Tensor:
        return super().whole(name, grad) / self.size


@fault("DST-2", caught_by="sharded_gradients_are_the_unsharded_ones")
class InputGradientsNotSummed(HeadsParallel):
    """The gradient of an input is that of a rank's own heads."""

    def copy(self, x: Tensor) -> Tensor:
        return x


@fault("DST-4", trigger="a causal call")
class LocalPositions(SequenceParallel):
    """The causal mask of each pair of shards starts at position 0."""

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        return torch.arange(len(columns)) > torch.arange(len(rows))[:, None]


@fault("DST-4", trigger="a causal call")
class ZigzagForgotten(SequenceParallel):
    """The sequence is in zigzag order, and the causal mask in its original one."""

    order = "zigzag"

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        rows, columns = rows.sort().values, columns.sort().values
        return (
            columns + rank * len(columns) - columns[:1]
            > (rows + self.rank * len(rows) - rows[:1])[:, None]
        )


@fault("DST-4", trigger="a causal call")
class StripesAsOne(SequenceParallel):
    """In striped order, a query sees the keys of its own stripe position on later ranks, which come
    after it.
    """

    order = "striped"

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        return (columns // self.size) > (rows // self.size)[:, None]


@fault("DST-4", trigger="a causal call")
class LaterRanksSkipped(SequenceParallel):
    """Keys of later ranks are skipped in causal calls, though the order is zigzag."""

    order = "zigzag"

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        return super().later(rows, columns, rank) | (rank > self.rank)


@fault("DST-5", trigger="a mask")
class MaskCutInOrder(SequenceParallel):
    """The columns of a mask are cut into chunks, though the keys are in zigzag order."""

    order = "zigzag"

    def columns_of(
        self, mask: Tensor | None, columns: Tensor, rank: int, lengths: list[int]
    ) -> Tensor | None:
        start = sum(lengths[:rank])
        return super().columns_of(mask, torch.arange(start, start + lengths[rank]), rank, lengths)


@fault("DST-5", trigger="a mask")
class MaskStays(SequenceParallel):
    """The keys travel, and the columns of the mask are those of the rank's own keys each time."""

    def columns_of(
        self, mask: Tensor | None, columns: Tensor, rank: int, lengths: list[int]
    ) -> Tensor | None:
        own = positions(self.order, sum(lengths), self.size)[self.rank]
        if len(own) == len(columns):
            columns = own
        return super().columns_of(mask, columns, rank, lengths)


@fault("DST-5", trigger="a float mask")
class MaskAddedOnEveryRank(HeadsParallel):
    """A float mask is added once for each rank."""

    def hide(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.is_floating_point():
            mask = mask * self.size
        return super().hide(scores, mask)


@fault("DST-6", trigger="a rank without allowed keys")
class EmptyPartCounts(SequenceParallel):
    """A part without allowed keys has the log-sum-exp 0, as if it had one key with the score 0."""

    def part(self, scores: Tensor, v: Tensor) -> Part:
        context, z = super().part(scores, v)
        return context, z.masked_fill(z == -math.inf, 0.0)


@fault(
    "DST-6",
    trigger="a rank without allowed keys",
    source="https://github.com/NVIDIA/Megatron-LM/issues/1764",
)
class EmptyPartIsNan(SequenceParallel):
    """The softmax of a part without allowed keys is NaN, and stays so in the merge."""

    def part(self, scores: Tensor, v: Tensor) -> Part:
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


@fault("DST-7", trigger="fewer key/value heads than ranks")
class GroupsTiledOverRanks(HeadsParallel):
    """Key/value heads are tiled over the ranks instead of repeated."""

    def of_group(self, x: Tensor, own: slice) -> Tensor:
        if self.config.kv_heads % self.size == 0:
            return super().of_group(x, own)
        return x.repeat(1, self.config.n_heads // x.shape[1], 1, 1)[:, own]


@fault("DST-7", trigger="fewer key/value heads than query heads")
class GroupGradientsOfOneRank(HeadsParallel):
    """W_k and W_v that every rank has, as there are few key/value heads, get the gradient of one
    rank's query heads.
    """

    def whole(self, name: str, grad: Tensor) -> Tensor:
        shared = name[-1] in "kv" and self.config.kv_heads % self.size
        if shared:
            return grad
        return super().whole(name, grad)


@fault("DST-8")
class BiasOnEveryRank(HeadsParallel):
    """Each rank adds b_o before the sum."""

    def add_up(self, partial: Tensor) -> Tensor:
        b_o = getattr(self, "b_o", None)
        if b_o is None:
            return super().add_up(partial)
        return super().add_up(partial) + (self.size - 1) * b_o


@fault("DST-8")
class BiasGradientOnEveryRank(HeadsParallel):
    """The gradient of b_o, which every rank has whole, is summed over the ranks."""

    def whole(self, name: str, grad: Tensor) -> Tensor:
        if name == "b_o":
            return self.size * grad
        return super().whole(name, grad)
