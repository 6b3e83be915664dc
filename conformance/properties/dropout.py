"""DRP: dropout. What can fail by chance says how often.

A test of DRP-2 fails a correct implementation with a probability of at most `FALSE_ALARM`; fewer than a hundred of them
are made of an implementation in a run, so that a run is wrong once in 10^9 at most. Their power, at `DRAWS` draws and
p = 0.5: a probability that is wrong by 0.018 is caught with probability 0.99.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, FEW, FLOAT
from mha.conformance.expect import expect, expect_close, expect_equal, need
from mha.conformance.observed import Observed
from mha.conformance.properties.changes import passing_heads, weights_of
from mha.conformance.registry import checks
from mha.conformance.trial import Trial
from mha.spec import Problem

FALSE_ALARM = 1e-11
DRAWS = 1 << 16
PROBABILITIES = (0.5, 0.1, 0.9)
TRAINING = ("train",)
DRAWN = Domain(
    inputs=("cross",),
    bias=(True,),
    regimes=("normal",),
    layouts=DENSE,
    paths=TRAINING,
    need_weights=(False,),
    dtypes=("float32", "float64"),
)


def _dropping(problem: Problem, dropout: float) -> Problem:
    return problem.change(config=replace(problem.config, dropout=dropout))


@checks(
    "DRP-1",
    Domain(masks=("none", *FEW, "bias"), causal=BOTH),
    needs="dropout",
    after="HED-1",
    rejects=("zeros", "noise"),
)
def evaluation_and_zero_drop_nothing(attention: Trial, case: Case) -> None:
    training = case.path.startswith("train")
    dropout = 0.0 if training else PROBABILITIES[case.seed % 3]
    problem = _dropping(case.problem(), dropout)
    told = f"the oracle's value without dropout, on the path {case.path!r} with p = {dropout}"
    expect_close(attention(problem).output, attention.answer(problem).output, because=told)


def _ones(attention: Trial, case: Case, dropout: float, keys: int) -> tuple[Observed, float]:
    """Return the outputs where every weight is 1/keys and every value 1, for one head of width 1: each a draw.

    Returned with it is the bound of an output without dropout.

    All are of one item and one head, since implementations may share what they drop between items and heads.
    """
    one = replace(case, n_heads=1, head_dim=1, B=1, L=DRAWS, S=keys)
    problem = passing_heads(_dropping(one.problem(), dropout))
    named = {name: tensor * 0 for name, tensor in problem.weights.named() if name in ("w_q", "b_q", "w_v")}
    b_v = problem.weights.b_v
    assert b_v is not None
    problem = problem.change(**named, b_v=torch.ones_like(b_v))
    return attention(problem, seed=case.seed).output, float(attention.answer(problem).output.rad.max())


@checks("DRP-2", DRAWN, needs="dropout", rejects=("zeros",), limit=2)
def what_is_dropped_is_a_share_p_and_the_rest_is_rescaled(attention: Trial, case: Case) -> None:
    """With one key, an output is 0 with probability p, and 1/(1-p) otherwise: an exact binomial test."""
    for dropout in PROBABILITIES:
        _expect_share(attention, case, dropout)


def _expect_share(attention: Trial, case: Case, dropout: float) -> None:
    seen, bound = _ones(attention, case, dropout, 1)
    outputs = seen.tensor.double().flatten()
    kept = 1 / (1 - dropout)
    # 1 - p, its inverse and the product are rounded; the rest is in the bound of the output without dropout.
    single = attention.claims.rounding.softmax_in_float32
    roundoff = torch.finfo(torch.float32 if single else seen.tensor.dtype).eps / 2
    reach = kept * (bound + (kept + 2) * roundoff)
    right = (outputs == 0) | ((outputs - kept).abs() <= reach)
    told = (
        f"with p = {dropout}, one key and a value of 1, an output is {float(outputs[~right][:1].sum()):.6g}, but should"
    )
    check = f"assert ((x := {seen.code}.double()).eq(0) | ((x - {kept!r}).abs() <= {reach!r})).all()"
    expect(bool(right.all()), f"{told} be 0 or 1/(1 - p) = {kept:.6g}", check)
    count, (low, high) = int((outputs == 0).sum()), accepted(DRAWS, dropout)
    told = (
        f"with p = {dropout}, {count} of {DRAWS} outputs are dropped, but should be {low} to {high}: more or fewer are "
    )
    check = f"assert {low} <= int(({seen.code} == 0).sum()) <= {high}"
    expect(low <= count <= high, f"{told}dropped by chance with probability {FALSE_ALARM} only", check)


@checks("DRP-2", DRAWN, needs="dropout", rejects=("zeros",), limit=2)
def the_mean_over_many_draws_is_the_output_without_dropout(attention: Trial, case: Case) -> None:
    """With several keys: Hoeffding's inequality for the mean of numbers between 0 and 1/(1-p)."""
    for dropout in PROBABILITIES:
        _expect_mean(attention, case, dropout, 2 + case.seed % 5)


def _expect_mean(attention: Trial, case: Case, dropout: float, keys: int) -> None:
    seen, bound = _ones(attention, case, dropout, keys)
    mean, width = float(seen.tensor.double().mean()), 1 / (1 - dropout)
    reach = hoeffding(DRAWS, width) + 2 * width * bound
    told = f"with p = {dropout}, the mean of {DRAWS} outputs is {mean:.6g}, but should be 1 within {reach:.3g}, "
    check = f"assert abs(float({seen.code}.double().mean()) - 1) <= {reach!r}"
    expect(abs(mean - 1) <= reach, f"{told}which it leaves by chance with probability {FALSE_ALARM} only", check)


def hoeffding(draws: int, width: float) -> float:
    """How far the mean of independent numbers in an interval of this width strays with probability `FALSE_ALARM`."""
    return width * math.sqrt(math.log(2 / FALSE_ALARM) / (2 * draws))


@cache
def accepted(trials: int, p: float) -> tuple[int, int]:
    """The smallest and the largest count that a binomial variable leaves with probability `FALSE_ALARM` at most."""
    counts = torch.arange(trials + 1, dtype=torch.float64)
    logs = torch.distributions.Binomial(trials, torch.tensor(p, dtype=torch.float64)).log_prob(counts)
    each = math.log(FALSE_ALARM / 2)
    low = int((logs.logcumsumexp(0) <= each).sum())
    return low, trials - int((logs.flip(0).logcumsumexp(0) <= each).sum())


# A row of 64 keys is never dropped alike by two seeds but with probability 2^-64, also where all rows share a pattern.
SEEDED = Domain(regimes=("normal",), layouts=DENSE, paths=TRAINING, min_L=2, min_S=64)


@checks("DRP-3", SEEDED, needs="dropout")
def the_seed_decides_what_is_dropped(attention: Trial, case: Case) -> None:
    problem = _dropping(case.problem(), 0.5)
    first, again, other = (attention(problem, seed=seed).output for seed in (1, 1, 2))
    expect_equal(again, first, because="the seed is the same")
    moved = not torch.equal(first.tensor, other.tensor)
    expect(
        moved,
        f"{other.code} is {first.code}, though the seed is another",
        f"assert not {first.code}.equal({other.code})",
    )


@checks("DRP-3", Domain(masks=("none", *FEW), regimes=MODERATE, paths=TRAINING), needs="dropout", rejects=())
def dropping_everything_is_not_nan(attention: Trial, case: Case) -> None:
    problem = _dropping(case.problem(), 1.0)
    seen = attention(problem, seed=1).output
    expect(
        not bool(seen.tensor.isnan().any()), f"{seen.code} has NaN with p = 1", f"assert not {seen.code}.isnan().any()"
    )


@checks(
    "DRP-4",
    Domain(masks=("none", *BOOLEAN, *FLOAT), regimes=MODERATE, paths=TRAINING, need_weights=(True,)),
    needs="dropout",
    after="HED-1",
    rejects=("zeros", "mean", "noise"),
)
def returned_weights_are_those_before_dropout(attention: Trial, case: Case) -> None:
    need(attention.claims.returns_weights, "needs the claim returns_weights")
    problem = _dropping(case.problem(), 0.5)
    weights = weights_of(attention(problem, seed=1))
    expect_close(weights, attention.answer(problem).weights, because="the weights before dropout")
