"""EQV: symmetries of attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, MOST_VALUES, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, FEW, FLOAT
from mha.conformance.cases.transforms import item, passing_heads, select_keys, zeroed
from mha.conformance.harness.assertions import assume, expect_agree, expect_close, expect_unchanged
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import NO_POSITIONS, UNCHANGED_HEADS, property_of
from mha.conformance.properties.support.exact_results import (
    expect_exact,
    factor_for_scale,
    is_exact,
    of_heads,
    with_identity,
)
from mha.conformance.properties.support.shared_assertions import (
    another_order,
    assume_answered,
    assume_unquantised,
    refuses,
)
from mha.spec import Problem
from mha.spec.bounds import Ball

CROSS = ("cross",)
NO_PREFIX = "masks allow the first keys, and the order of the keys changes"
SHARED = ("self", "memory", "query_key", "query_value")


@property_of("EQV-1", Domain(masks=("none", *BOOLEAN, *FLOAT), causal=BOTH, min_B=2, layouts=DENSE))
def other_items_have_no_influence(session: Session, case: Case) -> None:
    """The result for one item of a batch does not depend on the other items."""
    problem = case.problem()
    own = case.seed % case.B
    others = torch.arange(case.B) != own
    generator = case.generator

    def with_other_items(x: Tensor) -> Tensor:
        fresh = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        return torch.where(others.to(x.device).view(-1, 1, 1), fresh, x)

    changed = problem.map_inputs(with_other_items)
    base, output = session(problem).output, session(changed).output
    because = f"only items other than {own} changed"
    expect_unchanged(
        session,
        output[own],
        base[own],
        bound=lambda: session.expected(problem).output[own],
        because=because,
    )


@property_of("EQV-1", Domain(masks=("none", *FEW, *FLOAT), causal=BOTH, min_B=2), number=2)
def batch_size_does_not_matter(session: Session, case: Case) -> None:
    """The result for one item does not depend on the size of its batch."""
    problem = case.problem()
    own = case.seed % case.B
    alone = session(item(problem, own)).output
    together = session(problem).output[own : own + 1]
    bound = session.bound_of(problem, slice(own, own + 1))
    expect_agree(alone, together, bound, because=f"the output of item {own} in a batch of {case.B}")


@property_of(
    "EQV-2",
    Domain(masks=("none", *FEW), inputs=CROSS, plain=True, min_L=2),
    needs=NO_POSITIONS,
)
def permuted_queries_permute_outputs(session: Session, case: Case) -> None:
    """Permuting the queries, in self-attention keys and values too, permutes the outputs."""
    problem = case.problem()
    order = another_order(case.L, case.generator)
    mask = problem.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask[:, :, order]
    if mask is not None and problem.key is problem.query:
        assume(not session.claims.prefix_masks, NO_PREFIX)
        mask = mask[..., order]
    permuted = problem.map_inputs(lambda x: x[:, order] if x is problem.query else x)
    permuted = permuted.change(mask=mask)
    output, expected = session(permuted).output, session(problem).output[:, order]
    bound = session.bound_of(permuted)
    expect_agree(output, expected, bound, because="the outputs of the queries in the new order")


@property_of("EQV-3", Domain(masks=COMMON, inputs=CROSS, min_S=2), needs=NO_POSITIONS)
def order_of_keys_does_not_matter(session: Session, case: Case) -> None:
    """Permuting keys, values and mask together changes nothing."""
    problem = case.problem()
    if problem.is_self:  # the last query stays in its place, and the others change theirs
        assume(case.S > 2, "there is one key besides the last")
        order = torch.cat([another_order(case.S - 1, case.generator), torch.tensor([case.S - 1])])
    else:
        order = another_order(case.S, case.generator)
    permuted = _with_keys(problem, order)
    _expect_same_where_all_is_seen(
        session, problem, permuted, "the output for the keys in their old order"
    )


def _with_keys(problem: Problem, keys: Tensor) -> Problem:
    """Select keys and values by index, with their columns of the mask; its rows where shared."""
    mask = None if problem.mask is None else problem.mask[..., keys]
    if mask is not None and mask.shape[2] > 1 and problem.is_self:
        mask = mask[:, :, keys]
    return select_keys(problem, keys).change(mask=mask)


def _expect_same_where_all_is_seen(
    session: Session, problem: Problem, changed: Problem, because: str
) -> None:
    """Expect the same outputs of the queries that see every key by the causal flag.

    In self-attention this is the last query of both problems.
    """
    assume(problem.mask is None or not session.claims.prefix_masks, NO_PREFIX)
    assume(not refuses(session, changed), "a row is empty then, and the declared policy is 'error'")
    rows: slice | list[int] = slice(None)
    if problem.is_self:
        rows = [-1]
    elif problem.is_causal:
        see_all = _see_every_key(session, problem) & _see_every_key(session, changed)
        rows = see_all.nonzero().flatten().tolist()
        assume(bool(rows), "the causal flag hides a key from every query")
    output, expected = session(changed).output[:, rows], session(problem).output[:, rows]
    bounds = (session.bound_of(each, (slice(None), rows)) for each in (changed, problem))
    expect_agree(output, expected, *bounds, because=because)


def _see_every_key(session: Session, problem: Problem) -> Tensor:
    """Return which queries see every key by the causal flag, boolean (L,)."""
    return problem.change(mask=None).allowed(session.claims.alignment)[0, 0].all(-1)


@property_of(
    "EQV-4",
    Domain(masks=("none", *FEW), inputs=CROSS, layouts=DENSE, values=("normal", "integers")),
)
def outputs_are_linear_in_the_values(session: Session, case: Case) -> None:
    """Adding two sets of values adds their outputs, once the value path has no bias."""
    first = zeroed(case.problem(), "b_v", "b_o")  # biases are added once, not twice
    # Where the value is another input too, two sets of projections are added instead.
    is_shared = first.value is first.query or first.value is first.key
    name, like = ("w_v", first.weights.w_v) if is_shared else ("value", first.value)
    # Halves of small integers: their sum is exact in every dtype, so only attention rounds.
    drawn = torch.randint(-8, 9, (2, *like.shape), generator=case.generator) / 2
    halves = drawn.to(like)
    parts = [first.change(**{name: x}) for x in (halves[0], halves[1], halves[0] + halves[1])]
    one, other, both = (session(part).output for part in parts)
    reach = sum(session.expected(part).output.rad for part in parts)
    expected = Ball(one.tensor.double() + other.tensor.double(), torch.as_tensor(reach))
    expect_close(
        both,
        expected,
        because=f"{one.code} + {other.code}, the outputs for the two parts of the values",
    )


@property_of(
    "EQV-5",
    Domain(masks=("none", *BOOLEAN), causal=BOTH, values=MODERATE),
    must_reject=("zeros", "lopsided", "slightly_lopsided"),
)
def zero_queries_give_the_mean(session: Session, case: Case) -> None:
    """A query projection of zero gives the mean of the allowed values."""
    problem = zeroed(passing_heads(case.problem()), "w_q", "b_q")
    output, expected = session(problem).output, session.expected(problem)
    allowed = problem.allowed(session.claims.alignment).double()
    mean = (allowed @ expected.value.mid).transpose(1, 2).flatten(2)
    count = allowed.sum(-1).transpose(1, 2).repeat_interleave(case.head_dim, -1)
    centre = (mean / count).where(count > 0, expected.output.mid)
    expect_close(
        output, Ball(centre, expected.output.rad), because="the mean of the allowed values"
    )


@property_of(
    "EQV-6",
    Domain(masks=("single",), values=MOST_VALUES),
    needs="masks",
    must_reject=("unmasked", "mean", "lopsided", "slightly_lopsided"),
)
def one_allowed_key_gives_its_value(session: Session, case: Case) -> None:
    """One allowed key gives the projected value of that key."""
    _expect_value_of_the_one_key(session, passing_heads(case.problem()))


@property_of(
    "EQV-6",
    Domain(values=MOST_VALUES, max_length=1),
    must_reject=("zeros", "lopsided", "slightly_lopsided"),
    number=3,
)
def the_only_key_gives_its_value(session: Session, case: Case) -> None:
    """The only key gives its projected value."""
    assume(case.S == 1, "Claims.sizes has no single key")
    _expect_value_of_the_one_key(session, passing_heads(case.problem()))


def _expect_value_of_the_one_key(session: Session, problem: Problem) -> None:
    """Each query may attend to one key at most, and gets its projected value."""
    assume_answered(session, problem)
    output, expected = session(problem).output, session.expected(problem)
    alignment = session.claims.alignment
    values = problem.allowed(alignment).double() @ expected.value.mid
    # Of a query before its key, where calls are always causal, MSK-8 says what it gets.
    is_empty = problem.empty_rows(alignment).unsqueeze(-1).expand_as(values)
    value, is_empty = (x.transpose(1, 2).flatten(2) for x in (values, is_empty))
    value = torch.where(is_empty, expected.output.mid, value)
    expect_close(
        output, Ball(value, expected.output.rad), because="the value of the one allowed key"
    )


@property_of("EQV-7", Domain(masks=COMMON, inputs=CROSS), needs=NO_POSITIONS)
def duplicated_keys_change_nothing(session: Session, case: Case) -> None:
    """Duplicating every key and value changes nothing."""
    problem = case.problem()
    doubled = _with_keys(problem, torch.arange(case.S).repeat(2))
    _expect_same_where_all_is_seen(
        session, problem, doubled, "the output for each key and value once"
    )


@property_of(
    "EQV-8",
    Domain(masks=COMMON, causal=BOTH, inputs=SHARED),
    needs=("projections", "cross_attention=True"),
)
def self_attention_is_cross_attention(session: Session, case: Case) -> None:
    """One tensor given for several inputs gives what copies of it give."""
    problem = case.problem()
    copies = {name: getattr(problem, name).clone() for name in ("query", "key", "value")}
    output, expected = session(problem).output, session(problem.change(**copies)).output
    expect_agree(
        output,
        expected,
        session.bound_of(problem),
        because="the output for copies of the shared inputs",
    )


@property_of(
    "EQV-8",
    Domain(masks=COMMON, causal=BOTH, inputs=("memory",), layouts=DENSE),
    needs="cross_attention",
    max_cases=24,
    number=2,
    must_reject=("lopsided", "slightly_lopsided"),
)
def inputs_may_lie_in_one_another(session: Session, case: Case) -> None:
    """The query may be a part of the keys and values, as a class token is, or these of it."""
    problem = case.problem()
    widths = {x.shape[-1] for x in (problem.query, problem.key, problem.value)}
    assume(
        len(widths) == 1, "keys have another width than queries, as there are fewer heads of them"
    )
    if case.L > case.S:
        part = dict.fromkeys(("key", "value"), problem.query[:, : case.S])
    elif case.seed % 2 or case.L == case.S:  # each query is the first key
        part = {"query": problem.key[:, :1].expand(-1, case.L, -1)}
    else:
        part = {"query": problem.key[:, : case.L]}
    problem = problem.change(**part)
    output, expected = session(problem).output, session.expected(problem).output
    expect_close(
        output,
        expected,
        because=f"the oracle's value, with {' and '.join(part)} in the memory of the others",
    )


@property_of(
    "EQV-9",
    Domain(inputs=CROSS, square=True, values=MODERATE),
    needs="projections",
    must_reject=("zeros", "mean"),
)
def each_input_has_its_own_projection(session: Session, case: Case) -> None:
    """Swapping two of the inputs changes the result as their own projections say.

    In self-attention, and where key and value are one tensor, two projections are swapped instead.
    """
    problem = case.problem()
    pairs = (("query", "key"), ("key", "value"), ("query", "value"))
    one, other = pairs[case.seed % 3]
    if len(problem.distinct()) == 3:
        swapped = problem.change(**{one: getattr(problem, other), other: getattr(problem, one)})
    else:
        if problem.weights.w_q.shape != problem.weights.w_k.shape:
            one, other = pairs[1]
        matrices = {name: getattr(problem.weights, f"w_{name[0]}") for name in (one, other)}
        swapped = problem.change(**{f"w_{one[0]}": matrices[other], f"w_{other[0]}": matrices[one]})
    actual = session(swapped).output
    expected = session.expected(swapped).output
    expect_close(actual, expected, because=f"the result with {one} and {other} swapped")


INTEGER_VALUES = Domain(values=("integers",), inputs=CROSS, layouts=DENSE)


@property_of("EQV-5", replace(INTEGER_VALUES, min_S=2), must_reject=("lopsided",), number=2)
def zero_queries_over_a_power_of_two_of_keys_are_exact(session: Session, case: Case) -> None:
    """The mean of a power of two of small integers comes without rounding."""
    problem = with_identity(case.problem(), "v")
    count = 1 << min(case.S.bit_length() - 1, 5)
    problem = select_keys(problem, torch.arange(count))
    problem = zeroed(problem, "w_q", "b_q")
    allowed = problem.allowed(session.claims.alignment)[0, 0]
    keys = allowed.sum(-1)
    rows = torch.isin(keys, 2 ** torch.arange(6, device=keys.device)).nonzero().flatten()
    sums = allowed.double() @ of_heads(problem, problem.value.double())
    mean = sums / keys.clamp(min=1).unsqueeze(-1)
    because = f"the mean of {count} small integers, or fewer, is a number of this dtype"
    expect_exact(session, problem, mean[:, rows].to(problem.query), because, rows)


@property_of(
    "EQV-6",
    replace(INTEGER_VALUES, plain=True),
    needs=("cross_attention=True", *UNCHANGED_HEADS),
    must_reject=("zeros", "lopsided", "mean"),
    number=2,
)
def a_key_that_wins_by_far_gives_its_value_exactly(session: Session, case: Case) -> None:
    """A key whose score is far above all others gives its value without rounding."""
    assume_unquantised(session)
    problem = with_identity(case.problem(), "q", "k", "v")
    winner = torch.randint(case.S, (case.B,), generator=case.generator)
    chosen = (torch.arange(case.S) == winner.unsqueeze(1)).unsqueeze(-1).to(problem.key)
    # Scores of 1024 or more, and of 0: their exponentials differ by more than float64 can hold.
    # Where results need not be exact, the scores are smaller: the bound grows with them, and in
    # half precision would soon be of no use.
    far = 32 if is_exact(session) else 4
    factor = factor_for_scale(session, case)
    problem = problem.change(
        query=problem.query * 0 + far * factor, key=problem.key * 0 + far * chosen
    )
    won = of_heads(problem, problem.value[torch.arange(case.B), winner])
    exact = won.unsqueeze(1).expand(-1, case.L, -1)
    expect_exact(session, problem, exact, "the weights of all other keys vanish beside its own")
