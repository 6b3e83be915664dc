"""What the judge found: a verdict for each clause, and the report of a run, from which every other form is made."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal

from mha.spec import CLAUSES

Status = Literal[
    "pass",
    "fail",
    "waived",
    "stale_waiver",
    "not_claimed",
    "refused",
    "unclaimed",
    "blocked",
    "harness_error",
]
# A required clause with one of these means that the implementation does not conform.
NONCONFORMING = ("fail", "refused", "stale_waiver", "blocked")
# Of the JSON; a change that a reader of the old one would misread makes the next.
FORMAT: Literal[1] = 1
# What may differ between two runs with one seed.
OF_THE_MOMENT = ("started", "host", "seconds")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one clause on one implementation, in one dtype on one device.

    required: whether the implementation must keep it: a SHOULD only in a strict run. examples: how many cases were run;
    first: how many of them up to the first that failed, before it was shrunk.
    margin: the largest error/bound among them. rejected: how many of the cases that were given to a known wrong answer
    rejected it, by its name ("zeros"), and how many were given to it ("zeros tried"). case: the minimal failing case,
    as code, and violated: the name of the property that it violates. message: why, where the status is not "pass".
    script: a stand-alone script that shows the failure. blocked_by: the clause or family whose failure leaves nothing
    to say of this one. seconds: how long it took.
    """

    implementation: str
    clause: str
    level: str
    dtype: str
    device: str
    status: Status
    required: bool = True
    examples: int = 0
    first: int | None = None
    margin: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)
    case: str | None = None
    violated: str = ""
    message: str = ""
    script: str | None = None
    blocked_by: str | None = None
    seconds: float = 0.0

    @property
    def conforms(self) -> bool:
        """Whether this verdict lets the implementation conform."""
        return not self.required or self.status not in NONCONFORMING


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdicts of a run, in the order of the contract, with what is needed to repeat it.

    targets: how each implementation was named, for `mha.implementations.resolve`, where it was. strict: whether SHOULD
    was taken for MUST. incomplete: the run was stopped, and there may be clauses that were not judged. broken: what is
    registered and could not be loaded, and why. started: in UTC. host: the machine.
    """

    verdicts: tuple[Verdict, ...]
    profile: str
    seed: int
    versions: dict[str, str]
    targets: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    incomplete: bool = False
    broken: dict[str, str] = field(default_factory=dict)
    started: str = ""
    host: str = ""
    format: Literal[1] = FORMAT

    @property
    def conforms(self) -> bool:
        """Whether something was judged, and every clause that is claimed, and must be kept, is kept."""
        return self.exit_status == 0

    @property
    def exit_status(self) -> int:
        """0 if it conforms, 1 if not, 2 if the judge failed, nothing was judged, or not all that was to be judged."""
        statuses = {verdict.status for verdict in self.verdicts}
        if "harness_error" in statuses or statuses <= {"not_claimed"} or self.incomplete or self.broken:
            return 2
        return 0 if all(verdict.conforms for verdict in self.verdicts) else 1

    @property
    def failing(self) -> str:
        """The clauses that keep it from conforming, in words; nothing if it conforms."""
        failed = [v.clause for v in self.verdicts if not v.conforms or v.status == "harness_error"]
        return "" if self.conforms else ", ".join(failed) or "nothing was judged"

    @property
    def by_implementation(self) -> dict[str, list[Verdict]]:
        """The verdicts on each implementation, in their order."""
        return by_implementation(self.verdicts)

    def to_json(self) -> str:
        """Return the report as JSON; two runs with one seed give the same text, but for what is `OF_THE_MOMENT`."""
        told = {"conforms": self.conforms, **asdict(self)}
        try:
            json.dumps(told, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a character, which no reader of JSON need take
            told = json.loads(json.dumps(told, ensure_ascii=False).encode(errors="replace"))
        return json.dumps(told, indent=2)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read a report; raises ValueError, in a line, for a text that is none, or is of another format."""
        from pydantic import ValidationError

        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no report of mha-conformance: it is no JSON: {error}") from None
        written = told.get("format") if isinstance(told, dict) else None
        if written is None:
            raise ValueError("it is no report of mha-conformance: it does not say its format")
        if written != FORMAT:
            raise ValueError(f"it is a report of format {written!r}, and this version reads format {FORMAT}")
        try:
            found = _adapter().validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"it is no report of mha-conformance: {where}: {first['msg']}") from None
        unknown = sorted({verdict.clause for verdict in found.verdicts} - set(CLAUSES))
        if unknown:
            raise ValueError(f"it is about {', '.join(unknown)}, which the contract of this version does not have")
        return found  # type: ignore[no-any-return]  # of a cached function

    @staticmethod
    def schema() -> dict[str, Any]:
        """Return the JSON schema of what `to_json` gives."""
        found: dict[str, Any] = _adapter().json_schema(mode="serialization")
        found["properties"] = {"conforms": {"type": "boolean"}} | found["properties"]
        return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found


def by_implementation(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts on each implementation, in their order."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.implementation, []).append(verdict)
    return found


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Report)


def now() -> str:
    """Return the time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def host() -> str:
    """Return the machine, in words."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
