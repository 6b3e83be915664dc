"""The command `mha` as a process: how it starts, its help, and its usage errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from mha.conformance.cli import app, main, options
from mha.conformance.properties.registry import properties
from mha.conformance.properties.source_index import listing
from mha.conformance.reports import files
from mha.spec import CLAUSES

VERBS = (
    "spec",
    "check",
    "watch",
    "report",
    "replay",
    "show",
    "waive",
    "bench",
    "list",
    "init",
    "faults",
    "judge-all",
    "export",
    "verify",
    "campaign",
)
# Slow to import, and not needed to print help or a clause. Recent versions of typer import
# pydantic.
SLOW = ("torch", "numpy", "rich", "jinja2", "hypothesis", "pytest", "einops")
RECORDS_IMPORTS = f"""
import atexit, sys
atexit.register(lambda: print("imported:", *(name for name in {SLOW} if name in sys.modules)))
from mha.conformance.cli import main
sys.argv = ["mha", *sys.argv[1:]]
main()
"""


def run(*command: str, width: int = 80) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, on a terminal of this many columns."""
    environment = os.environ | {"COLUMNS": str(width)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "Usage: mha [OPTIONS]"),
        (["--version"], 0, "mha-conformance 0."),
        (["check", "--help"], 0, "--profile"),
        (["spec"], 0, "INC-1   MAY     Cached decoding equals one causal pass"),
        (["spec", "MSK-8"], 0, "MSK-8 (MUST): Empty rows follow one declared policy"),
        (["spec", "MSK-99"], 2, "did you mean MSK-9"),
        (["chekc", "sdpa"], 2, "No such command 'chekc'"),
        (["check"], 2, "Missing argument"),
        (["check", "sdpa", "--seed", "-1"], 2, "--seed"),
        (["waive", "MSK-8"], 2, "Missing option '--reason'"),
    ],
)
def test_text_and_usage_errors_need_no_slow_import(
    arguments: list[str], status: int, text: str
) -> None:
    done = run("-c", RECORDS_IMPORTS, *arguments)
    assert done.returncode == status, done.stderr
    assert text in done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("imported:")
    assert "Traceback" not in done.stderr


def test_flag_that_is_read_as_text_prints_no_version() -> None:
    """As typer 0.12 does with click 8.3 and later: exit status 0, and nothing judged."""
    print_version: Any = app._print_version
    with pytest.raises(typer.Exit) as end:
        print_version("False")
    assert end.value.exit_code == 2


def test_output_that_is_closed_ends_the_command_without_a_word() -> None:
    command = f"set -o pipefail; {sys.executable} -m mha.conformance spec --markdown | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_sigterm_ends_a_run_as_an_interrupt_does(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "mha.conformance", "check", "loop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stdout
        assert running.stdout.readline().startswith("Checking loop")
        running.send_signal(signal.SIGTERM)
        assert "INCOMPLETE: the run was stopped." in running.stdout.read()
    assert running.returncode == 2
    assert json.loads((tmp_path / ".mha" / "last.json").read_text())["incomplete"]


@pytest.mark.parametrize("module", ["mha.conformance", "mha.conformance.cli"])
def test_modules_run_the_command(module: str) -> None:
    done = run("-m", module, "spec", "MSK-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("MSK-1 (MUST): ")
    done = run("-m", module, "spec", "MSK-99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mha: 'MSK-99' is neither a clause")
    assert run("-m", module, "--help").stdout.startswith("Usage: mha ")


def test_entry_point_is_the_same_command() -> None:
    (entry_point,) = entry_points(group="console_scripts", name="mha")
    assert entry_point.load() is main


def test_no_arguments_print_the_help() -> None:
    done = run("-m", "mha.conformance")
    assert done.returncode == 2
    assert "Usage: mha" in done.stdout + done.stderr


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_a_screen_and_has_an_example(verb: str) -> None:
    done = run("-m", "mha.conformance", *filter(None, [verb]), "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith(f"  Example: mha {verb}")
    assert "..." not in done.stdout.partition("Commands:")[2]


def test_help_names_every_verb() -> None:
    commands = run("-m", "mha.conformance", "--help").stdout.partition("Commands:")[2]
    assert (
        tuple(
            line.split()[0]
            for line in commands.splitlines()
            if line.startswith("  ") and line[2] != "E"
        )
        == VERBS
    )


def test_default_report_is_the_last_run() -> None:
    assert options.LAST == files.LAST


def test_listing_agrees_with_the_registry() -> None:
    registered = properties()
    assert listing().keys() == registered.keys()
    for clause, members in listing().items():
        level = CLAUSES[clause].level
        listed = [(each.name, each.number, each.level or level, each.module) for each in members]
        expected = registered[clause]
        assert listed == [(each.name, each.number, each.level, each.module) for each in expected]
