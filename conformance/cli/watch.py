"""`mha watch`: a target judged again at each save of its file, or of what that imports."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from time import monotonic, sleep

from rich.console import Console

from mha.conformance.cli.check import CheckOptions, find, finish, report_on, validate_request
from mha.conformance.cli.console import Printer, advance, line, progress_bar
from mha.conformance.cli.watched_files import POLL, WatchedFiles, shown
from mha.conformance.engine.report import not_covered
from mha.conformance.engine.workers import Workers
from mha.conformance.reports.layout import INDENT, counted, shortened, wrapped
from mha.conformance.reports.merge import Key, key_of
from mha.conformance.reports.summary import is_failure
from mha.conformance.reports.text import (
    HANGING,
    brief_message,
    in_columns,
    place,
    summarise,
    visible_line,
    visible_name,
)
from mha.conformance.results import Report, Verdict, now
from mha.conformance.settings import Settings, Task
from mha.implementations import Resolved
from mha.implementations.inference.rows import Row, table

# The profile of the first look: a few cases of each clause, in one dtype.
FIRST_LOOK = "smoke"
# So many of the clauses that failed last are judged before the first look: those that take least.
MOST_AGAIN = 3
# In characters, of why a version is not understood.
LONGEST_REASON = 160
# After so many failures, each of which takes a while to explain, a look ends.
ENOUGH = 3


class Saved(Exception):
    """A file that is watched was saved."""


def watch(target: str, settings: Settings, options: CheckOptions, workers: Workers) -> int:
    """Judge a target, and again at each save, until Ctrl-C; return the status of the last report.

    Raises ValueError for a target without a file, and a report file that cannot be written.
    """
    validate_request([target], options)
    files = WatchedFiles(target)
    workers.timeout = settings.call_timeout
    # Python takes compiled code for current where a file was saved in the same second as before,
    # with the same length.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    return Watch(target, settings, options, workers, files).run()


class Watch:
    """A target that is watched.

    rows: how it was understood last.
    understood: the settings of what was judged last.
    found: the verdicts of this run.
    failing: the verdicts that failed last, in this run or before, each with the profile in which.
    lately: the clauses that have failed in any run, the latest last.
    is_told: whether this run has told of a case that fails.
    profile: that of this look.
    status: the exit status of the last report.
    """

    def __init__(
        self,
        target: str,
        settings: Settings,
        options: CheckOptions,
        workers: Workers,
        files: WatchedFiles,
    ) -> None:
        self.target, self.settings, self.options = target, settings, options
        self.workers, self.files = workers, files
        self.printer = Printer(Console(highlight=False))
        self.rows: tuple[Row, ...] = ()
        self.understood: Settings | None = None
        self.found: dict[Key, Verdict] = {}
        self.failing: dict[Key, tuple[Verdict, str]] = {}
        self.lately: dict[str, None] = {}
        self.is_told = False
        self.profile = settings.profile
        self.declarations: dict[str, str] = {}
        self.status = 2
        self.begun = monotonic()
        workers.between, workers.heard, workers.heard_at_once = self.look, self.note, self.note_case
        workers.declarations = self.declarations

    def run(self) -> int:
        """Judge at each save, until Ctrl-C."""
        event = f"judging {visible_line(self.target)}"
        try:
            while True:
                self.printer.paragraph(f"{time.strftime('%H:%M:%S')}  {event}")
                try:
                    self.judge()
                    self.wait()
                except Saved as saved:
                    event = f"{visible_line(str(saved))} saved"
                    self.begun = monotonic()
                self.afresh()
                self.files.settle()
        except KeyboardInterrupt:
            return self.status

    def wait(self) -> None:
        """Wait for a save: raise Saved."""
        self.tell(f"watching {visible_line(self.files.names())}; Ctrl-C ends")
        self.afresh()  # before the next save
        while True:
            self.look()
            sleep(POLL)

    def look(self) -> None:
        """Raise Saved if a file was saved."""
        if files := self.files.saved():
            raise Saved(shown(files))

    def judge(self) -> None:
        """Judge the target, print what is found, and write the reports; raises Saved."""
        read, started = time.time_ns(), now()
        self.found, self.is_told = {}, False
        try:
            found = find([self.target], self.workers, self.options, self.printer)
        except ValueError as error:
            self.status = 2
            self.printer.folded(f"mha: {visible_line(str(error))}")
            return
        finally:
            self.files.add(self.workers.files, read)
        (resolved,) = found.chosen.values()
        self.tell_reading(resolved, found.why_declared)
        settings = self.judge_by_stages(resolved)
        report = report_on(
            settings,
            found,
            list(self.found.values()),
            started=started,
            incomplete=self.failures >= ENOUGH,
        )
        self.sum_up(report, resolved)
        self.status = finish(self.printer, report, self.options)

    def judge_by_stages(self, resolved: Resolved) -> Settings:
        """Judge what failed last, then a little of everything, and if that is right, everything.

        Returns the settings of the report.
        """
        settings = self.settings.of_target(resolved)
        first = first_look(settings)
        self.understood = settings
        if again := self.again(settings):
            self.judge_by(resolved, again)
            if not self.failures:
                self.tell(f"mended: {', '.join(again.clauses)}")
        elif again := self.once_failed(first):
            self.judge_by(resolved, again)
        self.judge_by(resolved, first)
        if self.failures:
            return replace(settings, profile=FIRST_LOOK)
        judged = [verdict for verdict in self.found.values() if verdict.status != "not_claimed"]
        clauses = counted(len({verdict.clause for verdict in judged}), "clause")
        self.tell(f"a first look at {clauses} found no failure; now profile {settings.profile}")
        self.judge_by(resolved, settings)
        return settings

    def again(self, settings: Settings) -> Settings | None:
        """Return the settings to judge what failed last, in the dtype of what took least time."""
        failing = list[tuple[Verdict, str]]()
        for verdict, profile in self.failing.values():
            if Task(verdict.clause, verdict.dtype, verdict.device) in settings.tasks:
                failing.append((verdict, profile))
        if not failing:
            return None
        failing.sort(key=lambda each: each[0].seconds)
        first, profile = failing[0]
        alike = [each.clause for each, _ in failing if each.dtype == first.dtype]
        at = settings.at(first.dtype, first.device)
        return replace(at, clauses=tuple(alike[:MOST_AGAIN]), profile=profile)

    def once_failed(self, first: Settings) -> Settings | None:
        """Return the settings to look first at what failed in the last wrong version."""
        judged = {task.clause for task in first.tasks}
        clauses = [clause for clause in reversed(self.lately) if clause in judged]
        return replace(first, clauses=tuple(clauses[:MOST_AGAIN])) if clauses else None

    def afresh(self) -> None:
        """Have new processes, and say what one of them judges while the others infer."""
        tasks = list[tuple[Task, Settings]]()
        if self.understood:
            first = first_look(self.understood)
            again = self.again(self.understood) or self.once_failed(first)
            for look in filter(None, (again, first)):
                tasks += [(task, look) for task in look.tasks]
        self.workers.ahead.tasks = tasks
        self.workers.afresh()

    def judge_by(self, resolved: Resolved, settings: Settings) -> None:
        """Judge the target up to a few failures, with a progress bar; raises Saved."""
        clauses = [*(task.clause for task in settings.tasks), ""]
        reached, self.profile = list[Verdict](), settings.profile
        verdicts = self.workers.judge_all(resolved, settings)
        with progress_bar(self.printer.console, clauses) as bar, closing(verdicts):
            while self.failures < ENOUGH and (verdict := next(verdicts, None)):
                reached.append(verdict)
                self.note(verdict)
                advance(bar, reached, clauses[len(reached)])

    def note(self, verdict: Verdict) -> None:
        """Note a verdict, and print it if it is the first failure.

        A look that is less thorough undoes no failure.
        """
        key = key_of(verdict)
        known = self.found.get(key)
        if known is not None and is_failure(known):
            return
        if is_failure(verdict):
            if not self.failures:
                self.tell(line(verdict, self.printer.width))
            self.failing[key] = verdict, self.profile
            self.lately.pop(verdict.clause, None)
            self.lately[verdict.clause] = None
        elif key in self.failing and self.profile in (self.failing[key][1], self.settings.profile):
            del self.failing[key]
        self.found[key] = verdict

    def note_case(self, verdict: Verdict) -> None:
        """Print the first case that fails, before it is made simpler and explained."""
        if self.is_told or self.failures or not is_failure(verdict):
            return
        self.is_told = True
        said = f"{place(verdict)}: {brief_message(verdict)}"
        row = in_columns("a case fails", verdict.clause, said)
        self.tell(wrapped(row, self.printer.width, "", HANGING))

    @property
    def failures(self) -> int:
        """How many failures this run has found."""
        return sum(map(is_failure, self.found.values()))

    def tell(self, text: str) -> None:
        """Print what is known so far, and how long after the save."""
        self.printer.line(f"{text}  [{monotonic() - self.begun:.1f} s]")

    def tell_reading(self, resolved: Resolved, why_declared: str) -> None:
        """Print how the target is understood: all at first, and then what has changed."""
        inference, name = resolved.inference, visible_name(resolved.implementation.name)
        if inference is None:
            if self.rows:
                said = "not understood as it is now; judged as it was understood before"
                why = shortened(visible_line(why_declared), LONGEST_REASON)
                self.printer.folded(f"{name}: {said}\n{INDENT}{why}".rstrip())
            return
        # What is wrong later may not be understood.
        self.declarations[self.target] = inference.declaration
        new = [row for row in inference.rows if row not in self.rows]
        self.rows = inference.rows
        if new:
            self.printer.folded(f"{name}, as inferred from the {inference.kind}:")
            self.printer.paragraph(table(new, self.printer.width))
            if self.is_told:
                self.printer.folded(
                    "The case above was judged as the version before was understood."
                )

    def sum_up(self, report: Report, resolved: Resolved) -> None:
        """Print what fails, by cause, and the verdict."""
        *details, said = summarise(
            report.verdicts,
            incomplete=report.incomplete,
            width=self.printer.width,
            profile=report.profile,
            not_covered=not_covered([resolved]),
        )
        if details:
            self.printer.paragraph("\n".join(details))
        self.printer.paragraph(said)


def first_look(settings: Settings) -> Settings:
    """Return the settings of a first look, in the first dtype."""
    return replace(settings, profile=FIRST_LOOK, dtypes=settings.dtypes[:1])
