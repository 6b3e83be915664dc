"""`mha check`: what it prints, its exit status, and what it says of bad input."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from reports_made import verdict
from rich.console import Console
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.cli.check import progress_bar, show

CLASSES = Path(__file__).parent / "classes"
PLAIN = f"{CLASSES}/separate_linears.py:MultiHeadAttention"
QUICK = ("--dtype", "float32", "--clause", "SHP-1", "--clause", "MSK-8")


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha check`; return its status, and all that it says."""
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_plain_class_is_understood_and_judged() -> None:
    status, told = run(PLAIN, *QUICK)
    assert status == 1
    for line in (
        "MultiHeadAttention, as it was understood:",
        "projections  w_q: W_q, w_k: W_k, w_v: W_v, w_o: W_o  [tested]",
        "mask         mask: True = may attend, broadcastable to (b, h, l, s)  [tested]",
        "    implementation = from_module(",
        "MSK-8 (MUST): Empty rows follow one declared policy",
        f"implementation = resolve('{PLAIN}')[0].implementation",
        "MultiHeadAttention: DOES NOT CONFORM (1 fail, 1 pass;",
    ):
        assert line in told


def test_script_of_an_inferred_class_runs_alone_and_fails() -> None:
    _, told = run(PLAIN, *QUICK)
    lines = told.split("save this as a file and run it:\n\n")[1].split("\n\n\n\n")[0]
    script = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    with pytest.raises(AssertionError):
        exec(compile(script, "script", "exec"), {})


def test_without_a_clause_each_departure_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha.conformance import checking

    some = {clause: members for clause, members in checking.properties().items() if clause in ("SHP-1", "MSK-8")}
    monkeypatch.setattr(checking, "properties", lambda: some)
    status, told = run(PLAIN, "sdpa", "--dtype", "float32")
    assert status == 1
    assert "fail            MSK-8   float32: output_2[0, 0, 0] is -0.0798787773, but should be" in told
    assert "add --clause MSK-8" in told
    assert "sdpa: conforms (2 pass;" in told


def test_the_clause_to_look_at_is_one_that_must_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from mha.conformance import checking

    some = {clause: members for clause, members in checking.properties().items() if clause in ("MSK-10", "NUM-1")}
    monkeypatch.setattr(checking, "properties", lambda: some)
    told = run("mha.conformance.faults.softmax:faulty_Unscaled", "--dtype", "float32")[1]
    assert told.index("MSK-10") < told.index("NUM-1")
    assert "add --clause NUM-1" in told


def test_what_is_not_claimed_is_told() -> None:
    status, told = run(PLAIN, "--dtype", "float16", "--clause", "SHP-1")
    assert status == 2
    assert "MultiHeadAttention: NOTHING WAS JUDGED (1 not claimed;" in told
    assert "    float16 on cpu is not claimed; claimed: float32, float64 on cpu, cuda\n" in told


def test_progress_is_shown_on_a_terminal_and_erased() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    verdicts = [verdict("x", "SHP-1"), verdict("x", "MSK-8", "fail")]
    with progress_bar(console, ["SHP-1", "MSK-8", ""]) as bar:
        for count in (1, 2):
            show(bar, verdicts[:count], ["SHP-1", "MSK-8", ""][count])
            bar.refresh()
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # of StringIO
    assert re.search(r"MSK-8 .*━.*1/2.*40 cases, 0 not kept", shown)
    assert "80 cases, 1 not kept" in shown
    assert shown.rstrip("\x1b[?25h").endswith("\x1b[2K")
    assert "━" not in run(PLAIN, *QUICK)[1]


def test_what_conforms_ends_with_status_0() -> None:
    status, told = run("sdpa", *QUICK)
    assert status == 0
    assert "sdpa: conforms (2 pass;" in told


BAD = {
    "an unknown name": (("nobody",), "no implementation is registered as 'nobody'"),
    "a missing file": (("nowhere.py:Class",), "there is no file 'nowhere.py'"),
    "a file that does not import": (("{broken}:Class",), "cannot be run: ZeroDivisionError: division by zero"),
    "a class that needs more": (("{needs}:Needs",), "its constructor requires rank, which has no known name"),
    "a forward that raises": (("{raises}:Raises",), "each call raises, the first one RuntimeError: never here"),
    "a number": (("{broken_not}:NUMBER",), "is of type int, neither a torch.nn.Module class nor an implementation"),
    "two projections for one": (("{twice}:Twice",), "query and q_proj both look like w_q"),
    "an unknown clause": (("sdpa", "--clause", "XYZ-1"), "no clause 'XYZ-1'"),
    "an unknown dtype": (("sdpa", "--dtype", "float8"), "no dtype 'float8'"),
    "an unknown profile": (("sdpa", "--profile", "fast"), "no profile 'fast'"),
}
HEAD = "from torch import nn\nNUMBER = 3\n"
INIT = "    def __init__(self, d_model, n_heads{more}):\n        super().__init__()\n"
LAYERS = "        self.q_proj, self.k, self.v, self.o{more} = (nn.Linear(d_model, d_model) for _ in range({count}))\n"
FILES = {
    "broken": "1 / 0\n",
    "broken_not": HEAD,
    "needs": HEAD + "class Needs(nn.Module):\n" + INIT.format(more=", rank"),
    "raises": HEAD
    + "class Raises(nn.Module):\n"
    + INIT.format(more="")
    + LAYERS.format(more="", count=4)
    + "    def forward(self, query, key, value, mask=None):\n        raise RuntimeError('never here')\n",
    "twice": HEAD
    + "class Twice(nn.Module):\n"
    + INIT.format(more="")
    + LAYERS.format(more=", self.query", count=5)
    + "    def forward(self, x):\n        return x\n",
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_line_and_status_2(what: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    arguments, told = BAD[what]
    names = {name: str(tmp_path / f"{name}.py") for name in FILES}
    status, said = run(*(argument.format(**names) for argument in arguments))
    assert status == 2
    assert told in said
    assert len(said.strip().splitlines()) == 1
