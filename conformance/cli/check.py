"""`mha check`: implementations judged one after another, with a summary of each."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mha.conformance.engine.estimate import estimate
from mha.conformance.engine.report import not_covered, report_of_run
from mha.conformance.engine.workers import Found, TimeIsUp, Workers
from mha.conformance.harness.isolation import INTERRUPTS, heeding_interrupts
from mha.conformance.ranges import SECONDS
from mha.conformance.reports.entries import SECTIONS, entries
from mha.conformance.reports.files import save_last, validate_file, write
from mha.conformance.reports.github import runner_annotations, write_step_summary
from mha.conformance.reports.journal import journal
from mha.conformance.reports.layout import WIDTH, fitted, width_of, wrapped
from mha.conformance.reports.summary import SIGNS, is_failure
from mha.conformance.reports.terminal import STYLES, matrix, needs_plain
from mha.conformance.reports.text import (
    HANGING,
    brief,
    describe,
    describe_changes,
    place,
    summarise,
    visible_line,
    visible_name,
)
from mha.conformance.results import Report, Verdict, now, settled, status_of
from mha.conformance.settings import Settings
from mha.conformance.waivers import expiry_notes, validate_judged
from mha.implementations import Resolved
from mha.spec.claims import DTYPES

# Where every clause is judged, these are only counted.
QUIET = ("pass", "not_claimed", "blocked")


# In columns: a terminal that is narrower has no room for a bar.
NARROW = 60
# What is coloured at a terminal, which repeats what the words say: a status and a label at the
# start of a line.
LABELS = (
    "diagnosis|seen in|message|steps|usual fix|case|sizes|last call|blocked"
    " by|judged|clause|why|libraries|source"
)
COLOURS = {
    rf"(?m)^{re.escape(status)}(?= )": STYLES[sign] for status, (sign, *_) in SIGNS.items()
} | {
    "DOES NOT CONFORM": STYLES["✗"],
    r"\bCONFORMS\b": STYLES["✓"],
    rf"(?m)^({'|'.join(map(re.escape, SECTIONS.values()))}):$": "bold",
    rf"(?m)^({LABELS})(?=  )": "cyan",
}


class Printer:
    """Prints paragraphs, with a blank line between them, and lines, one below the other.

    Texts are printed as they are: nothing in them is markup, and no line is broken. width: in
    columns, of the lines to print. error: why no more is printed, as where a disk is full; "" if it
    is.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = width_of(console.file)
        self.error = ""
        self.last: Literal["", "paragraph", "line"] = ""

    def paragraph(self, text: str) -> None:
        """Print a paragraph."""
        self._print(Text(text.rstrip("\n")), "paragraph")

    def folded(self, text: str) -> None:
        """Print a paragraph, each of its lines folded to the width of the terminal."""
        self.paragraph(fitted(text, self.console.file))

    def line(self, text: str) -> None:
        """Print a line."""
        self._print(Text(text), "line")

    def drawing(self, lines: Sequence[str]) -> None:
        """Print lines that hold escape sequences for colours, as a paragraph."""
        self._print(Text.from_ansi("\n".join(lines)), "paragraph")

    def _print(self, text: Text, kind: Literal["paragraph", "line"]) -> None:
        for pattern, style in COLOURS.items():
            text.highlight_regex(pattern, style)
        try:
            if self.last and (self.last, kind) != ("line", "line"):
                self.console.print()
            self.console.print(text, soft_wrap=True)
        except OSError as error:
            self.error = f"the output cannot be written: {error.strerror}"
            self.console = Console(file=StringIO(), highlight=False)
        self.last = kind


@dataclass(frozen=True)
class Stop:
    """When a run ends early. first: at the first failure. after: seconds, once a clause is judged;
    0 for never.
    """

    first: bool = False
    after: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a time that no run can take."""
        SECONDS.require("--max-time", self.after)

    def reason(self, verdict: Verdict, begun: float) -> str:
        """Return why the run ends with a verdict, if it does; begun: when it began, by the
        monotonic clock.
        """
        if self.first and is_failure(verdict):
            return f"stopped at the first failure, {verdict.clause}"
        return f"stopped after {self.after:g} s" if 0 < self.after <= monotonic() - begun else ""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is printed and written, and when to stop.

    waivers: the file of them that was asked for. reports: files, by the suffix. json: where the
    report is printed as JSON, if it is; then all else goes to stderr. verbose: whether every
    verdict is printed.
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
        """Return the options for what users write; json: a file, or - for the output. Raises
        ValueError.
        """
        if json not in ("", "-") and not json.endswith(".json"):
            raise ValueError(
                f"--json takes - or a file name that ends in .json, but was given {json!r}"
            )
        files = (*reports, Path(json)) if json.endswith(".json") else tuple(reports)
        stdout = sys.stdout if json == "-" else None
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
    printer, started = Printer(Console(highlight=False, stderr=options.json is not None)), now()
    found = find(targets, workers, options, printer)
    chosen = found.chosen
    if options.waivers:
        validate_judged(settings.waivers, options.waivers, chosen)
    run, interrupted = Run(printer, settings, options, workers, begun), False
    for note in found.notes:
        printer.folded(f"Note: {visible_line(note)}")
    if found.torch_changes:
        printer.folded(f"Note: {describe_changes(found.torch_changes)}.")
    report_of = partial(_report, settings, found, started)
    with journal(Path()) as kept:
        kept.start(report_of(()))
        workers.heard = kept.note
        try:
            with heeding_interrupts():
                run.judge_all(chosen.values())
        except (KeyboardInterrupt, Stopped) as end:
            interrupted = True
            run.verdicts += workers.unread
            printer.paragraph(f"INCOMPLETE: {str(end) or 'the run was stopped'}.")
        return finish(printer, report_of(run.verdicts, incomplete=interrupted), options)


def _report(
    settings: Settings,
    found: Found,
    started: str,
    verdicts: Sequence[Verdict],
    *,
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
    """Return what the targets name, and say at a terminal what takes that long; raises ValueError."""
    what = Text(f"importing {visible_line(', '.join(targets))}, and trying out how it is called")
    status = printer.console.status(what) if printer.console.is_terminal else nullcontext()
    try:
        with status:
            return workers.find(targets)
    except TimeIsUp as end:
        raise ValueError(f"stopped after {options.stop.after:g} s: {end}") from None


def validate_request(targets: Sequence[str], options: CheckOptions) -> None:
    """Raise ValueError for a report file that cannot be written, and for a dtype among the targets."""
    for file in options.reports:
        validate_file(file, "--report")
    if dtypes := [target for target in targets if target in DTYPES]:
        raise ValueError(
            f"{dtypes[0]!r} is a dtype, not an implementation; several go together: --dtype"
            " float32,float64"
        )


def announce(printer: Printer, resolved: Resolved, settings: Settings, jobs: int) -> None:
    """Print what was inferred about an implementation, and how it is judged."""
    name, inference = visible_name(resolved.implementation.name), resolved.inference
    if inference:
        printer.folded(f"{name}, as inferred from the {inference.kind}:")
        printer.paragraph(inference.report(printer.width))
    where = f"on {', '.join(settings.devices)} in {', '.join(settings.dtypes)}"
    takes = ""
    if printer.console.is_terminal:
        takes = f": {estimate([resolved.implementation.claims], settings, 1 / jobs)}"
    printer.folded(f"Checking {name} {where} ({visible_line(str(settings))}){takes}")
    for note in expiry_notes(
        settings.waivers_of(resolved.implementation), [resolved.implementation.name]
    ):
        printer.folded(f"Note: {visible_line(note)}.")


class Run:
    """A run over several implementations. verdicts: those reached, none of which is lost where the
    run ends early.
    """

    def __init__(
        self,
        printer: Printer,
        settings: Settings,
        options: CheckOptions,
        workers: Workers,
        begun: float,
    ) -> None:
        self.printer, self.settings, self.options, self.workers = (
            printer,
            settings,
            options,
            workers,
        )
        self.verdicts: list[Verdict] = []
        self.begun, self.left = begun, 0

    def judge_all(self, chosen: Collection[Resolved]) -> None:
        """Judge implementations one after another; raises Stopped where an option ends that early."""
        self.left = sum(len(self.settings.of_target(resolved).tasks) for resolved in chosen)
        for resolved in chosen:
            self.judge(resolved)

    def judge(self, resolved: Resolved) -> None:
        """Judge one implementation, and print what is found; raises Stopped."""
        own, settings, reason = list[Verdict](), self.settings.of_target(resolved), ""
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
                    if self.left and (reason := self.options.stop.reason(verdict, self.begun)):
                        break
            except TimeIsUp:
                reason = f"stopped after {self.options.stop.after:g} s"
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
        for verdict in own:
            if (
                verdict.blocked_by and self.prints_each
            ):  # only now is it known whether that fails too
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
            hint = (
                "To see a failure in full, with a script that reproduces it: mha show"
                f" {scripted[0].clause}"
            )
            self.printer.folded(hint)
        self.printer.paragraph(said)


def print_verdict(printer: Printer, verdict: Verdict, *, in_full: bool) -> None:
    """Print a verdict: in a line, or in full if it is not a pass and the clause was asked for."""
    if in_full and verdict.status not in ("pass", "not_claimed"):
        printer.paragraph(describe(verdict, printer.width))
    elif in_full or verdict.status not in QUIET:
        printer.line(line(verdict, printer.width))


def line(verdict: Verdict, width: int = WIDTH) -> str:
    """Return a verdict in a line or two."""
    text = f"{verdict.examples} cases" if verdict.status == "pass" else brief(verdict)
    first = f"{status_of(verdict):15} {verdict.clause:7} {place(verdict)}: {text}"
    return wrapped(first, width, "", HANGING)


def finish(printer: Printer, report: Report, options: CheckOptions) -> int:
    """Write the reports, print what concerns the whole run, and return the exit status."""
    errors = [error for file in options.reports if (error := write(report, file))]
    warnings = [
        warning for warning in [write_step_summary(report), save_last(report, Path())] if warning
    ]
    console = printer.console
    if len(report.by_implementation) > 1:
        plain = needs_plain(console.encoding)
        printer.drawing(
            matrix(report.verdicts, width=printer.width, color=console.is_terminal, plain=plain)
        )
    for text in (*runner_annotations(report), *(f"mha: {text}" for text in (*errors, *warnings))):
        printer.line(text)
    if options.json:
        print(report.to_json(), file=options.json)
    if printer.error:
        print(f"mha: {printer.error}", file=sys.stderr)
    return 2 if errors or printer.error else exit_status(report, options.stop)


def exit_status(report: Report, stop: Stop) -> int:
    """Return that of the report, but 1 where the run was to end at a failure, and found one."""
    return (
        1
        if stop.first and any(not verdict.conforms for verdict in report.verdicts)
        else report.exit_status
    )


def progress_bar(console: Console, clauses: Sequence[str]) -> Progress:
    """Return a progress bar, shown on a terminal only and erased at the end.

    clauses: those to be judged, in order, and an empty one for the end.
    """
    columns = (
        TextColumn("{task.description:7}"),
        *([BarColumn()] if console.width >= NARROW else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(clauses[0], total=len(clauses) - 1, counts="")
    return bar


def advance(bar: Progress, verdicts: Sequence[Verdict], clause: str) -> None:
    """Move the bar to the next clause, with the counts of the verdicts until now."""
    cases, failed = (
        sum(verdict.examples for verdict in verdicts),
        sum(not verdict.conforms for verdict in verdicts),
    )
    counts = f"{cases} cases, {failed} failed"
    bar.update(bar.task_ids[0], completed=len(verdicts), description=clause, counts=counts)
