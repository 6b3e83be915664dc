"""`mha campaign run` and `mha campaign report`: many implementations, dtypes and seeds as jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mha.conformance.cli.options import WrittenReports
from mha.conformance.cli.printing import HELP_WIDTH, errors_in_one_line

campaign = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"terminal_width": HELP_WIDTH},
    help="Judge many implementations, dtypes and seeds.",
    epilog="Example: mha campaign run plan.toml --out results; see docs/campaign.md",
)

Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="A TOML file: what to judge.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results are.")]
Engine = Annotated[str, typer.Option(metavar="NAME", help="local, or ray for a cluster.")]
Address = Annotated[
    str,
    typer.Option(
        metavar="WHERE", help="Of the Ray cluster: local starts one here, auto joins the one here."
    ),
]
Part = Annotated[str, typer.Option(metavar="I/N", help="Run only part I of N, such as 1/3.")]
JobsAtOnce = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        min=0,
        metavar="N",
        show_default=False,
        help="Jobs at once. Default: one a core.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the results that are there; run the others.")
]
Retry = Annotated[
    str, typer.Option(metavar="crashed", help="Run jobs again that crashed or came to a limit.")
]


@campaign.command(epilog="Example: mha campaign run plan.toml --out results --resume")
def run(  # noqa: PLR0913  the options of the command
    plan: Plan,
    out: Out,
    engine: Engine = "local",
    address: Address = "",
    shard: Part = "1/1",
    jobs: JobsAtOnce = 0,
    resume: Resume = False,
    retry: Retry = "",
) -> None:
    """Run the jobs of a plan that have no result yet.

    The exit status is 0 once every job has a result, whatever the verdicts are, and 2 otherwise,
    and where a registered implementation cannot be loaded.
    """
    with errors_in_one_line():
        from mha.conformance.campaign.run import RunOptions, Shard
        from mha.conformance.cli.campaign import run_plan

        if retry not in ("", "crashed"):
            raise ValueError(f"--retry takes crashed, but was given {retry!r}")
        part = Shard.parse(shard)
        options = RunOptions(
            part, engine=engine, address=address, workers=jobs, resume=resume, retry=bool(retry)
        )
        status = run_plan(plan, out, options)
    raise typer.Exit(status)


Folders = Annotated[
    list[Path], typer.Argument(metavar="FOLDER", help="The folders of one campaign's results.")
]
Before = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Compare with an earlier campaign, as with an older torch."
    ),
]


@campaign.command(epilog="Example: mha campaign report results --to report.html")
def report(folders: Folders, before: Before = None, to: WrittenReports = None) -> None:
    """Show what a campaign found.

    For each implementation and clause, that is the worst verdict of all seeds.

    The failing cases are written to failures.json in the first folder, for mha replay.
    """
    from mha.conformance.cli.campaign import report_lines
    from mha.conformance.cli.console import print_drawing

    with errors_in_one_line():
        lines, status = report_lines(folders, before, to or ())
        print_drawing(lines)
    raise typer.Exit(status)
