"""Functions for `from_sharded` that fail, and a correct class; ranks import them from here."""

from __future__ import annotations

import os
from time import sleep
from typing import Any

from torch import Tensor

from mha.conformance.faults.ranks import Part, SequenceParallel, Spmd


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


parts_stored = Spmd(PartsStored)


def refuse(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    raise ValueError("not today")


def refuse_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        raise ValueError("not here")
    return query


def die_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        os._exit(3)
    return query


def hang_on_one(query: Tensor, key: Tensor, value: Tensor, *, mesh: Any, **_: Any) -> Tensor:
    if mesh.get_local_rank() == 1:
        sleep(1000)
    return query
