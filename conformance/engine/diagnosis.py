"""The diagnosis: which plain defect explains an incorrect answer.

The calls of a failing session, and of the same property on related cases, are compared with those of the textbook's
formula with one defect, in float64. A defect is named if it reproduces every answer, or every incorrect one where a
condition tells these from the others, and if no other defect does. A diagnosis is a hint and not a verdict: what counts
as reproduced is measured, by how far rounding takes the defective formula itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, Domain, fit_sizes
from mha.conformance.cases.modes import MODES
from mha.conformance.engine.conditions import condition
from mha.conformance.harness.explanations import (
    EXPLANATIONS,
    ExplainedAttention,
    Explanation,
    PAIRS,
    contexts_times,
    outputs_times,
    scores_times,
    sums_times,
)
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.isolation import threads
from mha.conformance.harness.recording import BuildStep, CallStep, RecordedOutput
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, PropertyFunction
from mha.implementations.torch_state import preserved
from mha.spec import Claims, Config, Implementation, Weights, oracle
from mha.spec.bounds import Ball

# Sizes of related cases. None of them repeats within a case, so that no two explanations coincide.
NAMES = ("n_heads", "head_dim", "B", "L", "S")
RELATED = ((2, 3, 4, 5, 7), (3, 4, 2, 6, 5), (3, 2, 2, 5, 29), (2, 3, 2, 13, 45))
PLAIN = Domain(
    masks=("none", "padding", "queries", "full", "bias", "full_bias"), causal=BOTH, values=("normal",), layouts=DENSE
)
# How many cases of the same sizes have other numbers.
AGAIN = 6
# How much larger an error may be than that of the defective formula in the same dtype, both as root mean squares, and
# how much larger its difference from the right answer must be.
SLACK, CLEAR = 16.0, 8.0
# An error this large is not one of rounding, relative to the answer.
GROSS = 0.05


@dataclass(frozen=True, eq=False)
class Evidence:
    """A plain call, and what it returned.

    config, weights: of the attention that was called. output: (B, L, D), in float64. right: the oracle's, with its
    bound. wrong: boolean (B, L), the rows outside that bound. filled: boolean (B, H, L), the rows with an allowed key.
    """

    step: CallStep
    config: Config
    weights: Weights
    output: Tensor
    right: Ball
    wrong: Tensor
    filled: Tensor


class Recorder(Session):
    """A session that keeps what each call returned."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.returned: dict[int, Tensor] = {}

    def _recorded(self, step: CallStep, returned: Any, dtypes: tuple[torch.dtype, ...]) -> RecordedOutput:
        recorded = super()._recorded(step, returned, dtypes)
        self.returned[step.number] = recorded.output.tensor.detach().clone()
        return recorded


def diagnose(prop: Property, session: Session) -> str:
    """Return in words the defect that explains why a property failed in a session, or "" if none is found.

    The implementation is called again: on the same case, on related ones, and on plain ones.
    """
    with threads(1), judging(session.implementation), preserved():
        first = _calls(prop.function, session, session.case)
        if not any(bool(call.wrong.any()) for call in first):
            return ""
        cases = [*related_cases(prop, session.case)]
        evidence = [first, *(_calls(prop.function, session, case) for case in cases), *_plain_calls(session)]
        with torch.inference_mode():
            return explain([calls for calls in evidence if calls], session.claims)


# Keyed by identity, as an implementation need not be hashable; it is kept alive so that its id is not used again.
_plain: dict[tuple[int, str, str], tuple[Implementation, list[list[Evidence]]]] = {}


def _plain_calls(session: Session) -> list[list[Evidence]]:
    """Return calls with each claimed form of mask, whatever the property is about."""
    key = id(session.implementation), session.case.dtype, session.case.device
    if key not in _plain:
        made = [_calls(_call_thrice, session, case) for case in plain_cases(session)]
        _plain[key] = session.implementation, made
    return _plain[key][1]


def _call_thrice(session: Session, case: Case) -> None:
    """Call an attention on three problems of the same shapes."""
    problem = case.problem()
    session(problem)
    for number in (100, 200):
        session(replace(case, seed=case.seed + number).problem(weights=problem.weights))


def plain_cases(session: Session) -> Iterator[Case]:
    """Yield cases with each claimed form of mask, with and without the causal flag."""
    domain = PLAIN.within(session.claims)
    if isinstance(domain, str):
        return
    pairs = [(mask, causal) for mask in domain.masks for causal in domain.causal]
    for number, (mask, causal) in enumerate(pairs):
        row = dict(zip(NAMES, RELATED[number % 2], strict=True))
        row |= {"mask": mask, "causal": causal, "inputs": domain.inputs[0], "bias": domain.bias[0], "seed": number}
        yield domain.case(session.claims, session.case.dtype, session.case.device, row)


def related_cases(prop: Property, case: Case) -> Iterator[Case]:
    """Yield the case with other numbers, and cases of other sizes, some of which keep what is special in it."""
    for number in range(1, AGAIN):
        yield replace(case, seed=case.seed + number, values=case.values if number < AGAIN // 2 else "normal")
    sizes = {name: getattr(case, name) for name in NAMES}
    larger = dict(zip(NAMES, RELATED[0], strict=True))
    rows = [larger | {name: size} for name, size in sizes.items() if size == 1]
    rows += [larger | {name: size for name, size in sizes.items() if size > 8}]
    rows += [larger | {"S": larger["L"]}] if case.L == case.S else []
    rows += [larger | {"n_heads": larger["B"]}] if case.n_heads == case.B else []
    rows += [dict(zip(NAMES, row, strict=True)) for row in RELATED]
    for number, row in enumerate(rows, AGAIN):
        if case.inputs in ("self", "query_key", "query_value") or prop.domain.square:
            row = row | {"S": row["L"]}
        yield replace(case, **row, seed=case.seed + number, values="normal")


def _calls(function: PropertyFunction, session: Session, case: Case) -> list[Evidence]:
    """Run a property; return its plain calls in order."""
    claims = session.claims
    sizes = fit_sizes({name: getattr(case, name) for name in ("n_heads", "head_dim", "L", "S")}, claims.sizes)
    recorder = Recorder(session.implementation, replace(case, **sizes))
    # Whatever a case of other sizes leads to, it says nothing about the property.
    with suppress(Exception), preserved():
        function(recorder, recorder.case)
    builds = {step.number: step for step in recorder.steps if isinstance(step, BuildStep)}
    calls = []
    for step in recorder.steps:
        if isinstance(step, CallStep) and step.number in recorder.returned and step.build in builds:
            build = builds[step.build]
            if _is_plain(step, build.config):
                calls.append(_evidence(step, build, recorder.returned[step.number].double().cpu(), claims))
    return calls


def _is_plain(step: CallStep, config: Config) -> bool:
    """Return whether the textbook's formula says what a call returns."""
    problem = step.problem
    if config.extra_keys or config.length_first or problem.query.ndim != 3 or problem.query.ndim != problem.key.ndim:
        return False
    if problem.mask is not None:
        try:
            torch.broadcast_shapes(problem.mask.shape, problem.shape)
        except RuntimeError:  # it should have been refused
            return False
    return step.mode != "autocast" and not (config.dropout and MODES[step.mode].training)


def _evidence(step: CallStep, build: BuildStep, output: Tensor, claims: Claims) -> Evidence:
    with torch.inference_mode():
        expected = oracle(step.problem, claims)
    right = Ball(expected.output.mid.cpu(), expected.output.rad.cpu())
    same = ((output - right.mid).abs() <= right.rad) | (output.isnan() & right.mid.isnan()) | (output == right.mid)
    wrong = ~(same | right.rad.isinf()).all(-1)
    return Evidence(step, build.config, build.weights, output, right, wrong, ~expected.empty.cpu())


@dataclass(frozen=True, eq=False)
class Fit:
    """How an explanation fits a call: whether it reproduces the answer, and whether only an incorrect one would.

    whole: whether it does so in every row, also in those that it leaves without a key.
    """

    call: Evidence
    fits: bool
    clear: bool
    whole: bool = True

    @property
    def explains(self) -> bool:
        """Whether the answer is incorrect, and as explained."""
        return self.fits and self.clear and bool(self.call.wrong.any())

    @property
    def contradicts(self) -> bool:
        """Whether the answer is right, where the explanation has another one."""
        return not self.fits and not bool(self.call.wrong.any())


def explain(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> str:
    """Return in words the simplest explanation that holds, or "" where several are as simple."""
    somewhere: list[str] = []
    for group in EXPLANATIONS:
        everywhere, conditional = candidates(group, evidence, claims)
        if everywhere:
            return _the_only(everywhere)
        somewhere = somewhere or conditional
    if somewhere:
        return _the_only(somewhere)
    everywhere, conditional = candidates(_fitted(evidence, claims), evidence, claims)
    if not everywhere and not conditional:
        everywhere, _ = candidates(PAIRS, evidence, claims)
    return _the_only(everywhere or conditional)


def _the_only(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else ""


def candidates(
    explanations: Iterable[Explanation], evidence: Sequence[Sequence[Evidence]], claims: Claims
) -> tuple[list[str], list[str]]:
    """Return the explanations that hold everywhere, and those that hold under a condition, in words.

    Those that say what every row is are preferred to those that leave some out.
    """
    found: dict[tuple[bool, bool], dict[str, str]] = {}
    for explanation in explanations:
        fits = _fits_of(explanation, evidence, claims)
        if fits is None:
            continue
        showing = [fit.call.step for fit in fits if fit.explains]
        where = condition(showing, [fit.call.step for fit in fits if fit.contradicts])
        if where is not None:
            text = f"{explanation.text}, {where}" if where else explanation.text
            whole = all(fit.whole for fit in fits if fit.explains)
            found.setdefault((where == "", whole), {})[text] = explanation.family
    return tuple(_merged(found.get((always, True)) or found.get((always, False)) or {}) for always in (True, False))


def _merged(found: dict[str, str]) -> list[str]:
    """Return explanations in the words of their family, if they are of one."""
    families = set(found.values())
    return list(families if len(found) > 1 and len(families) == 1 and "" not in families else found)


def _fitted(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> Iterator[Explanation]:
    """Yield explanations with a number that is fitted to the richest incorrect answer."""
    wrong = [call for calls in evidence for call in calls if bool(call.wrong.all()) and _is_ordinary(call)]
    if not wrong:
        return
    call = max(wrong, key=lambda call: call.output.numel())
    bias = call.weights.b_o
    shift = 0.0 if bias is None else bias.double().cpu()
    actual, right = call.output - shift, call.right.mid - shift
    yield contexts_times(float((actual * right).sum() / right.square().sum()))
    yield outputs_times(float((call.output * call.right.mid).sum() / call.right.mid.square().sum()))

    def error(log: float) -> float:
        answer, _ = _answer(scores_times(math.exp(log)), call, claims, {}, torch.float64)
        return _difference(call.output, answer)

    factor = math.exp(_minimum(error, -3.0, 3.0))
    yield scores_times(factor)
    yield sums_times(factor)


def _is_ordinary(call: Evidence) -> bool:
    return bool(call.output.isfinite().all()) and bool(call.right.mid.isfinite().all())


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is smallest, by its values on a grid and golden sections from the best of them."""
    step = (high - low) / 60
    best = min((low + step * number for number in range(61)), key=function)
    low, high, ratio = best - step, best + step, (math.sqrt(5) - 1) / 2
    for _ in range(45):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def _fits_of(explanation: Explanation, evidence: Sequence[Sequence[Evidence]], claims: Claims) -> list[Fit] | None:
    """Return how an explanation fits each call; None as soon as one is neither right nor as explained."""
    fits: list[Fit] = []
    explained = 0
    for calls in evidence:
        own = _fits_in(explanation, calls, claims)
        if own is None:
            return None
        if not fits and not any(fit.explains for fit in own):
            return None
        explained += any(fit.explains for fit in own)
        fits += own
    return fits if explained >= min(3, len(evidence)) else None


def _fits_in(explanation: Explanation, calls: Sequence[Evidence], claims: Claims) -> list[Fit] | None:
    """Return how an explanation fits each call of a session; None if one is neither right nor as explained."""
    made: dict[tuple[int, torch.dtype], ExplainedAttention] = {}
    fits = []
    for call in calls:
        try:
            fit = _fit(explanation, call, claims, made)
        except (RuntimeError, IndexError, ValueError):  # of shapes for which the defect means nothing
            fit = Fit(call, False, False)
        if not fit.fits and bool(call.wrong.any()):
            return None
        fits.append(fit)
    return fits


def _fit(
    explanation: Explanation, call: Evidence, claims: Claims, made: dict[tuple[int, torch.dtype], ExplainedAttention]
) -> Fit:
    """Compare a call with that of the defective formula, in float64 and in the dtype of the call.

    Where they differ, rows that the defect leaves without a key are left out: what those give is a matter of its own.
    """
    exact, filled = _answer(explanation, call, claims, made, torch.float64)
    known = call.right.rad.isfinite().all(-1)
    if exact.shape != call.output.shape:
        return Fit(call, False, False)
    dtype = call.step.problem.query.dtype
    single = torch.float32 if dtype == torch.float64 else dtype
    rounded = None
    fit = Fit(call, False, False)
    for rows in (known, known & filled):
        if not bool(rows.any()):
            return Fit(call, True, False)
        size, error = _rms(exact[rows]), _difference(call.output[rows], exact[rows])
        allowed = torch.finfo(dtype).eps / 2 * size
        if error > SLACK * allowed and not GROSS * size < error < math.inf:
            if rounded is None:
                rounded = _answer(explanation, call, claims, made, single)[0]
            factor = torch.finfo(dtype).eps / torch.finfo(single).eps
            allowed = max(allowed, factor * min(_difference(rounded[rows], exact[rows]), size))
            if dtype == single:
                error = min(error, _difference(call.output[rows], rounded[rows]))
        clear = _difference(exact[rows], call.right.mid[rows]) > CLEAR * SLACK * allowed
        fit = Fit(call, error <= SLACK * allowed, clear and bool(call.wrong[rows].any()), rows is known)
        if fit.fits:
            break
    return fit


def _answer(
    explanation: Explanation,
    call: Evidence,
    claims: Claims,
    made: dict[tuple[int, torch.dtype], ExplainedAttention],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the answer of the defective formula in a dtype, in float64, and the rows (B, L) that keep a key."""
    key, problem = (call.step.build, dtype), call.step.problem
    if key not in made:
        made[key] = explanation.attention(claims, call.config, call.weights.to(dtype), torch.Generator())
    mask = problem.mask
    if mask is not None:
        mask = mask.cpu() if mask.dtype == torch.bool else mask.cpu().to(dtype)
    inputs = (x.cpu().to(dtype) for x in (problem.query, problem.key, problem.value))
    attention = made[key].train(MODES[call.step.mode].training)
    output = attention(*inputs, mask=mask, is_causal=problem.is_causal).output.double()
    return output, (attention.allowed.any(-1) | ~call.filled).all(1)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the root mean square of a difference; infinite where only one of the two is NaN, or has an infinity."""
    same = (one == other) | (one.isnan() & other.isnan())
    return _rms((one - other).masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf")))


def _rms(x: Tensor) -> float:
    finite = x.masked_fill(x.isnan(), 0.0)
    return float(finite.square().mean().sqrt()) if x.numel() else 0.0
