"""Verdicts summed up: a cell for each family or clause, an outcome, causes, and totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from textwrap import shorten

from mha.conformance.cases.reasons import OTHER_DTYPES
from mha.conformance.harness.known_bad.advice import subject_of
from mha.conformance.results import Rejections, Verdict, status_of
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Kind

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
# The meaning of each sign, from the worst to the best.
MEANINGS = dict(SIGNS.values())
# Statuses, as `Verdict` names them, of which there is nothing to say.
QUIET = ("pass", "not_claimed")
UNJUDGED = ("not_claimed", "blocked")
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
        """The sign, and the number of clauses unless they pass or are not claimed."""
        if self.status in ("pass", "not claimed"):
            return self.sign
        return f"{self.sign}{self.clauses}"


def legend(signs: Collection[str]) -> list[str]:
    """Return each of these signs with its meaning."""
    return [f"{sign} {meaning}" for sign, meaning in MEANINGS.items() if sign in signs]


def is_failure(verdict: Verdict) -> bool:
    """Return whether the implementation cannot conform with a verdict, or the judge failed."""
    return verdict.status == "harness_error" or not verdict.conforms


def cell_of(verdicts: Collection[Verdict]) -> Cell:
    """Return the cell that sums up some verdicts, of which there is at least one."""
    worst = min(map(status_of, verdicts), key=list(SIGNS).index)
    clauses = {verdict.clause for verdict in verdicts if status_of(verdict) == worst}
    return Cell(worst, len(clauses))


def cells_by_family(verdicts: Iterable[Verdict]) -> dict[str, Cell]:
    """Return a cell for each family that has any verdict, in the order of the contract."""
    return {letters: cell_of(members) for letters, members in by_family(verdicts).items()}


def by_family(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each family that has any, in the order of the contract."""
    grouped: dict[str, list[Verdict]] = {letters: [] for letters in FAMILIES}
    for verdict in verdicts:
        grouped[CLAUSES[verdict.clause].family].append(verdict)
    return {letters: members for letters, members in grouped.items() if members}


def conforms(verdicts: Collection[Verdict]) -> bool:
    """Return whether an implementation conforms: something was judged, and nothing failed."""
    judged = any(verdict.status != "not_claimed" for verdict in verdicts)
    return judged and not any(map(is_failure, verdicts))


def outcome(verdicts: Collection[Verdict]) -> str:
    """Return the verdict on an implementation as a whole, in a few words; `sentence` says why."""
    statuses = {verdict.status for verdict in verdicts}
    if "harness_error" in statuses:
        return "COULD NOT BE JUDGED"
    if statuses <= {"not_claimed"}:
        return "NOTHING WAS JUDGED"
    if not conforms(verdicts):
        return "DOES NOT CONFORM"
    words = "CONFORMS where judged" if tally(verdicts).few_judged else "CONFORMS"
    return f"{words}, with waivers" if "waived" in statuses else words


def severity(verdict: Verdict) -> tuple[int, int, bool, bool, int]:
    """Return a sort key: the worst status comes first, and there incorrect answers.

    Of these, a diagnosed failure comes first, and a clause about a whole result, which any defect
    violates, last.
    """
    clause = CLAUSES[verdict.clause]
    # By the sign, since "fail", "refused" and "stale waiver" are equally bad.
    sign = list(MEANINGS).index(SIGNS[status_of(verdict)][0])
    kind = list(KINDS).index(clause.kind)
    place = list(CLAUSES).index(clause.id)
    return sign, kind, not verdict.diagnosis, clause.general, place


def findings(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return verdicts in groups, the most severe first: of one diagnosis, or else of one clause.

    A group is about one implementation; the verdicts of a clause have the same status.

    >>> where = {"implementation": "mine", "level": "MUST", "status": "fail", "device": "cpu"}
    >>> same = {"diagnosis": "the mask is ignored", "dtype": "float32"}
    >>> failed = [Verdict(clause=clause, **where, **same) for clause in ("HED-1", "MSK-1")]
    >>> [[verdict.clause for verdict in found] for found in findings(failed)]
    [['MSK-1', 'HED-1']]
    """
    grouped: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in sorted(verdicts, key=severity):
        key: tuple[str, ...] = (verdict.implementation, verdict.diagnosis)
        if not verdict.diagnosis:
            key = (verdict.implementation, verdict.clause, status_of(verdict))
        grouped.setdefault(key, []).append(verdict)
    return [_most_telling_first(same) for same in grouped.values()]


def _most_telling_first(same: list[Verdict]) -> list[Verdict]:
    """Return verdicts of one diagnosis with those on its own subject first."""
    subject = subject_of(same[0].diagnosis)
    return sorted(same, key=lambda verdict: verdict.clause != subject)


def clauses_in(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the clauses of some verdicts, each once, in the order of the verdicts."""
    return list(dict.fromkeys(verdict.clause for verdict in verdicts))


def cause_of(verdicts: Collection[Verdict]) -> str:
    """Return the diagnosis that verdicts share, with the clauses that it explains; or ""."""
    clauses = clauses_in(verdicts)
    diagnosis = next(iter(verdicts)).diagnosis
    if not diagnosis or len(clauses) == 1:
        return diagnosis
    return f"{diagnosis} (one cause, {len(clauses)} clauses: {', '.join(clauses)})"


@dataclass(frozen=True)
class Count:
    """How many clauses pass in every dtype and on every device, and how many were judged."""

    passing: int
    judged: int

    def __str__(self) -> str:
        """Return it as in "57 of 58"."""
        return f"{self.passing} of {self.judged}"


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The clauses of an implementation, each counted once, by its worst verdict.

    must, should: those that were judged, by kind; a MAY that is claimed, and a SHOULD that is
    required, count as a MUST. unjudged: how many were not judged, since they are not claimed or
    blocked, by the reason, the most frequent first.
    """

    must: dict[Kind, Count]
    should: dict[Kind, Count]
    unjudged: dict[str, int]

    @property
    def judged(self) -> int:
        """The number of clauses that were judged."""
        return sum(count.judged for count in (*self.must.values(), *self.should.values()))

    @property
    def clauses(self) -> int:
        """The number of clauses, judged or not."""
        return self.judged + sum(self.unjudged.values())

    @property
    def few_judged(self) -> bool:
        """Whether fewer than half of the clauses were judged."""
        return 2 * self.judged < self.clauses

    def __str__(self) -> str:
        """Return the counts, as in "answers 57 of 58; refusals 2 of 3; SHOULD: answers 4 of 5"."""
        parts = [f"{kind} {count}" for kind, count in self.must.items()]
        if self.should:
            recommended = ", ".join(f"{kind} {count}" for kind, count in self.should.items())
            parts.append(f"SHOULD: {recommended}")
        return "; ".join(parts)


def tally(verdicts: Iterable[Verdict]) -> Tally:
    """Count the clauses of an implementation by level and kind.

    >>> where = {"implementation": "mine", "dtype": "float32", "device": "cpu"}
    >>> passes = Verdict(clause="MSK-1", level="MUST", status="pass", **where)
    >>> fails = Verdict(clause="MSK-2", level="MUST", status="fail", **where)
    >>> print(tally([passes, fails]))
    answers 1 of 2
    """
    by_clause: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_clause.setdefault(verdict.clause, []).append(verdict)
    must: list[Verdict] = []
    should: list[Verdict] = []
    reasons: Counter[str] = Counter()
    for own in by_clause.values():
        worst = min(own, key=severity)  # "not claimed" is the least severe
        if worst.status in UNJUDGED:
            reasons[_reason(worst, own)] += 1
        elif worst.required:
            must.append(worst)
        else:
            should.append(worst)
    return Tally(must=_counts(must), should=_counts(should), unjudged=dict(reasons.most_common()))


def _counts(verdicts: Iterable[Verdict]) -> dict[Kind, Count]:
    """Return the counts of each kind that has any, in the order of `KINDS`."""
    passes: dict[Kind, list[bool]] = {kind: [] for kind in KINDS}
    for verdict in verdicts:
        passes[CLAUSES[verdict.clause].kind].append(verdict.status == "pass")
    return {kind: Count(sum(each), len(each)) for kind, each in passes.items() if each}


def _reason(worst: Verdict, verdicts: Collection[Verdict]) -> str:
    """Return in a word or two why a clause was not judged, such as the claim that is missing."""
    if worst.blocked_by:
        return f"blocked by {worst.blocked_by}"
    # What is missing in every dtype tells more than a dtype in which the clause is not judged.
    own = [verdict for verdict in verdicts if verdict.topic != OTHER_DTYPES]
    first = own[0] if own else worst
    return first.topic or shorten(first.message.partition("; ")[0], 40)


def total_rejections(verdicts: Iterable[Verdict]) -> Rejections:
    """Return how often the cases rejected a known-bad answer, over all clauses and answers."""
    total = Rejections(0, 0)
    for verdict in verdicts:
        for count in verdict.rejections.values():
            total += count
    return total
