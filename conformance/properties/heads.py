"""HED: attention equals a loop over its heads."""

from __future__ import annotations

from functools import partial

import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, MODERATE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.transforms import passing_heads
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_unchanged,
)
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import another_order
from mha.spec.bounds import Ball

# Defects that show without a mask.
DEFECTS_WITHOUT_MASK = ("lopsided", "slightly_lopsided", "slightly_scaled", "one_weight")


@property_of(
    "HED-1",
    Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, min_heads=2),
    must_reject=DEFECTS_WITHOUT_MASK,
)
def result_is_that_of_the_loop_over_heads(session: Session, case: Case) -> None:
    """The result equals the loop over heads, each with its own rows of W_q, W_k and W_v."""
    problem = case.problem()
    actual = session(problem).output
    expected = session.expected(problem).output
    expect_close(actual, expected, because=f"the loop over {case.n_heads} heads")


@property_of(
    "HED-2",
    Domain(masks=("none", *FEW), min_heads=2, min_S=2, values=MODERATE),
    needs="qk_norm.over=None|head",  # a norm over all heads depends on each
)
def heads_are_independent(session: Session, case: Case) -> None:
    """Changing one head's rows of W_q changes that head's context, and no other."""
    problem = passing_heads(case.problem())
    head = case.seed % case.n_heads
    own = slice(head * case.head_dim, (head + 1) * case.head_dim)
    w_q = problem.weights.w_q.clone()
    w_q[own] = -2 * w_q[own]
    changed = problem.change(w_q=w_q)
    base, output = session(problem).output, session(changed).output
    others = [column for column in range(case.config.d_model) if not own.start <= column < own.stop]
    because = f"only head {head}'s rows of W_q changed, and W_o is the identity"
    before, after = session.expected(problem).output, session.expected(changed).output
    bound = partial(before.__getitem__, (..., others))
    expect_unchanged(session, output[..., others], base[..., others], bound=bound, because=because)
    must_change = (before.mid - after.mid).abs() > before.rad + after.rad
    unchanged = (must_change & (output.tensor == base.tensor)).nonzero()
    if len(unchanged):
        place = tuple(unchanged[0].tolist())
        message = f"{output[place].code} did not change with head {head}'s own rows of W_q"
        expect(False, message, f"assert {output[place].code} != {base[place].code}")
    # As with one key in each row, or a norm of a single column.
    assume(bool(must_change.any()), f"nothing changes with head {head}'s rows of W_q")


@property_of("HED-3", Domain(masks=("none", "keys", "padding", "items"), min_heads=2))
def order_of_heads_does_not_matter(session: Session, case: Case) -> None:
    """Permuting the heads, rows of W_q, W_k, W_v and columns of W_o together, changes nothing."""
    problem = case.problem()
    order = another_order(case.n_heads, case.generator).tolist()
    rows = torch.cat([torch.arange(case.head_dim) + head * case.head_dim for head in order])
    weights = problem.weights
    # Rows of W_o are not of heads; those of W_k and W_v are of all, where all share one.
    shared = ("_o", "_k", "_v") if case.n_kv_heads == 1 else ("_o",)
    if problem.config.norm_weights == "head":
        shared = (*shared, "q_norm", "k_norm")  # one weight for all heads
    elif case.n_kv_heads == 1:
        shared = (*shared, "k_norm")
    moved = {name: tensor[rows] for name, tensor in weights.named() if not name.endswith(shared)}
    because = f"the output before the heads were put in the order {order}"
    if not problem.config.projected:  # the contexts are in that order, too
        permuted, columns = problem.change(**moved), (..., rows)
        bounds = session.bound_of(permuted), session.bound_of(problem, columns)
        expect_agree(
            session(permuted).output, session(problem).output[columns], *bounds, because=because
        )
        return
    permuted = problem.change(**moved, w_o=weights.w_o[:, rows])
    output, expected = session(permuted).output, session(problem).output
    bounds = session.bound_of(permuted), session.bound_of(problem)
    expect_agree(output, expected, *bounds, because=because)


@property_of(
    "HED-4",
    Domain(masks=COMMON, causal=BOTH, max_heads=1),
    must_reject=DEFECTS_WITHOUT_MASK,
)
def one_head_is_plain_attention(session: Session, case: Case) -> None:
    """One head equals single-head attention followed by W_o."""
    problem = case.problem()
    actual = session(problem).output
    expected = session.expected(problem).output
    expect_close(actual, expected, because="single-head attention followed by W_o")


@property_of("HED-5", Domain(masks=("none", *FEW), min_heads=2), needs="projections")
def output_is_the_sum_of_the_heads(session: Session, case: Case) -> None:
    """The output is the sum of what each head alone gives, the columns of W_o of others zero."""
    problem = case.problem()
    output = session(problem).output
    total, parts = torch.zeros_like(output.tensor, dtype=torch.float64), [problem]
    for head in range(case.n_heads):
        own = slice(head * case.head_dim, (head + 1) * case.head_dim)
        w_o = torch.zeros_like(problem.weights.w_o)
        w_o[:, own] = problem.weights.w_o[:, own]
        b_o = problem.weights.b_o
        if head > 0 and b_o is not None:  # it is added once
            b_o = torch.zeros_like(b_o)
        alone = problem.change(w_o=w_o, b_o=b_o)
        total = total + session(alone).output.tensor.double()
        parts.append(alone)
    reach = torch.stack([session.expected(part).output.rad for part in parts]).sum(0)
    because = "the sum of the outputs of each head alone, with the other heads' columns of W_o zero"
    expect_close(output, Ball(total, reach), because=because)
