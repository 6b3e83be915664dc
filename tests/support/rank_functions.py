"""Functions for `from_sharded` that fail, and a correct class; ranks import them from here."""

from __future__ import annotations

import os
from time import sleep
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from mha.conformance.faults.ranks import Copy, HeadsParallel, Part, SequenceParallel, Spmd
from mha.implementations.adapters.sharded import from_sharded
from mha.spec import Claims, Output


class PartsStored(SequenceParallel):
    """Correct: parts of contexts, and merges of them, are stored in the dtype of the inputs."""

    def part(self, scores: Tensor, v: Tensor) -> Part:
        context, z = super().part(scores, v)
        return self.stored(context), z

    def merge(self, one: Part, other: Part) -> Part:
        context, z = super().merge(one, other)
        return self.stored(context), z

    def stored(self, context: Tensor) -> Tensor:
        return context + (context.to(self.w_o).to(context) - context).detach()


class CopyOffInTraining(HeadsParallel):
    """The copy of the output on one rank is wrong where inputs require gradients."""

    def forward(self, query: Tensor, *inputs: Any, **options: Any) -> Output:
        output = super().forward(query, *inputs, **options).output
        return Output(output + 1 if query.requires_grad and self.rank == 1 else output)


parts_stored, copy_off_in_training = Spmd(PartsStored), Spmd(CopyOffInTraining)


def attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, mesh: Any, **_: Any
) -> Tensor:
    key, value = (Copy.apply(x, mesh) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ value


# Correct: each rank has a part of the queries, and all keys.
keys_everywhere = from_sharded(
    attend_to_all,
    placements={"query": Shard(2), "key": Replicate(), "value": Replicate(), "output": Shard(2)},
    claims=Claims(world_sizes={2}, masks={"float"}, causal=None, returns_weights=False),
)


def refuse(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    raise ValueError("not today")


def shorten(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return query[:, :, 1:]


NO_MASKS = Claims(world_sizes={2}, masks=(), causal=None, returns_weights=False)
short_part, short_output = (
    from_sharded(shorten, placements=each, claims=NO_MASKS) for each in (Shard(2), Replicate())
)


def refuse_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        raise ValueError("not here")
    return query


def return_nothing(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> None:
    return None


def return_dtensor(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    return DTensor.from_local(query, mesh, [Shard(2)])


def return_lengths_first(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return query.transpose(1, 2)


def refuse_gloo(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    raise ValueError("needs nccl, not gloo")


def interrupt(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    raise KeyboardInterrupt


def die_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        os._exit(3)
    return query


def hang_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        sleep(1000)
    return query
