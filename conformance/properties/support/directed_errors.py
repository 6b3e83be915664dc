"""Expect rounding alone to explain the error of an output in half precision (NUM-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.oracle_answers import kept
from mha.conformance.harness.recording import BuildStep, CallStep, RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.support.directed_script import assertion_of, percent
from mha.conformance.properties.support.directions import Direction, directions
from mha.conformance.properties.support.shared_assertions import refuses
from mha.spec import Claims, Problem
from mha.spec.directed import Allowance, allowance, allowances
from mha.spec.rounding_graph import RoundingGraph, rounding_graph

# About how many directions a case has, as far as memory goes.
MOST_DIRECTIONS = 12
# Of queries; tiles of kernels have a multiple of it.
TILE = 16


# The start and the length of a part of a dimension.
Part = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Tested:
    """A direction, what rounding may do along it, and the projection of the error on it."""

    direction: Direction
    part: Allowance
    projected: float

    @property
    def ratio(self) -> float:
        """The error over what rounding explains."""
        return abs(self.projected) / self.part.threshold

    @property
    def explained(self) -> float:
        """The share of the defect that rounding explains."""
        return self.part.threshold / self.part.size

    @property
    def text(self) -> str:
        """What the results are as if, with {} for how much."""
        return self.direction.more if self.projected > 0 else self.direction.less


def expect_explained(
    code: str,
    tested: Sequence[Tested],
    place: Callable[[Tested], str] = lambda _: "",
    assertion: Callable[[Tested], Sequence[str]] = lambda _: (),
) -> float:
    """Expect rounding to explain the error along each direction; return the largest ratio.

    code: the results, as in "output_1 is".
    place: says where a defect is, as in " in head 0", or "".
    assertion: the lines of a script that show it.
    """
    informative = [test for test in tested if test.part.is_informative]
    assume(bool(informative), "rounding alone could hide each defect that is looked for")
    largest = max(test.ratio for test in informative)
    if largest > 1:
        found = _explanation(informative)
        expect(False, _message(code, found, place(found)), *assertion(found))
    return largest


def assume_modelled(session: Session, case: Case, *, changed_heads: bool = False) -> None:
    """Discard a case to which the model of the directed tests does not apply.

    changed_heads: whether queries and keys may be normed or rotated.
    """
    assume(
        changed_heads or not session.claims.changes_heads,
        "queries and keys are normed or rotated, whose own roundings hide small defects; ROT-1 and"
        " QKN-1 look for larger ones",
    )
    assume(
        case.device == "cpu",
        "a GPU may store partial sums in half precision, which the rounding graph does not have",
    )
    rounding = session.claims.rounding
    assume(
        not rounding.reductions,
        "Rounding.reductions is declared, and the rounding graph has no partial sums",
    )
    assume(
        rounding.accumulator != "float16",
        "sums in float16 are declared, and the rounding graph has none",
    )
    assume(
        rounding.mode != "toward_zero",
        'the model is of rounding to nearest, and Rounding(mode="toward_zero") is declared',
    )


def expect_rounding_alone(
    session: Session,
    case: Case,
    problem: Problem | None = None,
    mode: str = "",
    *,
    changed_heads: bool = False,
) -> None:
    """Expect the error of the output along each direction to be one that rounding explains.

    problem, mode: those of the case by default.
    changed_heads: as for `assume_modelled`.
    """
    assume_modelled(session, case, changed_heads=changed_heads)
    problem = problem or case.problem()
    assume(not refuses(session, problem), "a row is empty, so that the call raises")
    output = session(problem, mode=mode or case.mode).output
    expect_errors_of_rounding(session, case, problem, output)


def expect_errors_of_rounding(
    session: Session,
    case: Case,
    problem: Problem,
    output: RecordedTensor,
    claims: Claims | None = None,
    defects: Defects | None = None,
) -> None:
    """Expect rounding to explain the error of an output (B, L, D) along each direction.

    claims: say how it rounds; those of the session by default.
    defects: what is looked for; by default the small defects of `directions`.
    """
    known = Known(case, problem, claims or session.claims, defects)
    exact = exact_output(known)
    finite = bool((output.tensor.isfinite() | ~exact.known).all())
    expect(finite, f"{output.code} is not finite in a row that has keys")
    error = (output.tensor.detach().double() - exact.output).masked_fill(~exact.known, 0.0)
    tested = []
    for direction, part in exact.parts:
        projected = float((error * direction.change["output"]).sum())
        tested.append(Tested(direction, part, projected))
    ratio = expect_explained(
        f"{output.code} is",
        tested,
        lambda found: _place(known, error, found),
        lambda found: _assertion(session, found),
    )
    output.note_margin(ratio)


@dataclass(frozen=True, eq=False)
class Known:
    """A problem, and what its directions and allowances depend on besides."""

    case: Case
    problem: Problem
    claims: Claims
    defects: Defects | None = None


# Yields what defects would do to an output.
Defects = Callable[[RoundingGraph, Known], Iterable[Direction]]


def small_defects(graph: RoundingGraph, known: Known) -> Iterable[Direction]:
    """Yield the directions that every output is looked at along."""
    return directions(graph, known.case)


@dataclass(frozen=True, eq=False)
class ExactOutput:
    """The exact output, its known rows, and the directions with their allowances."""

    output: Tensor
    known: Tensor
    parts: Sequence[tuple[Direction, Allowance]]


def exact_output(known: Known) -> ExactOutput:
    """Solve a problem, and bound what rounding may do to its output along each direction."""

    def solve() -> ExactOutput:
        graph = rounding_graph(known.problem, known.claims)
        found = list((known.defects or small_defects)(graph, known))
        parts = allowances(graph, [each.change["output"] for each in found])
        return ExactOutput(graph.output, graph.known, list(zip(found, parts, strict=True)))

    size = 2 * MOST_DIRECTIONS * known.problem.query.numel()  # of outputs, and of contexts
    question = ("directed", known.claims, known.case, known.defects)
    return kept.answer(known.problem, question, size, solve)


def _assertion(session: Session, found: Tested) -> list[str]:
    """Return the lines of a script that fail by the last call; none without a formula for it."""
    if not session.scripted:
        return []
    last = last_call(session)
    calls = [step for step in session.steps if isinstance(step, CallStep)]
    # A script names tensors by the first call that has them.
    first = next(step for step in calls if step.problem is last.problem)
    return assertion_of(
        replace(first, build=last.build),
        last.number,
        session.claims,
        found.direction.formula,
        found.text,
        found.explained,
    )


def last_call(session: Session) -> CallStep:
    """Return the last call of a session, with the first build that has its weights.

    A script names weights by that one.
    """
    call = session.steps[-1]
    assert isinstance(call, CallStep)
    builds = [step for step in session.steps if isinstance(step, BuildStep)]
    first = next(step for step in builds if step.weights is call.problem.weights)
    return replace(call, build=first.number)


def _place(known: Known, error: Tensor, found: Tested) -> str:
    """Return in words the only item, head and tile of queries that explain the error, or ""."""
    contexts = found.direction.contexts
    if contexts is None:
        return ""
    # <error, W_o c> = <W_o^T error, c> for contexts c
    gradient = error @ known.problem.weights.w_o.detach().double()
    by_heads = gradient.unflatten(-1, (contexts.shape[1], -1)).transpose(1, 2)
    products = by_heads * contexts
    graph = cache(lambda: rounding_graph(known.problem, known.claims))

    def explains(dim: int, part: Part) -> bool:
        """Return whether rounding explains the error without a part of it, and not the part."""
        projected = float(products.narrow(dim, *part).sum())
        if abs(found.projected - projected) > found.part.threshold:
            return False
        only = torch.zeros_like(contexts)
        only.narrow(dim, *part).copy_(contexts.narrow(dim, *part))
        return abs(projected) > allowance(graph(), graph().output_of(only)).threshold

    places = []
    for dim, parts in enumerate(_parts(contexts)):
        share = {name: abs(float(products.narrow(dim, *parts[name]).sum())) for name in parts}
        largest = sorted(parts, key=share.__getitem__, reverse=True)[:2]
        if len(parts) > 1 and [explains(dim, parts[name]) for name in largest] == [True, False]:
            places.append(largest[0])
    if not places:
        return ""
    return f" in {', '.join(places)}"


def _parts(contexts: Tensor) -> list[dict[str, Part]]:
    """Return the parts of contexts (B, H, L, d_k) along each dimension, by their names."""
    batch, heads, rows, _ = contexts.shape
    items = {f"item {item}": (item, 1) for item in range(batch)}
    of_heads = {f"head {head}": (head, 1) for head in range(heads)}
    tiles = {}
    for start in range(0, rows, TILE):
        length = min(TILE, rows - start)
        tiles[f"queries {start} to {start + length - 1}"] = (start, length)
    return [items, of_heads, tiles]


def _explanation(tested: Sequence[Tested]) -> Tested:
    """Return the first direction that explains all others; else the one with the largest ratio.

    It explains them if they would all pass without its share of the error.
    """
    for one in tested:
        if one.ratio <= 1:
            continue
        share = one.projected / one.part.size
        if all(_rest(test, one, share) <= test.part.threshold for test in tested):
            return one
    return max(tested, key=lambda test: test.ratio)


def _rest(test: Tested, one: Tested, share: float) -> float:
    """Return how much error is left along a direction without a share of another one."""
    return abs(test.projected - share * test.direction.times(one.direction))


def _message(code: str, found: Tested, place: str) -> str:
    """Return how much of which defect there is, with its interval."""
    share, least, most = found.part.share(found.projected)
    if share < 0:
        share, least, most = -share, -most, -least
    size = f"{percent(share)} ({percent(least)} to {percent(most)})"
    return (
        f"{code} as if {found.text.format(size)}{place}; rounding explains"
        f" {percent(found.explained)} at most"
    )
