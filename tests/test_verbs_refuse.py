"""What `mha` cannot use gets one line that says what was expected, and the status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from reports_made import two_implementations
from test_verbs import RIGHT, run

from mha.conformance.faults import registry as faults

correct = faults.implementation_of(faults.Correct)


BAD_INPUT = {
    "no run": (("replay",), "no run is kept in this folder: judge something first"),
    "no run to waive": (("waive", "MSK-8", "--reason", "x"), "no run is kept in this folder"),
    "no file": (("report", "nowhere.json"), "the report 'nowhere.json' cannot be read: No such file"),
    "no report": (("report", "text.json"), "'text.json': it is no report of mha-conformance"),
    "three reports": (("report", "a", "b", "c"), "two reports are compared, but there are 3; add --merge"),
    "two reports to write": (("report", "a", "b", "--to", "c.md"), "--to writes one report"),
    "another form": (("report", "run.json", "--to", "c.pdf"), "--to must be the name of a .html or .json or .md file"),
    "a full disk": (("report", "run.json", "--to", "full.md"), "No space left on device"),
    "nothing to replay": (("replay", "run.json", "--clause", "CAU-1"), "nothing to replay: nothing fails CAU-1"),
    "an implementation of no name": (("replay", "run.json"), "does not say where 'wrong' is; name it with --impl"),
    "a case alone": (("replay", "Case(L=2)"), "a case alone does not say what it violates"),
    "no case": (("replay", "Case(L=)", "--clause", "MSK-1", "--impl", "sdpa"), "is no case, as Case(L=2"),
    "a field of no case": (("replay", "Case(T=1)", "--clause", "MSK-1", "--impl", "sdpa"), "a case has only B, L, S"),
    "no clause": (("waive", "MSK-99", "--reason", "x", "--run", "run.json"), "there is no clause 'MSK-99'"),
    "no reason": (("waive", "MSK-8", "--reason", " ", "--run", "run.json"), "a waiver needs a reason"),
    "a predicate too long": (
        ("waive", "MSK-8", "--reason", "x", "--where", "not " * 20000 + "L", "--run", "run.json"),
        "is no expression",
    ),
    "another case": (
        ("waive", "MSK-8", "--reason", "x", "--where", "L > 5", "--run", "run.json"),
        "where 'L > 5' leaves out the case that fails: Case(mask='empty_rows')",
    ),
    "a day that is past": (
        ("waive", "MSK-8", "--reason", "x", "--expires", "2001-01-01", "--run", "run.json"),
        "the last day of a waiver must be to come",
    ),
    "a length of letters": (
        ("replay", "Case(L='x')", "--clause", "MSK-1", "--impl", "sdpa"),
        "L of a case must be as 1",
    ),
    "an unknown mask": (
        ("replay", "Case(mask='x')", "--clause", "MSK-1", "--impl", "sdpa"),
        "no mask of a case 'x'; known are none, all, keys",
    ),
    "several implementations": (
        ("replay", "run.json", "--impl", "all"),
        "'all' names ",
    ),
    "two of one name": (("check", RIGHT, f"{__file__}:correct"), "two implementations are named 'Correct'"),
    "no predicate": (("waive", "MSK-8", "--reason", "x", "--where", "len(x)", "--run", "run.json"), "may only compare"),
    "a report of no form": (("check", "sdpa", "--report", "x.pdf"), "--report must be the name of a .html"),
    "an unknown waived one": (
        ("check", "sdpa", "--waivers", "other.toml"),
        "it waives clauses of nobody, which is not",
    ),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("text")
    Path("run.json").write_text(two_implementations().to_json())
    Path("full.md").symlink_to("/dev/full")
    Path("other.toml").write_text('[[waiver]]\nimplementation = "nobody"\nclause = "MSK-8"\nreason = "x"\n')
    arguments, message = BAD_INPUT[what]
    status, told = run(*arguments)
    assert status == 2
    assert message in told
    assert len(told.splitlines()) == 1, told
