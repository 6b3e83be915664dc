"""What does not pass, in the order in which a reader needs it: sections, and entries by cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha.conformance.reports.sentence import EMPTY_ROWS
from mha.conformance.reports.summary import QUIET, clauses_in, findings
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
# The sections of statuses that come before the kind of a clause.
OWN_SECTIONS = {"harness error": "judge", "stale waiver": "waivers", "waived": "waived"}


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
        return clauses_in(self.verdicts)

    @property
    def cause(self) -> str:
        """The diagnosis that they share; empty without one."""
        return self.first.diagnosis

    @property
    def section(self) -> str:
        """The section that it belongs to, a key of `SECTIONS`."""
        status = status_of(self.first)
        kind = CLAUSES[self.first.clause].kind
        if status in OWN_SECTIONS:
            return OWN_SECTIONS[status]
        if status != "unmet SHOULD":
            return kind
        if self.first.clause == EMPTY_ROWS:
            return "empty rows"
        return "invalid input" if kind == "refusals" else "advice"


def entries(verdicts: Iterable[Verdict]) -> list[Entry]:
    """Return what does not pass, by section, and there what blocks other clauses first.

    What only another failure blocks is left out.
    """
    listed: list[Verdict] = []
    blocking: set[str | None] = set()
    for verdict in verdicts:
        if verdict.status == "blocked":
            blocking.add(verdict.blocked_by)
        elif verdict.status not in QUIET:
            listed.append(verdict)

    def rank(entry: Entry) -> tuple[int, bool]:
        # A verdict is blocked by a clause or by a whole family.
        families = [CLAUSES[clause].family for clause in entry.clauses]
        return list(SECTIONS).index(entry.section), blocking.isdisjoint(entry.clauses + families)

    found = [Entry(tuple(same)) for same in findings(listed)]
    return sorted(found, key=rank)


def by_section(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return entries by the title of their section, in order."""
    grouped: dict[str, list[Entry]] = {}
    for entry in found:
        grouped.setdefault(SECTIONS[entry.section], []).append(entry)
    return grouped
