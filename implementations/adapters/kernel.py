"""`from_kernel`: judge a function that computes softmax(q k^T s + mask) v, the projections supplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from mha.implementations.adapters.calls import Call, by_name
from mha.implementations.adapters.loading import load, weight_gradients
from mha.implementations.errors import ImplementationError
from mha.spec import Claims, Config, MaskConvention, Output, Weights, validate_call

PARAMETERS = {f"w_{role}": f"{role}_proj" for role in "qkvo"}


def from_kernel(
    kernel: Callable[..., Any],
    *,
    layout: str = "b h l d",
    mask: MaskConvention | None = "keep",
    call: Call | None = None,
    claims: Claims | None = None,
    name: str | None = None,
) -> KernelImplementation:
    """Adapt a kernel to the contract.

    kernel: called with query, key and value by position, each of `layout`; returns the context in that layout, or the
        context and the weights (B, H, L, S). It scales by 1/sqrt(d_k) itself.
    layout: the order of b (batch), h (heads), l (length) and d (head_dim), separated by spaces.
    mask, call, claims, name: as in `from_module`; by default the kernel claims no weights.

    Raises ImplementationError for a layout or a signature that cannot be understood.
    """
    label = name or str(getattr(kernel, "__name__", "kernel"))
    if sorted(layout.split()) != ["b", "d", "h", "l"]:
        raise ImplementationError(f"{label}: layout must name b, h, l and d once each, as 'b h l d', but is {layout!r}")
    if claims is None:
        claims = Claims(returns_weights=False) if mask else Claims(masks=(), causal=None, returns_weights=False)
    caller = call or by_name(label, kernel, mask, claims, layout)
    return KernelImplementation(label, claims, kernel, layout, caller)


@dataclass(frozen=True, eq=False)
class KernelImplementation:
    """A kernel as an implementation; made by `from_kernel`."""

    name: str
    claims: Claims
    kernel: Callable[..., Any]
    layout: str
    call: Call

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> KernelAttention:
        """Put four projections around the kernel; raises ValueError for an invalid configuration."""
        config.validate()
        module = KernelAttention(config, self.kernel, self.layout, self.call, self.claims)
        module.to(device=device, dtype=dtype)
        load(self.name, module, PARAMETERS, weights, config.head_dim)
        if not self.claims.gradients:
            module.requires_grad_(False)
        module.rows = {name: len(tensor) for name, tensor in weights.named()}
        return module


class KernelAttention(nn.Module):
    """Multi-head attention around a kernel."""

    def __init__(self, config: Config, kernel: Callable[..., Any], layout: str, call: Call, claims: Claims) -> None:
        super().__init__()
        self.config, self.kernel, self.layout, self.call, self.claims = config, kernel, layout, call, claims
        self.rows: dict[str, int] = {}
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.k_proj = nn.Linear(config.key_width, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(config.value_width, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)

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
        """Project, call the kernel, and project back; see `mha.spec.Attention`."""
        validate_call(self.config, query, key, value, mask, masks=self.claims.masks)
        split = f"b l (h d) -> {self.layout}"
        heads = [
            rearrange(projected, split, d=self.config.head_dim)
            for projected in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        ]
        context, weights = self.call(self.kernel, *heads, mask=mask, is_causal=is_causal, need_weights=need_weights)
        return Output(self.o_proj(rearrange(context, f"{self.layout} -> b l (h d)")), weights)

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the weights; see `mha.spec.Differentiable`."""
        return weight_gradients(self, PARAMETERS, self.rows, self.config.head_dim)
