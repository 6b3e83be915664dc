"""How tests judge a class, a function or an implementation on a few clauses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mha.conformance import Report, Verdict, check
from mha.implementations.inference.infer import Inference
from support.effort import EVERYTHING

# What is right passes every case alike: one of each property shows that it is judged.
RIGHT = "quick" if EVERYTHING else "smoke"
ALLOWED = ("pass", "not_claimed")


def judged(
    target: Any, clauses: str | Collection[str], profile: str = "quick", **options: Any
) -> Report:
    """Judge what is given, or what was inferred of it, on a few clauses; in float32 by default."""
    implementation = target.implementation if isinstance(target, Inference) else target
    return check(implementation, profile, clauses=clauses, **{"dtypes": ["float32"], **options})


def verdict_of(target: Any, clause: str, profile: str = "quick", **options: Any) -> Verdict:
    """Return the only verdict of one clause."""
    (verdict,) = judged(target, [clause], profile, **options).verdicts
    return verdict


def judged_throughout(target: Any, clauses: Collection[str] = (), **options: Any) -> Report:
    """Judge a right class on a case of each property, and on more where that one does not apply."""
    report = judged(target, clauses, RIGHT, **options)
    left_out = [verdict.clause for verdict in report.verdicts if verdict.status == "not_claimed"]
    if not left_out or RIGHT == "quick":
        return report
    later = {each.clause: each for each in judged(target, left_out, **options).verdicts}
    verdicts = [later.get(verdict.clause, verdict) for verdict in report.verdicts]
    return replace(report, verdicts=type(report.verdicts)(verdicts))


def expect_fail(target: Any, clause: str, message: str = "", **options: Any) -> Verdict:
    """Expect that what is wrong fails a clause, with words of the message; return the verdict."""
    verdict = verdict_of(target, clause, **options)
    assert verdict.status == "fail", verdict
    assert message in verdict.message
    return verdict


def expect_pass(
    target: Any, *passing: str, also: Collection[str] = (), **options: Any
) -> dict[str, str]:
    """Expect that a right class passes clauses or families; return the status of each clause.

    passing: each of their clauses must pass. also: these may not be claimed instead. It is judged
        on a case of each property, or on all of the quick profile by `make lattice`.
    """
    clauses = list(dict.fromkeys((*passing, *also)))
    report = judged(target, clauses, RIGHT, **options)
    violated = [verdict for verdict in report.verdicts if verdict.status not in ALLOWED]
    assert not violated, violated
    for verdict in report.verdicts:
        assert verdict.status == "pass" or not _is_one_of(passing, verdict), verdict
    return {verdict.clause: verdict.status for verdict in report.verdicts}


def expect_conforms(target: Any, clauses: Collection[str], **options: Any) -> None:
    """Expect that a right class conforms, which may violate recommendations."""
    report = judged(target, clauses, RIGHT, **options)
    failed = [verdict for verdict in report.verdicts if not verdict.conforms]
    assert not failed, failed


def _is_one_of(clauses: Collection[str], verdict: Verdict) -> bool:
    family, _, _ = verdict.clause.partition("-")
    return verdict.clause in clauses or family in clauses
