"""Input that `mha` cannot use gets one line that says what was expected, and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from reports_made import two_implementations
from test_verbs import CORRECT, run

from mha.conformance.faults import registry

correct = registry.implementation_of(registry.Correct)

IN_RUN = ("--run", "run.json")
WAIVE = ("waive", "MSK-8", "--reason", "x", *IN_RUN)
BAD_INPUT = {
    "no run": (("replay",), "no run is saved in this folder"),
    "no run to waive": (("waive", "MSK-8", "--reason", "x"), "no run is saved in this folder"),
    "no file": (("report", "nowhere.json"), "the report 'nowhere.json' cannot be read: No such file"),
    "no report": (("report", "text.json"), "'text.json': not a report of mha-conformance"),
    "three reports": (("report", "a", "b", "c"), "only two reports can be compared, but 3 are given; add --merge"),
    "two reports to write": (("report", "a", "b", "--to", "c.md"), "--to writes one report"),
    "another format": (
        ("report", "run.json", "--to", "c.pdf"),
        "--to takes a file name that ends in .html, .json or .md",
    ),
    "a full disk": (("report", "run.json", "--to", "full.md"), "No space left on device"),
    "nothing to replay": (
        ("replay", "run.json", "--clause", "CAU-1"),
        "nothing to replay: 'run.json' has no failure of CAU-1",
    ),
    "an implementation of unknown origin": (
        ("replay", "run.json"),
        "does not say where 'faulty' is; name it with --impl",
    ),
    "a case without its clause": (("replay", "Case(L=2)"), "add --clause and --impl"),
    "not a case": (("replay", "Case(L=)", "--clause", "MSK-1", "--impl", "sdpa"), "is not a case"),
    "an unknown field": (("replay", "Case(T=1)", "--clause", "MSK-1", "--impl", "sdpa"), "a case takes only B, L, S"),
    "a length of letters": (
        ("replay", "Case(L='x')", "--clause", "MSK-1", "--impl", "sdpa"),
        "the L of a case must be",
    ),
    "an unknown mask": (
        ("replay", "Case(mask='x')", "--clause", "MSK-1", "--impl", "sdpa"),
        "unknown mask of a case",
    ),
    "several implementations": (("replay", "run.json", "--impl", "all"), "'all' names "),
    "an unknown clause": (("waive", "MSK-99", "--reason", "x", *IN_RUN), "unknown clause 'MSK-99'"),
    "no reason": (("waive", "MSK-8", "--reason", " ", *IN_RUN), "a waiver needs a reason"),
    "a predicate that is too long": ((*WAIVE, "--where", "not " * 20000 + "L"), "is not an expression"),
    "a call in a predicate": ((*WAIVE, "--where", "len(x)"), "may only compare"),
    "an unknown field in a predicate": ((*WAIVE, "--where", "regimes == 'large'"), "a case has no regimes; it has B, "),
    "another case": ((*WAIVE, "--where", "L > 5"), "--where 'L > 5' excludes the case that fails: Case(mask='empty_"),
    "a day in the past": ((*WAIVE, "--expires", "2001-01-01"), "--expires must not be in the past"),
    "two of one name": (("check", CORRECT, f"{__file__}:correct"), "two implementations are named 'Correct'"),
    "two dtypes as words": (
        ("check", "sdpa", "--dtype", "float32", "float64"),
        "'float64' is a dtype, not an implement",
    ),
    "a near name": (("check", "sdpaa"), "no implementation is registered as 'sdpaa'; did you mean sdpa?"),
    "no clause": (("check", "sdpa", "--clause", ""), "no clause is named; leave it out to judge all of them"),
    "no dtype": (("check", "sdpa", "--dtype", ""), "no dtype is named"),
    "nothing to show": (("show", ""), "no clause is named"),
    "one name for all": (("check", "mine=all"), "'mine=all' gives one name to all implementations"),
    "a report in an unknown format": (
        ("check", "sdpa", "--report", "x.pdf"),
        "--report takes a file name that ends in .html, .json or .md",
    ),
    "a waiver of another implementation": (("check", "sdpa", "--waivers", "other.toml"), "waives clauses of nobody"),
    "no folder for a declaration": (("init", "sdpa", "--folder", "nowhere"), "--folder: there is no folder 'nowhere'"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("text")
    Path("run.json").write_text(two_implementations().to_json())
    Path("full.md").symlink_to("/dev/full")
    Path("other.toml").write_text('[[waiver]]\nimplementation = "nobody"\nclause = "MSK-8"\nreason = "x"\n')
    arguments, message = BAD_INPUT[what]
    status, output = run(*arguments)
    assert status == 2
    assert message in output
    assert len(output.splitlines()) == 1, output
