"""The fields of a report read from a file, which anyone may have made: what they may hold.

Their types are checked before. All here is about reports as JSON has them, or `asdict` makes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, get_args

from mha.spec.claims import DEVICES, DTYPES
from mha.spec.clauses import CLAUSES, FAMILIES, Level

# The words of a verdict, by its field.
WORDS: dict[str, Collection[str]] = {"dtype": DTYPES, "device": DEVICES, "level": get_args(Level)}
TIMES = ("started", "since")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
# The seed of a random generator, and any count, is less than that.
LIMIT = 1 << 63


def validate_fields(report: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for a value that no report of this version has."""
    verdicts = report["verdicts"]
    unknown = sorted({verdict["clause"] for verdict in verdicts} - set(CLAUSES))
    if unknown:
        raise ValueError(
            f"the report has clauses that this version does not know: {', '.join(unknown)}"
        )
    for problem in (*_problems_of_report(report), *_problems_of_verdicts(verdicts)):
        raise ValueError(f"not a report of mha-conformance: {problem}")


def _problems_of_report(report: Mapping[str, Any]) -> Iterator[str]:
    for name in TIMES:
        text = report[name]
        if text and not _is_time(text):
            yield f"{name}: must be a time such as 2030-12-31T23:59:59+00:00, but is {text!r:.80}"
    for name, seeds in {"seed": [report["seed"]], "seeds": report["seeds"]}.items():
        if not _are_counts(seeds):
            yield f"{name}: must be from 0 to 2**63 - 1"


def _problems_of_verdicts(verdicts: Collection[Mapping[str, Any]]) -> Iterator[str]:
    for number, verdict in enumerate(verdicts):
        for problem in _problems_of_verdict(verdict):
            yield f"verdicts.{number}.{problem}"


def _problems_of_verdict(verdict: Mapping[str, Any]) -> Iterator[str]:
    for name, known in WORDS.items():
        if verdict[name] not in known:
            yield f"{name}: must be one of {', '.join(known)}, but is {verdict[name]!r:.80}"
    cause = verdict["blocked_by"]
    if cause is not None and cause not in CLAUSES and cause not in FAMILIES:
        yield f"blocked_by: must be a clause or a family, but is {cause!r:.80}"
    for name, numbers in _counts_of(verdict).items():
        if not _are_counts(numbers):
            yield f"{name}: must be from 0 to 2**63 - 1"
    if verdict["margin"] < 0:
        yield f"margin: must be 0 or more, but is {verdict['margin']}"
    if not 0 <= verdict["seconds"] < math.inf:
        yield f"seconds: must be a number, 0 or more, but is {verdict['seconds']}"


def _counts_of(verdict: Mapping[str, Any]) -> dict[str, Collection[int]]:
    """Return all whole numbers of a verdict, by its fields."""
    rejections: list[int] = []
    for counts in verdict["rejections"].values():
        rejections += counts.values()
    return {
        "examples": [verdict["examples"]],
        "cases_to_failure": [verdict["cases_to_failure"] or 0],
        "rejections": rejections,
        "seeds": verdict["seeds"],
    }


def _are_counts(numbers: Collection[int]) -> bool:
    return all(0 <= number < LIMIT for number in numbers)


def _is_time(text: str) -> bool:
    if not TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:  # as of a month 13
        return False
    return True


def from_format_1(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of format 1 in the words of the next format, as far as it is well formed.

    In format 1 the rejections of an answer "zeros" were two counts, "zeros" and "zeros tried".
    """
    verdicts = report.get("verdicts")
    if isinstance(verdicts, list):
        verdicts = [_verdict_of_format_1(verdict) for verdict in verdicts]
    return {**report, "verdicts": verdicts}


def _verdict_of_format_1(verdict: Any) -> Any:
    if not isinstance(verdict, dict):
        return verdict
    counts = verdict.get("rejected", {})
    if not isinstance(counts, dict):
        return verdict
    rejections = {}
    for key, tried in counts.items():
        if key.endswith(" tried"):
            name = key.removesuffix(" tried")
            rejections[name] = {"rejected": counts.get(name, 0), "tried": tried}
    rest = {name: value for name, value in verdict.items() if name not in ("rejected", "first")}
    return rest | {"rejections": rejections, "cases_to_failure": verdict.get("first")}
