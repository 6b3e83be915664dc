"""`mha check`: implementations judged one after another, with a summary of each."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.text import Text

from mha.conformance.cli.console import Printer, advance, line, print_verdict, progress_bar
from mha.conformance.engine.estimate import estimate
from mha.conformance.engine.found import Found
from mha.conformance.engine.report import not_covered, report_of_run
from mha.conformance.engine.workers import TimeIsUp, Workers
from mha.conformance.harness.isolation import INTERRUPTS, heeding_interrupts
from mha.conformance.ranges import SECONDS
from mha.conformance.reports.entries import entries
from mha.conformance.reports.files import save_last, validate_file, write
from mha.conformance.reports.github import runner_annotations, write_step_summary
from mha.conformance.reports.journal import journal
from mha.conformance.reports.summary import is_failure
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import (
    describe_changes,
    summarise,
    visible_line,
    visible_name,
)
from mha.conformance.results import Report, Verdict, now, settled
from mha.conformance.settings import Settings
from mha.conformance.waivers import expiry_notes, validate_judged
from mha.implementations import Resolved
from mha.spec.claims import DTYPES


@dataclass(frozen=True)
class Stop:
    """When a run ends early.

    first: at the first failure. after: seconds, once a clause is judged; 0 for never.
    """

    first: bool = False
    after: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a time that no run can take."""
        SECONDS.require("--max-time", self.after)

    def reason(self, verdict: Verdict, begun: float) -> str:
        """Return why the run ends with a verdict, or ""; begun: when, by the monotonic clock."""
        if self.first and is_failure(verdict):
            return f"stopped at the first failure, {verdict.clause}"
        if self.after and monotonic() - begun >= self.after:
            return self.when_time_is_up
        return ""

    @property
    def when_time_is_up(self) -> str:
        """Why a run ends that has taken its time."""
        return f"stopped after {self.after:g} s"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is printed and written, and when to stop.

    waivers: the file of them that was asked for.
    reports: files, by the suffix.
    json: where the report is printed as JSON, if it is; then all else goes to stderr.
    verbose: whether every verdict is printed.
    """

    waivers: Path | None = None
    reports: tuple[Path, ...] = ()
    json: TextIO | None = None
    verbose: bool = False
    stop: Stop = Stop()

    @classmethod
    def of(
        cls,
        *,
        waivers: Path | None,
        reports: Collection[Path],
        json: str,
        verbose: bool,
        stop: Stop,
    ) -> CheckOptions:
        """Return the options that users gave; json: a file, or - for stdout. Raises ValueError."""
        files, stdout = tuple(reports), None
        if json == "-":
            stdout = sys.stdout
        elif json.endswith(".json"):
            files = (*files, Path(json))
        elif json:
            raise ValueError(
                f"--json takes - or a file name that ends in .json, but was given {json!r}"
            )
        return cls(waivers=waivers, reports=files, json=stdout, verbose=verbose, stop=stop)


class Stopped(Exception):
    """The run ends before everything is judged, because an option says so."""


def check_all(
    targets: Sequence[str], settings: Settings, options: CheckOptions, workers: Workers
) -> int:
    """Judge all targets, print what is found, write the reports, and return the exit status.

    An interrupted run is reported with the verdicts that it reached. Raises ValueError, before
    anything is judged, for a target, a waiver file or a report file that cannot be used.
    """
    validate_request(targets, options)
    begun = monotonic()
    workers.timeout = settings.call_timeout
    workers.until = begun + options.stop.after if options.stop.after else 0.0
    printer = Printer(Console(highlight=False, stderr=options.json is not None))
    report_of = partial(report_on, settings, started=now())
    found = find(targets, workers, options, printer)
    if options.waivers:
        validate_judged(settings.waivers, options.waivers, found.chosen)
    for note in found.notes:
        printer.folded(f"Note: {visible_line(note)}")
    if found.torch_changes:
        printer.folded(f"Note: {describe_changes(found.torch_changes)}.")
    run, interrupted = Run(printer, settings, options, workers, begun), False
    with journal(Path()) as kept:
        kept.start(report_of(found, ()))
        workers.heard = kept.note
        try:
            with heeding_interrupts():
                run.judge_all(found.chosen.values())
        except (KeyboardInterrupt, Stopped) as end:
            interrupted = True
            run.verdicts += workers.unread
            printer.paragraph(f"INCOMPLETE: {str(end) or 'the run was stopped'}.")
        report = report_of(found, run.verdicts, incomplete=interrupted)
        return finish(printer, report, options)


def report_on(
    settings: Settings,
    found: Found,
    verdicts: Sequence[Verdict],
    *,
    started: str,
    incomplete: bool = False,
) -> Report:
    """Return the report on what the targets name."""
    chosen = found.chosen
    report = report_of_run(
        settings.of_report(chosen.values()),
        verdicts,
        targets={name: resolved.target for name, resolved in chosen.items()},
        started=started,
        incomplete=incomplete,
        broken=found.broken,
    )
    return replace(
        report, torch_changes=found.torch_changes, not_covered=not_covered(chosen.values())
    )


def find(
    targets: Sequence[str], workers: Workers, options: CheckOptions, printer: Printer
) -> Found:
    """Return what the targets name; at a terminal, say what takes long. Raises ValueError."""
    what = Text(f"importing {visible_line(', '.join(targets))}, and trying out how it is called")
    status = printer.console.status(what) if printer.console.is_terminal else nullcontext()
    try:
        with status:
            return workers.find(targets)
    except TimeIsUp as end:
        raise ValueError(f"{options.stop.when_time_is_up}: {end}") from None


def validate_request(targets: Sequence[str], options: CheckOptions) -> None:
    """Raise ValueError for a report file that cannot be written, and a dtype among the targets."""
    for file in options.reports:
        validate_file(file, "--report")
    for target in targets:
        if target in DTYPES:
            raise ValueError(
                f"{target!r} is a dtype, not an implementation; several go together: --dtype"
                " float32,float64"
            )


def announce(printer: Printer, resolved: Resolved, settings: Settings, jobs: int) -> None:
    """Print what was inferred about an implementation, and how it is judged."""
    implementation, inference = resolved.implementation, resolved.inference
    name = visible_name(implementation.name)
    if inference:
        printer.folded(f"{name}, as inferred from the {inference.kind}:")
        printer.paragraph(inference.report(printer.width))
    where = f"on {', '.join(settings.devices)} in {', '.join(settings.dtypes)}"
    takes = ""
    if printer.console.is_terminal:
        takes = f": {estimate([implementation.claims], settings, 1 / jobs)}"
    printer.folded(f"Checking {name} {where} ({visible_line(str(settings))}){takes}")
    for note in expiry_notes(settings.waivers_of(implementation), [implementation.name]):
        printer.folded(f"Note: {visible_line(note)}.")


class Run:
    """A run over several implementations.

    verdicts: all that were reached, also where the run ends early.
    left: how many are still to come.
    """

    def __init__(
        self,
        printer: Printer,
        settings: Settings,
        options: CheckOptions,
        workers: Workers,
        begun: float,
    ) -> None:
        self.printer = printer
        self.settings = settings
        self.options = options
        self.workers = workers
        self.begun = begun
        self.verdicts: list[Verdict] = []
        self.left = 0

    def judge_all(self, chosen: Collection[Resolved]) -> None:
        """Judge implementations one after another; raises Stopped where an option ends that."""
        self.left = sum(len(self.settings.of_target(resolved).tasks) for resolved in chosen)
        for resolved in chosen:
            self.judge(resolved)

    def judge(self, resolved: Resolved) -> None:
        """Judge one implementation, and print what is found; raises Stopped."""
        own: list[Verdict] = []
        settings, reason = self.settings.of_target(resolved), ""
        announce(self.printer, resolved, settings, self.workers.jobs)
        clauses = [*(task.clause for task in settings.tasks), ""]
        verdicts = self.workers.judge_all(resolved, settings)
        with progress_bar(self.printer.console, clauses) as bar, closing(verdicts):
            try:
                for verdict in verdicts:
                    own.append(verdict)
                    self.verdicts.append(verdict)
                    advance(bar, own, clauses[len(own)])
                    if not verdict.blocked_by and self.prints_each:
                        self.print(verdict)
                    self.left -= 1
                    if INTERRUPTS:  # by Ctrl-C, while something swallowed what it raised
                        raise KeyboardInterrupt
                    if self.left:
                        reason = self.options.stop.reason(verdict, self.begun)
                    if reason:
                        break
            except TimeIsUp:
                reason = self.options.stop.when_time_is_up
        self.sum_up(list(settled(own)), not_covered([resolved]), incomplete=bool(reason))
        if reason:
            raise Stopped(reason)

    @property
    def prints_each(self) -> bool:
        """Whether each verdict is printed when it is reached."""
        return self.options.verbose or bool(self.settings.clauses)

    def print(self, verdict: Verdict) -> None:
        """Print a verdict, in full where its clause was asked for."""
        if self.options.verbose and not self.settings.clauses:
            self.printer.line(line(verdict, self.printer.width))
        else:
            print_verdict(self.printer, verdict, in_full=bool(self.settings.clauses))

    def sum_up(
        self, own: Sequence[Verdict], options: Mapping[str, Collection[str]], *, incomplete: bool
    ) -> None:
        """Print what fails, by cause, what to do next, and the verdict, which is the last line."""
        if self.prints_each:
            # Only now is it known whether what blocks a clause fails too.
            for verdict in own:
                if verdict.blocked_by:
                    self.print(verdict)
        *details, said = summarise(
            own,
            incomplete=incomplete,
            width=self.printer.width,
            failures=not self.settings.clauses,
            profile=self.settings.profile,
            not_covered=options,
        )
        if details:
            self.printer.paragraph("\n".join(details))
        scripted = [entry.first for entry in entries(own) if entry.first.script]
        if scripted and not self.settings.clauses:
            command = f"mha show {scripted[0].clause}"
            self.printer.folded(
                f"To see a failure in full, with a script that reproduces it: {command}"
            )
        self.printer.paragraph(said)


def finish(printer: Printer, report: Report, options: CheckOptions) -> int:
    """Write the reports, print what concerns the whole run, and return the exit status."""
    errors = list(filter(None, [write(report, file) for file in options.reports]))
    warnings = filter(None, [write_step_summary(report), save_last(report, Path())])
    console = printer.console
    if len(report.by_implementation) > 1:
        plain = needs_plain(console.encoding)
        printer.drawing(
            matrix(report.verdicts, width=printer.width, color=console.is_terminal, plain=plain)
        )
    for annotation in runner_annotations(report):
        printer.line(annotation)
    for text in (*errors, *warnings):
        printer.line(f"mha: {text}")
    if options.json:
        print(report.to_json(), file=options.json)
    if printer.error:
        print(f"mha: {printer.error}", file=sys.stderr)
    return 2 if errors or printer.error else exit_status(report, options.stop)


def exit_status(report: Report, stop: Stop) -> int:
    """Return that of the report, but 1 where the run was to end at a failure, and found one."""
    if stop.first and not all(verdict.conforms for verdict in report.verdicts):
        return 1
    return report.exit_status
