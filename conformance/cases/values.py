"""Values: named distributions of the numbers in a case, each chosen for what goes wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mha.spec import Config, Weights
from mha.spec.dtypes import traits_of

Made = tuple[Weights, Tensor, Tensor, Tensor]


class Source(NamedTuple):
    """What values are made with.

    far: how far from 1 they may go in the dtype (`DtypeTraits.far`).
    """

    generator: torch.Generator
    far: float


def _integers(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """Small integers, whose sums are exact in every dtype."""
    rounded = {name: tensor.sign() for name, tensor in weights.named()}
    return Weights(**rounded), query.round(), key.round(), value.round()


def _uniform(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """Zero projected queries: all keys have the same score, so the context is a mean."""
    return _zeroed(dict(weights.named()), "w_q", "b_q"), query, key, value.round()


def _zeroed(named: dict[str, Tensor], *names: str) -> Weights:
    """Return weights with zeros for these names, where there are such tensors."""
    zeros = {name: named[name] * 0 for name in names if name in named}
    return Weights(**named | zeros)


def _copying(weight: Tensor) -> Tensor:
    """The identity in the shape of a weight, whose columns are repeated where it has more rows."""
    rows, columns = weight.shape
    return torch.eye(columns, dtype=torch.float64)[torch.arange(rows) % columns]


def _selection(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """One key of each item has so large a score that all other weights underflow to zero."""
    named = dict(weights.named()) | {"w_q": _copying(weights.w_q), "w_k": _copying(weights.w_k)}
    winner = torch.randint(max(key.shape[1], 1), (key.shape[0], 1), generator=source.generator)
    chosen = (torch.arange(key.shape[1]) == winner).unsqueeze(-1)
    # With the usual scale, the winner's score is 64 sqrt(d_k), and e^-64 is below every roundoff.
    key = 64.0 * chosen * torch.ones_like(key)
    return _zeroed(named, "b_q", "b_k"), torch.ones_like(query), key, value


def _large(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """Scores in the hundreds and thousands: exp overflows unless a row's maximum is subtracted."""
    return weights, 30 * query, 30 * key, value


def _offset(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """All scores of a row far from zero, and close to one another."""
    return weights, query, key + 30.0, value


def _low(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """All scores of a row close to one another, and lower than what masked scores are set to.

    That is usually a finite number, such as -1e4 or -1e9.
    """
    # Queries near 384 and keys near -384 have products near -147456 d_k. Their own numbers differ
    # from 384 by multiples of 1 / 4096, which are exact beside it in float32.
    far = min(source.far, 384.0)
    named = dict(weights.named()) | {"w_q": _copying(weights.w_q), "w_k": -_copying(weights.w_k)}
    query, key = (8 * query).round() / 4096 + far, (8 * key).round() / 4096 + far
    return _zeroed(named, "b_q", "b_k"), query, key, value


def _duplicates(
    weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source
) -> Made:
    """Only two distinct keys and values, repeated: scores are tied everywhere."""
    pair = torch.arange(key.shape[1]) % 2
    return weights, query, key[:, pair], value[:, pair]


def _heavy(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """Heavy tails: a few numbers much larger than the others."""
    return weights, query**3, key**3, value**3


def _tiny(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """Inputs so small that all scores are almost equal."""
    return weights, query / source.far, key / source.far, value / source.far


def _huge(weights: Weights, query: Tensor, key: Tensor, value: Tensor, source: Source) -> Made:
    """A value input of very large magnitude."""
    return weights, query, key, value * source.far


# The functions take standard normal query, key and value.
VALUES: dict[str, Callable[[Weights, Tensor, Tensor, Tensor, Source], Made]] = {
    "normal": lambda weights, query, key, value, source: (weights, query, key, value),
    "integers": _integers,
    "uniform": _uniform,
    "selection": _selection,
    "large": _large,
    "offset": _offset,
    "low": _low,
    "duplicates": _duplicates,
    "heavy": _heavy,
    "tiny": _tiny,
    "huge": _huge,
}


def make_inputs(
    values: str,
    config: Config,
    sizes: tuple[int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> Made:
    """Return weights, query (B, L, D), key (B, S, kdim) and value (B, S, vdim).

    They are in float64 on the CPU.

    values: a name in `VALUES`.
    sizes: (B, L, S).
    dtype: the dtype that they will be rounded to, and must not overflow.
    """
    batch, queries, keys = sizes

    def normal(length: int, width: int) -> Tensor:
        return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)

    seed = int(torch.randint(2**31, (1,), generator=generator))
    inputs = (
        normal(queries, config.d_model),
        normal(keys, config.key_width),
        normal(keys, config.value_width),
    )
    source = Source(generator, traits_of(dtype).far)
    return VALUES[values](Weights.random(config, seed), *inputs, source)
