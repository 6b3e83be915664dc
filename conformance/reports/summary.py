"""Verdicts summed up: a cell for each implementation and family or clause, an outcome, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mha.conformance.results import NONCONFORMING, Rejections, Verdict
from mha.spec.clauses import CLAUSES, FAMILIES

# The sign of each status and what it means, from the worst status to the best.
SIGNS = {
    "harness error": ("!", "the judge failed"),
    "fail": ("✗", "fails"),
    "refused": ("✗", "fails"),
    "stale waiver": ("✗", "fails"),
    "blocked": ("b", "blocked by another failure"),
    "waived": ("w", "waived"),
    "unmet SHOULD": ("s", "unmet SHOULD"),
    "pass": ("✓", "passes"),
    "not claimed": ("-", "not claimed"),
}
# In ASCII, for terminals that cannot show the signs.
PLAIN = {"✗": "x", "✓": "."}


@dataclass(frozen=True)
class Cell:
    """The worst status among some verdicts, and the number of clauses that have it."""

    status: str
    clauses: int

    @property
    def sign(self) -> str:
        """The sign of the status."""
        return SIGNS[self.status][0]

    @property
    def text(self) -> str:
        """The sign and the number of clauses; the sign alone for a pass and for what is not claimed."""
        return self.sign if self.status in ("pass", "not claimed") else f"{self.sign}{self.clauses}"


def legend(signs: Collection[str]) -> list[str]:
    """Return each of these signs with its meaning."""
    return [f"{sign} {meaning}" for sign, meaning in dict(SIGNS.values()).items() if sign in signs]


def status_of(verdict: Verdict) -> str:
    """Return the status in words; a failure that does not keep the implementation from conforming is an unmet SHOULD.

    >>> where = {"implementation": "sdpa", "dtype": "float32", "device": "cpu"}
    >>> status_of(Verdict(clause="NUM-3", level="SHOULD", status="fail", required=False, **where))
    'unmet SHOULD'
    """
    optional = not verdict.required and verdict.status in NONCONFORMING
    return "unmet SHOULD" if optional else verdict.status.replace("_", " ")


def is_failure(verdict: Verdict) -> bool:
    """Return whether a verdict keeps the implementation from conforming, or the judge failed to reach it."""
    return verdict.status == "harness_error" or not verdict.conforms


def cell_of(verdicts: Collection[Verdict]) -> Cell:
    """Return the cell that sums up some verdicts, of which there is at least one."""
    worst = min((status_of(verdict) for verdict in verdicts), key=list(SIGNS).index)
    return Cell(worst, len({verdict.clause for verdict in verdicts if status_of(verdict) == worst}))


def by_family(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each family that has any, in the order of the contract."""
    grouped: dict[str, list[Verdict]] = {letters: [] for letters in FAMILIES}
    for verdict in verdicts:
        grouped[CLAUSES[verdict.clause].family].append(verdict)
    return {letters: members for letters, members in grouped.items() if members}


def conforms(verdicts: Collection[Verdict]) -> bool:
    """Return whether an implementation with these verdicts conforms; it does not where nothing was judged."""
    judged = any(verdict.status != "not_claimed" for verdict in verdicts)
    return judged and not any(is_failure(verdict) for verdict in verdicts)


def outcome(verdicts: Collection[Verdict]) -> str:
    """Return the verdict on an implementation as a whole, in words."""
    statuses = {verdict.status for verdict in verdicts}
    if "harness_error" in statuses:
        return "COULD NOT BE JUDGED"
    if statuses <= {"not_claimed"}:
        return "NOTHING WAS JUDGED"
    if not conforms(verdicts):
        return "DOES NOT CONFORM"
    return "conforms, with waivers" if "waived" in statuses else "conforms"


def count_clauses(verdicts: Collection[Verdict]) -> tuple[int, int]:
    """Return how many clauses pass in every dtype and on every device, and how many are claimed."""
    claimed = {verdict.clause for verdict in verdicts if verdict.status != "not_claimed"}
    unmet = {verdict.clause for verdict in verdicts if verdict.status not in ("pass", "not_claimed")}
    return len(claimed - unmet), len(claimed)


def count_statuses(verdicts: Iterable[Verdict]) -> str:
    """Return the number of verdicts of each status, the worst first, as in "1 fail, 40 pass"."""
    counts = Counter(status_of(verdict) for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status}" for status in SIGNS if status in counts)


def total_rejections(verdicts: Iterable[Verdict]) -> Rejections:
    """Return how often the cases rejected a known-bad answer, over all clauses and all known-bad answers."""
    return sum((count for verdict in verdicts for count in verdict.rejections.values()), Rejections(0, 0))
