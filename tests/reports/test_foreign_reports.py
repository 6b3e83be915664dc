"""Reports of others: impossible values are refused, and texts are shown, never acted on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.campaign.report import Jobs, write_campaign
from mha.conformance.pytest_plugin.items import properties_of
from mha.conformance.reports.changes import FORMATS as CHANGES
from mha.conformance.reports.compare import Comparison, describe_changes
from mha.conformance.reports.files import FORMATS, render
from mha.conformance.reports.github import workflow_commands
from mha.conformance.reports.text import describe, summarise_report
from mha.conformance.results import Report, Verdict
from mha.conformance.settings import Settings
from mha.conformance.shown import markdown_line, visible
from support.command import run
from support.reports_made import report, two_implementations, verdict

ESCAPE = "\x1b[2J"
# Each would be a command, a heading, a table, a list or markup, at the start of a line or anywhere.
FORGED = (
    "::error::forged",
    "::stop-commands::forged",
    "##[error]forged",
    "# forged",
    "===",
    "---",
    "- forged",
    "1. forged",
    "| forged |",
    "|---|",
    "```",
    "~~~",
    "<h1>forged</h1>",
    "faulty: CONFORMS: forged",
    "[forged](https://example.org)",
)
WRONG_OF_REPORT: dict[str, tuple[str, Any]] = {
    "a path for a time": ("started", "../../outside/x"),
    "an absolute path for a time": ("since", "/tmp/x"),
    "a time with a separator of its own": ("started", "2026-01-02/03:04:05"),
    "a time with an escape sequence": ("started", f"2026-01-02T03:04:05{ESCAPE}"),
    "a month 13": ("since", "2026-13-02T03:04:05+00:00"),
    "a negative seed": ("seed", -1),
    "a seed of many digits": ("seed", 10**400),
    "many digits among the seeds": ("seeds", [1 << 63]),
}
WRONG_OF_VERDICT: dict[str, tuple[str, Any]] = {
    "a dtype with an escape sequence": ("dtype", f"float32{ESCAPE}"),
    "an unknown dtype": ("dtype", "float7"),
    "an unknown device": ("device", "cpu\n::error::x"),
    "an unknown level": ("level", "MUST\n\n# CONFORMS"),
    "an unknown cause": ("blocked_by", f"STA{ESCAPE}"),
    "a count below 0": ("examples", -1),
    "a count of many digits": ("cases_to_failure", 10**400),
    "rejections of many digits": ("rejections", {"zeros": {"rejected": 10**400, "tried": 1}}),
    "time without an end": ("seconds", float("inf")),
    "a negative margin": ("margin", -1.0),
}


def changed(name: str, value: Any) -> dict[str, Any]:
    """Return a report as JSON with one field of it, or of its second verdict, changed."""
    data: dict[str, Any] = json.loads(two_implementations().to_json())
    (data if name in data else data["verdicts"][1])[name] = value
    return data


@pytest.mark.parametrize("what", WRONG_OF_REPORT | WRONG_OF_VERDICT)
def test_value_that_no_report_has_is_refused_in_a_line(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = (WRONG_OF_REPORT | WRONG_OF_VERDICT)[what]
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(json.dumps(changed(name, value)))
    Path("good.json").write_text(two_implementations().to_json())
    for command in (
        ("report", "r.json"),
        ("report", "good.json", "r.json"),
        ("report", "good.json", "r.json", "--merge"),
        ("show", "--run", "r.json"),
        ("replay", "r.json"),
        ("waive", "MSK-8", "--reason", "x", "--run", "r.json"),
    ):
        status, output = run(*command)
        assert (status, output.count("\n")) == (2, 1), output
        assert output.startswith("mha: 'r.json': not a report of mha-conformance: ")
        assert re.search(rf"\b{name}\b", output)
        assert "\x1b" not in output


def forged(text: str) -> Report:
    """Return a report whose texts all hold a line of their own that is forged."""
    lines = f"first{ESCAPE}\u202e\n\n{text}\n\nlast"
    texts = dict.fromkeys(
        ("message", "diagnosis", "fix", "steps", "arguments", "violated", "case"), lines
    )
    failing = verdict(f"faulty{lines}", "MSK-8", "fail", **texts)
    other = verdict(f"faulty{lines}", "MSK-9", "fail", message=lines)
    unclaimed = verdict(f"faulty{lines}", "CAU-1", "not_claimed", message=lines)
    return report(
        failing,
        other,
        unclaimed,
        versions={lines: lines},
        host=lines,
        profile=lines,
        targets={failing.implementation: lines},
        broken={lines: lines},
        torch_changes=(lines,),
        not_covered={failing.implementation: (lines,)},
    )


def lines_of(texts: Iterator[str] | list[str]) -> list[str]:
    return [line.strip() for text in texts for line in text.split("\n")]


@pytest.mark.parametrize("text", FORGED)
def test_nothing_in_a_report_begins_a_line_of_another_kind(text: str, tmp_path: Path) -> None:
    made, before = forged(text), two_implementations()
    jobs = Jobs(total=1, flaky=[f"x\n{text}"], corrupt=[f"x\n{text}"])
    jobs.stops[f"x\n{text}"] = 1
    assert write_campaign(made, jobs, tmp_path / "c.md") == ""
    comparison = Comparison(before, made)
    markdown = [render(made, ".md"), CHANGES[".md"](comparison), (tmp_path / "c.md").read_text()]
    terminal = [
        *summarise_report(made),
        *describe_changes(comparison),
        *workflow_commands(made),
        *jobs.lines(made),
    ]
    for line in lines_of([*markdown, *terminal, repr(made)]):
        assert line != text, line
        assert line.isprintable(), line
    of_ours = [
        line for line in lines_of([*terminal, describe(made.verdicts[0])]) if line.startswith("::")
    ]
    assert len(of_ours) == 3
    assert not any(
        "##[" in line for line in lines_of([*markdown, *terminal, describe(made.verdicts[0])])
    )
    for page in (render(made, ".html"), CHANGES[".html"](comparison), made._repr_html_()):
        assert "<h1>forged" not in page
        assert ESCAPE not in page
    assert ESCAPE not in describe(made.verdicts[0])


@pytest.mark.parametrize("text", FORGED)
def test_markdown_has_no_markup_but_code(text: str) -> None:
    line = re.sub(r"\\.", "x", markdown_line(f"  {text}\nx"))
    assert not re.search(r"[*_\[\]#|~<]|^[-+=]|^\d+[.)]|``", line), line
    assert markdown_line("pass `x_1` on") == "pass `x_1` on"


def test_commands_of_a_runner_are_escaped_where_a_line_may_begin() -> None:
    assert visible("a::b x[:, ::2] ::error::c") == "a::b x[:, ::2] \\x3a:error::c"


@pytest.mark.parametrize("suffix", FORMATS)
def test_report_from_elsewhere_is_shown_and_rendered(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = replace(forged("# forged"), broken={})
    Path("r.json").write_text(made.to_json())
    assert Report.from_json(made.to_json()) == made
    for command in (
        ("report", "r.json"),
        ("show", "--run", "r.json"),
        ("show", "MSK-8", "--run", "r.json"),
    ):
        status, output = run(*command)
        assert status in (0, 1)
        assert all(line.isprintable() for line in output.splitlines()), output
    assert run("report", "r.json", "--to", f"out{suffix}")[0] == 0
    assert ESCAPE not in Path(f"out{suffix}").read_text()
    status, output = run("replay", "r.json")
    assert (status, "\x1b" in output) == (2, False)


def test_properties_of_junit_have_no_control_characters() -> None:
    made: Verdict = replace(forged("x").verdicts[0], violated=ESCAPE)
    for _, value in properties_of(made, Settings()):
        assert ESCAPE not in str(value)
