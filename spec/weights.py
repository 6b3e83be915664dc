"""The projection matrices and biases of one multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

import torch
from torch import Tensor

from mha.spec.config import Config

# Almost 1; the product of a float32 number with it has all the digits of float64.
ALL_DIGITS = 1 - 2**-24 / 3


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The four projections, in the convention of `torch.nn.Linear`: y = x @ w.T + b, with w of shape (out, in).

    w_q: (H * d_k, D); w_k: (n_kv_heads * d_k, kdim); w_v: (n_kv_heads * d_k, vdim); w_o: (D, H * d_k). Head i uses the
        rows i*d_k to (i+1)*d_k - 1 of w_q, w_k and w_v, and the same columns of w_o (clause HED-1).
    b_q, b_k, b_v, b_o: one vector each, as long as the first dimension of its matrix; None for a projection without
        a bias.
    extra_k, extra_v: (n_kv_heads * d_k,), the projected key and value that `Config.bias_kv` appends, or None.

    >>> weights = Weights.random(Config(d_model=6, n_heads=2, kdim=5, bias=False), seed=0)
    >>> {name: tuple(tensor.shape) for name, tensor in weights.named()}
    {'w_q': (6, 6), 'w_k': (6, 5), 'w_v': (6, 6), 'w_o': (6, 6)}
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
        """Return random weights, on the CPU, that depend only on `config` and `seed`.

        Matrices have standard deviation 1/sqrt(fan-in), biases 1/2. They are made in float64 and rounded to `dtype`,
        so that a seed gives the same numbers in every dtype. An invalid configuration gets weights too, so that the
        CFG clauses can try to build it.
        """
        width = max(config.d_model, 0)
        inner_width = max(config.inner_width, 0)
        kv_width = inner_width
        if config.n_kv_heads is not None and config.n_heads:
            kv_width = max(config.n_kv_heads * config.head_dim, 0)
        layout: list[tuple[str, tuple[int, ...], bool]] = [
            ("w_q", (inner_width, width), True),
            ("w_k", (kv_width, max(config.key_width, 0)), True),
            ("w_v", (kv_width, max(config.value_width, 0)), True),
            ("w_o", (width, inner_width), True),
            ("b_q", (inner_width,), config.has_bias("q")),
            ("b_k", (kv_width,), config.has_bias("k")),
            ("b_v", (kv_width,), config.has_bias("v")),
            ("b_o", (width,), config.has_bias("o")),
            ("extra_k", (kv_width,), config.bias_kv),
            ("extra_v", (kv_width,), config.bias_kv),
        ]
        sizes = [prod(shape) for _, shape, _ in layout]
        # In float32, which torch draws five times as fast. What is absent is drawn too, so that the rest is the same.
        drawn = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        parts = zip(drawn.double().split(sizes), layout, strict=True)
        named = {
            name: (part.view(shape) * (ALL_DIGITS / (max(shape[1], 1) ** 0.5 if shape[1:] else 2))).to(dtype)
            for part, (name, shape, present) in parts
            if present
        }
        return Weights(**named)

    def to(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> Weights:
        """Return the weights in `dtype`, on `device`."""
        moved = {name: tensor.to(device, dtype) for name, tensor in self.named()}
        return Weights(**moved)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) for each tensor that is not None, in the order of the fields."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]
