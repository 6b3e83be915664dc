"""HED: heads are what a loop over heads computes."""

from __future__ import annotations

from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import expect, expect_agree, expect_close, expect_unchanged
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.spec.bounds import Ball

PLAIN_WRONGS = ("mean", "zeros", "noise", "unscaled")
MASKS = ("none", *BOOLEAN, *FLOAT)


@property_of("HED-1", Domain(masks=MASKS, causal=BOTH, min_heads=2), must_reject=PLAIN_WRONGS, min_rejection_rate=0.3)
def result_is_that_of_the_loop_over_heads(session: Session, case: Case) -> None:
    problem = case.problem()
    expected = session.expected(problem).output
    expect_close(session(problem).output, expected, because=f"the loop over {case.n_heads} heads")


@property_of("HED-2", Domain(masks=("none", *FEW), min_heads=2, min_S=2, values=MODERATE))
def heads_are_independent(session: Session, case: Case) -> None:
    problem = passing_heads(case.problem())
    head = case.seed % case.n_heads
    own = slice(head * case.head_dim, (head + 1) * case.head_dim)
    w_q = problem.weights.w_q.clone()
    w_q[own] = -2 * w_q[own]
    changed = problem.change(w_q=w_q)
    base, seen = session(problem).output, session(changed).output
    others = [column for column in range(case.config.d_model) if not own.start <= column < own.stop]
    because = f"only head {head}'s rows of W_q changed, and W_o is the identity"
    answers = session.expected(problem).output, session.expected(changed).output
    bound = partial(answers[0].__getitem__, (..., others))
    expect_unchanged(session, seen[..., others], base[..., others], bound=bound, because=because)
    must_move = (answers[0].mid - answers[1].mid).abs() > answers[0].rad + answers[1].rad
    stuck = (must_move & (seen.tensor == base.tensor)).nonzero()
    if len(stuck):
        at = tuple(stuck[0].tolist())
        message = f"{seen[at].code} did not change with head {head}'s own rows of W_q"
        expect(False, message, f"assert {seen[at].code} != {base[at].code}")


@property_of("HED-3", Domain(masks=("none", "keys", "padding", "items"), min_heads=2))
def order_of_heads_does_not_matter(session: Session, case: Case) -> None:
    problem = case.problem()
    order = torch.randperm(case.n_heads, generator=case.generator).tolist()
    rows = torch.cat([torch.arange(case.head_dim) + head * case.head_dim for head in order])
    weights = problem.weights
    moved = {name: tensor[rows] for name, tensor in weights.named() if not name.endswith("_o")}
    permuted = problem.change(**moved, w_o=weights.w_o[:, rows])
    bounds = session.expected(permuted).output, session.expected(problem).output
    seen, expected = session(permuted).output, session(problem).output
    expect_agree(seen, expected, bounds=bounds, because=f"what the heads give that are here in the order {order}")


@property_of("HED-4", Domain(masks=COMMON, causal=BOTH, max_heads=1), must_reject=PLAIN_WRONGS, min_rejection_rate=0.3)
def one_head_is_plain_attention(session: Session, case: Case) -> None:
    problem = case.problem()
    expected = session.expected(problem).output
    expect_close(session(problem).output, expected, because="single-head attention followed by W_o")


@property_of("HED-5", Domain(masks=("none", *FEW), min_heads=2))
def output_is_the_sum_of_the_heads(session: Session, case: Case) -> None:
    problem = case.problem()
    base = session(problem).output
    answer = session.expected(problem).output
    total, reach = torch.zeros_like(answer.mid), answer.rad
    for head in range(case.n_heads):
        own = slice(head * case.head_dim, (head + 1) * case.head_dim)
        w_o = torch.zeros_like(problem.weights.w_o)
        w_o[:, own] = problem.weights.w_o[:, own]
        b_o = problem.weights.b_o if head == 0 or problem.weights.b_o is None else torch.zeros_like(problem.weights.b_o)
        alone = problem.change(w_o=w_o, b_o=b_o)
        total = total + session(alone).output.tensor.double()
        reach = reach + session.expected(alone).output.rad
    expect_close(
        base, Ball(total, reach), because="the sum of what each head gives with the others' columns of W_o zero"
    )
