"""What the judge found: a verdict for each clause, and the report of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one clause on one implementation, in one dtype on one device.

    required: whether the implementation must keep it: a SHOULD only in a strict run. examples: how many cases were run;
    first: how many of them up to the first that failed, before it was shrunk.
    margin: the largest error/bound among them. rejected: how many of the cases that were given to a known wrong answer
    rejected it, by its name ("zeros"), and how many were given to it ("zeros tried"). case: the minimal failing case,
    as code. message: why, where the status is not "pass". script: a stand-alone script that shows the failure.
    blocked_by: the clause or family whose failure leaves nothing to say of this one.
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
    message: str = ""
    script: str | None = None
    blocked_by: str | None = None

    @property
    def conforms(self) -> bool:
        """Whether this verdict lets the implementation conform."""
        return not self.required or self.status not in NONCONFORMING


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdicts of a run, in the order of the contract, with what is needed to repeat it.

    incomplete: the run was stopped, and there may be clauses that were not judged.
    """

    verdicts: tuple[Verdict, ...]
    profile: str
    seed: int
    versions: dict[str, str]
    incomplete: bool = False

    @property
    def conforms(self) -> bool:
        """Whether something was judged, and every clause that is claimed, and must be kept, is kept."""
        judged = any(verdict.status != "not_claimed" for verdict in self.verdicts) and not self.incomplete
        return judged and all(verdict.conforms and verdict.status != "harness_error" for verdict in self.verdicts)

    def to_json(self) -> str:
        """Return the report as JSON; two runs with one seed give the same text."""
        return json.dumps({"conforms": self.conforms, **asdict(self)}, indent=2)
