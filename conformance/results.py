"""What a run found: a verdict on each clause, and the report that every other form is made of."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any, Literal

from mha.conformance.report_fields import from_format_1, validate_fields
from mha.conformance.shown import visible, visible_line, visible_name
from mha.spec.clauses import CLAUSES

Status = Literal[
    "pass", "fail", "waived", "stale_waiver", "not_claimed", "refused", "blocked", "harness_error"
]
# A clause with one of these was seen to fail.
FAILED = ("fail", "refused", "waived")
# A required clause with one of these means that the implementation does not conform.
NONCONFORMING = ("fail", "refused", "stale_waiver", "blocked")
# Of the JSON. A change that a reader of an older format would misread makes the next; format 1 is
# still read.
FORMAT: Literal[2] = 2
# In characters, of what a verdict opens to in a notebook.
LONGEST_DETAILS = 100_000
# The fields that may differ between two runs with the same seed.
VOLATILE = ("started", "since", "host", "seconds")


@dataclass(frozen=True)
class Rejections:
    """How many of the cases that a known-bad answer was tried on rejected it."""

    rejected: int
    tried: int

    def __add__(self, other: Rejections) -> Rejections:
        """Return the counts of both together."""
        return Rejections(self.rejected + other.rejected, self.tried + other.tried)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one clause for one implementation, in one dtype on one device.

    level: MUST, SHOULD or MAY.
    required: whether the clause must hold for the implementation to conform; a SHOULD is required
        in a strict run only.
    examples: the number of cases tried.
    cases_to_failure: how many of them it took to the first failure, before shrinking.
    margin: the largest error/bound among them.
    rejections: for each known-bad answer, how many cases rejected it.
    case: the minimal failing case, as code.
    violated: the name of the property that failed.
    message: why, where the status is not "pass".
    diagnosis: the defect that explains the failure, in words, where one is found.
    fix: what usually mends that defect.
    steps: where none is found, which steps of the call are right, as far as they can be seen.
    arguments: of the last call, by the names that the adapted module or kernel has for them.
    script: a stand-alone script that reproduces the failure.
    blocked_by: the clause or family that explains the failure; the status is "blocked" only if
        that is seen to fail too (see `settled`).
    topic: what a clause that is not judged is counted under: the field of `Claims` that is
        missing, or "other dtypes"; empty for other reasons.
    seconds: how long it took.
    seeds: in a report over several seeds, those that gave the status, the one of the case first;
        empty where it is a pass or not claimed.

    >>> where = {"implementation": "sdpa", "dtype": "float32", "device": "cpu"}
    >>> Verdict(clause="MSK-8", level="MUST", status="fail", **where).conforms
    False
    """

    implementation: str
    clause: str
    level: str
    dtype: str
    device: str
    status: Status
    required: bool = True
    examples: int = 0
    cases_to_failure: int | None = None
    margin: float = 0.0
    rejections: dict[str, Rejections] = field(default_factory=dict)
    case: str | None = None
    violated: str = ""
    message: str = ""
    diagnosis: str = ""
    fix: str = ""
    steps: str = ""
    arguments: str = ""
    script: str | None = None
    blocked_by: str | None = None
    topic: str = ""
    seconds: float = 0.0
    seeds: tuple[int, ...] = ()

    @property
    def conforms(self) -> bool:
        """Whether the implementation can conform with this verdict."""
        return not self.required or self.status not in NONCONFORMING


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The verdicts of a run, in the order of the contract, and what it takes to repeat the run.

    targets: for each implementation, how it was named, as `mha.implementations.resolve` takes it.
    strict: whether SHOULD counted as MUST.
    incomplete: the run was stopped, so clauses may be missing.
    broken: the registered implementations that could not be loaded, and why.
    not_covered: for each implementation, the options that no clause judges, as far as known.
    torch_changes: what had been replaced or set in torch before the run, as by the import of an
        implementation; it is in place while implementations run, and at no other time.
    started: in UTC.
    since: when the first of its runs was started, if narrower ones have updated it.
    host: the machine.
    seeds: of the runs that were merged into it, if they are several; `seed` is then the least.

    >>> report = Report(verdicts=(), profile="quick", seed=0, versions={})
    >>> report.conforms, report.failing, Report.from_json(report.to_json()) == report
    (False, 'nothing was judged', True)
    """

    verdicts: tuple[Verdict, ...]
    profile: str
    seed: int
    versions: dict[str, str]
    targets: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    incomplete: bool = False
    broken: dict[str, str] = field(default_factory=dict)
    not_covered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    torch_changes: tuple[str, ...] = ()
    started: str = ""
    since: str = ""
    host: str = ""
    seeds: tuple[int, ...] = ()
    format: Literal[2] = FORMAT

    def __repr__(self) -> str:
        """Return the outcome of each implementation, with counts, and a line for each failure."""
        lines = []
        for outcome, listed in self._outcomes():
            lines.append(outcome)
            lines += [f"    {_in_a_line(verdict)}" for verdict in listed]
        return "\n".join(lines) or "nothing was judged"

    def _repr_html_(self) -> str:
        """Return the same for a notebook, where a failure opens to its case and script."""
        parts = []
        for outcome, listed in self._outcomes():
            parts.append(f"<p>{escape(outcome)}</p>")
            parts += [_opening(verdict) for verdict in listed]
        return "\n".join(parts) or "nothing was judged"

    def _outcomes(self) -> Iterator[tuple[str, list[Verdict]]]:
        """Yield the outcome of each implementation in a line, and the verdicts to list below it."""
        for name, own in self.by_implementation.items():
            statuses = [status_of(verdict) for verdict in own]
            counts = ", ".join(f"{count} {status}" for status, count in Counter(statuses).items())
            if "harness error" in statuses:
                outcome = "could not be judged"
            elif not all(verdict.conforms for verdict in own):
                outcome = "does not conform"
            elif self.incomplete:
                outcome = "not judged in full"
            else:
                outcome = "conforms"
            listed = [verdict for verdict in own if verdict.status not in ("pass", "not_claimed")]
            yield f"{visible_name(name)}: {outcome} ({counts})", listed

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of its cases: one, if it is not of a campaign."""
        return self.seeds or (self.seed,)

    @property
    def conforms(self) -> bool:
        """Whether something was judged, and every required clause that is claimed holds."""
        return self.exit_status == 0

    @property
    def exit_status(self) -> int:
        """0 if everything conforms, 1 if not, 2 if the judge failed or not all was judged."""
        statuses = {verdict.status for verdict in self.verdicts}
        nothing_judged = statuses <= {"not_claimed"}
        if "harness_error" in statuses or nothing_judged or self.incomplete or self.broken:
            return 2
        return 0 if all(verdict.conforms for verdict in self.verdicts) else 1

    @property
    def failing(self) -> str:
        """The clauses that keep it from conforming, as text; empty if it conforms."""
        if self.conforms:
            return ""
        failed = [v.clause for v in self.verdicts if not v.conforms or v.status == "harness_error"]
        return ", ".join(failed) or "nothing was judged"

    @property
    def by_implementation(self) -> dict[str, list[Verdict]]:
        """The verdicts on each implementation, in order."""
        return by_implementation(self.verdicts)

    def to_json(self) -> str:
        """Return the report as JSON: the same for the same seed, except for `VOLATILE` fields."""
        data = {"conforms": self.conforms, **asdict(self)}
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a lone surrogate, which a reader of JSON may refuse
            data = json.loads(json.dumps(data, ensure_ascii=False).encode(errors="replace"))
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read a report of format 1 or 2, and settle it.

        Raises ValueError, in one line, for anything else.
        """
        from pydantic import ValidationError

        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a report of mha-conformance: not JSON: {error}") from None
        written = data.get("format") if isinstance(data, dict) else None
        if written is None:
            raise ValueError("not a report of mha-conformance: it has no format")
        if written not in (1, FORMAT):
            raise ValueError(
                f"the report has format {written!r}, but this version reads formats 1 and {FORMAT}"
            )
        try:
            if written == 1:
                text = json.dumps(from_format_1(data) | {"format": FORMAT})
            report: Report = _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a report of mha-conformance: {where}: {first['msg']}") from None
        validate_fields(asdict(report))
        return replace(report, verdicts=settled(report.verdicts))

    @staticmethod
    def schema() -> dict[str, Any]:
        """Return the JSON schema of what `to_json` gives."""
        schema: dict[str, Any] = _adapter().json_schema(mode="serialization")
        schema["properties"] = {"conforms": {"type": "boolean"}} | schema["properties"]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def status_of(verdict: Verdict) -> str:
    """Return the status in words: "unmet SHOULD" for a failure with which one may still conform.

    >>> where = {"implementation": "sdpa", "dtype": "float32", "device": "cpu"}
    >>> status_of(Verdict(clause="NUM-3", level="SHOULD", status="fail", required=False, **where))
    'unmet SHOULD'
    """
    if verdict.status in NONCONFORMING and not verdict.required:
        return "unmet SHOULD"
    return verdict.status.replace("_", " ")


def _in_a_line(verdict: Verdict) -> str:
    subject = (verdict.implementation, verdict.dtype, verdict.device)
    name, dtype, device = map(visible_name, subject)
    text = repr(verdict.diagnosis or verdict.message)[1:-1]  # nothing in it ends the line
    return (
        f"{status_of(verdict)} {verdict.clause} {name}, {dtype} on {device}:"
        f" {visible_line(text):.200}"
    )


def _opening(verdict: Verdict) -> str:
    """Return a verdict as a line of HTML that opens to its message, case and script, if any."""
    line = escape(_in_a_line(verdict))
    if not verdict.script:
        return f"<div>{line}</div>"
    details = "\n\n".join(filter(None, (verdict.message, verdict.case, verdict.script)))
    text = escape(visible(details, LONGEST_DETAILS))
    return f"<details><summary>{line}</summary><pre>{text}</pre></details>"


def settled(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts, each "blocked" instead of "fail" if what explains it fails too.

    That clause must fail by itself, for the same implementation, in the same dtype and on the same
    device; of a family, a required clause must. The order of the verdicts does not matter.

    >>> where = {"implementation": "mine", "level": "MUST", "dtype": "float32", "device": "cpu"}
    >>> cause = Verdict(clause="STA-1", status="fail", **where)
    >>> explained = Verdict(clause="NUM-1", status="fail", blocked_by="STA", **where)
    >>> [verdict.status for verdict in settled([explained, cause])], settled([explained])[0].status
    (['blocked', 'fail'], 'fail')
    """
    verdicts = tuple(verdicts)
    causes = {(*_subject(verdict), cause) for verdict in verdicts for cause in _explains(verdict)}
    return tuple(_settle(verdict, causes) for verdict in verdicts)


def by_implementation(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts on each implementation, in order."""
    grouped: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        grouped.setdefault(verdict.implementation, []).append(verdict)
    return grouped


def versions() -> dict[str, str]:
    """Return the versions of everything that a verdict may depend on."""
    packages = {name: version(name) for name in ("mha-conformance", "torch", "hypothesis")}
    return packages | {"python": platform.python_version()}


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_host() -> str:
    """Return what a report says about the machine that made it."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"


def _subject(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.implementation, verdict.dtype, verdict.device


def _explains(verdict: Verdict) -> Iterator[str]:
    """Yield what a verdict shows to fail by itself: its clause, and if required, its family."""
    if verdict.status in FAILED and not verdict.blocked_by:
        yield verdict.clause
        if verdict.required:
            yield CLAUSES[verdict.clause].family


def _settle(verdict: Verdict, causes: Collection[tuple[str | None, ...]]) -> Verdict:
    is_explained = (*_subject(verdict), verdict.blocked_by) in causes
    if is_explained and verdict.status in ("fail", "refused"):
        return replace(verdict, status="blocked")
    if not is_explained and verdict.status == "blocked":
        return replace(verdict, status="fail")
    return verdict


def read_verdict(data: object) -> Verdict:
    """Return a verdict that another process wrote by `asdict`; raises ValueError if it is none."""
    try:
        verdict: Verdict = _verdict_adapter().validate_python(data)
    except ValueError as error:  # of pydantic
        raise ValueError(f"not a verdict: {error}") from None
    return verdict


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Report)


@cache
def _verdict_adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Verdict)
