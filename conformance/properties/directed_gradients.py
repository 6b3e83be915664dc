"""GRD-8: in half precision, the errors of whole gradients, projected on what small defects would do to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import WITH_GRADIENT
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed import (
    MANY_ROWS,
    Direction,
    Tested,
    assume_cpu,
    expect_explained,
    last_key,
    masked_weight,
    random_signs,
)
from mha.conformance.properties.registry import property_of
from mha.spec.directed_gradients import allowance_of_gradients, projection_of_gradients
from mha.spec.gradient_graph import GradientGraph, gradient_graph
from mha.spec.problem import INPUTS


@property_of(
    "GRD-8",
    replace(
        MANY_ROWS,
        modes=WITH_GRADIENT,
        sizes={"n_heads": (4, 8), "head_dim": (32, 16), "B": (4,), "L": (65, 33), "S": (65, 33)},
    ),
    needs="gradients",
    requires="HED-1",
    must_reject=("mean", "zeros", "unscaled", "detached", "softmax_gradient_without_row_sum"),
    max_cases=8,
)
def errors_of_gradients_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of the gradients better than rounding does."""
    assume_cpu(case)
    problem = case.problem()
    assume(bool(problem.allowed(session.claims.causal).any(-1).all()), "a row is empty")
    upstream = torch.randn(problem.query.shape, generator=case.generator).to(problem.query)
    recorded = session.gradients(problem, upstream)
    graph = gradient_graph(problem, session.claims, upstream)
    found = {name: recorded[name].tensor for name in recorded if name in graph.exact}
    for name, gradient in found.items():
        expect(bool(gradient.isfinite().all()), f"{recorded[name].code} is not finite")
    tested = [
        Tested(
            direction,
            allowance_of_gradients(graph, direction.change),
            projection_of_gradients(graph, found, direction.change),
        )
        for direction in _directions(graph, found, case)
    ]
    recorded[next(iter(found))].note_margin(expect_explained("the gradients are", tested))


def _directions(graph: GradientGraph, found: Mapping[str, Tensor], case: Case) -> Iterator[Direction]:
    """Yield what defects do to the gradients that were found: sizes first, then steps of the backward pass."""
    for name in found:
        text = f"the gradient of {'the ' if name in INPUTS else ''}{name} were"
        yield Direction({name: graph.exact[name]}, f"{text} {{}} too large", f"{text} {{}} too small")
    for change, more, less in _changes(graph):
        yield Direction({name: change[name] for name in found if name in change}, more, less)
    drawn = {name: random_signs(graph.exact[name], case) for name in graph.problem.distinct()}
    more = "{} of gradients of random signs were added"
    yield Direction(drawn, more, more.replace("added", "taken"))


def _changes(graph: GradientGraph) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Yield how gradients move by a defect of one step of the backward pass, in words for more and less of it."""
    forward = graph.forward
    p, s, allowed, d_s = forward.weights, forward.scores, forward.allowed, graph.d_score
    none = torch.zeros_like(p)
    yield (
        graph.joined(graph.core(d_s, none)),
        "the gradients of the scores were {} too large",
        "the gradients of the scores were {} too small",
    )
    yield (
        graph.of_weights(p * (s - (p * s).sum(-1, keepdim=True))),
        "the scores of the backward pass were {} too large",
        "the scores of the backward pass were {} too small",
    )
    yield (
        graph.joined(graph.core(p * graph.row_sum, none)),
        "{} of the row sum of P dP were left out",
        "{} of the row sum of P dP were subtracted twice",
    )
    last = last_key(allowed)
    lost = graph.core(-d_s * last, -p * last)
    yield (
        graph.joined(lost | {"q": torch.zeros_like(lost["q"])}),
        "{} of the gradients of the last allowed key were lost",
        "the gradients of the last allowed key were {} too large",
    )
    yield (
        graph.joined({role: x if role == "q" else torch.zeros_like(x) for role, x in lost.items()}),
        "{} of the part of the last allowed key in the queries' gradient were lost",
        "the part of the last allowed key in the queries' gradient were {} too large",
    )
    if not bool(allowed.all()):
        yield (
            graph.of_weights(masked_weight(forward), of_sum=False),
            "{} of a masked key were read in the backward pass",
            "{} of a masked key were subtracted in the backward pass",
        )
