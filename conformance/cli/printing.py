"""What the verbs of `mha` share: lines folded to the terminal, and errors in one line."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

# Click itself folds to no less than 50 columns; in fewer than these, there is nothing to read.
HELP_WIDTH = max(20, min(shutil.get_terminal_size().columns, 80) - 2)


def print_folded(text: str, indent: str = "    ", *, err: bool = False) -> None:
    """Print lines, folded to the width of a terminal; indent: of the rest of a line."""
    from mha.conformance.reports.layout import fitted

    typer.echo(fitted(text, sys.stderr if err else sys.stdout, indent), err=err)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with status 2 and one line on stderr for input that cannot be used."""
    try:
        yield
    except ValueError as error:
        from mha.conformance.shown import visible_line

        print_folded(f"mha: {visible_line(str(error))}", "     ", err=True)
        raise typer.Exit(2) from None


def exit_guarded(run: Callable[[], int]) -> NoReturn:
    """End with the status that `run` returns; it runs in a fork, since it runs code that is judged.

    `run` imports what it needs, since a fork can be made only before torch is imported.
    """
    from mha.conformance.engine.guard import run_guarded
    from mha.conformance.project import read_project

    with errors_in_one_line():
        timeout = read_project(Path()).call_timeout
    outcome = run_guarded(lambda: _status_of(run), timeout=timeout)
    if outcome.status is None:
        from mha.conformance.reports.text import visible

        print_folded(
            f"mha: the code to be judged ended the command: {visible(outcome.why)}",
            "     ",
            err=True,
        )
    raise typer.Exit(2 if outcome.status is None else outcome.status)


def _status_of(run: Callable[[], int]) -> int:
    """Return the status of a command; 2 for whatever it raises, which is printed."""
    try:
        with errors_in_one_line():
            return run()
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt:
        print("mha: interrupted", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        print("mha: this is an error of mha-conformance; please report it", file=sys.stderr)
    return 2
