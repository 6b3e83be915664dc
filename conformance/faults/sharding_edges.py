"""Faults that DST-3, DST-9, DST-10 and DST-11 must catch: uneven parts, and numbers of ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.fault import fault
from mha.conformance.faults.ranks import CLAIMS, SequenceParallel
from mha.spec import Output


@fault(
    "DST-3",
    trigger="a length that the ranks do not divide",
    source="https://github.com/NVIDIA/TransformerEngine/issues/1930",
)
class LastTokenLost(SequenceParallel):
    """Each rank passes on S // ranks keys: of an odd length, the last one is lost."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        return [
            part[:, :, : max(1, sum(lengths) // self.size)] for part in super().gather(x, lengths)
        ]

    def columns_of(
        self, mask: Tensor | None, columns: Tensor, rank: int, lengths: list[int]
    ) -> Tensor | None:
        return super().columns_of(mask, columns[: max(1, sum(lengths) // self.size)], rank, lengths)

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        return super().later(rows, columns[: max(1, self.shortest)], rank)

    def lengths(self, x: Tensor) -> list[int]:
        found = super().lengths(x)
        self.shortest = sum(found) // self.size
        return found


@fault("DST-3", trigger="a length that the ranks do not divide")
class PaddedKeysCount(SequenceParallel):
    """Parts are padded with zeros to the longest one, and the padding is attended to."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        return super().gather(x, [max(lengths)] * self.size)

    def positions(self, rank: int, lengths: list[int]) -> Tensor:
        return F.pad(super().positions(rank, lengths), (0, max(lengths) - lengths[rank]))

    def forward(self, query: Tensor, *rest: Any, **options: Any) -> Output:
        mask = options.pop("mask", None)
        longest = max(self.lengths(query))
        padded = F.pad(query, (0, 0, 0, longest - query.shape[1]))
        if mask is not None and mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, longest - mask.shape[2]))
        return Output(
            super().forward(padded, *rest, mask=mask, **options).output[:, : query.shape[1]]
        )


@fault("DST-3", trigger="a length that the ranks do not divide")
class RefusedOnTheShortRank(SequenceParallel):
    """Only a rank whose part is shorter than the first raises; the others wait for it."""

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        if lengths[self.rank] < lengths[0]:
            raise ValueError(f"{sum(lengths)} positions are not a multiple of {self.size}")
        return super().gather(x, lengths)


@fault("DST-9", caught_by="numbers_of_ranks_do_not_matter", trigger="a mesh within a larger group")
class GlobalRank(SequenceParallel):
    """A rank takes the part of the mask and of the positions that belongs to its number among all
    processes.
    """

    def positions(self, rank: int, lengths: list[int]) -> Tensor:
        rank = dist.get_rank() % self.size if rank == self.rank else rank
        return super().positions(rank, lengths)


@fault("DST-9", caught_by="one_rank_equals_no_sharding", trigger="a single rank")
class OneRankForgetsMasks(SequenceParallel):
    """On one rank a shortcut is taken, which knows no mask and no causal flag."""

    def hide(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.size == 1:
            return scores
        return super().hide(scores, mask)

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        return super().later(rows, columns, rank) & (self.size > 1)


@fault("DST-10", trigger="a rank without a query")
class ReturnsEarly(SequenceParallel):
    """A rank without a query returns at once; the others wait for its keys."""

    def forward(self, query: Tensor, *rest: Any, **options: Any) -> Output:
        if query.shape[1] == 0:
            return Output(query * 0)
        return super().forward(query, *rest, **options)


@fault("DST-10", trigger="a rank without a query")
class Dies(SequenceParallel):
    """The process of a rank without a query ends, as where a kernel is launched without a block."""

    def forward(self, query: Tensor, *rest: Any, **options: Any) -> Output:
        if query.shape[1] == 0:
            os._exit(3)
        return super().forward(query, *rest, **options)


@fault("DST-11", script_shows=False, trigger="dropout", claims=replace(CLAIMS, dropout="output"))
class ShardsDroppedAlike(SequenceParallel):
    """Each rank drops of its own part, and all of them the same, as they have one seed."""

    def forward(self, *inputs: Tensor, **options: Any) -> Output:
        output = super().forward(*inputs, **options).output
        return Output(F.dropout(output, self.config.dropout, self.training))
