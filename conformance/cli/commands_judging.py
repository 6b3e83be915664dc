"""The verbs of `mha` that run implementations: on the contract, on failures, in time, on faults."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from mha.conformance.cli.completion import complete_clause, complete_target
from mha.conformance.cli.options import LAST, Seed, WaiverFile, WrittenReports
from mha.conformance.cli.printing import errors_in_one_line, exit_guarded, print_folded


def _targets(text: str) -> Any:
    """Return the argument that names implementations; text: its help."""
    return typer.Argument(metavar="TARGET", help=text, autocompletion=complete_target)


Targets = Annotated[
    list[str], _targets("A registered name, module:object, file.py:Class, or NAME=one of these.")
]
Clauses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID",
        help="Check only this clause (MSK-8) or family (MSK), and report in full. Repeatable.",
        autocompletion=complete_clause,
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A dtype. Default: float32 and float64. Repeatable."),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="cpu or cuda. Default: cpu. Repeatable."),
]
ProfileOfProject = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="quick, default or thorough. Default: default."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Require the clauses of level SHOULD too.")]
Required = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Require this clause or family too. Repeatable."),
]
Json = Annotated[
    str,
    typer.Option(metavar="FILE", help="Write a JSON report; - prints it, and all else to stderr."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every verdict.")]
ExitFirst = Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")]
MaxTime = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="Stop after this time; 0: no limit.")
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


def check(  # noqa: PLR0913  the options of the command
    targets: Targets,
    clause: Clauses = None,
    dtype: Dtypes = None,
    device: Devices = None,
    profile: ProfileOfProject = None,
    seed: Seed = 0,
    strict: Strict = False,
    require: Required = None,
    waivers: WaiverFile = None,
    report: WrittenReports = None,
    json: Json = "",
    verbose: Verbose = False,
    exitfirst: ExitFirst = False,
    max_time: MaxTime = 0,
    jobs: Jobs = 0,
) -> None:
    """Check implementations against the contract.

    A plain module class needs no adapter: how to build and call it is inferred. Options that are
    left out are as [tool.mha] in pyproject.toml says. The exit status is 0 if every implementation
    conforms, 1 if one does not, and 2 if something could not be checked.
    """
    from mha.conformance.engine.workers import Workers

    # The processes are started before torch is imported.
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
    if given:
        return given
    if few:
        return 1
    if device or read_project(Path()).table.device:
        return min(cores(), 4)
    return cores()


WatchedTarget = Annotated[str, _targets("FILE.py:OBJECT or module:object, as for mha check.")]
ProfileOfWatch = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of the second look: quick, default or thorough."),
]


def watch(  # noqa: PLR0913  the options of the command
    target: WatchedTarget,
    clause: Clauses = None,
    dtype: Dtypes = None,
    device: Devices = None,
    profile: ProfileOfWatch = "quick",
    seed: Seed = 0,
    waivers: WaiverFile = None,
    report: WrittenReports = None,
    jobs: Jobs = 0,
) -> None:
    """Judge a class or a kernel again whenever its file is saved.

    What failed last is judged first, then a few cases of each clause in one dtype, and if all are
    right, what --profile says; a few failures end that. A save starts anew. Files that it imports
    are watched too. Ctrl-C ends with the exit status of the last report, which mha show opens.
    """
    from mha.conformance.engine.workers import Workers

    # The processes are started before torch is imported.
    with errors_in_one_line(), Workers(_jobs(jobs, device, few=False)) as workers:
        from mha.conformance.cli.check import CheckOptions, Stop
        from mha.conformance.cli.watch import watch as watch_target
        from mha.conformance.settings import Settings

        asked = clause or (), dtype or None, device or None, waivers
        settings = Settings.of(profile, seed, *asked)
        options = CheckOptions.of(
            waivers=waivers, reports=report or (), json="", verbose=False, stop=Stop(first=True)
        )
        status = watch_target(target, settings, options, workers)
    raise typer.Exit(status)


ReportOrCase = Annotated[
    str,
    typer.Argument(
        show_default=False,
        help='A JSON report, or a case as "Case(L=2)". Default: the last run.',
    ),
]
ClausesReplayed = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Replay only failures of this clause. Repeatable."),
]
OtherImplementation = Annotated[
    str,
    typer.Option(metavar="TARGET", help="Run this implementation instead of the one that failed."),
]


def replay(
    what: ReportOrCase = str(LAST), clause: ClausesReplayed = None, impl: OtherImplementation = ""
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
        if "FAILS" in outcomes:
            return 1
        return 2 if "INAPPLICABLE" in outcomes else 0

    exit_guarded(run)


BenchTargets = Annotated[
    list[str], _targets("Implementations; the others are compared with the first.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="encoder, long, token or huge. Default: all but huge. Repeatable."
    ),
]
Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep", help="Time self-attention over 128 to 8192 tokens instead of the shapes."
    ),
]
BenchDtype = Annotated[
    str | None, typer.Option(metavar="NAME", help="The dtype to time in. Default: float32.")
]
BenchDevice = Annotated[str | None, typer.Option(metavar="NAME", help="cpu or cuda. Default: cpu.")]
Rounds = Annotated[
    int,
    typer.Option(min=6, metavar="N", help="Rounds of timing; fewer if they take over a minute."),
]
Threads = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", show_default=False, help="Threads of torch. Default: its own setting."
    ),
]
TimingFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Write FILE.html, .json or .svg. Repeatable."),
]


def bench(  # noqa: PLR0913  the options of the command
    targets: BenchTargets,
    shape: Shapes = None,
    sweep: Sweep = False,
    dtype: BenchDtype = None,
    device: BenchDevice = None,
    waivers: WaiverFile = None,
    rounds: Rounds = 30,
    threads: Threads = 0,
    to: TimingFiles = None,
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


Faults = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Names of faults. Default: all of them."),
]
Profile = Annotated[
    str, typer.Option(metavar="NAME", help="How thorough: quick, default or thorough.")
]
EveryClause = Annotated[
    bool,
    typer.Option(
        "--every-clause", help="Check every clause, not only those that must catch the fault."
    ),
]
MatrixAsJson = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the matrix as JSON.")
]
MatrixAsTable = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the matrix as a table.")
]


def faults(
    names: Faults = None,
    seed: Seed = 0,
    profile: Profile = "default",
    every_clause: EveryClause = False,
    json: MatrixAsJson = None,
    markdown: MatrixAsTable = None,
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
        ):
            print_folded(line)
            if not caught:
                status = 1
    raise typer.Exit(status)
