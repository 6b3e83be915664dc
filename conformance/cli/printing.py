"""What the verbs of `mha` share: lines folded to the terminal, and errors in one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# Click itself folds to no less than 50 columns; in fewer than these, there is nothing to read.
HELP_WIDTH = max(20, min(shutil.get_terminal_size().columns, 80) - 2)


def print_folded(text: str, indent: str = "    ", *, err: bool = False) -> None:
    """Print lines, folded to the width of a terminal; indent: what the rest of a line begins with."""
    from mha.conformance.reports.text import fitted

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
