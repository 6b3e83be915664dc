"""The verbs of `mha`: their arguments and help. Each verb has its own module, imported when it is
run.

Help, `mha spec` and usage errors must not wait for torch.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mha.conformance.cli.campaign_app import campaign
from mha.conformance.cli.completion import complete_clause, complete_target
from mha.conformance.cli.printing import HELP_WIDTH, errors_in_one_line, exit_guarded, print_folded

# That of `reports.files`, whose import would load the renderers of reports.
LAST = Path(".mha") / "last.json"

Seed = Annotated[
    int, typer.Option(min=0, metavar="N", help="Seed of the cases, which repeats a run.")
]
ProfileName = Annotated[
    str, typer.Option(metavar="NAME", help="How thorough: quick, default or thorough.")
]
WaiverFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Known failures to accept; see mha waive.")
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Write a .html, .json or .md report. Repeatable."),
]
Run = Annotated[
    Path,
    typer.Option(
        metavar="FILE", show_default=False, help="The JSON report. Default: the last run."
    ),
]


def _targets(text: str) -> Any:
    """Return the argument that names implementations; text: its help."""
    return typer.Argument(metavar="TARGET", help=text, autocompletion=complete_target)


Targets = Annotated[
    list[str], _targets("A registered name, module:object, file.py:Class, or NAME=one of these.")
]
BenchTargets = Annotated[
    list[str], _targets("Implementations; the others are compared with the first.")
]
Clauses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID",
        help="Check only this clause (MSK-8) or family (MSK), and report in full. Repeatable.",
        autocompletion=complete_clause,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        "-j",
        min=0,
        metavar="N",
        envvar="MHA_JOBS",
        show_envvar=False,
        show_default=False,
        help="Processes. Default: one a core; at most 4 with --device, one with --clause.",
    ),
]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": HELP_WIDTH},
)
app.add_typer(campaign, name="campaign")


def _print_version(given: bool) -> None:
    if isinstance(
        given, str
    ):  # "False", which would print the version instead of judging, with exit status 0
        typer.echo(
            "mha: this version of typer does not read options with this version of click; update"
            " both",
            err=True,
        )
        raise typer.Exit(2)
    if given:
        from importlib.metadata import version

        typer.echo(f"mha-conformance {version('mha-conformance')}")
        raise typer.Exit


@app.callback(epilog="Example: mha check my_file.py:MyAttention")
def mha(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Check implementations of multi-head attention against a contract.

    The contract is a list of clauses, such as MSK-1: masked keys have no influence. To read it, run
    mha spec.
    """


@app.command(epilog="Example: mha spec MSK-1")
def spec(
    clause: Annotated[
        str | None,
        typer.Argument(
            help=(
                "A clause, such as MSK-1, or a family, such as MSK. Default: an index of all"
                " clauses."
            ),
            autocompletion=complete_clause,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole contract as Markdown.")
    ] = False,
) -> None:
    """Show what a clause requires, why, and how libraries differ."""
    from mha.conformance.cli.spec import contract_text

    with errors_in_one_line():
        typer.echo(contract_text(clause, markdown=markdown))


@app.command(epilog="Example: mha check my_file.py:MyAttention")
def check(  # noqa: PLR0913  the options of the command
    targets: Targets,
    clause: Clauses = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A dtype. Default: float32 and float64. Repeatable."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="cpu or cuda. Default: cpu. Repeatable."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="quick, default or thorough. Default: default."),
    ] = None,
    seed: Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Require the clauses of level SHOULD too.")
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Require this clause or family too. Repeatable."),
    ] = None,
    waivers: WaiverFile = None,
    report: Reports = None,
    json: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Write a JSON report; - prints it, and all else to stderr."
        ),
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every verdict.")] = False,
    exitfirst: Annotated[
        bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")
    ] = False,
    max_time: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Stop after this time; 0: no limit.")
    ] = 0,
    jobs: Jobs = 0,
) -> None:
    """Check implementations against the contract.

    A plain module class needs no adapter: how to build and call it is inferred. Options that are
    left out are as [tool.mha] in pyproject.toml says. The exit status is 0 if every implementation
    conforms, 1 if one does not, and 2 if something could not be checked.
    """
    from mha.conformance.engine.workers import Workers

    with errors_in_one_line(), Workers(_jobs(jobs, device, few=bool(clause))) as workers:
        from mha.conformance.cli.check import CheckOptions, Stop, check_all
        from mha.conformance.settings import Settings

        asked = clause or (), dtype or None, device or None, waivers
        settings = Settings.of(profile, seed, *asked, strict=strict, require=require or ())
        stop = Stop(first=exitfirst, after=max_time)
        options = CheckOptions.of(
            waivers=waivers, reports=report or (), json=json, verbose=verbose, stop=stop
        )
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            status = check_all(targets, settings, options, workers)
    raise typer.Exit(status)


def _jobs(given: int, device: list[str] | None, *, few: bool) -> int:
    """Return how many processes judge; a GPU, also one of the project, keeps a context for each.

    given: 0 where nobody says. few: whether few clauses are judged. Raises ValueError.
    """
    from mha.conformance.engine.workers import cores
    from mha.conformance.project import read_project
    from mha.conformance.ranges import JOBS

    JOBS.require("--jobs (or MHA_JOBS)", given)
    if given or few:
        return given or 1
    return min(cores(), 4) if device or read_project(Path()).table.device else cores()


@app.command(epilog="Example: mha report before.json after.json")
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="JSON reports. Default: the last run."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge reports that are shards of one run.")
    ] = False,
    to: Reports = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a report.")
    ] = False,
) -> None:
    """Show or convert a report, merge several, or compare two."""
    from mha.conformance.cli.report import report_lines

    with errors_in_one_line():
        lines, status = report_lines(files or [LAST], merge_all=merge, to=to or (), schema=schema)
        typer.echo("\n".join(lines))
    raise typer.Exit(status)


@app.command(epilog="Example: mha replay --clause MSK-8")
def replay(
    what: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help='A JSON report, or a case as "Case(L=2)". Default: the last run.',
        ),
    ] = str(LAST),
    clause: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Replay only failures of this clause. Repeatable."),
    ] = None,
    impl: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="Run this implementation instead of the one that failed."
        ),
    ] = "",
) -> None:
    """Run failures again, each on the case that failed.

    Each is FIXED, or FAILS, or is INAPPLICABLE if the clause does not apply to the case.
    """

    def run() -> int:
        from mha.conformance.cli.replay import replay_what
        from mha.conformance.settings import clauses_of

        outcomes = set()
        for outcome, line in replay_what(what, clauses_of(clause or ()), impl):
            outcomes.add(outcome)
            print_folded(line, " " * 13)
        return 1 if "FAILS" in outcomes else 2 if "INAPPLICABLE" in outcomes else 0

    exit_guarded(run)


@app.command(epilog="Example: mha show MSK-8 --script msk8.py")
def show(
    clauses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CLAUSE",
            help=(
                "Clauses, such as MSK-8, or families, such as MSK. Default: a list of all failures."
            ),
            autocompletion=complete_clause,
        ),
    ] = None,
    run: Run = LAST,
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the script that reproduces the failure, and print nothing else.",
        ),
    ] = None,
) -> None:
    """Show the failures of the last run, or a clause of it in full."""
    from mha.conformance.cli.show import show_verdicts

    with errors_in_one_line():
        show_verdicts(clauses or (), run, script)


@app.command(epilog='Example: mha waive MSK-8 --reason "rows are never empty"')
def waive(  # noqa: PLR0913  the options of the command
    clause: Annotated[
        str, typer.Argument(help="The clause that fails.", autocompletion=complete_clause)
    ],
    reason: Annotated[str, typer.Option(help="Why the failure is accepted.")],
    impl: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The implementation, if several of the run fail the clause."
        ),
    ] = "",
    url: Annotated[str, typer.Option(help="Where the failure is discussed.")] = "",
    where: Annotated[
        str,
        typer.Option(
            metavar="PREDICATE", help='Which cases to waive, such as "L == 0". Default: all.'
        ),
    ] = "",
    expires: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"], metavar="DATE", help="The last day, such as 2030-12-31."
        ),
    ] = None,
    run: Run = LAST,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help=(
                "The waiver file to add to. Default: the one that the next run reads,"
                " mha_waivers.toml."
            ),
        ),
    ] = None,
) -> None:
    """Accept a failure of the last run by adding a waiver to a file."""
    from mha.conformance.cli.waive import waive_failure
    from mha.conformance.waivers import Waiver

    with errors_in_one_line():
        last_day = expires and expires.date()
        requested = Waiver(
            implementation=impl,
            clause=clause.upper(),
            reason=reason,
            url=url,
            where=where,
            expires=last_day,
        )
        print_folded(waive_failure(requested, run, file))


@app.command(epilog="Example: mha bench sdpa vectorized --shape encoder")
def bench(  # noqa: PLR0913  the options of the command
    targets: BenchTargets,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="encoder, long, token or huge. Default: all but huge. Repeatable."
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="Time self-attention over 128 to 8192 tokens instead of the shapes."
        ),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="The dtype to time in. Default: float32.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda. Default: cpu.")
    ] = None,
    waivers: WaiverFile = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=6, metavar="N", help="Rounds of timing; fewer if they take over a minute."
        ),
    ] = 30,
    threads: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            show_default=False,
            help="Threads of torch. Default: its own setting.",
        ),
    ] = 0,
    to: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Write FILE.html, .json or .svg. Repeatable."),
    ] = None,
) -> None:
    """Time conforming implementations side by side."""

    def run() -> int:
        from mha.conformance.cli.bench import BenchOptions, run_benchmarks

        options = BenchOptions(
            targets=tuple(targets),
            shapes=tuple(shape or ()),
            sweep=sweep,
            dtype=dtype,
            device=device,
            waivers=waivers,
            rounds=rounds,
            threads=threads,
            files=tuple(to or ()),
        )
        return run_benchmarks(options)

    exit_guarded(run)


@app.command("list", epilog="Example: mha list")
def list_() -> None:
    """List the registered implementations and their dtypes."""

    def run() -> int:
        from mha.conformance.cli.list import list_registered

        return list_registered()

    exit_guarded(run)


@app.command(epilog="Example: mha init my_file.py:MyAttention")
def init(
    target: Annotated[
        str, typer.Argument(help="A plain module class, as file.py:Class or module:Class.")
    ],
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The root of the project.")
    ] = Path(),
    source: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where the job installs mha-conformance from: git+https://..."
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an earlier declaration and job.")
    ] = False,
) -> None:
    """Write a declaration of a class, and a CI job that checks it."""

    def run() -> int:
        from mha.conformance.cli.init import write_files

        for line in write_files(target, folder, source, force=force):
            print_folded(line)
        return 0

    exit_guarded(run)


@app.command(epilog="Example: mha faults --markdown kills.md")
def faults(  # noqa: PLR0913  the options of the command
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names of faults. Default: all of them."),
    ] = None,
    seed: Seed = 0,
    profile: ProfileName = "default",
    every_clause: Annotated[
        bool,
        typer.Option(
            "--every-clause", help="Check every clause, not only those that must catch the fault."
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the matrix as JSON.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the matrix as a table.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the matrix as a picture.")
    ] = None,
) -> None:
    """Run the self-test: check that every known fault is caught."""
    from mha.conformance.cli.faults import self_test

    status = 0
    with errors_in_one_line():
        for line, caught in self_test(
            names or (),
            seed,
            profile,
            every_clause=every_clause,
            json=json,
            markdown=markdown,
            svg=svg,
        ):
            print_folded(line)
            status = max(status, int(not caught))
    raise typer.Exit(status)
