"""Ranks that exchange parts of the sequence for heads, and attend over the whole sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from mha.implementations.adapters.sharded import from_sharded, gathered_lengths
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES


class Exchange(torch.autograd.Function):
    """All-to-all of Jacobs et al. 2023: from positions of all heads to heads of all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], mesh: DeviceMesh) -> Tensor:
        """Return (B, H / ranks, L, d) for this rank's part (B, H, L_r, d).

        lengths: of all parts.
        """
        ctx.lengths, ctx.mesh = lengths, mesh
        return to_heads(x, lengths, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient back the way that the tensor came."""
        return to_sequence(upstream, ctx.lengths, ctx.mesh), None, None


class ExchangeBack(torch.autograd.Function):
    """The same in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], mesh: DeviceMesh) -> Tensor:
        """Return this rank's part (B, H, L_r, d) for (B, H / ranks, L, d)."""
        ctx.lengths, ctx.mesh = lengths, mesh
        return to_sequence(x, lengths, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient back the way that the tensor came."""
        return to_heads(upstream, ctx.lengths, ctx.mesh), None, None


def to_heads(x: Tensor, lengths: list[int], mesh: DeviceMesh) -> Tensor:
    """Return (B, H / ranks, L, d) for this rank's part (B, H, L_r, d)."""
    batch, heads, _, width = x.shape
    own = heads // mesh.size()
    shapes = [(batch, own, length, width) for length in lengths]
    return torch.cat(all_to_all(list(x.split(own, 1)), shapes, mesh), 2)


def to_sequence(x: Tensor, lengths: list[int], mesh: DeviceMesh) -> Tensor:
    """Return this rank's part (B, H, L_r, d) for (B, H / ranks, L, d)."""
    batch, own, _, width = x.shape
    shapes = [(batch, own, lengths[mesh.get_local_rank()], width)] * mesh.size()
    return torch.cat(all_to_all(list(x.split(lengths, 2)), shapes, mesh), 1)


def all_to_all(
    parts: list[Tensor], shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh
) -> list[Tensor]:
    """Send a part to each rank; return what each one sent, of these shapes."""
    given = torch.cat([part.flatten() for part in parts])
    given_sizes = [part.numel() for part in parts]
    sizes = [math.prod(shape) for shape in shapes]
    received = given.new_empty(sum(sizes))
    dist.all_to_all_single(received, given, sizes, given_sizes, group=mesh.get_group())
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    mesh: DeviceMesh,
) -> Tensor:
    """Return this rank's context; see `from_sharded`. The ranks must divide the heads."""
    size, heads = mesh.size(), query.shape[1]
    if heads % size:
        raise ValueError(f"{size} ranks must divide the number of heads, {heads}")
    if key.shape[1] % size:  # too few to share out: each query head gets its own copy
        key, value = (x.repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    of_queries, of_keys = (gathered_lengths(x.shape[2], mesh, x.device) for x in (query, key))
    q = Exchange.apply(query, of_queries, mesh)  # type: ignore[no-untyped-call]  # of torch
    k, v = (Exchange.apply(x, of_keys, mesh) for x in (key, value))  # type: ignore[no-untyped-call]  # of torch
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if is_causal:
        allowed = allowed.tril()
    if mask is not None:
        whole = mask_of_heads(mask[(None,) * (4 - mask.ndim)], heads, of_queries, mesh)
        if whole.dtype == torch.bool:
            allowed = allowed & whole
        else:
            allowed = allowed & (whole != -math.inf)
            scores = scores + whole.masked_fill(whole == -math.inf, 0.0)
    # A row without an allowed key keeps its scores in the softmax, which would be NaN if all were
    # -infinity.
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -math.inf)
    weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
    context: Tensor = ExchangeBack.apply(weights @ v, of_queries, mesh)  # type: ignore[no-untyped-call]  # of torch
    return context


def mask_of_heads(mask: Tensor, heads: int, lengths: list[int], mesh: DeviceMesh) -> Tensor:
    """Return the mask (B or 1, heads / ranks, L, S) of this rank's heads.

    A mask that is broadcast over the queries is sent too: it looks like the rows of a rank that has
    one query.

    mask: this rank's rows, (B or 1, H or 1, L_r or 1, S).
    """
    rows = mask.expand(-1, heads, lengths[mesh.get_local_rank()], -1)
    if mask.dtype == torch.bool:
        return to_heads(rows.to(torch.uint8), lengths, mesh).bool()
    whole: Tensor = Exchange.apply(rows, lengths, mesh)  # type: ignore[no-untyped-call]  # of torch
    return whole


implementation = from_sharded(
    attend,
    placements=Shard(2),
    claims=Claims(
        masks={"bool", "float"},
        grouped_query=True,
        returns_weights=False,
        world_sizes={1, 2, 3, 4},
        dtypes=COMPUTE_DTYPES,
        devices={"cpu"},
        rounding=Rounding(
            softmax_stored=False, log_normaliser=False, rescales=0, partials_stored=False
        ),
    ),
    name="ulysses",
)
