"""The correct classes of faults on ranks: sequences over ranks, and heads over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from mha.spec import Attention, Claims, Config, Implementation, Options, Output, Weights, positions
from mha.spec.claims import COMPUTE_DTYPES
from mha.spec.sharding import PLACED, Order

CLAIMS = Claims(
    masks={"bool", "float"},
    grouped_query=True,
    returns_weights=False,
    world_sizes={1, 2, 3, 4},
    dtypes=COMPUTE_DTYPES,
    devices={"cpu"},
)
# A part of the result: the contexts, and the log-sum-exps of the scores, (B, H, L_r, 1).
Part = tuple[Tensor, Tensor]


class Gather(torch.autograd.Function):
    """Each rank's (B, H, n, d), padded to the longest, for those of all, (ranks, B, H, n, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, x = mesh, x.contiguous()
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x, group=mesh.get_group())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.contiguous()
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return total[ctx.mesh.get_local_rank()], None


class Copy(torch.autograd.Function):
    """What every rank has, for different uses on each; the gradients of these are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.contiguous().clone()
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return total, None


class Sum(torch.autograd.Function):
    """The sum of what the ranks have, which each one gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class OnRank(nn.Module):
    """What both classes share: the weights, and the steps of the formula."""

    placement: ClassVar[Placement] = Shard(1)
    order: ClassVar[Order] = "contiguous"

    def __init__(self, config: Config, weights: Weights, mesh: DeviceMesh) -> None:
        super().__init__()
        config.validate()
        self.config, self.mesh, self.rank, self.size = (
            config,
            mesh,
            mesh.get_local_rank(),
            mesh.size(),
        )
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(self.cut(name, tensor.detach()).clone()))

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's part of a weight."""
        return weight

    def project(self, x: Tensor, role: str) -> Tensor:
        """Apply the projection of a role, "q", "k", "v" or "o"."""
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None))

    def split(self, x: Tensor) -> Tensor:
        """Split (B, N, heads * d_k) into heads (B, heads, N, d_k)."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def repeat(self, x: Tensor, heads: int) -> Tensor:
        """Repeat key/value heads, so that there are as many as query heads."""
        return x.repeat_interleave(heads // x.shape[1], 1)

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled scores (B, H, L, S)."""
        return q @ k.mT / math.sqrt(self.config.head_dim)

    def hide(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Apply a mask of the shape of the scores, or broadcastable to it."""
        if mask is None:
            return scores
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, -math.inf)
        return scores + mask

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights, whole on every rank."""
        held = dict(self.named_parameters())
        gradients = {}
        for name, p in held.items():
            own = torch.zeros_like(p) if p.grad is None else p.grad
            gradients[name] = self.whole(name, own)
        return gradients

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient of a weight from this rank's part of it."""
        total = grad.clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total


class SequenceParallel(OnRank):
    """Correct: each rank gathers keys and values, attends to them rank by rank, and merges."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Return this rank's part of the output."""
        options = Options(**given)
        mask = options.mask
        of_queries, of_keys = self.lengths(query), self.lengths(key)
        q, k, v = (
            self.split(self.project(x, role))
            for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        rows = self.positions(self.rank, of_queries)
        merged: Part | None = None
        for rank, (k_part, v_part) in enumerate(
            zip(self.gather(k, of_keys), self.gather(v, of_keys), strict=True)
        ):
            columns = self.positions(rank, of_keys)
            scores = self.product(q, self.repeat(k_part, q.shape[1]))
            scores = self.hide(scores, self.columns_of(mask, columns, rank, of_keys))
            if options.is_causal:
                scores = scores.masked_fill(self.later(rows, columns, rank), -math.inf)
            # Log-sum-exps in half precision would be off by more than the bound has.
            wide = torch.promote_types(scores.dtype, torch.float32)
            part = self.part(scores.to(wide), self.repeat(v_part, q.shape[1]).to(wide))
            merged = part if merged is None else self.merge(merged, part)
        assert merged is not None
        return Output(self.project(merged[0].to(q).transpose(1, 2).flatten(2), "o"))

    def lengths(self, x: Tensor) -> list[int]:
        """Return the lengths of all ranks' parts."""
        own = torch.tensor([x.shape[1]])
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.mesh.get_group())
        return [int(each) for each in every]

    def positions(self, rank: int, lengths: list[int]) -> Tensor:
        """Return the global positions of a rank's part."""
        return positions(self.order, sum(lengths), self.size)[rank]

    def gather(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        """Return the parts (B, H, n, d) of all ranks."""
        padded = F.pad(x, (0, 0, 0, max(lengths) - x.shape[2]))
        every: Tensor = Gather.apply(padded, self.mesh)
        return [part[:, :, :length] for part, length in zip(every, lengths, strict=True)]

    def columns_of(
        self, mask: Tensor | None, columns: Tensor, rank: int, lengths: list[int]
    ) -> Tensor | None:
        """Return the columns of a mask for the keys of a rank."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        return mask[..., columns]

    def later(self, rows: Tensor, columns: Tensor, rank: int) -> Tensor:
        """Return which keys are later than which queries, (L_r, S_r)."""
        return columns > rows[:, None]

    def part(self, scores: Tensor, v: Tensor) -> Part:
        """Return contexts over the keys of one rank, and log-sum-exps, -infinity without a key."""
        empty = (scores == -math.inf).all(-1, keepdim=True)
        if scores.shape[-1]:
            z = scores.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
        else:
            z = scores.sum(-1, True)
        return (scores - z).exp() @ v, z.masked_fill(empty, -math.inf)

    def merge(self, one: Part, other: Part) -> Part:
        """Return two parts as one."""
        z = torch.maximum(one[1], other[1]).detach()
        z = z.masked_fill(z == -math.inf, 0.0)
        shares = (one[1] - z).exp(), (other[1] - z).exp()
        total = shares[0] + shares[1]
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        context = (one[0] * shares[0] + other[0] * shares[1]) / total
        return context, (z + total.log()).masked_fill(empty, -math.inf)


class HeadsParallel(OnRank):
    """Correct: each rank has some of the heads, and the outputs are summed.

    Heads that the ranks do not divide are refused. With few key/value heads, each rank has the
    whole W_k and W_v.
    """

    placement = Replicate()

    def cut(self, name: str, weight: Tensor) -> Tensor:
        if self.config.n_heads % self.size:
            raise ValueError(
                f"{self.size} ranks must divide the number of heads, {self.config.n_heads}"
            )
        if name == "b_o" or (name[-1] in "kv" and self.config.kv_heads % self.size):
            return weight
        return weight.chunk(self.size, 1 if name == "w_o" else 0)[self.place(name)]

    def place(self, name: str) -> int:
        """Return which part of a weight this rank has."""
        return self.rank

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Return the whole output."""
        options = Options(**given)
        mask = options.mask
        q, k, v = (
            self.split(self.project(self.copy(x), r))
            for x, r in ((query, "q"), (key, "k"), (value, "v"))
        )
        own = slice(self.rank * q.shape[1], (self.rank + 1) * q.shape[1])
        k, v = self.of_group(k, own), self.of_group(v, own)
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, own]
        scores = self.hide(self.product(q, k), mask)
        if options.is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        partial = F.linear((weights @ v).transpose(1, 2).flatten(2), self.w_o)
        return Output(self.add_up(partial))

    def copy(self, x: Tensor) -> Tensor:
        """Return an input that all ranks have, whose gradient is summed over them."""
        copied: Tensor = Copy.apply(x, self.mesh)
        return copied

    def of_group(self, x: Tensor, own: slice) -> Tensor:
        """Return the key/value heads of this rank's query heads, repeated for them."""
        if self.config.kv_heads % self.size == 0:
            return self.repeat(x, self.config.n_heads // self.size)
        return self.repeat(x, self.config.n_heads)[:, own]

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the output from what each rank's heads give to it."""
        total: Tensor = Sum.apply(partial, self.mesh)
        if getattr(self, "b_o", None) is None:
            return total
        return total + self.b_o

    def whole(self, name: str, grad: Tensor) -> Tensor:
        if name == "b_o":
            return grad
        if name[-1] in "kv" and self.config.kv_heads % self.size:
            return super().whole(name, grad)
        parts = [torch.zeros_like(grad) for _ in range(self.size)]
        parts[self.rank] = grad
        return super().whole(name, torch.cat(parts, 1 if name == "w_o" else 0))


@dataclass(frozen=True, eq=False)
class Spmd:
    """A subclass of one of these as an implementation."""

    cls: type[OnRank]
    claims: Claims = CLAIMS
    unsharded: Implementation | None = None

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.cls.__name__

    @property
    def order(self) -> Order:
        """That of the class."""
        return self.cls.order

    @property
    def placements(self) -> Mapping[str, Placement]:
        """That of the class, for every tensor."""
        return dict.fromkeys(PLACED, self.cls.placement)

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        """Raise NotImplementedError: it has no form without ranks."""
        raise NotImplementedError(f"{self.name} runs on ranks only")

    def build_rank(
        self, config: Config, weights: Weights, *, mesh: DeviceMesh, dtype: torch.dtype, device: str
    ) -> OnRank:
        """Build what one rank runs."""
        return self.cls(config, weights.to(dtype, device), mesh)


sequence_parallel, heads_parallel = Spmd(SequenceParallel), Spmd(HeadsParallel)
