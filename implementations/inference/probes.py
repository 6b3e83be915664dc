"""What a module does, tried on small inputs of sizes that no axis shares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.spec import Config, Weights, causal_mask

# Five columns for each of two heads: the probes' other sizes are none of these.
CONFIG = Config(d_model=10, n_heads=2)
# Two readings differ by far more than this, and rounding in float64 makes far less; -1e4 is a fill too.
NEAR = 1e-3
SCALES = {"1/sqrt(d_k)": 5**-0.5, "1/sqrt(d_model)": 10**-0.5, "none": 1.0, "1/d_k": 1 / 5}


@dataclass(frozen=True)
class Formula:
    """A formula that may explain a module's output: the contract's, or one that departs from it."""

    scale: str = "1/sqrt(d_k)"
    causal: bool = False
    projected: bool = True

    def __call__(self, inputs: tuple[Tensor, Tensor, Tensor], weights: Weights, mask: Tensor | None) -> Tensor:
        """Return the output (B, L, D) for inputs (B, L, D) and a canonical mask, broadcastable to (B, H, L, S)."""
        heads = CONFIG.n_heads, CONFIG.head_dim
        named = dict(weights.named())
        q, k, v = (
            F.linear(x, named[f"w_{role}"], named.get(f"b_{role}")).unflatten(-1, heads).transpose(1, 2)
            for x, role in zip(inputs, "qkv", strict=True)
        )
        scores = q @ k.mT * SCALES[self.scale]
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.causal:
            scores = scores.masked_fill(~causal_mask(q.shape[2], k.shape[2], "top_left"), -math.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.linear(context, weights.w_o, weights.b_o) if self.projected else context


def formulas() -> Iterator[Formula]:
    """Yield the contract's formula, then those that depart from it."""
    for projected, causal, scale in product((True, False), (False, True), SCALES):
        yield Formula(scale, causal, projected)


def near(seen: object, right: Tensor) -> bool:
    """Whether an output is what a formula gives, but for rounding."""
    if not isinstance(seen, Tensor) or seen.shape != right.shape:
        return False
    return bool(((seen.detach().double() - right).abs() <= NEAR * right.abs().max()).all())


@dataclass(frozen=True)
class Probe:
    """Small inputs: query (B, L, D), key and value (B, S, D), or one tensor three times for self-attention."""

    batch: int
    queries: int
    keys: int
    alone: bool

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        generator = torch.Generator().manual_seed(0)

        def drawn(length: int) -> Tensor:
            return torch.randn(self.batch, length, CONFIG.d_model, generator=generator, dtype=torch.float64)

        query = drawn(self.queries)
        return (query, query, query) if self.alone else (query, drawn(self.keys), drawn(self.keys))

    def mask(self, extent: str, *, causal: bool) -> Tensor:
        """Return a boolean mask (B, H, L, S), True = may attend, that differs along the axes that `extent` names.

        In every row a key is allowed, the first where the rows are causal besides, and one is not.
        """
        keys = self.queries if self.alone else self.keys
        sizes = {"b": self.batch, "h": CONFIG.n_heads, "l": self.queries, "s": keys}
        shape = tuple(size if axis in extent else 1 for axis, size in sizes.items())
        order = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        if causal:
            order[..., 0] = -1.0
        kept = torch.randint(1, keys, (*shape[:-1], 1), generator=torch.Generator().manual_seed(2))
        return (order.argsort(-1).argsort(-1) < kept).expand(tuple(sizes.values()))


def probes(*, alone: bool) -> tuple[Probe, Probe]:
    """Return two probes whose sizes stand in another order, so that what fits both fits not by luck."""
    return Probe(3, 4, 6, alone), Probe(7, 6, 4, alone)


def with_numbers(mask: Tensor) -> Tensor:
    """Return a boolean mask as one that is added: -infinity, and small numbers, the same along the same axes."""
    numbers = mask.cumsum(-1, dtype=torch.float64) / 7
    return numbers.masked_fill(~mask, -math.inf)
