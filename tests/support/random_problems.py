"""Random problems, correct implementations to solve them, and how near a result is to its bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.mask_kinds import EXTENTS
from mha.conformance.cases.memory_layouts import LAYOUTS
from mha.conformance.cases.values import VALUES
from mha.conformance.faults.base import implementation_of
from mha.implementations.loop import implementation as loop
from mha.implementations.sdpa import implementation as sdpa
from mha.implementations.vectorized import implementation as vectorized
from mha.spec import Implementation, Problem, Rounding
from mha.spec.bounds import Ball
from support import variants

IMPLEMENTATIONS = {
    "loop": loop,
    "vectorized": vectorized,
    "sdpa": sdpa,
    "no_key_bias": implementation_of(variants.NoKeyBias),
}
# A softmax over whole rows in the accumulator, in which nothing is stored between the steps.
STRICT = Rounding(
    scores_stored=False,
    weights_stored=False,
    softmax_stored=False,
    scaling_roundings=0,
    log_normaliser=False,
    rescales=0,
)
# The dtypes in which the bound is sharp, with the relative error of one number that must exceed it,
# whatever the seed.
MUST_EXCEED = {"float32": 1e-2, "float64": 1e-9}


def one_thread() -> Iterator[None]:
    """Compute on one thread: for small tensors, threads would only wait. A fixture."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_case(rng: random.Random, dtype: str) -> Case:
    """A case of any kind."""
    inputs = rng.choice(("cross", "self"))
    queries, keys = rng.choice((1, 2, 3, 7, 16, 33)), rng.choice((1, 2, 5, 11, 17, 65, 129))
    return Case(
        n_heads=rng.choice((1, 2, 3, 4)),
        head_dim=rng.choice((1, 2, 3, 5, 8)),
        bias=rng.choice((True, False)),
        B=rng.choice((1, 2, 3)),
        L=queries,
        S=queries if inputs == "self" else keys,
        dtype=dtype,
        mask=rng.choice(("none", *EXTENTS)),
        causal=rng.choice((True, False)),
        inputs=inputs,
        layout=rng.choice(tuple(LAYOUTS)),
        values=rng.choice(tuple(VALUES)),
        seed=rng.randrange(2**31),
    )


def moderate_problem(seed: int, dtype: str, mask: str) -> Problem:
    """A problem without extreme scores or trivial sums; a float mask has finite entries."""
    rng = random.Random(seed)
    sizes = {
        "n_heads": rng.choice((1, 2, 3)),
        "head_dim": rng.choice((2, 3, 5, 8)),
        "B": rng.choice((1, 2)),
    }
    lengths = {"L": rng.choice((1, 2, 5, 7)), "S": rng.choice((2, 3, 5, 11, 17))}
    problem = Case(**sizes, **lengths, dtype=dtype, mask=mask, seed=seed).problem()
    return (
        problem
        if problem.mask is None
        else problem.change(mask=problem.mask.nan_to_num(neginf=0.0))
    )


def built(implementation: Implementation, problem: Problem) -> Any:
    """The implementation with the weights of the problem, in evaluation mode."""
    return implementation.build(
        problem.config, problem.weights, dtype=problem.query.dtype, device="cpu"
    ).eval()


def ratio(result: Tensor, expected: Ball) -> float:
    """The largest error/bound where there is a bound: above 1, or not finite, is a failure."""
    error = (result.double() - expected.mid).abs().nan_to_num(nan=float("inf"))
    return float(
        torch.where((error > 0) & expected.rad.isfinite(), error / expected.rad, 0.0).max()
    )
