"""The core on exact heads: kernels as they are written stay within its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mha.spec import Rounding
from mha.spec.bounds import Ball
from mha.spec.core import attend
from mha.spec.heads import Heads, Precision
from support.effort import tried

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor]]
FLASH = Rounding(
    scores_stored=False, softmax_stored=False, scaling_roundings=0, log_normaliser=False
)
PLAIN = Rounding(softmax_stored=False, scaling_roundings=0, log_normaliser=False, rescales=0)
STORED = Rounding(scaling_roundings=0, log_normaliser=False, rescales=0)


def problems(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """Yield queries, keys, values, allowed pairs and a scale: scores from small to huge."""
    # Of 48, each width is combined with each number of keys and each size.
    for seed in range(tried(48, 96)):
        generator = torch.Generator().manual_seed(seed)
        width, keys, size = (
            (1, 2, 4, 16)[seed % 4],
            (2, 7, 33, 130)[seed // 4 % 4],
            (0.3, 3.0, 30.0)[seed // 16 % 3],
        )
        q = (size * torch.randn(1, 2, 5, width, generator=generator)).to(dtype)
        k, v = (torch.randn(1, 2, keys, width, generator=generator).to(dtype) for _ in range(2))
        if seed % 3 == 0:  # so that the maximum grows at every key
            q, k = q.abs(), k.abs().sort(2).values
        allowed = torch.rand(1, 2, 5, keys, generator=generator) < (0.7 if seed % 2 else 2.0)
        yield q, k, v, allowed, width**-0.5


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores_of(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    return (wide(q) @ wide(k).mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)


def maximum(scores: Tensor) -> Tensor:
    return scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)


def divided(context: Tensor, total: Tensor, like: Tensor) -> Tensor:
    return (context / total.masked_fill(total == 0, 1.0)).to(like)


def flash(tile: int, slack: float = 0.0, *, base_two: bool = False) -> Kernel:
    """An online softmax over tiles of keys; weights are cast for their product with the values."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[None, Tensor]:
        scores, exp = scores_of(q, k, allowed), torch.exp2 if base_two else torch.exp
        scores = scores * math.log2(math.e) if base_two else scores
        highest = torch.full_like(scores[..., :1], -math.inf)
        total, context = torch.zeros_like(highest), torch.zeros_like(wide(q))
        for part, values in zip(scores.split(tile, -1), v.split(tile, 2), strict=True):
            reached = torch.maximum(highest, part.amax(-1, keepdim=True))
            higher = torch.where(
                (reached > highest + slack) | (highest == -math.inf), reached, highest
            )
            shift = higher.nan_to_num(neginf=0.0)
            rescale, raised = exp(highest - shift), exp(part - shift)
            total = total * rescale + raised.sum(-1, keepdim=True)
            context = context * rescale + wide(raised.to(q)) @ wide(values)
            highest = higher
        return None, divided(context, total, q)

    return kernel


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and weights are stored, the softmax is in the accumulator."""
    products = (wide(q) @ wide(k).mT).to(q.dtype)
    scores = wide(products * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    raised = (scores - maximum(scores)).exp()
    weights = divided(raised, raised.sum(-1, keepdim=True), q)
    return weights, (wide(weights) @ wide(v)).to(q)


def stored(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Every step is stored."""
    products = (wide(q) @ wide(k).mT).to(q.dtype)
    scores = (products * q.shape[-1] ** -0.5).masked_fill(~allowed, -math.inf)
    raised = (scores - maximum(scores)).exp()
    weights = divided(raised, wide(raised).sum(-1, keepdim=True).to(q), q)
    return weights, (wide(weights) @ wide(v)).to(q)


def split(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[None, Tensor]:
    """Three parts of the keys, each with its log-sum-exp, are merged at once."""
    scores, size = scores_of(q, k, allowed), -(-k.shape[2] // 3)
    sums, contexts = [], []
    for part, values in zip(scores.split(size, -1), v.split(size, 2), strict=True):
        raised = (part - maximum(part)).exp()
        total = raised.sum(-1, keepdim=True)
        sums.append(maximum(part) + total.log())
        contexts.append(divided(wide(raised.to(q)) @ wide(values), total, wide(q)))
    whole = torch.cat(sums, -1).logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    merged = torch.stack(
        [context * (lse - whole).exp() for context, lse in zip(contexts, sums, strict=True)]
    ).sum(0)
    return None, merged.to(q)


KERNELS = {
    "plain": (plain, PLAIN),
    "stored": (stored, STORED),
    **{f"online, tiles of {tile}": (flash(tile), FLASH) for tile in (1, 4, 16, 128)},
    "lazy rescale": (flash(4, slack=8.0), FLASH),
    "base two": (flash(16, base_two=True), FLASH),
    "split keys": (split, Rounding(scores_stored=False, softmax_stored=False, scaling_roundings=0)),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_stay_within_the_bound(
    name: str, dtype: torch.dtype, record_property: Callable[..., None]
) -> None:
    kernel, rounding = KERNELS[name]
    precision, largest = Precision.of(dtype, rounding), 0.0
    for q, k, v, allowed, tau in problems(dtype):
        found = attend(Heads(*map(Ball.exact, (q, k, v)), allowed), tau, precision, "zeros")
        for actual, expected in zip(
            kernel(q, k, v, allowed), (found.weights, found.context), strict=True
        ):
            if actual is not None:
                error = (actual.double() - expected.mid).abs()
                largest = max(largest, float((error / expected.rad.clamp(min=1e-300)).max()))
    record_property("largest error/bound", largest)
    assert 0.02 < largest <= 1


def test_the_bound_tells_scores_that_are_clamped() -> None:
    """Also where their own rounding is as large as many differences of scores."""
    q, k, v = (
        torch.full((1, 1, 1, 1), 2e4),
        torch.tensor([[[[0.7], [1.0], [1.3]]]]),
        torch.eye(3)[None, None],
    )
    precision = Precision.of(torch.float16, PLAIN)
    heads = Heads(*map(Ball.exact, (q, k, v)), torch.ones(1, 1, 1, 3, dtype=torch.bool))
    context = attend(heads, 1.0, precision, "zeros").context
    assert context.mid.flatten().tolist() == pytest.approx([0, 0, 1])
    assert context.rad.max() < 0.01


@pytest.mark.parametrize("side", ["query", "key"])
def test_scaled_numbers_may_be_stored_below_the_smallest_normal_one(side: str) -> None:
    """In float16, 3 * 2^-24 becomes 2^-23 once it is scaled by 1/2 and stored."""
    tiny, large, signs = 3 * 2.0**-24, 6e4, torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    of_query, of_key = (tiny, large) if side == "query" else (large, tiny)
    q = torch.full((1, 1, 1, 4), of_query).half()
    k = (of_key * signs).expand(-1, -1, -1, 4).half()
    scaled_q, scaled_k = (q / 2, k) if side == "query" else (q, k / 2)
    context = (scaled_q.double() @ scaled_k.double().mT).softmax(-1) @ signs.double()
    heads = Heads(*map(Ball.exact, (q, k, signs)), torch.ones(1, 1, 1, 2, dtype=torch.bool))
    bound = attend(heads, 0.5, Precision.of(torch.float16, Rounding()), "zeros").context
    assert ((context - bound.mid).abs() <= bound.rad).all()
