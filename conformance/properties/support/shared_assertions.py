"""Assertions that the properties of several families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.assertions import (
    assume,
    expect_agree,
    expect_close,
    expect_no_worse,
    expect_unchanged,
)
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, Violation
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedOutput, RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.support.domains import WIDTHS
from mha.spec import Claims, Expected, Problem
from mha.spec.bounds import Ball


def module_of(instance: Instance) -> nn.Module:
    """Return the attention as a module; discard the case if it is not one."""
    attention = instance.attention
    assume(isinstance(attention, nn.Module), "the attention is not a torch.nn.Module")
    assert isinstance(attention, nn.Module)
    return attention


def refuses(session: Session, problem: Problem) -> bool:
    """Return whether every call must raise: a row is empty, and the policy is "error" (MSK-8)."""
    return session.claims.empty_row == "error" and has_empty_row(session, problem)


def assume_answered(session: Session, problem: Problem) -> None:
    """Discard a case whose calls must raise, since a row is empty; see `refuses`."""
    assume(not refuses(session, problem), "a row is empty, and the declared policy is 'error'")


@contextmanager
def options_refused_without_causal(session: Session, problem: Problem) -> Iterator[None]:
    """Discard a case whose window, chunk or slopes are refused without the causal flag.

    That is so where calls may have the flag.
    """
    try:
        yield
    except CallRaised:
        options, may_be_causal = problem.options, session.claims.causal is not None
        by_place = (options.window, options.chunk, options.alibi)
        needs_flag = may_be_causal and any(given is not None for given in by_place)
        reason = "a window, chunks or ALiBi are refused without the causal flag"
        assume(problem.is_causal or not needs_flag, reason)
        raise


def has_empty_row(session: Session, problem: Problem) -> bool:
    """Return whether some query may attend to no key."""
    return bool(problem.empty_rows(session.claims.alignment).any())


def with_other(problem: Problem, tensor: Tensor, other: Tensor) -> Problem:
    """Return the problem with another tensor wherever this one is an input."""
    return problem.map_inputs(lambda x: other if x is tensor else x)


def another_order(count: int, generator: torch.Generator) -> Tensor:
    """Return a permutation of so many places, two at least, that moves some."""
    order = torch.randperm(count, generator=generator)
    if torch.equal(order, torch.arange(count)):
        return order.flip(0)
    return order


def hidden_pairs(session: Session, problem: Problem) -> Tensor:
    """Return boolean (B, H, L, S): the keys that mask or causal flag hide from a query.

    Rows without an allowed key are left out where the declared policy gives them other weights than
    zeros.
    """
    allowed = problem.allowed(session.claims.alignment)
    if session.claims.empty_row == "zeros":
        return ~allowed
    has_a_key = allowed.any(-1, keepdim=True)
    return ~allowed & has_a_key


def as_causal(claims: Claims, case: Case) -> Case:
    """Return the case as a causal call, if that is claimed beside its mask."""
    combines = case.mask == "none" or claims.combines_causal
    return replace(case, causal=claims.causal is not None and combines)


def assume_finite(session: Session, problem: Problem) -> None:
    """Discard the case if the declared policy makes a row NaN, or the call raise (MSK-8)."""
    empty = session.claims.empty_row in ("nan", "error") and has_empty_row(session, problem)
    assume(not empty, "a row has no allowed key, so its output is not finite")


def weights_of(result: RecordedOutput) -> RecordedTensor:
    """Return the weights (B, H, L, S) of a call that asked for them; raise if it has none."""
    if result.weights is None:
        name = result.output.name.replace("output", "weights")
        raise Violation(
            "the call with need_weights=True returned no weights, but they are claimed",
            (f"assert {name} is not None",),
        )
    return result.weights


def expect_rows_unchanged(
    session: Session,
    problem: Problem,
    outputs: tuple[RecordedTensor, RecordedTensor],
    rows: Tensor,
    because: str,
) -> None:
    """Expect some rows, boolean (B, L), of two outputs to be equal.

    problem: that of the first output.
    """
    base, output = outputs
    expected = cache(partial(session.expected, problem))
    for item in range(len(rows)):
        own = rows[item].nonzero().flatten()
        if len(own):
            bound = partial(rows_of, expected, item, own)
            expect_unchanged(
                session, output[item, own], base[item, own], bound=bound, because=because
            )


def rows_of(expected: Callable[[], Expected], item: int, rows: Tensor) -> Ball:
    """Return some rows of the expected output of an item; rows: indices."""
    return expected().output[item, rows]


def expect_gradients(session: Session, problem: Problem, rows: Tensor | None, because: str) -> None:
    """Expect the oracle's gradients of inputs, mask and weights, within their bounds.

    rows: boolean (B, L), the rows of the output that are differentiated; see `Session.upstream` for
    None.
    """
    upstream = session.upstream(problem, rows)
    actual = session.gradients(problem, upstream)
    expected = session.expected_gradients(problem, upstream)
    undetermined = undetermined_gradients(session, problem)
    known = []
    for name in actual:
        may_overflow = not bool(expected[name].rad.isfinite().any())
        if name not in undetermined and not may_overflow:
            known.append(name)
    assume(bool(known), "a step may overflow, so no gradient is known")
    for name in known:
        expect_close(actual[name], expected[name], because=f"the gradient, {because}")


def undetermined_gradients(session: Session, problem: Problem) -> set[str]:
    """Return the names of open gradients: W_o's, where a context is NaN by policy."""
    if session.claims.empty_row == "nan" and has_empty_row(session, problem):
        return {"w_o"}
    return set()


def expect_backward(
    session: Session,
    leaves: Problem,
    output: Tensor,
    because: str,
    of: Instance | None = None,
    upstream: Tensor | None = None,
) -> None:
    """Differentiate an earlier output; expect the oracle's gradients of its inputs.

    leaves: the problem whose inputs require grad.
    of: the attention that gave the output, to expect the gradients of its weights too; it must have
        none yet.
    upstream: the gradient of the output, if not the session's; if it requires a gradient itself,
        the backward pass is recorded.
    """
    if upstream is None:
        upstream = session.upstream(leaves)
    with guarded("backward()"):
        differentiate(output, upstream, create_graph=upstream.requires_grad)
    expected = session.expected_gradients(leaves, upstream)
    for name, gradient in input_gradients(session, leaves).items():
        expect_close(gradient, expected[name], because=f"the gradient, {because}")
    if of is not None and session.claims.weight_gradients:
        gradients = session.weight_gradients(of, leaves.weights)
        for name in sorted(gradients.keys() - undetermined_gradients(session, leaves)):
            expect_close(gradients[name], expected[name], because=f"the gradient, {because}")


def input_gradients(session: Session, leaves: Problem) -> dict[str, RecordedTensor]:
    """Return the gradients that a backward pass left on the inputs, zeros where there is none.

    That of inputs which are one tensor is under the first of their names.
    """
    gradients = {}
    for name, leaf in leaves.distinct().items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradients[name] = session.unscripted(gradient, f"{name}.grad")
    return gradients


def expect_result(actual: RecordedOutput, expected: Expected, because: str) -> None:
    """Expect the oracle's output, and its weights if the call returned any."""
    expect_close(actual.output, expected.output, because=because)
    if actual.weights is not None:
        expect_close(actual.weights, expected.weights, because=because)


def expect_finite(actual: RecordedTensor, because: str) -> None:
    """Expect no NaN and no infinity."""
    nonfinite = (~actual.tensor.isfinite()).nonzero()
    if len(nonfinite):
        element = actual[tuple(nonfinite[0].tolist())]
        raise Violation(
            f"{element.code} is {float(element.tensor)}, {because}",
            (f"assert {element.code}.isfinite(), {element.code}",),
        )


def assume_unquantised(session: Session) -> None:
    """Discard the case if heads are stored in float8: too little is known of its results."""
    assume(not session.claims.rounding.heads_stored, "heads are declared to be stored in float8")


def assume_as_accurate_as_plain(session: Session) -> None:
    """Discard the case if declared rounding is coarser than that of the plain formula."""
    assume_unquantised(session)
    coarse = session.claims.rounding.is_coarse
    assume(
        not coarse,
        "partial sums, an accumulator or an exponential are declared that the plain formula"
        " has not",
    )


def expect_no_worse_than_plain(session: Session, case: Case) -> None:
    """The root mean square error of the output is at most twice that of the plain formula."""
    assume_as_accurate_as_plain(session)
    problem = case.problem()
    output, expected = session(problem).output, session.expected(problem)
    filled = (~expected.empty).all(1)
    plain = plain_formula(
        problem, problem.allowed(session.claims.alignment), session.claims.scale, session.claims
    )
    expect_no_worse(output.code, output.tensor[filled], plain[filled], expected.output.mid[filled])


def cases_of_each_width(session: Session, case: Case) -> list[Case]:
    """Return the case with heads of each width that is claimed; discard it if none is."""
    sizes, lengths = session.claims.sizes, (case.L, case.S)
    cases = []
    for width in WIDTHS:
        if not sizes.refused(n_heads=case.n_heads, head_dim=width, lengths=lengths):
            cases.append(replace(case, head_dim=width))
    assume(bool(cases), "no width of heads of known models is claimed")
    return cases


def is_moved_by_slopes(session: Session, problem: Problem) -> bool:
    """Return whether sinks, or a cap, act on a bias that may be counted from any place."""
    declared, options = session.claims.scores.alibi, problem.options
    moves = declared is not None and declared.origin == "any" and options.alibi is not None
    return moves and (options.sinks is not None or options.softcap is not None)


def expect_together(session: Session, problem: Problem) -> None:
    """Expect the oracle's result for several options on the scores, if not refused together."""
    result = result_together(session, problem)
    expect_result(
        result, session.expected(problem), "the oracle's value, with all of these options"
    )


def assume_taken_together(session: Session, problem: Problem) -> None:
    """Discard a case whose options on the scores are refused together, or mean nothing exact."""
    result_together(session, problem)


def result_together(session: Session, problem: Problem) -> RecordedOutput:
    """Return the result for several options on the scores; discard those refused together."""
    is_moved = is_moved_by_slopes(session, problem)
    assume(not is_moved, "sinks or a cap act on a bias that may be counted from another place")
    assume_answered(session, problem)
    try:
        return session(problem)
    except (CallRaised, AdapterError):
        raise Discard("these options are refused together") from None


def expect_as_without(
    session: Session, output: RecordedTensor, plain: Problem, option: str
) -> None:
    """Expect the output of a call with an option that changes nothing: that of a call without it.

    plain: the problem without the option.
    option: with its article, in words.
    """
    because = f"the oracle's value without {option}"
    expect_close(output, session.expected(plain).output, because=because)
    because = f"the output without {option}"
    expect_agree(output, session(plain).output, session.bound_of(plain), because=because)


# An option is judged where its effect is so many times the bound.
CLEAR = 10.0


def expect_effect(session: Session, problem: Problem, option: str) -> None:
    """Expect a result that is not the one without an option, where the two are clearly apart."""
    assume_answered(session, problem)
    with options_refused_without_causal(session, problem):
        output = session(problem).output  # first: no frame above a call holds an answer
    expected = session.expected(problem).output
    without = session.expected(problem.change(**{option: None})).output
    value = getattr(problem.options, option)
    expect_other_than(output, without, expected, f"{option}={value!r} has no effect here")


def expect_other_than(output: RecordedTensor, without: Ball, expected: Ball, says: str) -> None:
    """Expect a result that is not the one without something, where the two are clearly apart.

    says: that it has no effect.
    """
    distance = (without.mid - expected.mid).abs()
    apart = distance > CLEAR * torch.maximum(without.rad, expected.rad)
    assume(bool(apart.any()), "no number is changed by ten times the bound")
    error = (output.tensor.detach().double().cpu() - without.mid.cpu()).abs()
    if bool((error < distance.cpu() / 2)[apart.cpu()].all()):
        expect_close(output, expected, because=f"the oracle's value; {says}")
