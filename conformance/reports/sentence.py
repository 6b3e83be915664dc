"""The verdict on an implementation in a sentence or two: what decides first, then what is advised."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mha.conformance.reports.summary import (
    Tally,
    conforms,
    findings,
    is_failure,
    outcome,
    tally,
)
from mha.conformance.results import Verdict, status_of
from mha.spec.clauses import CLAUSES, Kind

# How many clauses are named; the entries above have the others.
MOST_NAMED = 6
# Of invalid input that is accepted, how many kinds are described.
MOST_EXPLAINED = 2
# The clause about rows without any allowed key, which people dispute most: it is named on its own.
EMPTY_ROWS = "MSK-9"


def sentence(verdicts: Sequence[Verdict], not_covered: Collection[str] = ()) -> str:
    """Return the verdict on an implementation in words.

    not_covered: what it has that no clause judges, such as an option.

    >>> where = {"implementation": "mine", "dtype": "float32", "device": "cpu", "level": "MUST"}
    >>> passes, fails = {"status": "pass", **where}, {"status": "fail", **where}
    >>> sentence([Verdict(clause="MSK-1", **fails), Verdict(clause="STA-1", **passes)])
    'DOES NOT CONFORM: 1 of 1 answers is wrong (MSK-1).'
    >>> sentence([Verdict(clause=clause, **passes) for clause in ("MSK-1", "MSK-2", "STA-1")])
    'CONFORMS: all 2 answers right, 1 of conduct.'
    """
    counted, shown = tally(verdicts), outcome(verdicts)
    if any(verdict.status == "harness_error" for verdict in verdicts):
        broken = _named(verdict for verdict in verdicts if verdict.status == "harness_error")
        return f"{shown}: the judge itself failed ({broken})."
    if not counted.judged:
        return f"{shown}: {'; '.join(dict.fromkeys(verdict.message for verdict in verdicts))}."
    passes = conforms(verdicts)
    reasons = ", ".join(_passing(counted) if passes else _failing(verdicts, counted))
    remarks = list(_remarks(verdicts))
    options = _first_few(list(not_covered))
    if options and passes:
        where = "" if "where judged" in shown else " where judged"
        head = f"{shown}{where}; not covered: {options}. {reasons[0].upper()}{reasons[1:]}."
        return " ".join([head, *remarks])
    remarks += [f"Not covered: {options}."] if options else []
    return " ".join([f"{shown}: {reasons}.", *remarks])


def _passing(counted: Tally) -> list[str]:
    """Return what passes of what decides."""
    words: dict[Kind, tuple[str, str]] = {
        "answers": ("1 answer right", "all {} answers right"),
        "conduct": ("1 of conduct", "all {} of conduct"),
    }
    passing = []
    for kind, (single, several) in words.items():
        number = counted.must[kind].judged if kind in counted.must else 0
        passing += [single if number == 1 else several.format(number)] if number else []
    if passing:
        return passing
    return ["invalid sizes are refused" if counted.must else "nothing that was judged is required"]


def _failing(verdicts: Sequence[Verdict], counted: Tally) -> Iterator[str]:
    """Yield what fails of what decides, by kind."""
    failures = [verdict for verdict in verdicts if is_failure(verdict)]
    stale = [verdict for verdict in failures if verdict.status == "stale_waiver"]
    blocked = [verdict for verdict in failures if verdict.status == "blocked"]
    wrong = [verdict for verdict in failures if verdict not in stale and verdict not in blocked]
    by_kind: dict[Kind, list[Verdict]] = {}
    for verdict in wrong:
        by_kind.setdefault(CLAUSES[verdict.clause].kind, []).append(verdict)
    if answers := by_kind.get("answers"):
        number = len(_clauses(answers))
        are = "is" if number == 1 else "are"
        yield f"{number} of {counted.must['answers'].judged} answers {are} wrong ({_named(answers)})"
        if causes := _causes(answers):
            yield causes
    if conduct := by_kind.get("conduct"):
        number = len(_clauses(conduct))
        fails = "fails" if number == 1 else "fail"
        yield f"{number} of {counted.must['conduct'].judged} clauses of conduct {fails} ({_named(conduct)})"
    for clause in _clauses(by_kind.get("refusals", ())):
        yield f"it accepts {CLAUSES[clause].accepts} ({clause})"
    if stale:
        yield f"it no longer needs its waiver of {_named(stale)}"
    if blocked:
        number = len(_clauses(blocked))
        yield (
            f"{number} more cannot be judged before that is mended" if wrong else f"{_named(blocked)} cannot be judged"
        )


def _causes(wrong: Sequence[Verdict]) -> str:
    """Return how many causes failures have, where these are fewer than the clauses."""
    causes = len(findings(wrong))
    if causes >= len(_clauses(wrong)):
        return ""
    return "one cause" if causes == 1 else f"{causes} causes"


def _remarks(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what does not decide: waivers, rows without a key, invalid input, and other advice."""
    if waived := [verdict for verdict in verdicts if verdict.status == "waived"]:
        yield f"Waived: {_named(waived)}."
    unmet = [verdict for verdict in verdicts if status_of(verdict) == "unmet SHOULD"]
    if any(verdict.clause == EMPTY_ROWS for verdict in unmet):
        yield f"A row without any allowed key makes other results NaN ({EMPTY_ROWS})."
    others = [verdict for verdict in unmet if verdict.clause != EMPTY_ROWS]
    accepted = [clause for clause in _clauses(others) if CLAUSES[clause].accepts]
    if accepted:
        inputs = accepted
        if len(accepted) <= MOST_EXPLAINED:
            inputs = [f"{CLAUSES[clause].accepts} ({clause})" for clause in accepted]
        yield f"Accepts invalid input: {', '.join(inputs)}."
    advice = [verdict for verdict in others if verdict.clause not in accepted]
    if advice:
        yield f"Also advised: {_named(advice)}."


def _clauses(verdicts: Collection[Verdict]) -> list[str]:
    """Return the clauses of some verdicts, each once, in the order of the contract."""
    found = {verdict.clause for verdict in verdicts}
    return [clause for clause in CLAUSES if clause in found]


def _named(verdicts: Iterator[Verdict] | Collection[Verdict]) -> str:
    """Return the clauses of some verdicts, the first few by name."""
    return _first_few(_clauses(list(verdicts)))


def _first_few(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
