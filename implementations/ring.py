"""Keys and values that travel around a ring of ranks, each of which has a part of the sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from mha.implementations.adapters.sharded import from_sharded, gathered_lengths
from mha.spec import Claims, Rounding, positions
from mha.spec.claims import COMPUTE_DTYPES
from mha.spec.sharding import Order


@dataclass(frozen=True)
class Ring:
    """The ranks of a mesh in a circle; each sends to the next one.

    queries: the positions of this rank's queries. keys: for each rank, the positions of its keys.
    is_causal: whether no query sees a later key.
    """

    mesh: DeviceMesh
    queries: Tensor
    keys: list[Tensor]
    is_causal: bool

    def turn(self, parts: list[Tensor], source: int) -> list[Tensor]:
        """Send tensors (B, H, length of the source, d) to the next rank, and return what the
        previous one had.

        source: the rank whose keys these parts belong to.
        """
        size, rank, group = self.mesh.size(), self.mesh.get_local_rank(), self.mesh.get_group()
        arriving = len(self.keys[(source - 1) % size])
        received = [x.new_empty((*x.shape[:2], arriving, x.shape[3])) for x in parts]
        to, by = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        messages = [dist.P2POp(dist.isend, x.contiguous(), to, group) for x in parts if x.numel()]
        messages += [dist.P2POp(dist.irecv, x, by, group) for x in received if x.numel()]
        for work in dist.batch_isend_irecv(messages) if size > 1 and messages else []:
            work.wait()
        return received if size > 1 else parts


class RingAttention(torch.autograd.Function):
    """Liu et al. 2023: contexts of parts are merged by their log-sum-exps; gradients of keys travel
    with them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring
    ) -> Tensor:
        """Return the context (B, H, L_r, d_k) of this rank's queries over the keys of all ranks."""
        wide = torch.promote_types(q.dtype, torch.float32)
        context = torch.zeros_like(q, dtype=wide)
        total = context.new_full((*q.shape[:-1], 1), -math.inf)
        rank, size = ring.mesh.get_local_rank(), ring.mesh.size()
        parts = [k, v]
        for step in range(size):
            source = (rank - step) % size
            scores = scores_of(q.to(wide), parts[0].to(wide), mask, ring, source)
            part = (
                scores.logsumexp(-1, keepdim=True)
                if scores.shape[-1]
                else torch.full_like(total, -math.inf)
            )
            merged = torch.logaddexp(total, part)
            shift = merged.masked_fill(merged == -math.inf, 0.0)
            context = context * (total - shift).exp() + (scores - shift).exp() @ repeated(
                parts[1].to(wide), q
            )
            total = merged
            parts = ring.turn(parts, source)
        ctx.save_for_backward(q, k, v, mask, context, total)
        ctx.ring = ring
        return context.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and a float mask; those of keys and values end where they
        started.
        """
        q, k, v, mask, context, total = ctx.saved_tensors
        ring, wide, scale = ctx.ring, context.dtype, 1 / math.sqrt(q.shape[-1])
        rank, size = ring.mesh.get_local_rank(), ring.mesh.size()
        upstream, shift = upstream.to(wide), total.masked_fill(total == -math.inf, 0.0)
        mean = (upstream * context).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q, dtype=wide)
        keys = sum(map(len, ring.keys))
        grad_scores = (
            q.new_zeros((*q.shape[:-1], keys), dtype=wide) if ctx.needs_input_grad[3] else None
        )
        parts = [
            k.to(wide),
            v.to(wide),
            torch.zeros_like(k, dtype=wide),
            torch.zeros_like(v, dtype=wide),
        ]
        for step in range(size):
            source = (rank - step) % size
            scores = scores_of(q.to(wide), parts[0], mask, ring, source)
            weights = (scores - shift).exp()
            grad = weights * (upstream @ repeated(parts[1], q).mT - mean)
            if grad_scores is not None:
                grad_scores[..., ring.keys[source].to(q.device)] = grad
            grad_q += scale * grad @ repeated(parts[0], q)
            parts[2] = parts[2] + summed(scale * grad.mT @ q.to(wide), k)
            parts[3] = parts[3] + summed(weights.mT @ upstream, v)
            parts = ring.turn(parts, source)
        grad_mask = None if grad_scores is None else grad_scores.sum_to_size(mask.shape).to(mask)
        return grad_q.to(q), parts[2].to(k), parts[3].to(v), grad_mask, None


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, ring: Ring, source: int) -> Tensor:
    """Return the scores (B, H, L_r, S_r) for the keys of a rank, -infinity where a query may not
    attend.
    """
    scores, places = q @ repeated(k, q).mT / math.sqrt(q.shape[-1]), ring.keys[source].to(q.device)
    if mask is not None:
        part = mask.index_select(-1, places) if mask.shape[-1] > 1 else mask
        scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
    if ring.is_causal:
        scores = scores.masked_fill(places > ring.queries.to(q.device).unsqueeze(-1), -math.inf)
    return scores


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key/value heads for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def summed(x: Tensor, like: Tensor) -> Tensor:
    """Add up what query heads give to a key/value head that they share."""
    total: Tensor = x.unflatten(1, (like.shape[1], -1)).sum(2)
    return total


def attend(  # noqa: PLR0913  the arguments of every such function, and the order
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    mesh: DeviceMesh,
    order: Order = "contiguous",
) -> Tensor:
    """Return this rank's context; see `from_sharded`. order: of the sequence over the ranks."""
    rank, size = mesh.get_local_rank(), mesh.size()
    lengths = [sum(gathered_lengths(x.shape[2], mesh, x.device)) for x in (query, key)]
    queries, keys = (positions(order, length, size) for length in lengths)
    if (len(queries[rank]), len(keys[rank])) != (query.shape[2], key.shape[2]):
        raise ValueError(f"the parts of this rank are not those of the order {order!r}")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.shape[-1] not in (1, lengths[1]):
            raise ValueError(
                f"the mask must have the columns of all {lengths[1]} keys, but has {mask.shape[-1]}"
            )
    ring = Ring(mesh, queries[rank], keys, is_causal)
    context: Tensor = RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-untyped-call]  # of torch
    return context


CLAIMS = Claims(
    masks={"bool", "float"},
    grouped_query=True,
    returns_weights=False,
    world_sizes={1, 2, 3, 4},
    dtypes=COMPUTE_DTYPES,
    devices={"cpu"},
    rounding=Rounding(
        scores_stored=False,
        weights_stored=False,
        softmax_stored=False,
        scaling_roundings=0,
        partials_stored=False,
    ),
)
implementation = from_sharded(attend, placements=Shard(2), claims=CLAIMS, name="ring")
zigzag = from_sharded(
    partial(attend, order="zigzag"),
    placements=Shard(2),
    order="zigzag",
    claims=CLAIMS,
    name="ring_zigzag",
)
striped = from_sharded(
    partial(attend, order="striped"),
    placements=Shard(2),
    order="striped",
    claims=CLAIMS,
    name="ring_striped",
)
