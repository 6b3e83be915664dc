"""The projection matrices and biases of one multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mha.spec.config import Config


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Four projections in the convention of `torch.nn.Linear`: `y = x @ w.T + b`, each `w` of shape (out, in).

    w_q: (D, D), w_k: (n_kv_heads * d_k, kdim), w_v: (n_kv_heads * d_k, vdim), w_o: (D, D); head i owns the rows
    `i*d_k:(i+1)*d_k` of w_q, w_k and w_v, and the same columns of w_o (clause HED-1).
    b_q, b_k, b_v, b_o: one vector each, of the length of its matrix's first dimension, or None for all.
    extra_k, extra_v: the projected key and value that `Config.bias_kv` adds, (n_kv_heads * d_k,), or None.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None

    @staticmethod
    def random(config: Config, seed: int, dtype: torch.dtype = torch.float64) -> Weights:
        """Draw weights of standard deviation 1/sqrt(fan-in) and biases of 1/2, on the CPU, from `seed` alone.

        They are drawn in float64 and then rounded, so that one seed means the same numbers in every dtype.
        """
        generator = torch.Generator().manual_seed(seed)
        width = max(config.d_model, 0)
        kv_width = width if config.n_kv_heads is None else config.n_kv_heads * config.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            return drawn.div(max(columns, 1) ** 0.5).to(dtype)

        def vector(rows: int, present: bool) -> Tensor | None:
            drawn = torch.randn(rows, generator=generator, dtype=torch.float64) / 2
            return drawn.to(dtype) if present else None

        return Weights(
            w_q=matrix(width, width),
            w_k=matrix(kv_width, max(config.key_width, 0)),
            w_v=matrix(kv_width, max(config.value_width, 0)),
            w_o=matrix(width, width),
            b_q=vector(width, config.bias),
            b_k=vector(kv_width, config.bias),
            b_v=vector(kv_width, config.bias),
            b_o=vector(width, config.bias),
            extra_k=vector(kv_width, config.bias_kv),
            extra_v=vector(kv_width, config.bias_kv),
        )

    def to(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> Weights:
        """Return the same weights in another dtype and on another device."""
        moved = {name: tensor.to(device, dtype) for name, tensor in self.named()}
        return Weights(**moved)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are present, by name, in the order of the fields."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]
