"""GRD-8: no small defect explains errors of gradients in half precision better than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import WITH_GRADIENT
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.oracle_answers import kept
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed import (
    ITEMS_OF_TWO_KEYS,
    MANY_ITEMS,
    MANY_ROWS,
    PLAIN_ROWS,
)
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.directed_errors import (
    MOST_DIRECTIONS,
    Known,
    Tested,
    assume_modelled,
    expect_explained,
    last_call,
)
from mha.conformance.properties.support.directed_script import (
    BACKWARD_SCALE,
    D_SCORE,
    LAST_KEY_GRADIENT,
    LAST_KEY_OF_QUERIES,
    MASKED_KEY_GRADIENT,
    ROW_SUM,
    gradient_assertion_of,
    random_gradients,
)
from mha.conformance.properties.support.directions import (
    Direction,
    last_key,
    masked_weight,
    random_signs,
)
from mha.spec import Problem
from mha.spec.directed import Allowance
from mha.spec.directed_gradients import allowances_of_gradients
from mha.spec.gradient_graph import GradientGraph, gradient_graph
from mha.spec.problem import INPUTS

# How the gradients move, by name, in words for more and for less of it, and as a formula.
Change = tuple[dict[str, Tensor], str, str, tuple[str, ...]]

# Queries and keys of a case with several blocks of 512 in each direction.
LONG_ROWS, LONG_KEYS = 640, 520
GRADIENT_ROWS = replace(
    MANY_ROWS,
    modes=WITH_GRADIENT,
    sizes={"n_heads": (4, 8), "head_dim": (32, 16, 64), "B": (4,), "L": (65, 33), "S": (65, 33)},
)
# Those of cases whose sizes the property itself gives them.
PLAIN_GRADIENT_ROWS = replace(PLAIN_ROWS, modes=WITH_GRADIENT)


@property_of(
    "GRD-8",
    GRADIENT_ROWS,
    needs="gradients",
    requires="HED-1",
    must_reject=("unscaled", "detached", "softmax_gradient_without_row_sum"),
    max_cases=4,
)
def errors_of_gradients_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of gradients better than rounding."""
    expect_gradients_by_rounding_alone(session, case)


@property_of(
    "GRD-8",
    PLAIN_GRADIENT_ROWS,
    needs="gradients",
    requires="HED-1",
    must_reject=("unscaled", "detached"),
    max_cases=1,
    number=2,
)
def errors_of_gradients_for_many_keys_do_not_add_up_to_a_defect(
    session: Session, case: Case
) -> None:
    """This holds for several blocks of 512 keys and of 512 queries."""
    keys = LONG_KEYS if case.inputs == "cross" else LONG_ROWS
    long = replace(case, B=1, n_heads=1, head_dim=32, L=LONG_ROWS, S=keys)
    expect_gradients_by_rounding_alone(session, long)


@property_of(
    "GRD-8",
    PLAIN_GRADIENT_ROWS,
    needs="gradients",
    requires="HED-1",
    must_reject=("unscaled", "detached"),
    max_cases=1,
    number=5,
)
def errors_of_gradients_in_a_large_batch_do_not_add_up_to_a_defect(
    session: Session, case: Case
) -> None:
    """This holds for 32 items."""
    large = replace(case, B=MANY_ITEMS, n_heads=4, head_dim=16, L=33, S=33)
    expect_gradients_by_rounding_alone(session, large)


@property_of(
    "GRD-8",
    PLAIN_GRADIENT_ROWS,
    needs="gradients",
    requires="HED-1",
    must_reject=("unscaled", "detached"),
    max_cases=1,
    number=6,
)
def errors_of_gradients_for_two_keys_do_not_add_up_to_a_defect(
    session: Session, case: Case
) -> None:
    """This holds for two keys of many items."""
    queries = 2 if case.causal or case.inputs != "cross" else 8
    two = replace(case, B=ITEMS_OF_TWO_KEYS, n_heads=4, head_dim=16, L=queries, S=2)
    expect_gradients_by_rounding_alone(session, two)


def expect_gradients_by_rounding_alone(
    session: Session, case: Case, problem: Problem | None = None, *, frozen: bool = False
) -> None:
    """Expect the errors of the gradients along each direction to be ones that rounding explains.

    problem: that of the case by default.
    frozen: the weights require no gradient.
    """
    assume_modelled(session, case)
    problem = problem or case.problem()
    assume(bool(problem.allowed(session.claims.alignment).any(-1).all()), "a row is empty")
    recorded = session.gradients(problem, upstream_of(case, problem), frozen=frozen)
    expect_gradient_errors_of_rounding(session, Known(case, problem, session.claims), recorded)


def expect_gradient_errors_of_rounding(
    session: Session, known: Known, recorded: Mapping[str, RecordedTensor]
) -> None:
    """Expect rounding to explain the errors of recorded gradients along each direction."""
    exact = exact_gradients(known, tuple(recorded))
    for name in exact.gradients:
        expect(bool(recorded[name].tensor.isfinite().all()), f"{recorded[name].code} is not finite")
    errors = {
        name: recorded[name].tensor.detach().double() - x for name, x in exact.gradients.items()
    }
    tested = []
    for direction, part in exact.parts:
        products = [float((errors[name] * w).sum()) for name, w in direction.change.items()]
        tested.append(Tested(direction, part, sum(products)))
    codes = {name: recorded[name].code for name in errors}
    ratio = expect_explained(
        "the gradients are", tested, assertion=lambda one: _assertion(session, codes, one)
    )
    recorded[next(iter(errors))].note_margin(ratio)


@dataclass(frozen=True, eq=False)
class ExactGradients:
    """The exact gradients by name, and the directions with their allowances."""

    gradients: Mapping[str, Tensor]
    parts: Sequence[tuple[Direction, Allowance]]


def exact_gradients(known: Known, names: tuple[str, ...]) -> ExactGradients:
    """Differentiate a problem, and bound what rounding may do to gradients along each direction."""
    case, problem = known.case, known.problem

    def differentiate() -> ExactGradients:
        graph = gradient_graph(problem, known.claims, upstream_of(case, problem))
        found = {name: graph.exact[name] for name in names if name in graph.exact}
        along = list(directions(graph, found, case))
        allowances = allowances_of_gradients(graph, [each.change for each in along])
        kept_along = [_in_single_precision(each) for each in along]
        return ExactGradients(found, list(zip(kept_along, allowances, strict=True)))

    tensors = [*problem.distinct().values(), *dict(problem.weights.named()).values()]
    size = MOST_DIRECTIONS // 2 * sum(x.numel() for x in tensors)
    return kept.answer(
        problem, ("directed gradients", known.claims, case, names), size, differentiate
    )


def _in_single_precision(direction: Direction) -> Direction:
    """Return a direction in float32: it needs no more digits, and many of them are kept."""
    change = {name: w.float() for name, w in direction.change.items()}
    return replace(direction, change=change)


def upstream_of(case: Case, problem: Problem) -> Tensor:
    """Return the gradient of the output (B, L, D), which the case determines."""
    return torch.randn(problem.query.shape, generator=case.generator).to(problem.query)


def _assertion(session: Session, codes: Mapping[str, str], found: Tested) -> list[str]:
    """Return the lines of a script that fail by the last call; none without a formula for it."""
    call = last_call(session)
    return gradient_assertion_of(
        call, session.claims, codes, found.direction.formula, found.text, found.explained
    )


def directions(
    graph: GradientGraph, found: Mapping[str, Tensor], case: Case
) -> Iterator[Direction]:
    """Yield what defects do to the gradients: sizes first, then steps of the backward pass."""
    for name in found:
        text = f"the gradient of {'the ' if name in INPUTS else ''}{name} were"
        formula: tuple[str, ...] = (f"direction = {{{name!r}: exact[{name!r}]}}",)
        more = f"{text} {{}} too large"
        yield Direction({name: graph.exact[name]}, more, f"{text} {{}} too small", formula=formula)
    for moved, more, less, formula in _changes(graph):
        change = {name: moved[name] for name in found if name in moved}
        yield Direction(change, more, less, formula=formula)
    drawn = {name: random_signs(graph.exact[name], case) for name in graph.problem.distinct()}
    more = "{} of gradients of random signs were added"
    yield Direction(
        drawn, more, more.replace("added", "taken"), formula=random_gradients(case.seed, drawn)
    )


def _changes(graph: GradientGraph) -> Iterator[Change]:
    """Yield what a defect of one step of the backward pass does to the gradients."""
    p, s, d_s = graph.forward.weights, graph.forward.scores, graph.d_score
    none = torch.zeros_like(p)
    yield (
        graph.joined(graph.core(d_s, none)),
        "the gradients of the scores were {} too large",
        "the gradients of the scores were {} too small",
        D_SCORE,
    )
    yield (
        graph.of_weights(p * (s - (p * s).sum(-1, keepdim=True))),
        "the scores of the backward pass were {} too large",
        "the scores of the backward pass were {} too small",
        BACKWARD_SCALE,
    )
    yield (
        graph.joined(graph.core(p * graph.row_sum, none)),
        "{} of the row sum of P dP were left out",
        "{} of the row sum of P dP were subtracted twice",
        ROW_SUM,
    )
    yield from _changes_by_keys(graph)


def _changes_by_keys(graph: GradientGraph) -> Iterator[Change]:
    """Yield what the last allowed key lost and a masked key read do to the gradients."""
    forward = graph.forward
    p, allowed, d_s = forward.weights, forward.allowed, graph.d_score
    last = last_key(allowed)
    lost = graph.core(-d_s * last, -p * last)
    yield (
        graph.joined(lost | {"q": torch.zeros_like(lost["q"])}),
        "{} of the gradients of the last allowed key were lost",
        "the gradients of the last allowed key were {} too large",
        LAST_KEY_GRADIENT,
    )
    yield (
        graph.joined({role: x if role == "q" else torch.zeros_like(x) for role, x in lost.items()}),
        "{} of the part of the last allowed key in the queries' gradient were lost",
        "the part of the last allowed key in the queries' gradient were {} too large",
        LAST_KEY_OF_QUERIES,
    )
    if not bool(allowed.all()):
        yield (
            graph.of_weights(masked_weight(forward), of_sum=False),
            "{} of a masked key were read in the backward pass",
            "{} of a masked key were subtracted in the backward pass",
            MASKED_KEY_GRADIENT,
        )
