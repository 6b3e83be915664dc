"""`mha check`: judge a few implementations, and tell each departure as it is found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from mha.conformance.engine.judge import judged, versions
from mha.conformance.engine.search import PROFILES
from mha.conformance.properties.registry import properties
from mha.conformance.reports.files import keep, validate_file, write
from mha.conformance.reports.github import marks
from mha.conformance.reports.summary import status_of
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import brief, describe, shown, summarise
from mha.conformance.results import Report, Verdict, host, now
from mha.conformance.settings import named_once, validate_choice, validate_devices
from mha.conformance.waivers import built_in_waivers, read_waivers
from mha.implementations import Resolved, resolve
from mha.spec.claims import DTYPES

WIDTH = 110
QUIET = ("pass", "not_claimed", "blocked")


def check_all(
    targets: Sequence[str],
    *,
    clauses: Collection[str],
    dtypes: Sequence[str],
    devices: Sequence[str],
    profile: str,
    seed: int,
    strict: bool,
    waivers: Path | None,
    reports: Sequence[Path],
) -> int:
    """Judge all targets and tell what was found, also of a run that is stopped; return the exit status.

    Raises ValueError, before anything is judged, for a word that is not known or a target that cannot be used.
    """
    validate_choice("profile", [profile], PROFILES)
    validate_choice("dtype", dtypes, DTYPES)
    validate_choice("clause", clauses, properties())
    validate_devices(devices)
    for file in reports:
        validate_file(file, "--report")
    chosen = named_once(resolved for target in targets for resolved in resolve(target))
    known = (*built_in_waivers(), *(read_waivers(waivers, chosen) if waivers else ()))
    asked = [clause for clause in properties() if not clauses or clause in clauses]
    options: dict[str, Any] = {"profile": profile, "seed": seed, "strict": strict, "waivers": known}
    console, verdicts, started, stopped = Console(highlight=False), list[Verdict](), now(), False
    try:
        for resolved in chosen.values():
            implementation, options["target"] = resolved.implementation, resolved.target
            announce(console, resolved)
            own: list[Verdict] = []
            ahead = [*asked * (len(dtypes) * len(devices)), ""]
            with progress_bar(console, ahead) as bar:
                for verdict in judged(implementation, asked, dtypes, devices, **options):
                    own.append(verdict)
                    verdicts.append(verdict)
                    show(bar, own, ahead[len(own)])
                    if verdict.status not in QUIET:
                        say(bar.console, describe(verdict) + "\n" if clauses else line(verdict))
            first, *_, last = summarise(own)
            say(console, f"\n{first}\n{last}")
            if not clauses and any(verdict.script for verdict in own):
                scripted = (verdict for verdict in own if verdict.script)
                clause = min(scripted, key=lambda verdict: verdict.conforms).clause
                say(console, f"The whole of one, with a script that shows it: add --clause {clause}")
    except KeyboardInterrupt:
        stopped = True
        say(console, "\nINCOMPLETE: the run was stopped.")
    report = Report(
        verdicts=tuple(verdicts),
        profile=profile,
        seed=seed,
        versions=versions(),
        targets={name: resolved.target for name, resolved in chosen.items()},
        strict=strict,
        incomplete=stopped,
        started=started,
        host=host(),
    )
    unwritten = [why for file in reports if (why := write(report, file))]
    keep(report, Path())
    if len(chosen) > 1 and verdicts:
        plain, width = needs_plain(console.encoding), min(console.width, WIDTH)
        drawn = matrix(verdicts, width=width, color=console.is_terminal, plain=plain)
        console.print(Text.from_ansi("\n".join(["", *drawn])), soft_wrap=True)
    for told in (*marks(verdicts), *(f"mha: {why}" for why in unwritten)):
        say(console, told)
    return 2 if unwritten else report.exit_status


def announce(console: Console, resolved: Resolved) -> None:
    """Say what is judged, and what was inferred of it."""
    inference = resolved.inference
    say(console, shown(resolved.implementation.name) + (", as it was understood:\n" if inference else "\n"))
    if inference:
        say(console, "\n".join([*inference.lines, ""]))


def say(console: Console, text: str) -> None:
    """Print a text as it is: nothing in it is markup, and no line is broken."""
    console.print(Text(text), soft_wrap=True)


def progress_bar(console: Console, clauses: Sequence[str]) -> Progress:
    """Return a bar that shows where the run is, on a terminal, and leaves nothing behind."""
    columns = (TextColumn("{task.description:7}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(clauses[0], total=len(clauses) - 1, told="")
    return bar


def show(bar: Progress, own: Sequence[Verdict], clause: str) -> None:
    """Move the bar to the clause at hand."""
    cases, failing = sum(verdict.examples for verdict in own), sum(not verdict.conforms for verdict in own)
    told = f"{cases} cases, {failing} not kept"
    bar.update(bar.task_ids[0], completed=len(own), description=clause, told=told)


def line(verdict: Verdict) -> str:
    """Return a departure in a line or two."""
    first = f"{status_of(verdict):15} {verdict.clause:7} {verdict.dtype}: "
    return fill(first + brief(verdict), WIDTH, subsequent_indent=" " * 24, break_long_words=False)
