"""Heads over ranks, with DTensor: W_q, W_k and W_v are cut by columns of the output, W_o by rows of
the input.
"""

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
    """Shoeybi et al. 2019, section 3: each rank attends with its heads, and the outputs are summed
    over the ranks.
    """

    def __init__(self, config: Config, weights: Weights, mesh: DeviceMesh) -> None:
        super().__init__()
        config.validate()
        for name, heads in (("heads", config.n_heads), ("key/value heads", config.kv_heads)):
            if heads % mesh.size():
                raise ValueError(f"{mesh.size()} ranks must divide the number of {name}, {heads}")
        self.config, self.rank, self.size = config, mesh.get_local_rank(), mesh.size()
        given = dict(weights.named())
        for role in "qkvo":
            matrix, bias = given[f"w_{role}"], given.get(f"b_{role}")
            layer = nn.Linear(
                matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta"
            )
            for attribute, tensor in (("weight", matrix), ("bias", bias)):
                if tensor is not None:
                    setattr(layer, attribute, nn.Parameter(tensor.detach().clone()))
            self.add_module(role, layer)
        if (
            mesh.size() > 1
        ):  # on one rank, DTensor would have nothing to cut, and refuses some widths
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
        """Return the whole output (B, L, D), which every rank has; query, key and value are whole,
        too.
        """
        validate_call(self.config, query, key, value, mask)
        q, k, v = (self.split(role, x) for role, x in (("q", query), ("k", key), ("v", value)))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(self.config.head_dim)
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        allowed = allowed.tril() if is_causal else allowed
        if mask is not None:
            own = slice(self.rank * q.shape[1], (self.rank + 1) * q.shape[1])
            mask = (
                mask[:, own]
                if mask.ndim == 4 and mask.shape[1] > 1
                else mask[own]
                if self.per_head(mask)
                else mask
            )
            allowed = allowed & (mask if mask.dtype == torch.bool else mask != -math.inf)
            if mask.dtype != torch.bool:
                scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
        empty = ~allowed.any(-1, keepdim=True)
        weights = (
            scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1).masked_fill(~allowed, 0.0)
        )
        output: Tensor = self.get_submodule("o")((weights @ v).transpose(1, 2).flatten(2))
        # With one seed, every rank drops the same of the output, which all have.
        return Output(F.dropout(output, self.config.dropout, self.training))

    def per_head(self, mask: Tensor) -> bool:
        """Return whether a mask of three dimensions differs between heads."""
        return mask.ndim == 3 and mask.shape[0] > 1

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
                if held is not None:
                    grad = torch.zeros_like(held) if held.grad is None else held.grad
                    found[f"{kind}_{role}"] = (
                        grad.full_tensor() if isinstance(grad, DTensor) else grad
                    )
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
