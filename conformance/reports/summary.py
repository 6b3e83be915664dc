"""What a run found, summed up: a cell for each implementation and family or clause, and the share that is met."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mha.conformance.results import NONCONFORMING, Verdict
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES

# What a cell shows of the worst in it, worst first: a sign, and what it means.
SIGNS = {
    "harness error": ("!", "the judge failed"),
    "fail": ("✗", "fails"),
    "refused": ("✗", "fails"),
    "stale waiver": ("✗", "fails"),
    "blocked": ("b", "blocked by another failure"),
    "waived": ("w", "waived"),
    "SHOULD not kept": ("s", "SHOULD not kept"),
    "pass": ("✓", "kept"),
    "not claimed": ("-", "not claimed"),
}
# How the outcome begins of what conforms.
CONFORMS = "conforms"
# The signs in plain letters, for terminals without others.
PLAIN = {"✗": "x", "✓": "."}


def legend(signs: Collection[str]) -> list[str]:
    """Return what each of these signs means."""
    return [f"{sign} {meaning}" for sign, meaning in dict(SIGNS.values()).items() if sign in signs]


@dataclass(frozen=True)
class Cell:
    """What is worst in some verdicts, and in how many clauses."""

    status: str
    clauses: int

    @property
    def sign(self) -> str:
        """The sign of the status."""
        return SIGNS[self.status][0]

    @property
    def text(self) -> str:
        """The sign, and the number of clauses where it is about some of them."""
        return self.sign if self.status in ("pass", "not claimed") else f"{self.sign}{self.clauses}"


def status_of(verdict: Verdict) -> str:
    """Return the status in words; what does not stop conformance is told apart."""
    spared = not verdict.required and verdict.status in NONCONFORMING
    return "SHOULD not kept" if spared else verdict.status.replace("_", " ")


def cell_of(verdicts: Collection[Verdict]) -> Cell:
    """Return the cell of some verdicts."""
    worst = min((status_of(verdict) for verdict in verdicts), key=list(SIGNS).index)
    return Cell(worst, len({verdict.clause for verdict in verdicts if status_of(verdict) == worst}))


def families_of(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each family that has one, in the order of the contract."""
    found: dict[str, list[Verdict]] = {letters: [] for letters in FAMILIES}
    for verdict in verdicts:
        found[CLAUSES[verdict.clause].family].append(verdict)
    return {letters: own for letters, own in found.items() if own}


def outcome(verdicts: Collection[Verdict]) -> str:
    """Return what is to be said of an implementation as a whole."""
    statuses = {verdict.status for verdict in verdicts}
    if "harness_error" in statuses:
        return "CANNOT BE JUDGED"
    if statuses == {"not_claimed"}:
        return "NOTHING WAS JUDGED"
    if not all(verdict.conforms for verdict in verdicts):
        return "DOES NOT CONFORM"
    return f"{CONFORMS} but for what is waived" if "waived" in statuses else CONFORMS


def share(verdicts: Collection[Verdict]) -> tuple[int, int]:
    """Return how many clauses are met in every dtype and on every device, and how many are claimed."""
    claimed = {verdict.clause for verdict in verdicts if verdict.status != "not_claimed"}
    unmet = {verdict.clause for verdict in verdicts if verdict.status not in ("pass", "not_claimed")}
    return len(claimed - unmet), len(claimed)


def rejections(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """Return how many cases rejected the known-bad answer that they were tried on, and how many were tried."""
    counts = [count for verdict in verdicts for count in verdict.rejections.values()]
    return sum(count.rejected for count in counts), sum(count.tried for count in counts)
