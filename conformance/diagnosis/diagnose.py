"""The diagnosis: which plain defect explains an incorrect answer.

The answers of a failing session, and of calls like it, are compared with those of the textbook's
formula with one defect, in float64. A defect is named if it reproduces all of them, or if a
condition tells those that it reproduces from those that are right, and if no other defect that is
as simple does. A diagnosis is a hint and not a verdict: what counts as reproduced is measured, by
how far rounding takes the defective formula itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.modes import MODES
from mha.conformance.diagnosis.conditions import condition
from mha.conformance.diagnosis.evidence import (
    Evidence,
    PlainCalls,
    answers,
    collect,
    joins_causal,
    plain_calls,
)
from mha.conformance.diagnosis.wrong_gradients import wrong_gradients
from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.known_bad.catalogue import (
    NAMED,
    contexts_times,
    outputs_times,
    pairs,
    scale_of,
    scores_times,
    sums_times,
)
from mha.conformance.harness.known_bad.defect import Defect, KnownBad, defect
from mha.conformance.harness.known_bad.scores import TOO_HIGH
from mha.conformance.harness.session import Session
from mha.conformance.harness.textbook import TextbookAttention
from mha.conformance.properties.registry import Property
from mha.implementations.process.pristine import as_our_own
from mha.implementations.process.torch_state import preserved, threads
from mha.spec import Claims, Implementation

# Of one defect: the modules that have been made of it, by the call's attention and the dtype.
Made = dict[tuple[int, torch.dtype], TextbookAttention]

CORRECT = defect("correct", "no defect")
# Defects that calls with ordinary numbers do not show.
HIDDEN = tuple(each for group in NAMED for each in group if each.family == TOO_HIGH)
# How much larger an error may be than that of the defective formula in the same dtype, both as root
# mean squares, and how much larger its difference from the right answer must be.
SLACK, CLEAR = 16.0, 8.0
# A number in a message, and by how much two may differ that are the same with other roundings, of
# three digits each.
NUMBER, ALIKE = re.compile(r"-?(?:\d[\d.]*(?:e[-+]?\d+)?\b|nan\b|inf\b)"), 1e-2
# An error this large is not one of rounding, relative to the answer.
GROSS = 0.05


@dataclass(frozen=True, eq=False)
class Cause:
    """A defect that holds, in words; always: whether it does so without a condition."""

    text: str
    defect: Defect
    always: bool


def diagnose(prop: Property, session: Session) -> str:
    """Return in words the defect that explains why a property failed in a session, or "" if none is
    found.
    """
    with threads(1), judging(session.implementation), preserved():
        evidence = collect(prop, session)
        text = _seen_in_own_calls(prop, session, evidence) if evidence else ""
        if text := text or _seen_in_plain_calls(prop, session):
            return text
        return wrong_gradients(prop, session) if "gradients" in prop.needs else ""


def _seen_in_own_calls(
    prop: Property, session: Session, evidence: Sequence[Sequence[Evidence]]
) -> str:
    """Return the defect that the calls of the property show, of which one at least is incorrect."""
    plain = plain_calls(session)
    with torch.inference_mode():
        causes = explain([*evidence, *plain], session.claims)
    return _text([cause for cause in causes if _would_fail(prop, session, cause)], session)


def _would_fail(prop: Property, session: Session, cause: Cause) -> bool:
    """Return whether the property rejects the defective formula too; if not, it failed for another
    reason.
    """
    # The formula does not know of a condition.
    return not cause.always or bool(_message_of_formula(cause.defect, prop, session))


def _seen_in_plain_calls(prop: Property, session: Session) -> str:
    """Return the defect that plain calls show, and that makes the property fail with the very same
    numbers.

    This is for what no single call shows: gradients, results that are compared with each other, and
    fills that only the lowest scores show. These are tried where every plain call is right.
    """
    causes, alike = _causes_of(plain_calls(session), session.claims), ALIKE
    if causes is None:  # then only equal numbers show which fill it is
        causes, alike = [Cause(each.text, each, True) for each in HIDDEN], 0.0
    # What the formula without a defect fails too has another reason.
    if not causes or _message_of_formula(CORRECT, prop, session):
        return ""
    message = _message(prop, session.implementation, session.case)
    same = [
        cause
        for cause in causes
        if _is_alike(message, _message_of_formula(cause.defect, prop, session), alike)
    ]
    return _text(same, session)


def _message_of_formula(defect: Defect, prop: Property, session: Session) -> str:
    """Return how a property fails in the case of a session for the formula with a defect, "" if it
    does not.
    """
    with as_our_own():
        return _message(prop, _formula(defect, session), replace(session.case, device="cpu"))


def _formula(defect: Defect, session: Session) -> KnownBad:
    """Return the formula with a defect, called as the implementation is."""
    return KnownBad(defect, session.claims, joins_causal=joins_causal(session.implementation))


# Once for all clauses.
@lru_cache(maxsize=4)
def _causes_of(plain: PlainCalls, claims: Claims) -> list[Cause] | None:
    """Return the causes that plain calls show by themselves, None if all of them are right."""
    if not any(bool(call.wrong.any()) for call in chain.from_iterable(plain)):
        return None
    first_wrong = sorted(plain, key=lambda calls: not any(bool(call.wrong.any()) for call in calls))
    with torch.inference_mode():
        return explain(first_wrong, claims)


def _message(prop: Property, implementation: Implementation, case: Case) -> str:
    """Return how a property fails in a case, "" if it does not, or raises."""
    try:
        with preserved():
            prop.function(Session(implementation, case), case)
    except Violation as violation:
        return "" if isinstance(violation, CallRaised) else violation.message
    except Discard:
        return ""
    return ""


def _is_alike(message: str, other: str, alike: float) -> bool:
    """Return whether two messages have the same words, and numbers that differ by so much at most."""
    pairs = list(zip(NUMBER.findall(message), NUMBER.findall(other), strict=False))
    return (
        bool(pairs)
        and NUMBER.sub("#", message) == NUMBER.sub("#", other)
        and all(
            math.isclose(float(one), float(two), rel_tol=alike, abs_tol=alike) or one == two
            for one, two in pairs
        )
    )


@dataclass(frozen=True, eq=False)
class Fit:
    """How a defect fits a call: whether it reproduces the answer, and whether only an incorrect one
    would.

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
        """Whether the answer is right, where the defect has another one."""
        return not self.fits and not bool(self.call.wrong.any())


def explain(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> list[Cause]:
    """Return the simplest causes that the evidence shows, of which none is simpler than the others."""
    somewhere: list[Cause] = []
    for group in NAMED:
        causes = candidates(group, evidence, claims)
        if any(cause.always for cause in causes):
            return causes
        somewhere = somewhere or causes
    return (
        somewhere
        or candidates(_fitted(evidence, claims), evidence, claims)
        or _pairs(evidence, claims)
    )


def _pairs(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> list[Cause]:
    return [cause for cause in candidates(pairs(), evidence, claims) if cause.always]


def candidates(
    defects: Iterable[Defect], evidence: Sequence[Sequence[Evidence]], claims: Claims
) -> list[Cause]:
    """Return the defects that hold everywhere, or else those that hold under a condition.

    Those that say what every row is are preferred to those that leave some out.
    """
    found: dict[tuple[bool, bool], list[Cause]] = {}
    for each in defects:
        fits = _fits_of(each, evidence, claims)
        if fits is None:
            continue
        showing = [fit.call.step for fit in fits if fit.explains]
        where = condition(showing, [fit.call.step for fit in fits if fit.contradicts])
        if where == "" or (where and _explains_more_than_nan(fits)):
            text = ", ".join(filter(None, (each.text, where)))
            found.setdefault((where == "", _is_whole(fits)), []).append(
                Cause(text, each, where == "")
            )
    return found[max(found)] if found else []


def _explains_more_than_nan(fits: Sequence[Fit]) -> bool:
    """Return whether more is explained than NaN in rows with an allowed key, which defects of any
    kind can give.
    """
    calls = [fit.call for fit in fits if fit.explains]
    return any(
        bool((call.wrong & ~(call.output.isnan().all(-1) & call.filled.all(1))).any())
        for call in calls
    )


def _is_whole(fits: Sequence[Fit]) -> bool:
    return all(fit.whole for fit in fits if fit.explains)


def _text(causes: Sequence[Cause], session: Session) -> str:
    """Return causes in words, those of their family if they are of one; "" if it may be either of
    several.
    """
    texts = list(dict.fromkeys(cause.text for cause in causes))
    families = {cause.defect.family for cause in causes}
    if len(texts) > 1 and len(families) == 1 and "" not in families:
        return families.pop()
    return texts[0] if len(texts) == 1 or (texts and _are_one(causes, session)) else ""


def _are_one(causes: Sequence[Cause], session: Session) -> bool:
    """Return whether causes give the same answers in larger calls too, as where one input is key
    and value.
    """
    first, *others = (answers(_formula(cause.defect, session), session) for cause in causes)
    return all(cause.always for cause in causes) and all(
        len(each) == len(first) and all(map(torch.allclose, each, first)) for each in others
    )


def _fitted(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> Iterator[Defect]:
    """Yield defects with a number that is fitted to the richest incorrect answer."""
    wrong = [
        call
        for calls in evidence
        for call in calls
        if bool(call.wrong.all()) and _is_ordinary(call)
    ]
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
    yield scale_of(factor * call.step.problem.scale(claims))


def _is_ordinary(call: Evidence) -> bool:
    return bool(call.output.isfinite().all()) and bool(call.right.mid.isfinite().all())


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function is smallest, by its values on a grid and golden sections from the
    best of them.
    """
    step = (high - low) / 60
    best = min((low + step * number for number in range(61)), key=function)
    low, high, ratio = best - step, best + step, (math.sqrt(5) - 1) / 2
    for _ in range(45):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def _fits_of(
    defect: Defect, evidence: Sequence[Sequence[Evidence]], claims: Claims
) -> list[Fit] | None:
    """Return how a defect fits each call; None as soon as one is neither right nor as explained."""
    fits: list[Fit] = []
    explained = 0
    for calls in evidence:
        own = _fits_in(defect, calls, claims)
        if own is None:
            return None
        if not fits and not any(fit.explains for fit in own):
            return None
        explained += any(fit.explains for fit in own)
        fits += own
    return fits if explained >= min(3, len(evidence)) else None


def _fits_in(defect: Defect, calls: Sequence[Evidence], claims: Claims) -> list[Fit] | None:
    """Return how a defect fits each call of a session; None if one is neither right nor as
    explained.
    """
    made: Made = {}
    fits = []
    for call in calls:
        try:
            fit = _fit(defect, call, claims, made)
        except (
            RuntimeError,
            IndexError,
            ValueError,
            ArithmeticError,
        ):  # of shapes for which the defect means nothing
            fit = Fit(call, False, False)
        if not fit.fits and bool(call.wrong.any()):
            return None
        fits.append(fit)
    return fits


def _fit(defect: Defect, call: Evidence, claims: Claims, made: Made) -> Fit:
    """Compare a call with that of the defective formula, in float64 and in the dtype of the call.

    Where they differ, rows that the defect leaves without a key are left out: what those give is a
    matter of its own.
    """
    exact, filled = _answer(defect, call, claims, made, torch.float64)
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
                rounded = _answer(defect, call, claims, made, single)[0]
            factor = torch.finfo(dtype).eps / torch.finfo(single).eps
            allowed = max(allowed, factor * min(_difference(rounded[rows], exact[rows]), size))
            if dtype == single:
                error = min(error, _difference(call.output[rows], rounded[rows]))
        clear = _difference(exact[rows], call.right.mid[rows]) > CLEAR * SLACK * allowed
        most = max(
            SLACK * allowed,
            defect.unexplained * _difference(call.output[rows], call.right.mid[rows]),
        )
        fit = Fit(call, error <= most, clear and bool(call.wrong[rows].any()), rows is known)
        if fit.fits:
            break
    return fit


def _answer(
    defect: Defect,
    call: Evidence,
    claims: Claims,
    made: Made,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the answer of the defective formula in a dtype, in float64, and the rows (B, L) that
    keep a key.
    """
    key, problem = (call.step.build, dtype), call.step.problem
    if key not in made:
        made[key] = defect.attention(
            claims, call.config, call.weights.to(dtype, "cpu"), torch.Generator()
        )
    mask = problem.mask
    if mask is not None:
        mask = mask.cpu().to(dtype) if mask.is_floating_point() else mask.cpu()
    inputs = (x.cpu().to(dtype) for x in (problem.query, problem.key, problem.value))
    attention = made[key].train(MODES[call.step.mode].training)
    output = attention(*inputs, **problem.options.change(mask=mask).arguments).output.double()
    return output, (attention.allowed.any(-1) | ~call.filled).all(1)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the root mean square of a difference; infinite where only one of the two is NaN, or
    has an infinity.
    """
    same = (one == other) | (one.isnan() & other.isnan())
    return _rms(
        (one - other).masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    )


def _rms(x: Tensor) -> float:
    finite = x.masked_fill(x.isnan(), 0.0)
    return float(finite.square().mean().sqrt()) if x.numel() else 0.0
