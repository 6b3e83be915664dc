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

    queries: the positions of this rank's queries.
    keys: for each rank, the positions of its keys.
    is_causal: whether no query sees a later key.
    """

    mesh: DeviceMesh
    queries: Tensor
    keys: list[Tensor]
    is_causal: bool

    def turn(self, parts: list[Tensor], source: int) -> list[Tensor]:
        """Send tensors to the next rank, and return what the previous one had.

        parts: of the keys of a rank, (B, H, its number of keys, d).
        source: that rank.
        """
        size, rank, group = self.mesh.size(), self.mesh.get_local_rank(), self.mesh.get_group()
        if size == 1:
            return parts
        arriving = len(self.keys[(source - 1) % size])
        received = [x.new_empty((*x.shape[:2], arriving, x.shape[3])) for x in parts]
        to = dist.get_global_rank(group, (rank + 1) % size)
        by = dist.get_global_rank(group, (rank - 1) % size)
        messages = [dist.P2POp(dist.isend, x.contiguous(), to, group) for x in parts if x.numel()]
        messages += [dist.P2POp(dist.irecv, x, by, group) for x in received if x.numel()]
        if messages:
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        return received


class RingAttention(torch.autograd.Function):
    """Liu et al. 2023: the contexts of parts are merged by their log-sum-exps.

    In the backward pass, the gradients of keys and values travel with them.
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
            part = torch.full_like(total, -math.inf)
            if scores.shape[-1]:
                part = scores.logsumexp(-1, keepdim=True)
            merged = torch.logaddexp(total, part)
            # A row without any key so far has the log-sum-exp -infinity, and weights of 0.
            shift = merged.masked_fill(merged == -math.inf, 0.0)
            weights = (scores - shift).exp()
            context = context * (total - shift).exp() + weights @ repeated(parts[1].to(wide), q)
            total = merged
            parts = ring.turn(parts, source)
        ctx.save_for_backward(q, k, v, mask, context, total)
        ctx.ring = ring
        return context.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and a float mask.

        Those of keys and values end where they started, after one turn of the ring.
        """
        q, k, v, mask, context, total = ctx.saved_tensors
        ring = ctx.ring
        wide = context.dtype
        scale = 1 / math.sqrt(q.shape[-1])
        rank, size = ring.mesh.get_local_rank(), ring.mesh.size()
        upstream = upstream.to(wide)
        shift = total.masked_fill(total == -math.inf, 0.0)
        mean = (upstream * context).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(q, dtype=wide)
        grad_scores = None
        if ctx.needs_input_grad[3]:  # of the mask
            every_key = sum(map(len, ring.keys))
            grad_scores = q.new_zeros((*q.shape[:-1], every_key), dtype=wide)
        keys, values = k.to(wide), v.to(wide)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for step in range(size):
            source = (rank - step) % size
            scores = scores_of(q.to(wide), keys, mask, ring, source)
            weights = (scores - shift).exp()
            grad = weights * (upstream @ repeated(values, q).mT - mean)
            if grad_scores is not None:
                grad_scores[..., ring.keys[source].to(q.device)] = grad
            grad_q += scale * grad @ repeated(keys, q)
            grad_k = grad_k + summed(scale * grad.mT @ q.to(wide), k)
            grad_v = grad_v + summed(weights.mT @ upstream, v)
            keys, values, grad_k, grad_v = ring.turn([keys, values, grad_k, grad_v], source)
        grad_mask = None if grad_scores is None else grad_scores.sum_to_size(mask.shape).to(mask)
        return grad_q.to(q), grad_k.to(k), grad_v.to(v), grad_mask, None


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, ring: Ring, source: int) -> Tensor:
    """Return the scores (B, H, L_r, S_r) for the keys of a rank, -infinity for hidden ones."""
    scores = q @ repeated(k, q).mT / math.sqrt(q.shape[-1])
    places = ring.keys[source].to(q.device)
    if mask is not None:
        part = mask.index_select(-1, places) if mask.shape[-1] > 1 else mask
        is_bool = part.dtype == torch.bool
        scores = scores.masked_fill(~part, -math.inf) if is_bool else scores + part
    if ring.is_causal:
        is_later = places > ring.queries.to(q.device).unsqueeze(-1)
        scores = scores.masked_fill(is_later, -math.inf)
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
    length = sum(gathered_lengths(query.shape[2], mesh, query.device))
    length_of_keys = sum(gathered_lengths(key.shape[2], mesh, key.device))
    queries = positions(order, length, size)
    keys = positions(order, length_of_keys, size)
    if (len(queries[rank]), len(keys[rank])) != (query.shape[2], key.shape[2]):
        raise ValueError(f"the parts of this rank are not those of the order {order!r}")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.shape[-1] not in (1, length_of_keys):
            raise ValueError(
                f"the mask must have the columns of all {length_of_keys} keys, but has"
                f" {mask.shape[-1]}"
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
