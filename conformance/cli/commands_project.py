"""The verbs of `mha` that write files of a project: a declaration with a CI job, and waivers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from mha.conformance.cli.completion import complete_clause
from mha.conformance.cli.options import LAST, Run
from mha.conformance.cli.printing import errors_in_one_line, exit_guarded, print_folded

FailingClause = Annotated[
    str, typer.Argument(help="The clause that fails.", autocompletion=complete_clause)
]
Reason = Annotated[str, typer.Option(help="Why the failure is accepted.")]
FailingImplementation = Annotated[
    str,
    typer.Option(metavar="NAME", help="The implementation, if several of the run fail the clause."),
]
Url = Annotated[str, typer.Option(help="Where the failure is discussed.")]
WaivedCases = Annotated[
    str,
    typer.Option(metavar="PREDICATE", help='Which cases to waive, such as "L == 0". Default: all.'),
]
LastDay = Annotated[
    datetime | None,
    typer.Option(formats=["%Y-%m-%d"], metavar="DATE", help="The last day, such as 2030-12-31."),
]
FileToAddTo = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="The waiver file to add to. Default: the one that the next run reads,"
        " mha_waivers.toml.",
    ),
]


def waive(  # noqa: PLR0913  the options of the command
    clause: FailingClause,
    reason: Reason,
    impl: FailingImplementation = "",
    url: Url = "",
    where: WaivedCases = "",
    expires: LastDay = None,
    run: Run = LAST,
    file: FileToAddTo = None,
) -> None:
    """Accept a failure of the last run by adding a waiver to a file."""
    from mha.conformance.cli.waive import waive_failure
    from mha.conformance.waivers import Waiver

    with errors_in_one_line():
        requested = Waiver(
            implementation=impl,
            clause=clause.upper(),
            reason=reason,
            url=url,
            where=where,
            expires=expires and expires.date(),
        )
        print_folded(waive_failure(requested, run, file))


PlainClass = Annotated[
    str, typer.Argument(help="A plain module class, as file.py:Class or module:Class.")
]
Root = Annotated[Path, typer.Option(metavar="FOLDER", help="The root of the project.")]
Source = Annotated[
    str,
    typer.Option(
        metavar="URL", help="Where the job installs mha-conformance from: git+https://..."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an earlier declaration and job.")]


def init(
    target: PlainClass, folder: Root = Path(), source: Source = "", force: Force = False
) -> None:
    """Write a declaration of a class, and a CI job that checks it."""

    def run() -> int:
        from mha.conformance.cli.init import write_files

        for line in write_files(target, folder, source, force=force):
            print_folded(line)
        return 0

    exit_guarded(run)
