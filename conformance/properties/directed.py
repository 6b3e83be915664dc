"""NUM-7: no small defect explains the error of an output in half precision better than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_MODES, BOTH, DENSE, HALF, INPUTS, Domain
from mha.conformance.cases.mask_kinds import FEW
from mha.conformance.cases.transforms import item
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.oracle_answers import kept
from mha.conformance.harness.recording import BuildStep, CallStep, RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.directed_script import assertion_of, percent
from mha.conformance.properties.support.directions import Direction, directions
from mha.conformance.properties.support.shared_assertions import refuses
from mha.spec import Claims, Problem
from mha.spec.directed import Allowance, allowance, allowances
from mha.spec.rounding_graph import rounding_graph

# Values that spread over many units in the last place, and so many rows and heads that a defect of
# 1% outweighs rounding; see `mha.spec.directed` for the model.
MANY_ROWS = Domain(
    dtypes=HALF,
    scale="wide",
    masks=("none", *FEW, "bias"),
    causal=BOTH,
    values=("normal",),
    layouts=DENSE,
    inputs=INPUTS,
    sizes={
        "n_heads": (4, 8),
        "head_dim": (32, 16, 64, 128, 20),
        "B": (4, 2),
        "L": (33, 65),
        "S": (33, 65),
    },
)
# Those of cases whose sizes the property itself gives them.
PLAIN_ROWS = replace(MANY_ROWS, masks=("none",), causal=(False,), inputs=("cross",))
# As many rows, in calls that have few queries, keys or heads: those of a decoding step, or of a
# kernel of their own.
FEW_IN_EACH_CALL = replace(
    MANY_ROWS,
    min_S=8,
    sizes={
        "n_heads": (4, 1, 2),
        "head_dim": (32, 16, 64),
        "B": (128,),
        "L": (1, 8, 2),
        "S": (33, 8),
    },
)
# The items of a batch in which a scale 0.4% off shows in bfloat16: the more rows, the less of it
# rounding explains.
MANY_ITEMS = 32
# The lengths of a case with many keys: beyond a block of 512, and of 1024 with one query more than
# a tile of 64.
FEW_ROWS, MANY_KEYS = 40, 600
MORE_ROWS, MORE_KEYS = 65, 1100
# As many as sums that are kept in half precision from tile to tile take before that shows; fewer in
# self-attention, which has as many queries.
LONG_ROWS, LONG_KEYS, LONG_SELF = 33, 4096, 1024
# Items with two keys each, whose row sums are near 1, so that what is added to them shows from 0.1%
# on in bfloat16.
ITEMS_OF_TWO_KEYS = 1024
# About how many directions a case has, as far as memory goes.
MOST_DIRECTIONS = 12
# Of queries; tiles of kernels have a multiple of it.
TILE = 16


@property_of(
    "NUM-7",
    MANY_ROWS,
    requires="HED-1",
    must_reject=("one_percent", "lopsided"),
    min_rejection_rate=0.5,
    within_bounds=True,
    max_cases=10,
)
def errors_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error of the output better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=2, number=2
)
def errors_for_many_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 600 keys."""
    expect_rounding_alone(session, with_many_keys(case, FEW_ROWS, MANY_KEYS))


@property_of(
    "NUM-7",
    replace(MANY_ROWS, modes=("eval",), need_weights=(False,)),
    requires="HED-1",
    must_reject=("lopsided", "one_percent"),
    within_bounds=True,
    max_cases=1,
    number=3,
)
def errors_in_a_large_batch_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 32 items."""
    case = replace(case, B=MANY_ITEMS, n_heads=8, head_dim=16, L=33, S=33)
    problem = case.problem()
    for mode in ALL_MODES:
        expect_rounding_alone(session, case, problem, mode)


@property_of(
    "NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("lopsided",), max_cases=3, number=4
)
def errors_for_few_queries_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of few queries better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("lopsided",), max_cases=2, number=5
)
def errors_of_many_small_calls_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of small calls better than rounding."""
    assume_modelled(session, case)
    problem = case.problem()
    outputs = [session(item(problem, index)).output.tensor for index in range(case.B)]
    expect_errors_of_rounding(
        session, case, problem, session.unscripted(torch.cat(outputs), "the output of single items")
    )


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=7
)
def errors_for_more_than_1024_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 1100 keys."""
    many = with_many_keys(case, MORE_ROWS, MORE_KEYS)
    expect_rounding_alone(session, replace(many, n_heads=min(many.n_heads, 3), head_dim=64))


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=9
)
def errors_for_4096_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for 4096 keys."""
    assume(case.inputs == "cross", "in self-attention there would be as many queries")
    many = with_long_rows(case)
    expect_rounding_alone(session, replace(many, n_heads=min(many.n_heads, 3), head_dim=64))


@property_of(
    "NUM-7", PLAIN_ROWS, requires="HED-1", must_reject=("lopsided",), max_cases=1, number=8
)
def errors_for_two_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error better than rounding, for two keys."""
    queries = 2 if case.causal or case.inputs != "cross" else 8
    expect_rounding_alone(
        session, replace(case, B=ITEMS_OF_TWO_KEYS, n_heads=4, head_dim=16, L=queries, S=2)
    )


def with_long_rows(case: Case) -> Case:
    """Return a case with as many keys as sums in half precision show in."""
    return with_many_keys(case, LONG_ROWS, LONG_KEYS if case.inputs == "cross" else LONG_SELF)


def with_many_keys(case: Case, queries: int, keys: int) -> Case:
    """Return a case with so many keys; where inputs are shared, as many queries and one head."""
    if case.inputs == "cross":
        return replace(case, B=1, n_heads=4, head_dim=16, L=queries, S=keys)
    return replace(case, B=1, n_heads=1, head_dim=64, L=keys, S=keys)


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

    code: the results, as in "output_1 is". place: says where a defect is, as in " in head 0", or
    "". assertion: the lines of a script that show it.
    """
    informative = [test for test in tested if test.part.is_informative]
    assume(bool(informative), "rounding alone could hide each defect that is looked for")
    ratio = max(test.ratio for test in informative)
    if ratio > 1:
        found = _explanation(informative)
        expect(False, _message(code, found, place(found)), *assertion(found))
    return ratio


def assume_modelled(session: Session, case: Case) -> None:
    """Discard a case to which the model of the directed tests does not apply."""
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
    dropped = rounding.mode == "toward_zero"
    assume(
        not dropped,
        'the model is of rounding to nearest, and Rounding(mode="toward_zero") is declared',
    )


def expect_rounding_alone(
    session: Session, case: Case, problem: Problem | None = None, mode: str = ""
) -> None:
    """Expect the error of the output along each direction to be one that rounding explains.

    problem, mode: those of the case by default.
    """
    assume_modelled(session, case)
    problem = problem or case.problem()
    assume(not refuses(session, problem), "a row is empty, so that the call raises")
    expect_errors_of_rounding(
        session, case, problem, session(problem, mode=mode or case.mode).output
    )


def expect_errors_of_rounding(
    session: Session,
    case: Case,
    problem: Problem,
    output: RecordedTensor,
    claims: Claims | None = None,
) -> None:
    """Expect rounding to explain the error of an output (B, L, D) along each direction.

    claims: say how it rounds; those of the session by default.
    """
    known = Known(case, problem, claims or session.claims)
    exact = exact_output(known)
    finite = bool((output.tensor.isfinite() | ~exact.known).all())
    expect(finite, f"{output.code} is not finite in a row that has keys")
    error = (output.tensor.detach().double() - exact.output).masked_fill(~exact.known, 0.0)
    tested = [
        Tested(direction, part, float((error * direction.change["output"]).sum()))
        for direction, part in exact.parts
    ]
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
        found = list(directions(graph, known.case))
        parts = zip(
            found, allowances(graph, [each.change["output"] for each in found]), strict=True
        )
        return ExactOutput(graph.output, graph.known, list(parts))

    size = 2 * MOST_DIRECTIONS * known.problem.query.numel()  # of outputs, and of contexts
    return kept.answer(known.problem, ("directed", known.claims, known.case), size, solve)


def _assertion(session: Session, found: Tested) -> list[str]:
    """Return the lines of a script that fail by the last call; none without a formula for it."""
    if not session.scripted:
        return []
    last, formula = last_call(session), found.direction.formula
    # A script names tensors by the first call that has them.
    first = next(
        step
        for step in session.steps
        if isinstance(step, CallStep) and step.problem is last.problem
    )
    return assertion_of(
        replace(first, build=last.build),
        last.number,
        session.claims,
        formula,
        found.text,
        found.explained,
    )


def last_call(session: Session) -> CallStep:
    """Return the last call of a session, with the first build that has its weights.

    A script names weights by that one.
    """
    call = session.steps[-1]
    assert isinstance(call, CallStep)
    builds = (step for step in session.steps if isinstance(step, BuildStep))
    return replace(
        call, build=next(step.number for step in builds if step.weights is call.problem.weights)
    )


def _place(known: Known, error: Tensor, found: Tested) -> str:
    """Return in words the only item, head and tile of queries that explain the error, or ""."""
    contexts, places = found.direction.contexts, list[str]()
    if contexts is None:
        return ""
    # <error, W_o c> = <W_o^T error, c> for contexts c
    gradient = (error @ known.problem.weights.w_o.detach().double()).unflatten(
        -1, (contexts.shape[1], -1)
    )
    products, graph = (
        gradient.transpose(1, 2) * contexts,
        cache(lambda: rounding_graph(known.problem, known.claims)),
    )

    def explains(dim: int, part: tuple[int, int]) -> bool:
        """Return whether rounding explains the error without a part of it, and not the part."""
        projected, only = float(products.narrow(dim, *part).sum()), torch.zeros_like(contexts)
        if abs(found.projected - projected) > found.part.threshold:
            return False
        only.narrow(dim, *part).copy_(contexts.narrow(dim, *part))
        return abs(projected) > allowance(graph(), graph().output_of(only)).threshold

    for dim, parts in enumerate(_parts(contexts)):
        largest = sorted(
            parts, key=lambda name: -abs(float(products.narrow(dim, *parts[name]).sum()))
        )[:2]
        if len(parts) > 1 and [explains(dim, parts[name]) for name in largest] == [True, False]:
            places.append(largest[0])
    return f" in {', '.join(places)}" if places else ""


def _parts(contexts: Tensor) -> list[dict[str, tuple[int, int]]]:
    """Return start and length of parts of contexts (B, H, L, d_k), by name, for each dimension."""
    items, heads, rows, _ = contexts.shape
    tiles = {start: min(TILE, rows - start) for start in range(0, rows, TILE)}
    return [
        {f"item {item}": (item, 1) for item in range(items)},
        {f"head {head}": (head, 1) for head in range(heads)},
        {
            f"queries {start} to {start + length - 1}": (start, length)
            for start, length in tiles.items()
        },
    ]


def _explanation(tested: Sequence[Tested]) -> Tested:
    """Return the first direction that explains all others; else the one with the largest ratio."""
    for one in (test for test in tested if test.ratio > 1):
        share = one.projected / one.part.size
        left = [test.projected - share * test.direction.times(one.direction) for test in tested]
        if all(abs(rest) <= test.part.threshold for rest, test in zip(left, tested, strict=True)):
            return one
    return max(tested, key=lambda test: test.ratio)


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
