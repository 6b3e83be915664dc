"""How clauses are counted: by kind and level, with a reason for each that was not judged, incorrect answers first."""

from __future__ import annotations

import re

from reports_made import report, verdict

from mha.conformance.properties.registry import properties
from mha.conformance.reports.compare import Comparison
from mha.conformance.reports.files import render
from mha.conformance.reports.github import workflow_commands
from mha.conformance.reports.summary import Count, outcome, tally
from mha.conformance.reports.text import summarise
from mha.conformance.results import Verdict
from mha.spec import Claims
from mha.spec.clauses import CLAUSES, KINDS

REFUSALS = ["CFG-1", "CFG-2", "CFG-3", "CFG-6", "SHP-6", "MSK-12"]


def test_kind_of_each_clause() -> None:
    kinds = {kind: [clause.id for clause in CLAUSES.values() if clause.kind == kind] for kind in KINDS}
    assert kinds["refusals"] == REFUSALS
    assert set(kinds["conduct"]) == {clause for clause in CLAUSES if clause[:3] in ("STA", "CMP")} | {
        "DRP-3",
        "DST-10",
        "DST-11",
    }
    assert sum(map(len, kinds.values())) == len(CLAUSES)


def test_clauses_are_counted_once_for_all_dtypes() -> None:
    one = [verdict("x", "SHP-1"), verdict("x", "SHP-1", "fail", dtype="float64"), verdict("x", "CAU-1", "not_claimed")]
    counted = tally([*one, verdict("x", "MSK-8")])
    assert (counted.must, counted.should, counted.unjudged) == ({"answers": Count(1, 2)}, {}, {"causal": 1})


def test_kinds_and_levels_are_counted_separately() -> None:
    verdicts = [
        verdict("x", "MSK-1"),
        verdict("x", "MSK-12", "fail"),
        verdict("x", "SHP-6"),
        verdict("x", "CMP-1"),  # a MAY that is claimed
        verdict("x", "CFG-2", "fail"),
        verdict("x", "MSK-8", "fail", level="SHOULD", required=False),  # in the part that is a recommendation
    ]
    counts = "answers 1 of 1; refusals 1 of 2; conduct 1 of 1; SHOULD: answers 0 of 1, refusals 0 of 1"
    assert str(tally(verdicts)) == counts
    assert (tally(verdicts).judged, tally(verdicts).clauses) == (6, 6)
    assert str(tally([verdict("x", "CFG-2")])) == "SHOULD: refusals 1 of 1"


def test_outcome_names_the_kinds_that_fail() -> None:
    bad = [verdict("x", "SHP-6", "fail"), verdict("x", "NUM-1", "fail"), verdict("x", "STA-4")]
    assert outcome(bad[:1]) == "DOES NOT CONFORM in refusals"
    assert outcome(bad) == "DOES NOT CONFORM in answers and refusals"
    explained = verdict("x", "STA-4", "blocked", blocked_by="SHP")
    assert outcome([bad[0], explained]) == "DOES NOT CONFORM in refusals"


def test_blocked_clauses_were_not_judged() -> None:
    """No answer of theirs is known to be incorrect."""
    cause = verdict("x", "STA-1", "fail")
    blocked = [verdict("x", clause, "blocked", blocked_by="STA") for clause in ("SHP-1", "NUM-1")]
    counted = tally([cause, *blocked, verdict("x", "CAU-1", "not_claimed")])
    assert (str(counted), counted.unjudged) == ("conduct 0 of 1", {"blocked by STA": 2, "causal": 1})


def test_outcome_over_a_minority_says_so() -> None:
    unclaimed = [verdict("x", clause, "not_claimed") for clause in ("CAU-1", "CAU-2", "DRP-1")]
    assert outcome([verdict("x", "SHP-1"), *unclaimed[:1]]) == "conforms"
    assert outcome([verdict("x", "SHP-1"), *unclaimed]) == "conforms where judged"
    page = render(report(verdict("x", "SHP-1"), *unclaimed), ".html")
    assert "1 of 1 implementations conform, 1 of them where judged." in page
    first, *_ = summarise([verdict("x", "SHP-1"), *unclaimed])
    assert "(1 of 4 clauses judged on " in first


def unjudged_under(claims: Claims) -> list[Verdict]:
    """Return a verdict on each clause, with the reasons for which nothing is judged under these claims."""
    verdicts = []
    for clause, members in properties().items():
        reasons = [prop.within(claims, "float32") for prop in members]
        unclaimed = all(isinstance(reason, str) for reason in reasons)
        message = "; ".join(dict.fromkeys(map(str, reasons)))
        verdicts.append(verdict("x", clause, "not_claimed", message=message) if unclaimed else verdict("x", clause))
    return verdicts


def test_reasons_are_short_and_fit_the_width() -> None:
    """Whatever is claimed, the reason of each clause that is not judged is a claim or a few words."""
    few = Claims(causal=None, masks=frozenset(), returns_weights=False, cross_attention=False, bias={True})
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
    """Before what is not refused, which the contract lists before most answers."""
    verdicts = [verdict("x", clause, "fail") for clause in ("CFG-1", "SHP-6", "MSK-10", "NUM-1", "STA-4")]
    expected = ["NUM-1", "CFG-1", "SHP-6", "STA-4", "MSK-10"]
    named = re.compile(r"(?:fail|SHOULD) ([A-Z]{3}-\d+)")
    assert named.findall("\n".join(summarise(verdicts))) == expected
    assert named.findall(render(report(*verdicts), ".md")) == expected[:-1]
    assert re.findall(r"<h3>.*>([A-Z]{3}-\d+) ", render(report(*verdicts), ".html")) == expected
    assert re.findall(r"title=([A-Z]{3}-\d+)", "\n".join(workflow_commands(verdicts))) == expected
    comparison = Comparison(report(), report(*verdicts))
    assert [each.clause for each in comparison.new_failures] == expected[:-1]
