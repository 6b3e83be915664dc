"""The verdict on an implementation in a sentence or two: what decides, then what is advised."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from mha.conformance.reports.layout import counted, first_few
from mha.conformance.reports.summary import (
    Tally,
    clauses_in,
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
# How many kinds of accepted invalid input are described, and how many clauses of one cause named.
MOST_EXPLAINED = 2
# What joins two defects in a diagnosis.
PAIR = ", and "
# The clause about rows without any allowed key, which people dispute most: it is named on its own.
EMPTY_ROWS = "MSK-9"
# What is said of clauses that all pass: of one, and of several.
ALL_PASS: dict[Kind, tuple[str, str]] = {
    "answers": ("1 answer right", "all {} answers right"),
    "conduct": ("1 of conduct", "all {} of conduct"),
}


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
    totals = tally(others)
    if broken:
        fault = (
            f"COULD NOT BE JUDGED on {_named(broken)}: a fault of mha-conformance, not of what it"
            " judges."
        )
        if not totals.judged:
            return fault
        return f"{fault} Otherwise: {sentence(others, not_covered)}"
    if not totals.judged:
        reasons = dict.fromkeys(verdict.message for verdict in verdicts)
        return f"{outcome(verdicts)}: {'; '.join(reasons)}."
    return _judged(verdicts, totals, not_covered)


def sentence_of(report: Report, name: str) -> str:
    """Return the verdict of a report on an implementation, by its name, in words."""
    return sentence(report.by_implementation[name], report.not_covered.get(name, ()))


def _judged(verdicts: Sequence[Verdict], totals: Tally, not_covered: Collection[str]) -> str:
    """Return the verdict where something was judged, and the judge did not fail."""
    shown = outcome(verdicts)
    passes = conforms(verdicts)
    reasons = ", ".join(_passing(totals) if passes else _failing(verdicts, totals))
    remarks = list(_remarks(verdicts))
    options = _first_few(list(not_covered))
    if options and passes:
        where = "" if "where judged" in shown else " where judged"
        head = f"{shown}{where}; not covered: {options}. {reasons[0].upper()}{reasons[1:]}."
        return " ".join([head, *remarks])
    if options:
        remarks.append(f"Not covered: {options}.")
    return " ".join([f"{shown}: {reasons}.", *remarks])


def _passing(totals: Tally) -> list[str]:
    """Return how many required clauses pass, by kind."""
    passing = []
    for kind, (single, several) in ALL_PASS.items():
        if kind in totals.must:
            number = totals.must[kind].judged
            passing.append(single if number == 1 else several.format(number))
    if passing:
        return passing
    if totals.must:
        return ["invalid sizes are refused"]
    return ["nothing that was judged is required"]


def _failing(verdicts: Sequence[Verdict], totals: Tally) -> Iterator[str]:
    """Yield which required clauses fail: wrong ones by kind, stale waivers, and blocked ones."""
    wrong: list[Verdict] = []
    stale: list[Verdict] = []
    blocked: list[Verdict] = []
    groups = {"stale_waiver": stale, "blocked": blocked}
    for verdict in filter(is_failure, verdicts):
        groups.get(verdict.status, wrong).append(verdict)
    yield from _wrong(wrong, totals)
    if stale:
        yield f"it no longer needs its waiver of {_named(stale)}"
    if blocked and wrong:
        yield f"{len(_clauses(blocked))} more cannot be judged before that is mended"
    elif blocked:
        yield f"{_named(blocked)} cannot be judged"


def _wrong(wrong: Sequence[Verdict], totals: Tally) -> Iterator[str]:
    """Yield what fails in its own right, by kind."""
    answers, conduct, refusals = (_of_kind(wrong, kind) for kind in KINDS)
    if answers:
        number = len(_clauses(answers))
        judged = totals.must["answers"].judged
        are = "is" if number == 1 else "are"
        yield f"{number} of {judged} answers {are} wrong{_cause(answers)}"
    if conduct:
        number = len(_clauses(conduct))
        judged = totals.must["conduct"].judged
        fails = "fails" if number == 1 else "fail"
        yield f"{number} of {judged} clauses of conduct {fails} ({_named(conduct)})"
    for clause in _clauses(refusals):
        yield f"it accepts {CLAUSES[clause].accepts} ({clause})"


def _of_kind(verdicts: Sequence[Verdict], kind: Kind) -> list[Verdict]:
    return [verdict for verdict in verdicts if CLAUSES[verdict.clause].kind == kind]


def _cause(wrong: Sequence[Verdict]) -> str:
    """Return the clauses of some failures, with their cause, or how many causes they have."""
    groups = findings(wrong)
    clauses = clauses_in(chain.from_iterable(groups))
    diagnosed = [same for same in groups if same[0].diagnosis]
    if len(groups) == len(diagnosed) == 1:
        return _only_cause(clauses, groups[0][0].diagnosis)
    names, unexplained = _first_few(clauses), len(groups) - len(diagnosed)
    if not diagnosed:
        return f" ({names})"
    causes = counted(len(diagnosed), "cause")
    if unexplained:
        return f" ({names}), {causes} named, {unexplained} more unexplained"
    return f" ({names}), {causes}"


def _only_cause(clauses: Sequence[str], diagnosis: str) -> str:
    """Return the clauses that one diagnosis explains, the first of many, and the diagnosis."""
    if len(clauses) == 1:
        return f" ({clauses[0]}): {diagnosis}"
    most = MOST_EXPLAINED if len(clauses) <= MOST_EXPLAINED else 1
    causes = "two causes" if PAIR in diagnosis else "one cause"
    return f" ({first_few(clauses, most)}), {causes}: {diagnosis}"


def _remarks(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what does not decide: waivers and advice."""
    waived = [verdict for verdict in verdicts if verdict.status == "waived"]
    if waived:
        yield f"Waived: {_named(waived)}."
    causes = {verdict.diagnosis for verdict in verdicts if is_failure(verdict)} - {""}
    unmet = []
    for verdict in verdicts:
        is_unmet = status_of(verdict) == "unmet SHOULD" and verdict.status != "blocked"
        if is_unmet and verdict.diagnosis not in causes:
            unmet.append(verdict)
    yield from _advice(_clauses(unmet))


def _advice(unmet: Sequence[str]) -> Iterator[str]:
    """Yield what is advised: on rows without a key, on invalid input, and on the rest."""
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
    return first_few(names, MOST_NAMED, least_left_out=2)
