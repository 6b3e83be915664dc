"""NUM-7: in half precision, the error of a whole output, projected on what small defects would do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, HALF, INPUTS, Domain
from mha.conformance.cases.masks import FEW, OF_NUMBERS
from mha.conformance.cases.transforms import item
from mha.conformance.harness.assertions import assume, expect
from mha.conformance.harness.recording import CallStep, RecordedTensor
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed_script import (
    LAST_KEY,
    MASK,
    MASKED_KEY,
    MEAN,
    SCALE,
    VALUE,
    assertion_of,
    percent,
    random_formula,
)
from mha.conformance.properties.registry import property_of
from mha.spec import Claims, Problem
from mha.spec.directed import Allowance, allowance, projection
from mha.spec.rounding_graph import RoundingGraph, rounding_graph

# Values that spread over many units in the last place, and so many rows and heads that a defect of 1% outweighs
# rounding; see `mha.spec.directed` for the model.
MANY_ROWS = Domain(
    dtypes=HALF,
    scale="wide",
    masks=("none", *FEW, "bias"),
    causal=BOTH,
    values=("normal",),
    layouts=DENSE,
    inputs=INPUTS,
    sizes={"n_heads": (4, 8), "head_dim": (32, 16, 64, 128, 20), "B": (4, 2), "L": (33, 65), "S": (33, 65)},
)
# As many rows, in calls that have few queries, keys or heads: those of a decoding step, or of a kernel of their own.
FEW_IN_EACH_CALL = replace(
    MANY_ROWS,
    min_S=8,
    sizes={"n_heads": (4, 1, 2), "head_dim": (32, 16, 64), "B": (128,), "L": (1, 8, 2), "S": (33, 8)},
)
# The items of a batch in which a scale 0.4% off shows in bfloat16: the more rows, the less of it rounding explains.
MANY_ITEMS = 32
# The lengths of a case with many keys.
FEW_ROWS, MANY_KEYS = 40, 600
# Of queries; tiles of kernels have a multiple of it.
TILE = 16


@dataclass(frozen=True, eq=False)
class Direction:
    """What a small defect does to the results.

    change: of each result that is looked at, by name, for the whole defect or for each unit of a parameter. more, less:
    what the results are as if, for a positive and a negative share, with {} for how much. formula: of the change, as
    lines of a script; see `directed_script`.
    """

    change: Mapping[str, Tensor]
    more: str
    less: str
    contexts: Tensor | None = None
    formula: tuple[str, ...] = ()

    def times(self, other: Direction) -> float:
        """Return the scalar product of two."""
        return sum(
            float((change * other.change[name]).sum()) for name, change in self.change.items() if name in other.change
        )


@property_of(
    "NUM-7",
    MANY_ROWS,
    requires="HED-1",
    must_reject=("one_percent", "mean"),
    max_cases=10,
)
def errors_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error of the output better than rounding does."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7",
    replace(MANY_ROWS, masks=("none",), causal=(False,), inputs=("cross",)),
    requires="HED-1",
    must_reject=("mean",),
    max_cases=3,
    number=2,
)
def errors_for_many_keys_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error of the output better than rounding does, for 600 keys."""
    queries = FEW_ROWS if case.inputs == "cross" else MANY_KEYS
    expect_rounding_alone(session, replace(case, B=1, n_heads=4, head_dim=16, L=queries, S=MANY_KEYS))


@property_of("NUM-7", MANY_ROWS, requires="HED-1", must_reject=("one_percent",), max_cases=1, number=3)
def errors_in_a_large_batch_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error of the output better than rounding does, for 32 items."""
    expect_rounding_alone(session, replace(case, B=MANY_ITEMS, n_heads=8, head_dim=16, L=33, S=33))


@property_of("NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("mean",), max_cases=4, number=4)
def errors_for_few_queries_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of few queries of many items better than rounding."""
    expect_rounding_alone(session, case)


@property_of("NUM-7", FEW_IN_EACH_CALL, requires="HED-1", must_reject=("mean",), max_cases=2, number=5)
def errors_of_many_small_calls_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the errors of many calls with one item better than rounding does."""
    assume_modelled(session, case)
    problem = case.problem()
    outputs = [session(item(problem, index)).output.tensor for index in range(case.B)]
    expect_errors_of_rounding(
        session, case, problem, session.unscripted(torch.cat(outputs), "the output of single items")
    )


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
    """Expect the error along each direction to be one that rounding explains; return the largest ratio.

    code: the results, as in "output_1 is". place: says where a defect is, as in " in head 0", or "". assertion: the
    lines of a script that show it.
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
        case.device == "cpu", "a GPU may store partial sums in half precision, which the rounding graph does not have"
    )
    dropped = session.claims.rounding.mode == "toward_zero"
    assume(not dropped, 'the model is of rounding to nearest, and Rounding(mode="toward_zero") is declared')


def expect_rounding_alone(session: Session, case: Case, problem: Problem | None = None) -> None:
    """Expect the error of the output along each direction to be one that rounding explains.

    problem: that of the case by default.
    """
    assume_modelled(session, case)
    problem = problem or case.problem()
    expect_errors_of_rounding(session, case, problem, session(problem).output)


def expect_errors_of_rounding(
    session: Session, case: Case, problem: Problem, output: RecordedTensor, claims: Claims | None = None
) -> None:
    """Expect the error of an output (B, L, D) of a problem along each direction to be one that rounding explains.

    claims: say how it rounds; those of the session by default.
    """
    graph = rounding_graph(problem, claims or session.claims)
    finite = bool((output.tensor.isfinite() | ~graph.known).all())
    expect(finite, f"{output.code} is not finite in a row that has keys")
    tested = [_tested(graph, output.tensor, direction) for direction in directions(graph, case)]
    ratio = expect_explained(
        f"{output.code} is",
        tested,
        lambda found: _place(graph, output.tensor, found),
        lambda found: _assertion(session, found),
    )
    output.note_margin(ratio)


def _tested(graph: RoundingGraph, output: Tensor, direction: Direction) -> Tested:
    """Test an output along a direction."""
    w = direction.change["output"]
    return Tested(direction, allowance(graph, w), projection(graph, output, w))


def _assertion(session: Session, found: Tested) -> list[str]:
    """Return the lines of a script that fail by the last call, or none where there is no formula for it."""
    if not session.scripted:
        return []
    call = last_call(session)
    return assertion_of(call, session.claims, found.direction.formula, found.text, found.explained)


def last_call(session: Session) -> CallStep:
    """Return the last step of a session, which is a call."""
    call = session.steps[-1]
    assert isinstance(call, CallStep)
    return call


def _place(graph: RoundingGraph, output: Tensor, found: Tested) -> str:
    """Return in words which item, head and tile of queries explain the error, each where only one does, or ""."""
    contexts, places = found.direction.contexts, list[str]()
    if contexts is None:
        return ""
    for dim, parts in enumerate(_parts(contexts)):
        explaining = []
        for name, part in parts.items():
            only = torch.zeros_like(contexts)
            only.narrow(dim, *part).copy_(contexts.narrow(dim, *part))
            if _explains(graph, output, _of_contexts(graph, only, "", ""), found):
                explaining.append(name)
        places += explaining if len(explaining) == 1 < len(parts) else []
    return f" in {', '.join(places)}" if places else ""


def _parts(contexts: Tensor) -> list[dict[str, tuple[int, int]]]:
    """Return the start and the length of the parts of contexts (B, H, L, d_k), by their names, for each dimension."""
    items, heads, rows, _ = contexts.shape
    tiles = {start: min(TILE, rows - start) for start in range(0, rows, TILE)}
    return [
        {f"item {item}": (item, 1) for item in range(items)},
        {f"head {head}": (head, 1) for head in range(heads)},
        {f"queries {start} to {start + length - 1}": (start, length) for start, length in tiles.items()},
    ]


def _explains(graph: RoundingGraph, output: Tensor, part: Direction, found: Tested) -> bool:
    """Return whether a defect explains the error along the direction of another, and is more than rounding."""
    size = part.times(part)
    share = projection(graph, output, part.change["output"]) / size if size else 0.0
    rest = found.projected - share * part.times(found.direction)
    # What is rare first: an allowance takes a backward pass.
    return abs(rest) <= found.part.threshold and _tested(graph, output, part).ratio > 1


def _explanation(tested: Sequence[Tested]) -> Tested:
    """Return the first direction without whose share all others would pass, else the one with the largest ratio."""
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
    return f"{code} as if {found.text.format(size)}{place}; rounding explains {percent(found.explained)} at most"


def directions(graph: RoundingGraph, case: Case) -> Iterator[Direction]:
    """Yield what defects do to the output: derivatives first, then whole defects, then a random direction."""
    p, s, v, o, allowed = graph.weights, graph.scores, graph.value, graph.context, graph.allowed
    # d o / d log tau = sum_j p_j (s_j - sum_l p_l s_l) v_j
    scale = (p * (s - (p * s).sum(-1, keepdim=True))) @ v
    yield _of_contexts(graph, scale, "the scores were {} too large", "the scores were {} too small", SCALE)
    yield _of_contexts(graph, o, "the weights were {} too large", "the weights were {} too small", ("change = o",))
    if case.mask in OF_NUMBERS:  # d o / d log mask; log p - s is the mask, up to a number for each row
        added = (p.log() - s).masked_fill(p == 0, 0.0)
        mask = (p * (added - (p * added).sum(-1, keepdim=True))) @ v
        yield _of_contexts(
            graph, mask, "the mask's numbers were {} too large", "the mask's numbers were {} too small", MASK
        )
    constant = v.mean((0, 2), keepdim=True).expand_as(o)
    more = "{} of the mean value were added"
    yield _of_contexts(graph, constant, more, "{} of the mean value were subtracted", VALUE)
    yield from _keys(graph)
    mean = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).to(v) @ v - o
    more = "{} of each weight were spread evenly over the keys"
    yield _of_contexts(graph, mean, more, "{} of each weight were taken evenly from the keys", MEAN)
    drawn = random_signs(graph.output, case)
    more = "{} of an output of random signs were added"
    random = _of_output(graph, drawn, more, "{} of an output of random signs were taken")
    yield replace(random, formula=random_formula(case.seed))


def _keys(graph: RoundingGraph) -> Iterator[Direction]:
    """Yield the direction of the last allowed key lost, and of the first masked key read, where there are any."""
    p, v, o, allowed = graph.weights, graph.value, graph.context, graph.allowed
    last = last_key(allowed)
    # Without key j, o moves by -p_j (v_j - o) / (1 - p_j); a row's only key cannot be lost.
    lost = (p * last).sum(-1, keepdim=True)
    lost = lost.masked_fill(allowed.sum(-1, keepdim=True) < 2, 0.0)
    change = -lost / (1 - lost) * ((last.to(v) @ v) - o)
    more = "{} of the last allowed key were lost"
    yield _of_contexts(graph, change, more, "the last allowed key counted {} more", LAST_KEY)
    if not bool(allowed.all()):
        # With key j, o moves by r (v_j - o) / (1 + r), for r = exp(s_j - log sum exp(s)).
        first = first_masked_key(allowed)
        read = masked_weight(graph).sum(-1, keepdim=True)
        change = read / (1 + read) * ((first.to(v) @ v) - o)
        more = "{} of a masked key were read"
        yield _of_contexts(graph, change, more, "{} of a masked key were subtracted", MASKED_KEY)


def last_key(allowed: Tensor) -> Tensor:
    """Return where the last allowed key of each row is, boolean (B, H, L, S)."""
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    last: Tensor = ((place * allowed).amax(-1, keepdim=True) == place) & allowed
    return last


def first_masked_key(allowed: Tensor) -> Tensor:
    """Return where the first masked key of each row is, boolean (B, H, L, S)."""
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    first: Tensor = (torch.where(allowed, len(place), place).amin(-1, keepdim=True) == place) & ~allowed
    return first


def masked_weight(graph: RoundingGraph) -> Tensor:
    """Return the first masked key's exponential over the sum of the allowed ones, 0 elsewhere, (B, H, L, S)."""
    allowed, s = graph.allowed, graph.scores
    top = s.masked_fill(~allowed, -torch.inf).logsumexp(-1, keepdim=True)
    return ((s - top).exp() * first_masked_key(allowed)).nan_to_num(nan=0.0, posinf=0.0)


def random_signs(like: Tensor, case: Case) -> Tensor:
    """Return numbers as large as the mean magnitude of others, with random signs."""
    signs = torch.randint(0, 2, like.shape, generator=case.generator).to(like) * 2 - 1
    return signs * like.abs().mean()


def _of_contexts(
    graph: RoundingGraph, contexts: Tensor, more: str, less: str, formula: tuple[str, ...] = ()
) -> Direction:
    """Return the direction of a change of the contexts, (B, H, L, d_k)."""
    whole = _of_output(graph, graph.output_of(contexts), more, less)
    return replace(whole, contexts=contexts, formula=formula)


def _of_output(graph: RoundingGraph, change: Tensor, more: str, less: str) -> Direction:
    """Return the direction of a change of the output, (B, L, D), in the rows that are known."""
    return Direction({"output": change.masked_fill(~graph.known, 0.0)}, more, less)
