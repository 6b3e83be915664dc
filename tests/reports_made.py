"""Reports made up for tests: some verdicts of each kind, and hostile ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mha.conformance.results import OF_THE_MOMENT, Report, Verdict
from mha.spec import CLAUSES

# Markup, what a terminal obeys, what turns the direction of writing, a lone surrogate, and a megabyte.
MARKUP = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
HOSTILE = MARKUP + "\x1b[2J\x07\u202e\udc80`|*_@x\n::error::no\n"
MEGABYTE = HOSTILE + "x" * (1 << 20)


def verdict(implementation: str, clause: str, status: Any = "pass", **given: Any) -> Verdict:
    """Return a verdict, with what belongs to its status."""
    departs = {"case": "Case(mask='empty_rows')", "message": "output_2[0, 0, 0] is nan, but should be 0.5"}
    departs |= {"script": "import torch\nassert 1 < 0, 'less & more'\n", "violated": "empty_rows_follow_the_policy"}
    known: dict[str, Any] = {"level": CLAUSES[clause].level, "dtype": "float32", "device": "cpu", "examples": 40}
    known |= {"required": CLAUSES[clause].level != "SHOULD", "margin": 0.2}
    known |= {"rejected": {"zeros": 5, "zeros tried": 6}} if status == "pass" else {}
    known |= {"message": "needs the claim causal"} if status == "not_claimed" else {}
    known |= departs if status in ("fail", "waived") else {}
    return Verdict(**{"implementation": implementation, "clause": clause, "status": status} | known | given)


def report(*verdicts: Verdict, **given: Any) -> Report:
    """Return a report of these verdicts."""
    known: dict[str, Any] = {"profile": "quick", "seed": 0, "versions": {"torch": "2.13.0"}, "started": "then"}
    return Report(verdicts=verdicts, **known | given)


def two_implementations() -> Report:
    """Return a report in which one fails a clause and waives another, and one conforms."""
    return report(
        verdict("wrong", "SHP-1"),
        verdict("wrong", "MSK-8", "fail"),
        verdict("wrong", "MSK-10", "fail"),
        verdict("wrong", "CAU-1", "not_claimed"),
        verdict("wrong", "NUM-1", "waived", message="output is off [waived: <known>]"),
        verdict("right", "SHP-1"),
        verdict("right", "MSK-8"),
        verdict("right", "MSK-10"),
        verdict("right", "CAU-1", margin=0.4),
        verdict("right", "NUM-1", dtype="bfloat16"),
    )


def hostile() -> Report:
    """Return a report whose every text is hostile."""
    bad = verdict(HOSTILE, "MSK-8", "fail", message=MEGABYTE, case=HOSTILE, script=MEGABYTE)
    return report(bad, replace(bad, clause="NUM-1", status="not_claimed"), versions={HOSTILE: HOSTILE}, host=HOSTILE)


def without_the_moment(text: str) -> Any:
    """Return what two runs with one seed must agree on."""
    told = json.loads(text)
    for part in (told, *told["verdicts"]):
        for name in OF_THE_MOMENT:
            part.pop(name, None)
    return told
