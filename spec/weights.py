"""The projection matrices and biases of one multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from mha.spec.config import Config


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The four projections, y = x @ w.T + b, with w of shape (out, in) as in `torch.nn.Linear`.

    Head i uses the rows i*d_k to (i+1)*d_k - 1 of w_q and w_k, the rows i*d_v to (i+1)*d_v - 1 of
    w_v, and the same columns of w_o (clause HED-1). d_v is d_k, unless `Config.d_value` is given.

    w_q: (H * d_k, D).
    w_k: (n_kv_heads * d_k, kdim).
    w_v: (n_kv_heads * d_v, vdim).
    w_o: (D, H * d_v).
    b_q, b_k, b_v, b_o: one vector each, as long as the first dimension of its matrix; None for a
        projection without a bias.
    extra_k, extra_v: as long as b_k and b_v, the projected key and value that `Config.bias_kv`
        appends, or None.
    q_norm, k_norm: what columns of queries and keys are multiplied by after a norm (`QkNorm`), or
        None. Each is as long as `Config.norm_width` says.

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
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @staticmethod
    def random(config: Config, seed: int, dtype: torch.dtype = torch.float64) -> Weights:
        """Return random weights, on the CPU, that depend only on `config` and `seed`.

        Matrices have standard deviation 1/sqrt(fan-in), biases 1/2, norms 1/4 around 1. They are
        drawn in float64 and rounded to `dtype`, so that a seed gives the same numbers in every
        dtype. An invalid configuration gets weights too, so that the CFG clauses can try it.
        """
        # Copies, so that no caller changes what others get.
        drawn = _drawn(config, seed).named()
        return Weights(**{name: tensor.to(dtype, copy=True) for name, tensor in drawn})

    @staticmethod
    def identity(config: Config, dtype: torch.dtype, device: str | torch.device) -> Weights:
        """Return the weights of a configuration without projections: identities, zero biases."""
        widths = {
            "q": config.inner_width,
            "k": config.key_width,
            "v": config.value_width,
            "o": config.context_width,
        }
        parts = dict[str, Tensor]()
        for role, width in widths.items():
            parts[f"w_{role}"] = torch.eye(width, device=device).to(dtype)
            if config.has_bias(role):
                parts[f"b_{role}"] = torch.zeros(width, dtype=dtype, device=device)
        return Weights(**parts)

    def of(self, role: str) -> tuple[Tensor, Tensor | None]:
        """Return matrix and bias of a projection, "q", "k", "v" or "o"."""
        return getattr(self, f"w_{role}"), getattr(self, f"b_{role}")

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> Weights:
        """Return the weights in `dtype`, on `device`, by default where they are."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.named()}
        return Weights(**moved)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) for each tensor that is not None, in the order of the fields."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]


@lru_cache(maxsize=64)
def _drawn(config: Config, seed: int) -> Weights:
    """Draw the weights of `Weights.random`; the last ones are kept for later calls.

    The properties of a clause share cases.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(config.d_model, 0)
    inner_width = max(config.inner_width, 0)
    context_width = max(config.context_width, 0)
    key_width, value_width = inner_width, context_width
    if config.n_kv_heads is not None and config.n_heads:
        key_width = max(config.n_kv_heads * config.width_of("k"), 0)
        value_width = max(config.n_kv_heads * config.width_of("v"), 0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64, device="cpu")

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns).div(max(columns, 1) ** 0.5)

    def vector(rows: int, present: bool) -> Tensor | None:
        drawn = normal(rows) / 2
        return drawn if present else None

    def around_one(role: str) -> Tensor | None:
        rows = config.norm_width(role)
        return None if rows is None else 1 + normal(rows) / 4

    return Weights(
        w_q=matrix(inner_width, width),
        w_k=matrix(key_width, max(config.key_width, 0)),
        w_v=matrix(value_width, max(config.value_width, 0)),
        w_o=matrix(width, context_width),
        b_q=vector(inner_width, config.has_bias("q")),
        b_k=vector(key_width, config.has_bias("k")),
        b_v=vector(value_width, config.has_bias("v")),
        b_o=vector(width, config.has_bias("o")),
        extra_k=vector(key_width, config.bias_kv),
        extra_v=vector(value_width, config.bias_kv),
        q_norm=around_one("q"),
        k_norm=around_one("k"),
    )
