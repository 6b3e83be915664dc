"""Made-up reports: some verdicts of each kind, hostile ones, and a report of format 1."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mha.conformance.results import VOLATILE, Rejections, Report, Verdict
from mha.spec import CLAUSES

# Markup, escape sequences of a terminal, a character that reverses the direction of text, and a
# lone surrogate.
MARKUP = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
HOSTILE = MARKUP + "\x1b[2J\x07\u202e\udc80`|*_@x\n::error::no\n"
MEGABYTE = HOSTILE + "x" * (1 << 20)
STARTED = "2026-01-02T03:04:05+00:00"
# As version 0.1.0 wrote it, with fields and names of cases that have changed since.
FORMAT_1 = """\
{
  "conforms": false,
  "verdicts": [
    {
      "implementation": "loop", "clause": "SHP-1", "level": "MUST",
      "dtype": "float32", "device": "cpu",
      "status": "pass", "required": true, "examples": 40, "first": null, "margin": 0.2,
      "rejected": {"zeros": 5, "zeros tried": 6, "noise tried": 2}, "case": null,
      "violated": "", "message": "",
      "script": null, "blocked_by": null, "seconds": 0.5
    },
    {
      "implementation": "loop", "clause": "MSK-8", "level": "MUST",
      "dtype": "float32", "device": "cpu",
      "status": "fail", "required": true, "examples": 3, "first": 3, "margin": 0.0, "rejected": {},
      "case": "Case(mask='empty_rows', regime='large', path='no_grad')",
      "violated": "", "message": "off by 1",
      "script": null, "blocked_by": null, "seconds": 0.25
    }
  ],
  "profile": "quick", "seed": 0, "versions": {"torch": "2.13.0"},
  "targets": {"loop": "loop"},
  "strict": false, "incomplete": false, "broken": {}, "started": "2026-01-02T03:04:05+00:00",
  "host": "here", "format": 1
}
"""


def verdict(implementation: str, clause: str, status: Any = "pass", **given: Any) -> Verdict:
    """Return a verdict with the fields that its status comes with."""
    failure = {
        "case": "Case(mask='empty_rows')",
        "message": "output_2[0, 0, 0] is nan, but should be 0.5",
    }
    failure |= {
        "script": "import torch\nassert 1 < 0, 'less & more'\n",
        "violated": "empty_rows_follow_the_policy",
    }
    fields: dict[str, Any] = {
        "level": CLAUSES[clause].level,
        "dtype": "float32",
        "device": "cpu",
        "examples": 40,
    }
    fields |= {"required": CLAUSES[clause].level != "SHOULD", "margin": 0.2}
    fields |= {"rejections": {"zeros": Rejections(5, 6)}} if status == "pass" else {}
    fields |= (
        {"message": "needs the claim causal", "topic": "causal"} if status == "not_claimed" else {}
    )
    fields |= failure if status in ("fail", "waived") else {}
    return Verdict(
        **{"implementation": implementation, "clause": clause, "status": status} | fields | given
    )


def report(*verdicts: Verdict, **given: Any) -> Report:
    """Return a report of these verdicts."""
    fields: dict[str, Any] = {
        "profile": "quick",
        "seed": 0,
        "versions": {"torch": "2.13.0"},
        "started": STARTED,
    }
    return Report(verdicts=verdicts, **fields | given)


def two_implementations() -> Report:
    """Return a report: one implementation fails two clauses and has a waiver, one conforms."""
    return report(
        verdict("faulty", "SHP-1"),
        verdict("faulty", "MSK-8", "fail"),
        verdict("faulty", "MSK-10", "fail"),
        verdict("faulty", "CAU-1", "not_claimed"),
        verdict("faulty", "NUM-1", "waived", message="output is off [waived: <known>]"),
        verdict("correct", "SHP-1"),
        verdict("correct", "MSK-8"),
        verdict("correct", "MSK-10"),
        verdict("correct", "CAU-1", margin=0.4),
        verdict("correct", "NUM-1", dtype="bfloat16"),
    )


def hostile() -> Report:
    """Return a report whose every text is hostile."""
    bad = verdict(HOSTILE, "MSK-8", "fail", message=MEGABYTE, case=HOSTILE, script=MEGABYTE)
    return report(
        bad,
        replace(bad, clause="NUM-1", status="not_claimed"),
        versions={HOSTILE: HOSTILE},
        host=HOSTILE,
    )


def without_volatile(text: str) -> Any:
    """Return a report from its JSON without what differs between runs with the same seed."""
    data = json.loads(text)
    for part in (data, *data["verdicts"]):
        for name in VOLATILE:
            part.pop(name, None)
    return data
