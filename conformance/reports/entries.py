"""What does not pass, in the order in which a reader needs it: an entry for each cause, in
sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha.conformance.reports.sentence import EMPTY_ROWS
from mha.conformance.reports.summary import findings
from mha.conformance.results import Verdict, status_of
from mha.spec.clauses import CLAUSES

# The title of each section, in order.
SECTIONS = {
    "judge": "The judge failed",
    "answers": "Wrong answers",
    "conduct": "Side effects, or calls that differ when they are repeated, compiled or copied",
    "refusals": "Accepts sizes that do not fit",
    "waivers": "Waivers that are no longer needed",
    "waived": "Waived",
    "empty rows": "Rows without any allowed key (advice)",
    "invalid input": "Accepts invalid input (advice)",
    "advice": "Other advice",
}
PASSING = ("pass", "not claimed")


@dataclass(frozen=True)
class Entry:
    """Failures of one implementation with one cause, the most telling one first."""

    verdicts: tuple[Verdict, ...]

    @property
    def first(self) -> Verdict:
        """The failure that is shown."""
        return self.verdicts[0]

    @property
    def clauses(self) -> list[str]:
        """The clauses that fail, each once."""
        return list(dict.fromkeys(verdict.clause for verdict in self.verdicts))

    @property
    def cause(self) -> str:
        """The diagnosis that they share; empty without one."""
        return self.first.diagnosis

    @property
    def section(self) -> str:
        """The section that it belongs to, a key of `SECTIONS`."""
        return section_of(self.first)


def section_of(verdict: Verdict) -> str:
    """Return the section of a verdict that does not pass, a key of `SECTIONS`."""
    own = {"harness error": "judge", "stale waiver": "waivers", "waived": "waived"}
    status, kind = status_of(verdict), CLAUSES[verdict.clause].kind
    if status in own:
        return own[status]
    if status != "unmet SHOULD":
        return kind
    if verdict.clause == EMPTY_ROWS:
        return "empty rows"
    return "invalid input" if kind == "refusals" else "advice"


def entries(verdicts: Iterable[Verdict]) -> list[Entry]:
    """Return what does not pass, by section, and there what blocks other clauses first.

    What only another failure blocks is left out.
    """
    verdicts = list(verdicts)
    blocking = {verdict.blocked_by for verdict in verdicts if verdict.status == "blocked"}
    listed = [
        verdict
        for verdict in verdicts
        if verdict.status != "blocked" and status_of(verdict) not in PASSING
    ]
    found = [Entry(tuple(same)) for same in findings(listed)]

    def rank(entry: Entry) -> tuple[int, bool]:
        names = {name for clause in entry.clauses for name in (clause, CLAUSES[clause].family)}
        return list(SECTIONS).index(entry.section), names.isdisjoint(blocking)

    return sorted(found, key=rank)


def by_section(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return entries by the title of their section, in order."""
    grouped: dict[str, list[Entry]] = {}
    for entry in found:
        grouped.setdefault(SECTIONS[entry.section], []).append(entry)
    return grouped
