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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mha.conformance.cases.case import Case
from mha.conformance.diagnosis.conditions import condition
from mha.conformance.diagnosis.evidence import (
    Evidence,
    PlainCalls,
    answers,
    collect,
    joins_causal,
    plain_calls,
)
from mha.conformance.diagnosis.fits import Fit, fits_of
from mha.conformance.diagnosis.fitted import fitted
from mha.conformance.diagnosis.wrong_gradients import wrong_gradients
from mha.conformance.harness.errors import CallRaised, Discard, Violation
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.known_bad.catalogue import (
    NAMED,
    pairs,
)
from mha.conformance.harness.known_bad.defect import Defect, KnownBad, defect
from mha.conformance.harness.known_bad.scores import TOO_HIGH
from mha.conformance.harness.recording import CallStep
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property
from mha.implementations.process.pristine import as_our_own
from mha.implementations.process.torch_state import preserved, threads
from mha.spec import Claims, Implementation

CORRECT = defect("correct", "no defect")
# Defects that calls with ordinary numbers do not show.
HIDDEN = tuple(each for group in NAMED for each in group if each.family == TOO_HIGH)
# A number in a message, and by how much two may differ that are the same with other roundings, of
# three digits each.
NUMBER, ALIKE = re.compile(r"-?(?:\d[\d.]*(?:e[-+]?\d+)?\b|nan\b|inf\b)"), 1e-2


@dataclass(frozen=True, eq=False)
class Cause:
    """A defect that holds, in words; always: whether it does so without a condition."""

    text: str
    defect: Defect
    always: bool


def diagnose(prop: Property, session: Session) -> str:
    """Return in words the defect that explains why a property failed, or "" if none is found."""
    with threads(1), judging(session.implementation), preserved():
        text = _seen_in_own_calls(prop, session) or _seen_in_plain_calls(prop, session)
        if not text and "gradients" in prop.needs:
            return wrong_gradients(prop, session)
        return text


def _seen_in_own_calls(prop: Property, session: Session) -> str:
    """Return the defect that the calls of the property show, if any of them is incorrect."""
    evidence = collect(prop, session)
    if not evidence:
        return ""
    plain = plain_calls(session)
    with torch.inference_mode():
        causes = explain([*evidence, *plain], session.claims)
    return _text([cause for cause in causes if _would_fail(prop, session, cause)], session)


def _would_fail(prop: Property, session: Session, cause: Cause) -> bool:
    """Return whether the property rejects the defective formula too, so that this is the reason."""
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
        causes, alike = [Cause(each.text, each, always=True) for each in HIDDEN], 0.0
    # What the formula without a defect fails too has another reason.
    if not causes or _message_of_formula(CORRECT, prop, session):
        return ""
    message = _message(prop, session.implementation, session.case)
    same = []
    for cause in causes:
        other = _message_of_formula(cause.defect, prop, session)
        if _is_alike(message, other, alike):
            same.append(cause)
    return _text(same, session)


def _message_of_formula(defect: Defect, prop: Property, session: Session) -> str:
    """Return how a property fails for the formula with a defect, "" if it does not."""
    with as_our_own():
        return _message(prop, _formula(defect, session), replace(session.case, device="cpu"))


def _formula(defect: Defect, session: Session) -> KnownBad:
    """Return the formula with a defect, called as the implementation is."""
    return KnownBad(defect, session.claims, joins_causal=joins_causal(session.implementation))


# Once for all clauses.
@lru_cache(maxsize=4)
def _causes_of(plain: PlainCalls, claims: Claims) -> list[Cause] | None:
    """Return the causes that plain calls show by themselves, None if all of them are right."""
    if not any(map(_any_wrong, plain)):
        return None
    wrong_first = sorted(plain, key=_any_wrong, reverse=True)
    with torch.inference_mode():
        return explain(wrong_first, claims)


def _any_wrong(calls: Sequence[Evidence]) -> bool:
    return any(call.is_wrong for call in calls)


def _message(prop: Property, implementation: Implementation, case: Case) -> str:
    """Return how a property fails in a case, "" if it does not, or raises."""
    try:
        with preserved():
            prop.function(Session(implementation, case), case)
    except (CallRaised, Discard):
        return ""
    except Violation as violation:
        return violation.message
    return ""


def _is_alike(message: str, other: str, alike: float) -> bool:
    """Return whether two messages have the same words, and numbers that differ by this at most."""
    numbers, others = NUMBER.findall(message), NUMBER.findall(other)
    if not numbers or NUMBER.sub("#", message) != NUMBER.sub("#", other):
        return False
    return all(
        one == two or math.isclose(float(one), float(two), rel_tol=alike, abs_tol=alike)
        for one, two in zip(numbers, others, strict=True)
    )


def explain(evidence: Sequence[Sequence[Evidence]], claims: Claims) -> list[Cause]:
    """Return the simplest causes that the evidence shows, all of them equally simple.

    In this order: a named defect everywhere, one under a condition, one with a number that is
    fitted, and two named defects at once.
    """
    under_condition: list[Cause] = []
    for group in NAMED:
        causes = candidates(group, evidence, claims)
        if any(cause.always for cause in causes):
            return causes
        under_condition = under_condition or causes
    if under_condition:
        return under_condition
    if causes := candidates(fitted(evidence, claims), evidence, claims):
        return causes
    return [cause for cause in candidates(pairs(), evidence, claims) if cause.always]


def candidates(
    defects: Iterable[Defect], evidence: Sequence[Sequence[Evidence]], claims: Claims
) -> list[Cause]:
    """Return the defects that hold everywhere, or else those that hold under a condition.

    Defects that say what every row is are preferred to those that leave some out.
    """
    found: dict[tuple[bool, bool], list[Cause]] = {}
    for each in defects:
        fits = fits_of(each, evidence, claims)
        if fits is None:
            continue
        if cause := _cause_of(each, fits):
            is_whole = all(fit.whole for fit in fits if fit.explains)
            found.setdefault((cause.always, is_whole), []).append(cause)
    return found[max(found)] if found else []


def _cause_of(defect: Defect, fits: Sequence[Fit]) -> Cause | None:
    """Return a defect that fits, with the condition under which it shows; None if none is known."""
    showing: list[Evidence] = []
    others: list[CallStep] = []
    for fit in fits:
        if fit.explains:
            showing.append(fit.call)
        elif fit.contradicts:
            others.append(fit.call.step)
    where = condition([call.step for call in showing], others)
    if where == "":
        return Cause(defect.text, defect, always=True)
    if where and _explains_more_than_nan(showing):
        return Cause(f"{defect.text}, {where}", defect, always=False)
    return None


def _explains_more_than_nan(calls: Sequence[Evidence]) -> bool:
    """Return whether not all that is wrong is NaN in rows with an allowed key.

    Defects of any kind can give that.
    """
    for call in calls:
        is_nan = call.output.isnan().all(-1) & call.filled.all(1)
        if bool((call.wrong & ~is_nan).any()):
            return True
    return False


def _text(causes: Sequence[Cause], session: Session) -> str:
    """Return the defect in words; "" if it may be one of several that do not amount to the same."""
    texts = list(dict.fromkeys(cause.text for cause in causes))
    if len(texts) <= 1:
        return "".join(texts)
    families = {cause.defect.family for cause in causes}
    if len(families) == 1 and "" not in families:
        return families.pop()
    if _are_one(causes, session):
        return texts[0]
    return ""


def _are_one(causes: Sequence[Cause], session: Session) -> bool:
    """Return whether causes give the same answers in larger calls too.

    Two steps may be one where the same tensor is key and value.
    """
    if not all(cause.always for cause in causes):
        return False
    first, *others = (answers(_formula(cause.defect, session), session) for cause in causes)
    return all(len(each) == len(first) and all(map(torch.allclose, each, first)) for each in others)
