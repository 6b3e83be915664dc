"""`from_sharded`: judge a function of ranks, each of which has its part of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from mha.implementations.adapters.gradients import gradient_of
from mha.implementations.discovery.errors import ImplementationError, one_line
from mha.spec import (
    Attention,
    Claims,
    Config,
    Implementation,
    Options,
    Output,
    Weights,
    validate_call,
)
from mha.spec.sharding import ORDERS, PLACED, Order


def from_sharded(
    fn: Callable[..., Tensor],
    *,
    placements: Placement | Mapping[str, Placement],
    order: Order = "contiguous",
    claims: Claims,
    unsharded: Implementation | None = None,
    name: str | None = None,
) -> ShardedImplementation:
    """Adapt a function that runs on every rank of a mesh; it is judged between four replicated
    projections.

    fn: called as `fn(query, key, value, *, mask, is_causal, mesh)` with this rank's query (B, H,
        L_r, d_k), its key and value (B, H_kv, S_r, d_k), and a mask (B or 1, H or 1, L_r or 1, S)
        or None, with the rows of its queries and the columns of all keys in their original order.
        It scales the scores by 1/sqrt(d_k) itself, and returns its context (B, H, L_r, d_k), which
        can be differentiated on all ranks at once; it sums the gradient of a key or value that
        every rank has over the ranks. What it refuses, it refuses on every rank.
    placements: of "query", "key", "value" and "output": `Shard(2)`, over the sequence, or
        `Replicate()`; or one for all.
    order: which positions of the sequence each rank has: "contiguous", "zigzag" or "striped"; see
        `mha.spec.positions`.
    claims: with the numbers of ranks, `world_sizes`.
    unsharded: what it is without ranks, to be judged by all clauses; without one, only DST is
        claimed.
    name: the name in reports; by default that of the function.

    Raises ImplementationError for placements and orders that do not fit, for a function without
    these parameters, and for claims without `world_sizes`, or of dropout, which the function is not
    asked for.

    >>> def attend(query, key, value, *, mask, is_causal, mesh):
    ...     return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, dim=-1) @ value
    >>> keys_everywhere = {"key": Replicate(), "value": Replicate()}
    >>> placements = {"query": Shard(2), "output": Shard(2)} | keys_everywhere
    >>> claims = Claims(world_sizes={2}, masks=(), causal=None, returns_weights=False)
    >>> from_sharded(attend, placements=placements, claims=claims).name
    'attend'
    """
    label = name or str(getattr(fn, "__name__", "fn"))
    if isinstance(placements, Mapping):
        given = dict(placements)
    else:
        given = dict.fromkeys(PLACED, placements)
    are_known = all(each in (Shard(2), Replicate()) for each in given.values())
    if set(given) != set(PLACED) or not are_known:
        raise ImplementationError(
            f"{label}: placements must give Shard(2), the sequence, or Replicate() to each of"
            f" {', '.join(PLACED)}, but are {placements!r}"
        )
    if given["query"] != given["output"] or given["key"] != given["value"]:
        raise ImplementationError(
            f"{label}: placements must be the same for query and output, and for key and value, but"
            f" are {placements!r}"
        )
    if order not in ORDERS:
        raise ImplementationError(
            f"{label}: order must be one of {', '.join(ORDERS)}, but is {order!r}"
        )
    _require_claims(claims, unsharded, label)
    _require_parameters(fn, label)
    inputs = {key: Shard(1) if each.is_shard() else each for key, each in given.items()}
    return ShardedImplementation(label, claims, fn, inputs, order, unsharded)


def _require_claims(claims: Claims, unsharded: Implementation | None, label: str) -> None:
    """Raise ImplementationError for claims without ranks, or of dropout on ranks only."""
    if not claims.world_sizes:
        raise ImplementationError(
            f"{label}: claims has no world_sizes; claim the numbers of ranks, as world_sizes={{2}}"
        )
    if claims.dropout and unsharded is None:
        raise ImplementationError(
            f"{label}: claims dropout, which the function is not asked for; claim dropout=False"
        )


def _require_parameters(fn: Callable[..., Tensor], label: str) -> None:
    """Raise ImplementationError for a function that cannot be called as the ranks call it."""
    try:
        signature(fn).bind(None, None, None, mask=None, is_causal=False, mesh=None)
    except ValueError:  # no signature is known, as of some builtins
        return
    except TypeError as error:
        called = f"{label}(query, key, value, *, mask, is_causal, mesh)"
        raise ImplementationError(
            f"{label}: must be callable as {called}, but: {one_line(error)}"
        ) from error


@dataclass(frozen=True, eq=False)
class ShardedImplementation:
    """A function on ranks as an implementation; made by `from_sharded`.

    placements: of tensors (B, length, width).
    """

    name: str
    claims: Claims
    fn: Callable[..., Tensor]
    placements: Mapping[str, Placement]
    order: Order
    unsharded: Implementation | None

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        """Build it without ranks; raises NotImplementedError if it has no such form."""
        if self.unsharded is None:
            raise NotImplementedError(
                f"{self.name} runs on ranks only: it was made without `unsharded`"
            )
        return self.unsharded.build(config, weights, dtype=dtype, device=device)

    def build_rank(
        self, config: Config, weights: Weights, *, mesh: DeviceMesh, dtype: torch.dtype, device: str
    ) -> ShardedAttention:
        """Put four projections, with the same weights on every rank, around the function."""
        config.validate()
        module = ShardedAttention(self, config, weights.to(dtype, device), mesh)
        return module if self.claims.gradients else module.requires_grad_(False)


class ShardedAttention(nn.Module):
    """What one rank runs: it projects its part of the sequence, and attends with the others."""

    def __init__(
        self, adapter: ShardedImplementation, config: Config, weights: Weights, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        self.adapter, self.config, self.mesh = adapter, config, mesh
        self.roles = [name for name, _ in weights.named()]
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Return this rank's part of the output; see `mha.spec.Sharded`."""
        options = Options(**given)
        mask = options.mask
        if mask is None or not self.adapter.placements["key"].is_shard():
            validate_call(self.config, query, key, value, mask, masks=self.adapter.claims.masks)
        else:  # its columns are those of all keys
            validate_call(self.config, query, key, value, None)
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise TypeError(f"the mask must be boolean or floating-point, but is {mask.dtype}")
        q = self.split(self.project(query, "q"))
        k = self.split(self.project(key, "k"))
        v = self.split(self.project(value, "v"))
        context = self.adapter.fn(q, k, v, mask=mask, is_causal=options.is_causal, mesh=self.mesh)
        self.require_context(context, (*q.shape[:3], v.shape[3]))
        return Output(self.project(context.transpose(1, 2).flatten(2), "o"))

    def require_context(self, context: object, shape: tuple[int, ...]) -> None:
        """Raise TypeError or ValueError for no local tensor of this shape, be it of any length."""
        expected = f"{self.adapter.name} should return its context, a torch.Tensor of shape {shape}"
        if not isinstance(context, Tensor) or isinstance(context, DTensor):
            raise TypeError(f"{expected}, not a {type(context).__name__}")
        if (*context.shape[:2], *context.shape[3:]) != (*shape[:2], *shape[3:]):
            raise ValueError(f"{expected}, but returned one of {tuple(context.shape)}")

    def project(self, x: Tensor, role: str) -> Tensor:
        """Apply the projection of a role: "q", "k", "v" or "o"."""
        return F.linear(x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None))

    def split(self, x: Tensor) -> Tensor:
        """Return (B, length, heads * d_k) as (B, heads, length, d_k)."""
        heads: Tensor = x.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights, summed over ranks that have parts of the inputs."""
        found: dict[str, Tensor] = {}
        for name in self.roles:
            held = getattr(self, name)
            found[name] = gradient_of(held)
            projected = "query" if name[-1] in "qo" else "key"
            if self.adapter.placements[projected].is_shard():
                dist.all_reduce(found[name], group=self.mesh.get_group())
        return found


def gathered_lengths(length: int, mesh: Any, device: torch.device) -> list[int]:
    """Return the lengths of all ranks' parts, in the order of the mesh.

    length: of this rank's part.
    """
    own = torch.tensor([length], device=device)
    every = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(every, own, group=mesh.get_group())
    return [int(each) for each in every]
