"""`mha check`: what it prints, its exit status, and its messages for bad input."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mha.conformance import settings
from mha.conformance.cli.app import app
from mha.conformance.cli.completion import complete_clause, complete_target
from mha.conformance.cli.console import Printer, advance, line, progress_bar
from mha.conformance.reports.files import LAST, read
from mha.conformance.results import Report
from support.command import run_check as run
from support.folders import CLASSES
from support.reports_made import verdict

# Its masked scores are not low enough; see `plain_class`.
PLAIN = "low_fill.py:MultiHeadAttention"
DECLARED = """
from low_fill import MultiHeadAttention
from mha.implementations import from_module
from mha.spec import Claims

parameters = {"w_q": "W_q", "w_k": "W_k", "w_v": "W_v", "w_o": "W_o"}
claims = Claims(bias={True}, returns_weights=False, empty_row="uniform")
implementation = from_module(MultiHeadAttention, parameters=parameters, claims=claims)
"""
QUICK = ("--dtype", "float32", "--clause", "SHP-1", "--clause", "MSK-1")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in a folder of its own, where the last run is kept."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def plain_class(empty_folder: Path) -> None:
    """Write a plain class whose fill of masked scores, -1e4, is not low enough."""
    source = (CLASSES / "separate_linears.py").read_text(encoding="utf-8")
    (empty_folder / "low_fill.py").write_text(source.replace("-1e9", "-1e4"), encoding="utf-8")


@pytest.fixture
def judge_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a run without `--clause` judge these clauses only."""

    def only(*clauses: str) -> None:
        some = {
            clause: members
            for clause, members in settings.properties().items()
            if clause in clauses
        }
        monkeypatch.setattr(settings, "properties", lambda: some)

    return only


def test_plain_class_is_inferred_and_judged() -> None:
    status, output = run(PLAIN, *QUICK)
    assert status == 1
    for text in (
        "MultiHeadAttention, as inferred from the class:\n\n",
        "projections  w_q: W_q, w_k: W_k, w_v: W_v, w_o: W_o  [tested]",
        "mask         mask: True or 1 = may attend, broadcastable to (b, h, l, s)  [tested]",
        "    implementation = from_module(",
        "\n\nChecking MultiHeadAttention on cpu in float32 (profile default, seed 0)\n\n",
        "\npass            SHP-1   float32: ",
        "\n\nMSK-1 (MUST): Masked keys have no influence",
        "    from low_fill import MultiHeadAttention\n",
        "\n\nMultiHeadAttention: DOES NOT CONFORM: 1 of 2 answers is wrong (MSK-1): masked scores ",
    ):
        assert text in output


def test_what_was_inferred_from_a_function_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention\n" + KERNEL
    )
    _, output = run(f"{tmp_path / 'kernels.py'}:attend", "--clause", "SHP-1", "--dtype", "float32")
    assert "attend, as inferred from the function:\n\n" in output


KERNEL = """
def attend(query, key, value):
    return scaled_dot_product_attention(query, key, value)
"""


def test_script_of_an_inferred_class_runs_alone_and_fails() -> None:
    _, output = run(PLAIN, *QUICK)
    indented = output.split("run it:\n\n")[1].split("\n\n    judged: ")[0]
    script = "\n".join(line.removeprefix("    ") for line in indented.splitlines())
    with pytest.raises(AssertionError):
        exec(compile(script, "script", "exec"), {})


def test_each_failure_is_a_line_unless_a_clause_is_asked_for(
    judge_only: Callable[..., None],
) -> None:
    judge_only("SHP-1", "MSK-1")
    status, output = run(PLAIN, "sdpa", "--dtype", "float32")
    assert status == 1
    assert re.search(
        r"\n\nWrong answers:\nfail            MSK-1   float32: masked scores get a finite number,"
        r" which is not low "
        r"enough\n +MSK-1: output\[",
        output,
    )
    assert "mha show MSK-1" in output
    assert (
        "\n\nChecking sdpa on cpu in float32 (profile default, seed 0)\n\n    judged: 2 clauses on "
        in output
    )
    assert "\n\nsdpa: CONFORMS: all 2 answers right." in output
    assert "pass            " not in output


def test_wrong_answers_come_first_and_are_suggested_for_a_closer_look(
    judge_only: Callable[..., None],
) -> None:
    judge_only("SHP-8", "NUM-1")
    output = run("mha.conformance.faults.tutorials:einops", "--dtype", "float32")[1]
    assert output.index("\nfail            NUM-1") < output.index("\nunmet SHOULD    SHP-8")
    assert "mha show NUM-1" in output


def test_last_line_is_the_verdict(judge_only: Callable[..., None]) -> None:
    judge_only("CFG-1", "CFG-2", "SHP-1", "SHP-6", "MSK-1", "DRP-1", "INC-1", "STA-1")
    status, output = run(PLAIN, "--dtype", "float32")
    assert status == 1
    assert "\n    judged: 6 of 8 clauses on " in output
    assert "\n    not judged: dropout (1), decodes (1)\n" in output
    assert (
        "with a script that reproduces it: mha show MSK-1\n\nMultiHeadAttention: DOES NOT CONFORM: "
        in output
    )
    accepts = "a `d_model` that `n_heads` does not divide, at construction (CFG-2)"
    cause = "masked scores get a finite number, which is not low enough"
    said = f"1 of 2 answers is wrong (MSK-1): {cause}. Accepts invalid input: {accepts}."
    assert " ".join(output.split()).endswith(f"MultiHeadAttention: DOES NOT CONFORM: {said}")


def test_unclaimed_dtype_is_reported(empty_folder: Path) -> None:
    (empty_folder / "declared.py").write_text(DECLARED, encoding="utf-8")
    status, output = run("declared.py:implementation", "--dtype", "float16", "--clause", "SHP-1")
    assert status == 2
    assert (
        "not claimed     SHP-1   float16: float16 on cpu is not claimed; claimed: float32, float64"
        in output
    )
    assert "MultiHeadAttention: NOTHING WAS JUDGED: float16 on cpu is not claimed" in output


def test_run_stops_at_the_first_failure_or_after_a_time(judge_only: Callable[..., None]) -> None:
    judge_only(
        "SHP-1", "MSK-1", "MSK-5"
    )  # not NUM-1, which has several threads: the forks of a test lack these
    status, output = run(PLAIN, "--dtype", "float32", "--profile", "quick", "--exitfirst")
    assert status == 1
    assert "INCOMPLETE, so far: DOES NOT CONFORM" in output
    assert "INCOMPLETE: stopped at the first failure, MSK-1." in output
    assert [each.clause for each in read(LAST).verdicts] == ["SHP-1", "MSK-1"]
    status, output = run("loop", "--dtype", "float32", "--profile", "quick", "--max-time", "0.001")
    assert status == 2
    assert "mha: stopped after 0.001 s: 'loop' was still being imported or tried out" in output
    options = "--clause", "SHP-1", "--dtype", "float32", "--profile", "quick"
    status, output = run("loop", *options, "-x")
    assert status == 0, output


HANGS = """
import time
from mha.implementations.loop import implementation as loop

class Hangs:
    name, claims = "hangs", loop.claims
    def build(self, config, weights, **options):
        attention = loop.build(config, weights, **options)
        attention.register_forward_pre_hook(hang)
        return attention

def hang(module, inputs):
    if not inputs[0].numel():
        time.sleep(600)

implementation = Hangs()
"""


def test_run_that_hangs_is_stopped_after_its_time(
    judge_only: Callable[..., None], empty_folder: Path
) -> None:
    judge_only("SHP-1", "SHP-5", "MSK-1")
    (empty_folder / "hangs.py").write_text(HANGS)
    options = "--dtype", "float32", "--profile", "quick"
    status, output = run("hangs.py:implementation", *options, "--max-time", "10")
    assert status == 2
    assert "INCOMPLETE: stopped after 10 s." in output
    assert [each.clause for each in read(LAST).verdicts] == ["SHP-1"]


def test_call_that_does_not_return_fails_its_clause(
    judge_only: Callable[..., None], empty_folder: Path
) -> None:
    judge_only("SHP-1", "SHP-5", "MSK-1")
    (empty_folder / "hangs.py").write_text(HANGS)
    (empty_folder / "pyproject.toml").write_text("[tool.mha]\ncall_timeout = 2\n")
    status, output = run(
        "hangs.py:implementation", "--dtype", "float32", "--profile", "quick", "--strict"
    )
    assert status == 1
    reason = "a call did not return within 2 s (call_timeout = 2), in hang (hangs.py, line 14)"
    assert f"judging did not end: {reason}" in " ".join(output.split())
    assert [each.status for each in read(LAST).verdicts] == ["pass", "fail", "pass"]


def test_every_verdict_is_printed_if_asked_for(judge_only: Callable[..., None]) -> None:
    judge_only("SHP-1", "MSK-1", "XAT-1")
    status, output = run("loop", "--dtype", "float32", "--profile", "quick", "-v")
    assert status == 0
    assert [line.split()[:2] for line in output.splitlines() if " float32: " in line] == [
        ["not", "claimed"],  # XAT-1, of those that find most
        ["pass", "SHP-1"],
        ["pass", "MSK-1"],
    ]


def test_report_is_printed_as_json_beside_the_text(empty_folder: Path) -> None:
    arguments = ["check", "loop", *QUICK, "--profile", "quick", "--json"]
    result = CliRunner().invoke(app, [*arguments, "-"])
    assert [each.clause for each in Report.from_json(result.stdout).verdicts] == ["SHP-1", "MSK-1"]
    assert "loop: CONFORMS" in result.stderr
    assert run(*arguments[1:], "r.json")[0] == 0
    assert len(read(empty_folder / "r.json").verdicts) == 2
    status, output = run(*arguments[1:], "r.txt")
    assert status == 2
    assert (
        output == "mha: --json takes - or a file name that ends in .json, but was given 'r.txt'\n"
    )


def test_shells_complete_clauses_names_and_files() -> None:
    assert complete_clause("msk-1") == ["MSK-1", "MSK-10", "MSK-11", "MSK-12", "MSK-13", "MSK-14"]
    assert complete_clause("CA")[0] == "CAU"
    assert complete_target("lo") == ["loop", "low_fill.py"]


def test_progress_is_shown_on_a_terminal_and_erased() -> None:
    file = io.StringIO()
    verdicts = [verdict("x", "SHP-1"), verdict("x", "MSK-1", "fail")]
    with progress_bar(
        Console(file=file, force_terminal=True, width=80), ["SHP-1", "MSK-1", ""]
    ) as bar:
        for count in (1, 2):
            advance(bar, verdicts[:count], ["SHP-1", "MSK-1", ""][count])
            bar.refresh()
    assert re.search(r"MSK-1 .*━.*1/2.*40 cases, 0 failed", file.getvalue())
    assert "80 cases, 1 failed" in file.getvalue()
    assert file.getvalue().rstrip("\x1b[?25h").endswith("\x1b[2K")
    assert "━" not in run(PLAIN, *QUICK)[1]


def test_lines_name_the_device_unless_it_is_the_cpu() -> None:
    assert line(verdict("x", "SHP-1")) == "pass            SHP-1   float32: 40 cases"
    assert (
        line(verdict("x", "SHP-1", device="cuda"))
        == "pass            SHP-1   float32 on cuda: 40 cases"
    )


def test_paragraphs_are_separated_by_one_blank_line() -> None:
    file = io.StringIO()
    printer = Printer(Console(file=file, width=20))
    printer.line("[bold]a line that is never broken nor styled")
    printer.line("a line")
    printer.paragraph("a paragraph")
    printer.paragraph("another one")
    printer.line("a line")
    assert (
        file.getvalue()
        == "[bold]a line that is never broken nor styled\na line\n\na paragraph\n\nanother one\n\na"
        " line\n"
    )


def test_status_of_a_conforming_implementation_is_0() -> None:
    status, output = run("sdpa", *QUICK)
    assert status == 0
    assert "sdpa: CONFORMS: all 2 answers right" in output


BAD_INPUT = {
    "an unknown name": (("nobody",), "no implementation is registered as 'nobody'"),
    "a missing file": (("nowhere.py:Class",), "there is no file 'nowhere.py'"),
    "a file that does not import": (
        ("{broken}:Class",),
        "cannot be run: ZeroDivisionError: division by zero",
    ),
    "a class that needs more": (("{needs}:Needs",), "its constructor requires rank"),
    "a forward that raises": (("{raises}:Raises",), "RuntimeError: never here"),
    "a class without forward": (("{nothing}:Nothing",), "Nothing does not define forward"),
    "a number": (("{number}:NUMBER",), "is of type int"),
    "two projections for one": (("{twice}:Twice",), "query and q_proj both look like w_q"),
    "an unknown clause": (
        ("sdpa", "--clause", "MSK-99"),
        "unknown clause 'MSK-99'; did you mean MSK-9",
    ),
    "an unknown dtype": (("sdpa", "--dtype", "float8"), "unknown dtype 'float8'"),
    "an unknown device": (("sdpa", "--device", "tpu"), "unknown device 'tpu'"),
    "an unknown profile": (
        ("sdpa", "--profile", "fast"),
        "unknown profile 'fast'; known: quick, default, thorough",
    ),
}
HEAD = "from torch import nn\nNUMBER = 3\n"
INIT = "    def __init__(self, d_model, n_heads{more}):\n        super().__init__()\n"
LAYERS = (
    "        self.q_proj, self.k, self.v, self.o{more} = (nn.Linear(d_model, d_model) for _ in"
    " range({count}))\n"
)
FILES = {
    "broken": "1 / 0\n",
    "number": HEAD,
    "nothing": (
        HEAD
        + "class Nothing(nn.Module):\n"
        + INIT.format(more="")
        + LAYERS.format(more="", count=4)
    ),
    "needs": HEAD + "class Needs(nn.Module):\n" + INIT.format(more=", rank"),
    "raises": (
        HEAD
        + "class Raises(nn.Module):\n"
        + INIT.format(more="")
        + LAYERS.format(more="", count=4)
        + "    def forward(self, query, key, value, mask=None):\n        raise RuntimeError('never"
        " here')\n"
    ),
    "twice": (
        HEAD
        + "class Twice(nn.Module):\n"
        + INIT.format(more="")
        + LAYERS.format(more=", self.query", count=5)
        + "    def forward(self, x):\n        return x\n"
    ),
}


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    arguments, message = BAD_INPUT[what]
    files = {name: str(tmp_path / f"{name}.py") for name in FILES}
    status, output = run(*(argument.format(**files) for argument in arguments))
    assert status == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1
