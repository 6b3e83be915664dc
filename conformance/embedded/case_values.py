"""Numbers of the cases for kernels, chosen so that what a wrong kernel leaves out shows.

In Gaussian inputs of many keys every weight is small, the right output is nearly the mean of the
values, and a bound on rounding in half precision hides half of the keys. Here each query attends
mainly to a few keys: one that it may see, and one at an edge of what it may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# How much more than the logarithm of the number of keys the score of a target is: its weight is
# then about 0.8 beside all others.
ABOVE_ALL = 1.5
# The share of values that are outliers, and how many times as large these are.
OUTLIERS, TIMES = 0.02, 8.0


@dataclass(frozen=True, eq=False)
class Source:
    """What the numbers of a case are made of; all are in float64 on the CPU.

    query: (B, H, L, d_k), key: (B, H_kv, S, d_k), value: (B, H_kv, S, d_v); normal numbers.
    targets: two keys of each query, (L, 2).
    scale: what the scores are multiplied by.
    generator: of all other random numbers.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    targets: Tensor
    scale: float
    generator: torch.Generator

    @property
    def keys_of_heads(self) -> Tensor:
        """The keys of each query head, (B, H, S, d_k)."""
        return self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)

    @property
    def sign(self) -> float:
        """That of the scale, 1 for a scale of 0."""
        return -1.0 if self.scale < 0 else 1.0


Made = tuple[Tensor, Tensor, Tensor]


def _targets(source: Source) -> Made:
    """Queries that look for two keys each, one of which they may not see at times."""
    keys = source.keys_of_heads
    own, edge = source.targets.unbind(1)
    aimed = keys[:, :, own] + keys[:, :, edge]
    length = keys.square().sum(-1, keepdim=True).mean()
    wanted = math.log(max(2, keys.shape[2])) + ABOVE_ALL
    factor = wanted / (length * max(abs(source.scale), 1e-3)) * source.sign
    query = factor * aimed + 0.1 * source.query
    return query, source.key, _with_outliers(source)


def _with_outliers(source: Source) -> Tensor:
    """Return the values, some of which are much larger than the others."""
    draws = torch.rand(source.value.shape, generator=source.generator, dtype=torch.float64)
    return torch.where(draws < OUTLIERS, TIMES * source.value, source.value)


def _normal(source: Source) -> Made:
    """Normal numbers, as most programs test with."""
    return source.query, source.key, source.value


def _large(source: Source) -> Made:
    """Scores in the hundreds: their exponentials overflow unless the largest is subtracted."""
    query, key, value = _targets(source)
    return 40 * query, key, value


def _low(source: Source) -> Made:
    """All scores far below -104, whose exponential is 0 in float32, and below -1e4 in some rows."""
    width = source.query.shape[-1]
    far = 250.0 / (max(abs(source.scale), 1e-3) * width)
    signs = torch.randint(0, 2, (width,), generator=source.generator).double() * 2 - 1
    query = source.sign * math.sqrt(far) * signs + 0.2 * source.query
    key = -math.sqrt(far) * signs + 0.2 * source.key
    return query, key, _with_outliers(source)


def _one_large(source: Source) -> Made:
    """One key of each head, near the end, with a score far above all others, and small others."""
    key = 0.05 * source.key
    place = max(0, key.shape[2] - 2)
    query = source.query.abs() + 0.5
    width = query.shape[-1]
    wanted = math.log(max(2, key.shape[2])) + ABOVE_ALL
    key[:, :, place] += source.sign * wanted / (max(abs(source.scale), 1e-3) * width)
    return query, key, _with_outliers(source)


def _one_small(source: Source) -> Made:
    """One key of each head with a score far below all others, which are large."""
    query, key, value = _one_large(source)
    place = max(0, key.shape[2] - 2)
    large, small = key[:, :, place].clone(), key[:, :, 0].clone()
    key = key + large.unsqueeze(2)
    key[:, :, place] = small
    return query, key, value


def _heavy(source: Source) -> Made:
    """Heavy tails in every input."""
    return source.query**3 / 3, source.key, source.value**3


def _offset(source: Source) -> Made:
    """Values with a common offset, beside which they differ little."""
    query, key, value = _targets(source)
    return query, key, value + 16


VALUES: dict[str, Callable[[Source], Made]] = {
    "targets": _targets,
    "normal": _normal,
    "large": _large,
    "low": _low,
    "one_large": _one_large,
    "one_small": _one_small,
    "heavy": _heavy,
    "offset": _offset,
}
