"""Heads over ranks, with DTensor: W_q, W_k and W_v are cut by their outputs, W_o by its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, Replicate

from mha.spec import (
    Attention,
    Claims,
    Config,
    Implementation,
    Output,
    Rounding,
    Weights,
    validate_call,
)
from mha.spec.claims import COMPUTE_DTYPES
from mha.spec.sharding import PLACED, Order

PARAMETERS = {"w": "weight", "b": "bias"}


class TensorParallelAttention(nn.Module):
    """Shoeybi et al. 2019, section 3: each rank attends with its heads; the outputs are summed."""

    def __init__(self, config: Config, weights: Weights, mesh: DeviceMesh) -> None:
        super().__init__()
        config.validate()
        for name, heads in (("heads", config.n_heads), ("key/value heads", config.kv_heads)):
            if heads % mesh.size():
                raise ValueError(f"{mesh.size()} ranks must divide the number of {name}, {heads}")
        self.config = config
        self.rank = mesh.get_local_rank()
        given = dict(weights.named())
        for role in "qkvo":
            matrix, bias = given[f"w_{role}"], given.get(f"b_{role}")
            rows, columns = matrix.shape
            layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
            layer.weight = nn.Parameter(matrix.detach().clone())
            if bias is not None:
                layer.bias = nn.Parameter(bias.detach().clone())
            self.add_module(role, layer)
        # On one rank, DTensor would have nothing to cut, and refuses some widths.
        if mesh.size() > 1:
            by_columns = {role: ColwiseParallel() for role in "qkv"}
            parallelize_module(self, mesh, {**by_columns, "o": RowwiseParallel()})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> Output:
        """Return the whole output (B, L, D), which every rank has, of whole inputs."""
        validate_call(self.config, query, key, value, mask)
        q, k, v = self.split("q", query), self.split("k", key), self.split("v", value)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(self.config.head_dim)
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        if is_causal:
            allowed = allowed.tril()
        if mask is not None:
            mask = self.part_of(mask, heads=q.shape[1])
            if mask.dtype == torch.bool:
                allowed = allowed & mask
            else:
                allowed = allowed & (mask != -math.inf)
                scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
        # A row without an allowed key keeps its scores in the softmax, which would be NaN if all
        # were -infinity.
        empty = ~allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | empty), -math.inf)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        output: Tensor = self.get_submodule("o")((weights @ v).transpose(1, 2).flatten(2))
        # With one seed, every rank drops the same of the output, which all have.
        return Output(F.dropout(output, self.config.dropout, self.training))

    def part_of(self, mask: Tensor, heads: int) -> Tensor:
        """Return the mask of this rank's heads; one that is for all heads, as it is."""
        own = slice(self.rank * heads, (self.rank + 1) * heads)
        if mask.ndim == 4 and mask.shape[1] > 1:
            return mask[:, own]
        if mask.ndim == 3 and mask.shape[0] > 1:
            return mask[own]
        return mask

    def split(self, role: str, x: Tensor) -> Tensor:
        """Return this rank's heads of a projection, (B, heads / ranks, length, d_k)."""
        heads: Tensor = self.get_submodule(role)(x).unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights, whole on every rank."""
        found = {}
        for role in "qkvo":
            for kind, attribute in PARAMETERS.items():
                held = getattr(self.get_submodule(role), attribute)
                if held is None:
                    continue
                grad = torch.zeros_like(held) if held.grad is None else held.grad
                if isinstance(grad, DTensor):
                    grad = grad.full_tensor()
                found[f"{kind}_{role}"] = grad
        return found


CLAIMS = Claims(
    masks={"bool", "float"},
    grouped_query=True,
    returns_weights=False,
    dropout="output",
    world_sizes={1, 2, 3, 4},
    dtypes=COMPUTE_DTYPES,
    devices={"cpu"},
    rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
)


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Tensor parallelism as a `mha.spec.Sharded`."""

    name: str = "tensor_parallel"
    order: Order = "contiguous"
    placements: Mapping[str, Placement] = field(
        default_factory=lambda: dict.fromkeys(PLACED, Replicate())
    )
    unsharded: Implementation | None = None
    claims: Claims = CLAIMS

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        """Raise NotImplementedError: it has no form without ranks."""
        raise NotImplementedError("tensor_parallel runs on ranks only")

    def build_rank(
        self, config: Config, weights: Weights, *, mesh: DeviceMesh, dtype: torch.dtype, device: str
    ) -> TensorParallelAttention:
        """Build what one rank runs; see `mha.spec.Sharded`."""
        return TensorParallelAttention(config, weights.to(dtype, device), mesh)


implementation = TensorParallel()
