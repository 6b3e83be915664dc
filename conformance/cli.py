"""The command `mha`."""

from __future__ import annotations

import shutil
from difflib import get_close_matches
from typing import Annotated, NoReturn

import typer

WIDEST = 100  # longer lines are hard to read

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def mha() -> None:
    """The contract of multi-head attention, and the judge that holds implementations to it."""


@app.command()
def spec(
    clause: Annotated[str | None, typer.Argument(help="A clause (MSK-1) or a family (MSK); all, if none.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole contract as Markdown.")] = False,
) -> None:
    """Say what a clause asks, why, and who departs from it. Example: mha spec MSK-1"""
    from mha.conformance.pages import document, index, page
    from mha.spec.clauses import CLAUSES, FAMILIES

    if markdown and clause is not None:
        _refuse(f"--markdown prints the whole contract: leave out {clause!r}, or leave out --markdown")
    if markdown:
        typer.echo(document(), nl=False)
    elif clause is None:
        typer.echo(f"{index()}\n\n{len(CLAUSES)} clauses. More about one: mha spec MSK-1")
    elif (wanted := clause.strip().upper()) in FAMILIES:
        typer.echo(index(wanted))
    elif wanted in CLAUSES:
        typer.echo(page(wanted, min(shutil.get_terminal_size().columns, WIDEST)))
    else:
        near = get_close_matches(wanted, [*CLAUSES, *FAMILIES], n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`mha spec` lists them"
        _refuse(f"{clause!r} is neither a clause, such as MSK-1, nor a family, such as MSK; {hint}")


def _refuse(why: str) -> NoReturn:
    """End with status 2, and say why in one line."""
    typer.echo(f"mha: {why}", err=True)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line."""
    app()
