"""Attention that several processes compute together, and what each of them holds.

The words are those of torch.distributed: a rank is a process, a mesh the ranks, and a placement
says whether a tensor is sharded over them along a dimension, `Shard(dim)`, or whole on each,
`Replicate()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from mha.spec.config import Config
from mha.spec.protocols import Attention, Implementation
from mha.spec.weights import Weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS = get_args(Order)
# The tensors that have a placement.
PLACED = ("query", "key", "value", "output")


@runtime_checkable
class Sharded(Implementation, Protocol):
    """An implementation that also runs on `Claims.world_sizes` ranks, the same program on each.

    >>> from mha.implementations.ring import implementation
    >>> isinstance(implementation, Sharded), implementation.order
    (True, 'contiguous')
    """

    @property
    def placements(self) -> Mapping[str, Placement]:
        """How "query", "key", "value" and "output" lie: `Shard(1)`, over the sequence, or
        `Replicate()`.
        """
        ...

    @property
    def order(self) -> Order:
        """Which positions of a sharded sequence each rank has; see `positions`."""
        ...

    @property
    def unsharded(self) -> Implementation | None:
        """What it is without ranks, if it has such a form; without one, only DST is claimed."""
        ...

    def build_rank(
        self, config: Config, weights: Weights, *, mesh: DeviceMesh, dtype: torch.dtype, device: str
    ) -> Attention:
        """Return what one rank runs; every rank of the mesh builds it, with the whole weights.

        It is called with this rank's parts: query (B, L_r, D), key and value (B, S_r, D), and a
        mask with the rows of its queries and the columns of all keys in their original order, (B or
        1, H or 1, L_r or 1, S). It returns its part of the output. Gradients of inputs lie as the
        inputs do; of a mask that several ranks have, each has the gradient of what it has computed,
        and they are added up. The gradients of weights that it reports as a
        `mha.spec.Differentiable` are whole on every rank. What it refuses, it refuses on every
        rank.
        """
        ...


def positions(order: Order, length: int, ranks: int) -> list[Tensor]:
    """Return the positions of a sequence that each rank has, in the order in which it has them.

    "contiguous": one chunk each, as `torch.chunk` cuts them, and no position for the ranks that are
        left over.
    "zigzag": of twice as many chunks the rank's own, and the one as far from the end, so that
        causal work is balanced.
    "striped": every so many-th position.

    >>> [part.tolist() for part in positions("contiguous", 5, 2)]
    [[0, 1, 2], [3, 4]]
    >>> [part.tolist() for part in positions("zigzag", 8, 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> [part.tolist() for part in positions("striped", 5, 2)]
    [[0, 2, 4], [1, 3]]
    """
    every = torch.arange(length)
    if order == "striped":
        return [every[rank::ranks] for rank in range(ranks)]
    count = ranks if order == "contiguous" else 2 * ranks
    size = -(-length // count)
    chunks = [every[number * size : (number + 1) * size] for number in range(count)]
    if order == "contiguous":
        return chunks
    return [torch.cat([chunks[rank], chunks[count - 1 - rank]]) for rank in range(ranks)]
