"""The verbs of `mha` that show what is known: the contract, implementations, and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mha.conformance.cli.completion import complete_clause
from mha.conformance.cli.options import LAST, Run, WrittenReports
from mha.conformance.cli.printing import errors_in_one_line, exit_guarded

ClauseOrFamily = Annotated[
    str | None,
    typer.Argument(
        help="A clause, such as MSK-1, or a family, such as MSK. Default: an index of all clauses.",
        autocompletion=complete_clause,
    ),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Print the whole contract as Markdown.")
]


def spec(clause: ClauseOrFamily = None, markdown: AsMarkdown = False) -> None:
    """Show what a clause requires, why, and how libraries differ."""
    from mha.conformance.cli.spec import contract_text

    with errors_in_one_line():
        typer.echo(contract_text(clause, markdown=markdown))


def list_() -> None:
    """List the registered implementations and their dtypes."""

    def run() -> int:
        from mha.conformance.cli.list import list_registered

        return list_registered()

    exit_guarded(run)


Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE", help="JSON reports. Default: the last run."),
]
Merge = Annotated[bool, typer.Option("--merge", help="Merge reports that are shards of one run.")]
Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a report.")]


def report(
    files: Files = None, merge: Merge = False, to: WrittenReports = None, schema: Schema = False
) -> None:
    """Show or convert a report, merge several, or compare two."""
    from mha.conformance.cli.console import print_drawing
    from mha.conformance.cli.report import report_lines

    with errors_in_one_line():
        lines, status = report_lines(files or [LAST], merge_all=merge, to=to or (), schema=schema)
        print_drawing(lines)
    raise typer.Exit(status)


ClausesShown = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CLAUSE",
        help="Clauses, such as MSK-8, or families, such as MSK. Default: a list of all failures.",
        autocompletion=complete_clause,
    ),
]
Script = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the script that reproduces the failure, and print nothing else.",
    ),
]


def show(clauses: ClausesShown = None, run: Run = LAST, script: Script = None) -> None:
    """Show the failures of the last run, or a clause of it in full."""
    from mha.conformance.cli.show import show_verdicts

    with errors_in_one_line():
        show_verdicts(clauses or (), run, script)
