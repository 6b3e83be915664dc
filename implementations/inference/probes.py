"""Trial runs: small inputs whose sizes all differ, and the formulas that an output is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.spec import Config, Weights, causal_mask

# Two heads of five columns: no other size of a probe is one of these.
CONFIG = Config(d_model=10, n_heads=2)
# Of the largest output. Formulas differ by far more; rounding in float64, and a fill value of -1e4, by far less.
TOLERANCE = 1e-3
# By their name, from d_k and d_model.
SCALES: dict[str, Callable[[int, int], float]] = {
    "1/sqrt(d_k)": lambda head_dim, d_model: head_dim**-0.5,
    "1/sqrt(d_model)": lambda head_dim, d_model: d_model**-0.5,
    "none": lambda head_dim, d_model: 1.0,
    "1/d_k": lambda head_dim, d_model: 1 / head_dim,
}
# Of n_heads * d_k = 8 columns, for modules that take the width of a head.
OWN_HEAD_DIM = 4


@dataclass(frozen=True)
class Formula:
    """A formula that may give a module's output: the contract's, or a variant of it.

    scale: a key of `SCALES`. causal: whether it is always causal. projected: whether W_o is applied.
    """

    scale: str = "1/sqrt(d_k)"
    causal: bool = False
    projected: bool = True

    def __call__(self, inputs: tuple[Tensor, Tensor, Tensor], weights: Weights, mask: Tensor | None) -> Tensor:
        """Return the output (B, L, D) for inputs (B, L, D) and a canonical mask, broadcastable to (B, H, L, S)."""
        named = dict(weights.named())
        head_dim = len(weights.w_q) // CONFIG.n_heads
        q, k, v = (
            F.linear(x, named[f"w_{role}"], named.get(f"b_{role}")).unflatten(-1, (-1, head_dim)).transpose(1, 2)
            for x, role in zip(inputs, "qkv", strict=True)
        )
        k, v = (x.repeat_interleave(CONFIG.n_heads // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * SCALES[self.scale](q.shape[-1], CONFIG.d_model)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.causal:
            scores = scores.masked_fill(~causal_mask(q.shape[2], k.shape[2], "top_left"), -math.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.linear(context, weights.w_o, weights.b_o) if self.projected else context


def formulas() -> Iterator[Formula]:
    """Yield the contract's formula, then its variants."""
    for projected, causal, scale in product((True, False), (False, True), SCALES):
        yield Formula(scale, causal, projected)


def is_close(output: object, expected: Tensor) -> bool:
    """Return whether an output is what a formula gives, up to `TOLERANCE`."""
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    return bool(((output.detach().double() - expected).abs() <= TOLERANCE * expected.abs().max()).all())


@dataclass(frozen=True)
class Probe:
    """Small random inputs: query (B, L, D), key and value (B, S, D); cross_attention: as in `Claims`."""

    batch: int
    queries: int
    keys: int
    cross_attention: bool | Literal["memory"]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value in float64."""
        generator = torch.Generator().manual_seed(0)

        def draw(length: int) -> Tensor:
            return torch.randn(self.batch, length, CONFIG.d_model, generator=generator, dtype=torch.float64)

        query = draw(self.queries)
        key = draw(self.keys) if self.cross_attention else query
        return query, key, draw(self.keys) if self.cross_attention is True else key

    def mask(self, axes: str, *, causal: bool) -> Tensor:
        """Return a boolean mask (B, H, L, S), True = may attend, that differs along the given axes of "bhls".

        Each row has a key that is allowed and one that is not. causal: allow the first key in each row, so that the
        causal mask leaves no row empty.
        """
        keys = self.keys if self.cross_attention else self.queries
        sizes = {"b": self.batch, "h": CONFIG.n_heads, "l": self.queries, "s": keys}
        shape = tuple(size if axis in axes else 1 for axis, size in sizes.items())
        order = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        if causal:
            order[..., 0] = -1.0
        kept = torch.randint(1, keys, (*shape[:-1], 1), generator=torch.Generator().manual_seed(2))
        return (order.argsort(-1).argsort(-1) < kept).expand(tuple(sizes.values()))


def probes(cross_attention: bool | Literal["memory"]) -> tuple[Probe, Probe]:
    """Return two probes whose sizes are ordered differently, so that nothing fits both by coincidence."""
    return Probe(3, 4, 6, cross_attention), Probe(7, 6, 4, cross_attention)


def most_biases(biases: Collection[bool | str]) -> bool | str:
    """Return the value of `Config.bias`, of those given, with which most projections have a bias.

    >>> most_biases({False, "qvo"})
    'qvo'
    """
    counts = {bias: sum(Config(1, 1, bias=bias).has_bias(role) for role in "qkvo") for bias in biases}
    return max(counts, key=counts.__getitem__, default=False)


def additive(mask: Tensor) -> Tensor:
    """Return a boolean mask as an additive one: -infinity, and small numbers that vary along the last axis."""
    numbers = mask.cumsum(-1, dtype=torch.float64) / 7
    return numbers.masked_fill(~mask, -math.inf)
