"""How clauses are counted: by kind and level, with reasons, incorrect answers first."""

from __future__ import annotations

import re
from dataclasses import replace

from mha.conformance.cases.domain import Domain
from mha.conformance.properties.registry import properties
from mha.conformance.reports.compare import Comparison
from mha.conformance.reports.files import render
from mha.conformance.reports.github import workflow_commands
from mha.conformance.reports.sentence import sentence
from mha.conformance.reports.summary import Count, outcome, tally
from mha.conformance.reports.text import summarise
from mha.conformance.results import Verdict
from mha.spec import Claims
from mha.spec.clauses import CLAUSES, KINDS
from support.reports_made import report, verdict

REFUSALS = ["CFG-1", "CFG-2", "CFG-3", "CFG-6", "SHP-6", "SHP-8", "MSK-12", "PAK-4"]


def test_kind_of_each_clause() -> None:
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for clause in CLAUSES.values():
        kinds[clause.kind].append(clause.id)
    assert kinds["refusals"] == REFUSALS
    assert set(kinds["conduct"]) == {
        clause for clause in CLAUSES if clause[:3] in ("STA", "CMP", "DET")
    } | {
        "CFG-7",
        "SHP-9",
        "DRP-3",
        "MEM-1",
        "DST-10",
        "DST-11",
    }
    assert sum(map(len, kinds.values())) == len(CLAUSES)


def test_invalid_input_does_not_decide() -> None:
    """Of what is to be refused, only the sizes that this project is about must be."""
    required = [clause for clause in REFUSALS if CLAUSES[clause].level != "SHOULD"]
    assert required == ["CFG-1"]
    assert [clause.id for clause in CLAUSES.values() if clause.accepts] == REFUSALS


def test_clauses_are_counted_once_for_all_dtypes() -> None:
    one = [
        verdict("x", "SHP-1"),
        verdict("x", "SHP-1", "fail", dtype="float64"),
        verdict("x", "CAU-1", "not_claimed"),
    ]
    counted = tally([*one, verdict("x", "MSK-8")])
    assert (counted.must, counted.should, counted.unjudged) == (
        {"answers": Count(1, 2)},
        {},
        {"causal": 1},
    )


def test_kinds_and_levels_are_counted_separately() -> None:
    verdicts = [
        verdict("x", "MSK-1"),
        verdict("x", "MSK-12", "fail"),
        verdict("x", "SHP-6"),
        verdict("x", "CMP-1"),  # a MAY that is claimed
        verdict("x", "CFG-2", "fail"),
        verdict(
            "x", "MSK-8", "fail", level="SHOULD", required=False
        ),  # in the part that is a recommendation
    ]
    counts = "answers 1 of 1; conduct 1 of 1; SHOULD: answers 0 of 1, refusals 1 of 3"
    assert str(tally(verdicts)) == counts
    assert (tally(verdicts).judged, tally(verdicts).clauses) == (6, 6)
    assert str(tally([verdict("x", "CFG-2")])) == "SHOULD: refusals 1 of 1"


def test_sentence_says_what_decides_first() -> None:
    right = [verdict("x", clause) for clause in ("NUM-1", "MSK-1", "STA-4")]
    accepts = verdict("x", "SHP-6", "fail")
    assert sentence(right) == "CONFORMS: all 2 answers right, 1 of conduct."
    invalid = "Accepts invalid input: inputs whose widths or lengths do not match (SHP-6)."
    assert sentence([*right, accepts]) == f"CONFORMS: all 2 answers right, 1 of conduct. {invalid}"
    wrong = [verdict("x", clause, "fail") for clause in ("NUM-2", "HED-1", "STA-1", "CFG-1")]
    assert (
        sentence([*right, *wrong, accepts])
        == "DOES NOT CONFORM: 2 of 4 answers are wrong (NUM-2, HED-1), 1 of 2 clauses of conduct"
        " fails (STA-1), it accepts a `d_model` that `n_heads` does not divide (CFG-1)."
        f" {invalid}"
    )
    unmet = [
        verdict("x", clause, "fail", level="SHOULD", required=False)
        for clause in ("MSK-9", "MSK-10", "SHP-5")
    ]
    assert (
        sentence([right[0], *unmet])
        == "CONFORMS: 1 answer right. A row without any allowed key makes the gradients of other"
        " rows NaN (MSK-9). Also advised: SHP-5, MSK-10."
    )


def test_advice_that_is_required_decides() -> None:
    unmet = verdict("x", "MSK-10", "fail", required=True)
    assert sentence([unmet]) == "DOES NOT CONFORM: 1 of 1 answers is wrong (MSK-10)."
    assert str(tally([unmet, verdict("x", "MSK-1")])) == "answers 1 of 2"


def test_sentence_counts_causes_and_names_what_it_leaves_out() -> None:
    ignored = [
        verdict("x", clause, "fail", diagnosis="the mask is ignored")
        for clause in ("MSK-1", "MSK-2", "MSK-3")
    ]
    said = (
        "DOES NOT CONFORM: 3 of 3 answers are wrong (MSK-1 and 2 more), one cause: the mask is"
        " ignored."
    )
    assert sentence(ignored) == said
    other = verdict("x", "HED-1", "fail")
    assert sentence([*ignored, other]).endswith(
        "(MSK-1, MSK-2, MSK-3, HED-1), 1 cause named, 1 more unexplained."
    )
    scaled = replace(other, diagnosis="the scores are not scaled")
    assert sentence([*ignored, scaled]).endswith("(MSK-1, MSK-2, MSK-3, HED-1), 2 causes.")
    both = [
        replace(each, diagnosis="the mask is ignored, and the scores are not scaled")
        for each in ignored[:2]
    ]
    assert "(MSK-1, MSK-2), two causes: the mask is ignored, and the scores" in sentence(both)
    unmet = verdict("x", "MSK-10", "fail", diagnosis="the mask is ignored")
    assert sentence([*ignored, unmet]) == said  # it is an entry already
    many = [verdict("x", clause, "fail") for clause in CLAUSES if CLAUSES[clause].family == "NUM"]
    assert " and " in sentence([*ignored, *many]).partition("(")[2]
    passes = sentence([verdict("x", "SHP-1")], ["sinks", "sliding_window"])
    assert passes == "CONFORMS where judged; not covered: sinks, sliding_window. 1 answer right."
    assert sentence(ignored, ["sinks"]) == f"{said} Not covered: sinks."


def test_sentence_of_what_is_blocked_waived_or_not_judged() -> None:
    cause, explained = (
        verdict("x", "STA-1", "fail"),
        verdict("x", "SHP-1", "blocked", blocked_by="STA"),
    )
    assert (
        sentence([cause, explained])
        == "DOES NOT CONFORM: 1 of 1 clauses of conduct fails (STA-1), 1 more cannot be judged"
        " before that is mended."
    )
    waived = verdict("x", "NUM-1", "waived")
    assert (
        sentence([verdict("x", "SHP-1"), waived])
        == "CONFORMS, with waivers: all 2 answers right. Waived: NUM-1."
    )
    stale = verdict("x", "NUM-1", "stale_waiver")
    assert sentence([stale]) == "DOES NOT CONFORM: it no longer needs its waiver of NUM-1."
    broken = verdict("x", "NUM-1", "harness_error")
    fault = "COULD NOT BE JUDGED on NUM-1: a fault of mha-conformance, not of what it judges."
    assert sentence([broken]) == fault
    assert (
        sentence([broken, verdict("x", "SHP-1")]) == f"{fault} Otherwise: CONFORMS: 1 answer right."
    )
    assert (
        sentence([verdict("x", "CAU-1", "not_claimed")])
        == "NOTHING WAS JUDGED: needs the claim causal."
    )
    assert sentence([verdict("x", "CFG-1")]) == "CONFORMS: invalid sizes are refused."
    assert sentence([verdict("x", "CFG-2")]) == "CONFORMS: nothing that was judged is required."


def test_blocked_clauses_were_not_judged() -> None:
    """No answer of theirs is known to be incorrect."""
    cause = verdict("x", "STA-1", "fail")
    blocked = [verdict("x", clause, "blocked", blocked_by="STA") for clause in ("SHP-1", "NUM-1")]
    counted = tally([cause, *blocked, verdict("x", "CAU-1", "not_claimed")])
    assert (str(counted), counted.unjudged) == (
        "conduct 0 of 1",
        {"blocked by STA": 2, "causal": 1},
    )


def test_outcome_over_a_minority_says_so() -> None:
    unclaimed = [verdict("x", clause, "not_claimed") for clause in ("CAU-1", "CAU-2", "DRP-1")]
    assert outcome([verdict("x", "SHP-1"), *unclaimed[:1]]) == "CONFORMS"
    assert outcome([verdict("x", "SHP-1"), *unclaimed]) == "CONFORMS where judged"
    page = render(report(verdict("x", "SHP-1"), *unclaimed), ".html")
    assert "<h1>x: CONFORMS where judged</h1>" in page
    first, *_, last = summarise([verdict("x", "SHP-1"), *unclaimed])
    assert first.startswith("    judged: 1 of 4 clauses on 160 cases;")
    assert last == "x: CONFORMS where judged: 1 answer right."


def unjudged_under(claims: Claims) -> list[Verdict]:
    """Return a verdict on each clause, with the reasons why nothing is judged under claims."""
    verdicts = []
    for clause, members in properties().items():
        reasons = [prop.within(claims, "float32") for prop in members]
        missing = [reason for reason in reasons if not isinstance(reason, Domain)]
        if len(missing) < len(reasons):
            verdicts.append(verdict("x", clause))
            continue
        message = "; ".join(dict.fromkeys(map(str, missing)))
        verdicts.append(
            verdict("x", clause, "not_claimed", message=message, topic=missing[0].topic)
        )
    return verdicts


def test_reasons_are_short_and_fit_the_width() -> None:
    """Whatever is claimed, the reason why a clause is not judged is a claim or a few words."""
    few = Claims(
        causal=None, masks=frozenset(), returns_weights=False, cross_attention=False, bias={True}
    )
    verdicts = unjudged_under(few)
    reasons = tally(verdicts).unjudged
    assert {"masks", "causal", "dropout", "returns_weights", "other dtypes"} <= set(reasons)
    assert max(map(len, reasons)) <= 20, reasons
    assert sorted(reasons.values(), reverse=True) == list(reasons.values())
    for width in (60, 80, 110):
        line = summarise(verdicts, width=width)[-2]
        assert line.startswith("    not judged: masks (")
        assert len(line) <= width
        assert sum(map(int, re.findall(r"\((\d+)\)", line))) == sum(reasons.values())


def test_incorrect_answers_come_first() -> None:
    """Before missing refusals, which the contract lists first; advice comes last."""
    verdicts = [
        verdict("x", clause, "fail") for clause in ("CFG-1", "SHP-6", "MSK-10", "NUM-1", "STA-4")
    ]
    verdicts.append(verdict("x", "MSK-9", "fail", level="SHOULD", required=False))
    expected = ["NUM-1", "STA-4", "CFG-1", "MSK-9", "SHP-6", "MSK-10"]
    named = re.compile(r"(?:fail|SHOULD) +([A-Z]{3}-\d+)")
    assert named.findall("\n".join(summarise(verdicts))) == expected
    assert named.findall(render(report(*verdicts), ".md")) == expected[:3]
    assert re.findall(r"<h4>.*>([A-Z]{3}-\d+) ", render(report(*verdicts), ".html")) == expected
    annotated = re.findall(r"title=([A-Z]{3}-\d+)", "\n".join(workflow_commands(report(*verdicts))))
    assert annotated[:3] == expected[:3]
    comparison = Comparison(report(), report(*verdicts))
    assert [each.clause for each in comparison.new_failures] == expected[:3]
