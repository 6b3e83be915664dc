"""DRP: dropout. What can fail by chance says how often.

A test of DRP-2 fails a correct implementation with a probability of at most `FALSE_ALARM`; a run makes at most `TESTS`
of an implementation, so that it is wrong once in 10^9 at most. Their power, at `LONGEST` squared draws and
p = 0.5: a probability that is wrong by 0.019 is caught with probability 0.99.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.transforms import passing_heads, zeroed
from mha.conformance.harness.assertions import expect, expect_close, expect_equal
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import weights_of
from mha.spec import Problem
from mha.spec.bounds import Ball

# 23 cases of 3 probabilities and 7 of one, 3 tests for each of up to 6 items times heads and 1 of all; 9 more; all in 4
# dtypes and on 2 devices.
TESTS = 4 * 2 * ((23 * 3 + 7) * (6 * 3 + 1) + 9)
FALSE_ALARM = 1e-9 / TESTS
LONGEST = 256
PROBABILITIES = (0.5, 0.1, 0.9)
TRAINING = ("train",)
DRAWN = Domain(
    masks=COMMON,
    causal=BOTH,
    inputs=("cross", "self"),
    values=("normal",),
    layouts=DENSE,
    modes=("train", "train_no_grad"),
    max_heads=3,
    max_B=2,
)


def dropping(problem: Problem, dropout: float) -> Problem:
    return problem.change(config=replace(problem.config, dropout=dropout))


@property_of(
    "DRP-1",
    Domain(masks=COMMON, causal=BOTH),
    needs="dropout",
    requires="HED-1",
    must_reject=("zeros", "noise"),
)
def evaluation_and_zero_drop_nothing(session: Session, case: Case) -> None:
    training = case.mode.startswith("train")
    dropout = 0.0 if training else PROBABILITIES[case.seed % 3]
    problem = dropping(case.problem(), dropout)
    told = f"the oracle's value without dropout, on the path {case.mode!r} with p = {dropout}"
    expect_close(session(problem).output, session.expected(problem).output, because=told)


def expect_dropped(session: Session, problem: Problem, dropout: float, seed: int) -> None:
    """Each weight is 0 with probability p, alone, and 1/(1-p) times as large otherwise.

    problem: of which d_k is 2 S; its weights and values are changed to those of `_shown`.
    """
    problem = dropping(_shown(problem), dropout)
    batch, heads, _, length = problem.shape
    seen, answer = session(problem, seed=seed).output, session.expected(problem).output
    allowed, parts = problem.allowed(session.claims.causal), list[RecordedTensor]()
    for item in range(batch):
        for head in range(heads):
            first, second = (slice(start, start + length) for start in (2 * head * length, (2 * head + 1) * length))
            own, right = seen[item, slice(None), first], answer[item, :, first]
            expect_zero_or_rescaled(session, own, right, dropout, "the weight of key")
            twice = seen[item, slice(None), second]
            expect_equal(twice, own, because="a weight is dropped for all columns of its value, or for none")
            expect_share(own, allowed[item, head], dropout, ("queries", "keys"))
            parts.append(own)
    count = int(allowed.all(0).all(0).sum())
    if math.comb(len(parts), 2) * (dropout**2 + (1 - dropout) ** 2) ** count <= FALSE_ALARM:
        for one, other in combinations(parts, 2):
            apart = not torch.equal(one.tensor == 0, other.tensor == 0)
            check = f"assert not ({one.code} == 0).equal({other.code} == 0)"
            expect(apart, f"with p = {dropout}, {one.code} and {other.code} drop the same", check)


def _shown(problem: Problem) -> Problem:
    """Change a problem so that a row's keys weigh what the mask alone says, and the outputs are the weights, twice.

    Queries are projected to zero, and each value has two columns of its own: in the output, the columns of head h have
    what it gives to each key, and then the same again.
    """
    batch, length, width = problem.value.shape
    eye = torch.eye(length, width, dtype=problem.query.dtype, device=problem.query.device)
    one, column = eye.expand(batch, -1, -1).contiguous(), eye.repeat(2 * problem.config.kv_heads, 1)
    problem = problem.map_inputs(lambda x: one if x is problem.value else x)
    return zeroed(passing_heads(problem), "w_q", "b_q", "b_v").change(w_v=column)


def expect_zero_or_rescaled(session: Session, own: RecordedTensor, right: Ball, dropout: float, what: str) -> None:
    """Each number of two dimensions is 0, or 1/(1 - p) times what it is without dropout."""
    found, kept = own.tensor.double(), 1 / (1 - dropout)
    # 1 - p, its inverse and the product are rounded; the rest is in the bound of the output without dropout.
    single = session.claims.rounding.softmax_in_float32
    roundoff = torch.finfo(torch.float32 if single else own.tensor.dtype).eps / 2
    reach = kept * (right.rad + (kept + 2) * roundoff * right.mid.abs())
    wrong = ((found != 0) & ~((found - kept * right.mid).abs() <= reach)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        place, value, most = own[at], kept * float(right.mid[at]), float(reach[at])
        told = f"{place.code}, {what} {at[1]} with p = {dropout}, is {float(found[at]):.6g}, but should "
        check = f"assert {place.code} == 0 or abs({place.code}.item() - {value!r}) <= {most!r}, {place.code}"
        expect(False, f"{told}be 0 or 1/(1 - p) times what it is without dropout, {value:.6g}", check)


def expect_share(own: RecordedTensor, allowed: Tensor, dropout: float, names: tuple[str, str]) -> None:
    """As many of the allowed numbers are dropped as p says, and no two rows, nor columns, alike but by chance.

    names: what the rows are, and the columns.
    """
    dropped = (own.tensor == 0) & allowed
    count, total = int(dropped.sum()), int(allowed.sum())
    low, high = accepted(total, dropout)
    told = f"with p = {dropout}, {count} of {total} are dropped, but should be {low} to {high}: more or fewer "
    hidden = allowed.numel() - total
    check = f"assert {low + hidden} <= int(({own.code} == 0).sum()) <= {high + hidden}, int(({own.code} == 0).sum())"
    expect(low <= count <= high, f"{told}are dropped by chance with probability {FALSE_ALARM:.0e} only", check)
    for pattern, what, code in zip((dropped, dropped.T), names, (own.code, f"{own.code}.T"), strict=True):
        rows, columns = pattern.shape
        if not hidden and math.comb(rows, 2) * (dropout**2 + (1 - dropout) ** 2) ** columns <= FALSE_ALARM:
            apart = len(pattern.unique(dim=0)) == rows
            check = f"assert len(({code} == 0).unique(dim=0)) == {rows}"
            expect(apart, f"with p = {dropout}, two {what} drop the same in {own.code}", check)


@property_of("DRP-2", DRAWN, needs="dropout=True", must_reject=("zeros", "noise"), max_cases=12)
def each_weight_is_dropped_alone_or_rescaled(session: Session, case: Case) -> None:
    length = 65 if case.seed % 2 else 17
    queries = length if case.inputs == "self" else length - 1
    for dropout in PROBABILITIES:
        problem = replace(case, L=queries, S=length, head_dim=2 * length).problem()
        expect_dropped(session, problem, dropout, case.seed)


@property_of(
    "DRP-2",
    replace(DRAWN, masks=("none",), causal=(False,), max_B=1, max_heads=1),
    needs="dropout=True",
    max_cases=1,
    number=2,
)
def the_share_that_is_dropped_is_p(session: Session, case: Case) -> None:
    for dropout in PROBABILITIES:
        problem = replace(case, L=LONGEST, S=LONGEST, head_dim=2 * LONGEST).problem()
        expect_dropped(session, problem, dropout, case.seed)


@cache
def accepted(trials: int, p: float) -> tuple[int, int]:
    """The smallest and the largest count that a binomial variable leaves with probability `FALSE_ALARM` at most."""
    counts = torch.arange(trials + 1, dtype=torch.float64)
    logs = torch.distributions.Binomial(trials, torch.tensor(p, dtype=torch.float64)).log_prob(counts)
    each = math.log(FALSE_ALARM / 2)
    low = int((logs.logcumsumexp(0) <= each).sum())
    return low, trials - int((logs.flip(0).logcumsumexp(0) <= each).sum())


# 64 keys, or outputs, are never dropped alike by two seeds but with probability 2^-64, if all rows share a pattern too.
SEEDED = Domain(values=("normal",), layouts=DENSE, modes=TRAINING, min_L=8, min_S=64, min_head_dim=8)


@property_of("DRP-3", SEEDED, needs="dropout")
def the_seed_decides_what_is_dropped(session: Session, case: Case) -> None:
    problem = dropping(case.problem(), 0.5)
    first, again, other = (session(problem, seed=seed).output for seed in (1, 1, 2))
    expect_equal(again, first, because="the seed is the same")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one, next_one = session(problem).output, session(problem).output
    told = f"{next_one.code} is {one.code}: two calls of one run drop the same"
    expect(not torch.equal(one.tensor, next_one.tensor), told, f"assert not {one.code}.equal({next_one.code})")
    moved = not torch.equal(first.tensor, other.tensor)
    expect(
        moved,
        f"{other.code} is {first.code}, though the seed is another",
        f"assert not {first.code}.equal({other.code})",
    )


@property_of(
    "DRP-3", Domain(masks=("none", *FEW), values=MODERATE, modes=TRAINING), needs="dropout", must_reject=(), number=2
)
def dropping_everything_is_not_nan(session: Session, case: Case) -> None:
    problem = dropping(case.problem(), 1.0)
    seen = session(problem, seed=1).output
    told = session.gradients(problem, session.upstream(problem)) if session.claims.gradients else {}
    for each in (seen, *told.values()):
        nan = bool(each.tensor.isnan().any())
        expect(not nan, f"{each.code} has NaN with p = 1", f"assert not {each.code}.isnan().any()")


@property_of(
    "DRP-4",
    Domain(masks=("none", *BOOLEAN, *FLOAT), values=MODERATE, modes=TRAINING, need_weights=(True,)),
    needs=("dropout", "returns_weights"),
    requires="HED-1",
    must_reject=("zeros", "mean", "noise"),
)
def returned_weights_are_those_before_dropout(session: Session, case: Case) -> None:
    problem = dropping(case.problem(), 0.5)
    weights = weights_of(session(problem, seed=1))
    expect_close(weights, session.expected(problem).weights, because="the weights before dropout")
