"""The command `mha`, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from mha.conformance.cli.app import app

CORRECT = "mha.conformance.faults.base:correct"


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha`; return its exit status and all output."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_check(*arguments: str) -> tuple[int, str]:
    """Run `mha check`; return its exit status and all output."""
    return run("check", *arguments)
