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
from mha.conformance.results import Report, Verdict, status_of
from mha.spec.clauses import CLAUSES, KINDS, Kind

# How many clauses are named; the entries above have the others.
MOST_NAMED = 6
# Of invalid input that is accepted, how many kinds are described; and of one cause, how many
# clauses are named.
MOST_EXPLAINED = 2
# What joins two defects in a diagnosis.
PAIR = ", and "
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
    broken = [verdict for verdict in verdicts if verdict.status == "harness_error"]
    others = [verdict for verdict in verdicts if verdict.status != "harness_error"]
    counted = tally(others)
    if broken:
        fault = (
            f"COULD NOT BE JUDGED on {_named(broken)}: a fault of mha-conformance, not of what it"
            " judges."
        )
        return f"{fault} Otherwise: {sentence(others, not_covered)}" if counted.judged else fault
    if not counted.judged:
        return (
            f"{outcome(verdicts)}:"
            f" {'; '.join(dict.fromkeys(verdict.message for verdict in verdicts))}."
        )
    return _judged(verdicts, counted, not_covered)


def sentence_of(report: Report, name: str) -> str:
    """Return the verdict of a report on an implementation, by its name, in words."""
    return sentence(report.by_implementation[name], report.not_covered.get(name, ()))


def _judged(verdicts: Sequence[Verdict], counted: Tally, not_covered: Collection[str]) -> str:
    """Return the verdict where something was judged, and nothing is at fault but what is judged."""
    shown = outcome(verdicts)
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
    by_status: dict[str, list[Verdict]] = {"wrong": [], "stale_waiver": [], "blocked": []}
    for verdict in failures:
        by_status[verdict.status if verdict.status in by_status else "wrong"].append(verdict)
    wrong, stale, blocked = by_status.values()
    yield from _wrong(wrong, counted)
    if stale:
        yield f"it no longer needs its waiver of {_named(stale)}"
    if blocked and wrong:
        yield f"{len(_clauses(blocked))} more cannot be judged before that is mended"
    elif blocked:
        yield f"{_named(blocked)} cannot be judged"


def _wrong(wrong: Sequence[Verdict], counted: Tally) -> Iterator[str]:
    """Yield what fails in its own right, by kind."""
    answers, conduct, refusals = (_of_kind(wrong, kind) for kind in KINDS)
    if answers:
        number = len(_clauses(answers))
        are = "is" if number == 1 else "are"
        yield f"{number} of {counted.must['answers'].judged} answers {are} wrong{_cause(answers)}"
    if conduct:
        number = len(_clauses(conduct))
        fails = "fails" if number == 1 else "fail"
        yield (
            f"{number} of {counted.must['conduct'].judged} clauses of conduct {fails}"
            f" ({_named(conduct)})"
        )
    for clause in _clauses(refusals):
        yield f"it accepts {CLAUSES[clause].accepts} ({clause})"


def _of_kind(verdicts: Sequence[Verdict], kind: Kind) -> list[Verdict]:
    return [verdict for verdict in verdicts if CLAUSES[verdict.clause].kind == kind]


def _cause(wrong: Sequence[Verdict]) -> str:
    """Return the clauses of some failures, with their cause, or how many causes they have."""
    groups = findings(wrong)
    clauses = list(dict.fromkeys(verdict.clause for same in groups for verdict in same))
    diagnosis, named = groups[0][0].diagnosis, sum(bool(same[0].diagnosis) for same in groups)
    if len(groups) > 1 or not diagnosis:
        names, unnamed = _first_few(clauses), len(groups) - named
        if named == len(groups):
            return f" ({names}), {named} causes"
        return (
            f" ({names}), {_counted(named, 'cause')} named, {unnamed} more unexplained"
            if named
            else f" ({names})"
        )
    names = (
        ", ".join(clauses)
        if len(clauses) <= MOST_EXPLAINED
        else f"{clauses[0]} and {len(clauses) - 1} more"
    )
    if len(clauses) == 1:
        return f" ({names}): {diagnosis}"
    return f" ({names}), {'two causes' if PAIR in diagnosis else 'one cause'}: {diagnosis}"


def _counted(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _remarks(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what does not decide: waivers and advice."""
    waived = [verdict for verdict in verdicts if verdict.status == "waived"]
    if waived:
        yield f"Waived: {_named(waived)}."
    causes = {verdict.diagnosis for verdict in verdicts if is_failure(verdict)} - {""}
    unmet = [
        verdict
        for verdict in verdicts
        if status_of(verdict) == "unmet SHOULD" and verdict.status != "blocked"
    ]
    yield from _advice(_clauses([verdict for verdict in unmet if verdict.diagnosis not in causes]))


def _advice(unmet: Sequence[str]) -> Iterator[str]:
    """Yield what is advised: on rows without a key, on invalid input, and the rest by its clauses."""
    if EMPTY_ROWS in unmet:
        yield f"A row without any allowed key makes the gradients of other rows NaN ({EMPTY_ROWS})."
    others = [clause for clause in unmet if clause != EMPTY_ROWS]
    accepted = [clause for clause in others if CLAUSES[clause].accepts]
    if accepted:
        yield f"Accepts invalid input: {', '.join(_inputs(accepted))}."
    advice = [clause for clause in others if clause not in accepted]
    if advice:
        yield f"Also advised: {_first_few(advice)}."


def _inputs(accepted: Sequence[str]) -> list[str]:
    """Return the invalid input that is accepted, described if there are few kinds of it."""
    if len(accepted) > MOST_EXPLAINED:
        return list(accepted)
    return [f"{CLAUSES[clause].accepts} ({clause})" for clause in accepted]


def _clauses(verdicts: Collection[Verdict]) -> list[str]:
    """Return the clauses of some verdicts, each once, in the order of the contract."""
    found = {verdict.clause for verdict in verdicts}
    return [clause for clause in CLAUSES if clause in found]


def _named(verdicts: Collection[Verdict]) -> str:
    """Return the clauses of some verdicts, the first few by name."""
    return _first_few(_clauses(verdicts))


def _first_few(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
