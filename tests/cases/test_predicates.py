"""Predicates of waivers and cases in files are computed within bounds of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mha.conformance import Case
from mha.conformance.campaign.plan import Campaign, Plan
from mha.conformance.cases.parsing import read_case
from mha.conformance.waivers import WaiverError, read_waivers, validate_where, where_holds
from support.command import run
from support.reports_made import report, verdict

HUGE = {
    "a text times a number": "'x' * 9999999999 == 'x'",
    "a number times a text": "999999999 * 'x' == mask",
    "a field times a text": "L * 'x' * 999999999 == mask",
    "a field that is a text": "mask * 999999999 == mask",
    "a list times a number": "[1] * 999999999 == [1]",
    "a tuple times a field": "(1, 2) * L == (1, 2)",
    "a text in brackets": "('x') * 999999999 == mask",
    "a negative text": "-'x' == mask",
    "a comparison times a number": "(L == 1) * 999999999 > 0",
    "a width of a text": "'%9999999999d' % L == mask",
    "a width of a field": "mask % L == mask",
    "texts added": "mask + values == mask",
    "powers": "9**9**9 > 0",
    "powers in brackets": "10 ** 10 ** 8 > 0",
    "a shift": "1 << 9999999999 > 0",
    "a shift to the right": "1 >> 1 == L",
    "a division": "L / 2 == 1",
    "a division of whole numbers": "L // 2 == 1",
    "a product of matrices": "L @ S == 1",
    "bits": "L | 2 == 1",
    "all bits": "~L == 1",
    "many digits": f"L == {'9' * 10}",
    "many hexadecimal digits": "L == 0xfffffffff",
    "many digits before a point": "L == 1e300",
    "an infinite number": "L == 1e999",
    "an imaginary number": "L == 1j",
    "bytes": "mask == b'x'",
    "dots": "mask == ...",
    "a text with a field in it": "f'{L:>999999999}' == mask",
    "a comprehension": "[L for L in mask] == mask",
    "a lambda": "(lambda: 1) == mask",
    "an assignment": "(L := 9) == 9",
    "a slice": "mask[0] == 'n'",
    "a set": "L in {1}",
    "a conditional": "1 if L else 0",
    "a long one": "L == 1 or " * 100 + "L == 2",
    "a very long one": "L == 1 or " * 1000000 + "L == 2",
    "brackets": "(" * 150 + "L" + ")" * 150 + "(",
    "many signs": "-" * 400 + "1 == L",
    "many times not": "not " * 100 + "L",
    "a long sum": "L" + " + 1" * 100 + " == 2",
    "nested lists": "[" * 60 + "]" * 60 + " == L",
    "no character": "L == '\0'",
}
SMALL = {
    "L % 16 == 2": True,
    "-L + 3 * (S - 1) == 4": True,
    "L * S * B * n_heads * head_dim <= 999999999": True,
    "0 <= seed < 5 and not additive": True,
    "(L, S) == (2, 3)": True,
    "L in (2, 4) and mask not in ['padding']": True,
    "'pad' in mask": False,
    "head_dim == 1.0": True,
    "n_kv_heads * 2 > 1": False,
    "bias == 'qvo' or causal == True": False,
    "mask == '\\d'": False,
}


@pytest.mark.parametrize("what", HUGE)
def test_predicate_that_may_be_costly_is_refused(what: str, tmp_path: Path) -> None:
    text = HUGE[what]
    with pytest.raises(WaiverError, match="where: ") as raised:
        validate_where(text)
    assert len(str(raised.value)) < 400
    table = {"implementation": "x", "clause": "MSK-1", "reason": "y", "where": text}
    file = tmp_path / "w.toml"
    file.write_text(
        "[[waiver]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in table.items())
    )
    with pytest.raises(WaiverError, match="waiver 1: where: ") as raised:
        read_waivers(file)
    assert str(raised.value).startswith(str(file))
    assert str(raised.value).count("\n") == 0


@pytest.mark.parametrize("text", SMALL)
def test_predicate_may_compute_with_small_numbers(text: str) -> None:
    validate_where(text)
    assert where_holds(text, Case(L=2, S=3)) is SMALL[text]


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, f"a = {'9' * 5000}", "a = 2030-99-99"])
def test_waivers_that_are_no_toml_are_one_message(text: str, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text(text)
    with pytest.raises(WaiverError, match="is not valid TOML"):
        read_waivers(file)


LARGE = (
    "Case(L=10**9)",
    "Case(L=1000000000)",
    "Case(S=1000000000)",
    "Case(B=1000000000)",
    "Case(n_heads=1000000000)",
    "Case(head_dim=1000000000)",
    "Case(head_dim=100000)",
    "Case(L=100000, S=100000)",
    "Case(L=1000000000, S=0)",
    "Case(L=1000000000, B=0)",
    "Case(n_heads=0, head_dim=1000000000)",
    "Case(B=70000, L=70000, S=1)",
    "Case(ranks=1000000)",
    f"Case(seed={1 << 63})",
    f"Case(seed={'9' * 5000})",
    f"Case(L={'9' * 900})",
    "Case(n_kv_heads=-1)",
    "Case(n_kv_heads='x')",
    "Case(bias=1)",
    f"Case(mask='{'x' * 5000}')",
    f"Case(L={'(' * 90_000}1{')' * 90_000})",
    f"Case(L={'-' * 900}1)",
)


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("text", LARGE)
def test_case_that_would_take_all_of_a_machine_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="case") as raised:
        read_case(text)
    assert len(str(raised.value)) < 500
    failing = verdict("loop", "MSK-8", "fail", case=text)
    Path("r.json").write_text(report(failing, targets={"loop": "loop"}).to_json())
    status, output = run("replay", "r.json", "--impl", "loop")
    assert (status, output.count("\n"), output[:5]) == (2, 1, "mha: ")
    status, output = run("waive", "MSK-8", "--reason", "x", "--run", "r.json")
    assert (status, output.count("\n")) == (2, 1)
    assert run("show", "MSK-8", "--run", "r.json")[0] == 0
    with pytest.raises(ValueError, match="case"):
        Campaign.of(Plan(implementations=("loop",), known=("r.json",)))


def test_case_of_grouped_heads_and_long_rows_is_read() -> None:
    for case in (
        Case(n_heads=4, n_kv_heads=2),
        Case(L=33, S=65536, n_heads=3, B=2),
        Case(L=0, S=0),
        Case(bias="qvo"),
    ):
        assert read_case(repr(case)) == case


NOTED = (
    "import sys\nprint('imported', file=sys.stderr, flush=True)\nfrom mha.implementations.loop"
    " import implementation\n"
)


def replayed(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Run `mha replay` as a process of its own; return its errors, in lines, and its output."""
    command = [sys.executable, "-m", "mha.conformance", "replay", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines(), done.stdout


def test_replay_says_what_a_report_from_elsewhere_lets_it_import(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(NOTED)
    (tmp_path / ".mha").mkdir()
    failing = [verdict("loop", clause, "fail") for clause in ("MSK-8", "MSK-10")]
    text = report(*failing, targets={"loop": "x.py:implementation"}, host="elsewhere").to_json()
    for name in ("r.json", ".mha/last.json"):
        (tmp_path / name).write_text(text)
        errors, output = replayed(tmp_path, name)
        assert errors[:2] == [
            f"{name} names x.py:implementation; it is imported and run now",
            "imported",
        ]
        assert output.count("MSK-") == 2
    errors, _ = replayed(tmp_path, "r.json", "--impl", "x.py:implementation")
    assert errors == ["imported"]


def test_replay_of_the_last_run_of_this_folder_needs_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faulty = "mha.conformance.faults.mask_edges:faulty_FiniteFill"
    status, output = run(
        "check", faulty, "--clause", "MSK-8", "--dtype", "float32", "--profile", "quick"
    )
    assert status == 1, output
    assert "imported" not in run("replay")[1]
    Path("copy.json").write_bytes(Path(".mha/last.json").read_bytes())
    assert (
        f"copy.json names {faulty}; it is imported and run now\n" in run("replay", "copy.json")[1]
    )


@pytest.mark.parametrize("place", ["../elsewhere.toml", "link.toml"])
def test_project_does_not_name_a_file_outside_of_it_for_a_waiver(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("link.toml").symlink_to("../elsewhere.toml")
    Path("pyproject.toml").write_text(f'[tool.mha]\nwaivers = "{place}"\n')
    Path("r.json").write_text(report(verdict("x", "MSK-8", "fail")).to_json())
    command = ("waive", "MSK-8", "--reason", "x", "--run", "r.json")
    status, output = run(*command)
    assert (status, "is not in the project" in output, output.count("\n")) == (2, True, 1)
    assert not Path("../elsewhere.toml").exists()
    assert run(*command, "--file", "../elsewhere.toml")[0] == 0
