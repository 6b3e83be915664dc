"""Two runs compared: what fails now, what is fixed, and what else has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import filterfalse
from typing import NamedTuple

from mha.conformance.reports.layout import INDENT
from mha.conformance.reports.merge import Key, by_key, key_of, setting_changes
from mha.conformance.reports.summary import (
    Count,
    cause_of,
    clauses_in,
    findings,
    severity,
    tally,
)
from mha.conformance.reports.text import brief_message, subject, visible_line, visible_name
from mha.conformance.results import Report, Verdict, status_of

# All other statuses are failures.
SATISFIED = ("pass", "waived", "unmet SHOULD", "not claimed")
# An error or a time counts as grown if it is so many times the earlier one, and above these:
# error/bound, seconds.
FACTOR, LEAST_MARGIN, LEAST_SECONDS = 2.0, 0.05, 5.0


class Change(NamedTuple):
    """The verdicts of two runs on the same clause, implementation, dtype and device."""

    before: Verdict
    after: Verdict

    @property
    def is_unchanged(self) -> bool:
        """Whether both have the same status."""
        return status_of(self.before) == status_of(self.after)

    @property
    def differs_in_status_only(self) -> bool:
        """Whether the status is another one, though both fail or neither does."""
        return not self.is_unchanged and _fails(self.before) == _fails(self.after)

    @property
    def is_less_accurate(self) -> bool:
        """Whether the later one does not fail, but has a much larger error/bound."""
        allowed = max(LEAST_MARGIN, FACTOR * self.before.margin)
        return not _fails(self.after) and self.after.margin > allowed


class Slowdown(NamedTuple):
    """An implementation whose verdicts took longer: the seconds of those that both runs have."""

    implementation: str
    before: float
    after: float


@dataclass(frozen=True)
class Comparison:
    """What changed between two runs."""

    before: Report
    after: Report

    @property
    def new_failures(self) -> list[Verdict]:
        """What fails in the later run, and did not fail or was not judged in the earlier one."""
        return [verdict for verdict in self._failing if not self._failed_before(verdict)]

    @property
    def fixed(self) -> list[Verdict]:
        """What failed in the earlier run, and does not fail in the later one."""
        satisfied = filterfalse(_fails, self._new.values())
        return [verdict for verdict in satisfied if self._failed_before(verdict)]

    @property
    def still_failing(self) -> list[Verdict]:
        """What fails in both runs."""
        return [verdict for verdict in self._failing if self._failed_before(verdict)]

    @property
    def changed(self) -> list[Change]:
        """What has another status, though it fails in both runs or in neither."""
        return [change for change in self._changes if change.differs_in_status_only]

    @property
    def less_accurate(self) -> list[Change]:
        """What does not fail, but has a much larger error/bound than before."""
        return [change for change in self._changes if change.is_less_accurate]

    @property
    def slower(self) -> list[Slowdown]:
        """The implementations whose verdicts took much longer."""
        before: dict[str, float] = defaultdict(float)
        after: dict[str, float] = defaultdict(float)
        for old, new in self._changes:
            before[new.implementation] += old.seconds
            after[new.implementation] += new.seconds
        slowdowns = []
        for name, seconds in after.items():
            if before[name] and seconds > max(LEAST_SECONDS, FACTOR * before[name]):
                slowdowns.append(Slowdown(name, before[name], seconds))
        return slowdowns

    @property
    def no_longer_judged(self) -> list[Verdict]:
        """What only the earlier run judged, which is not a failure."""
        return [verdict for key, verdict in self._old.items() if key not in self._new]

    @property
    def unchanged(self) -> int:
        """The number of verdicts that have the same status in both runs."""
        return sum(change.is_unchanged for change in self._changes)

    @property
    def settings(self) -> list[tuple[str, object, object]]:
        """The settings that differ: the name, and the values of the earlier and the later run."""
        return list(setting_changes(self.before, self.after))

    @property
    def exit_status(self) -> int:
        """1 for new failures, else 2 if a run is incomplete or the later one is empty, else 0."""
        if self.new_failures:
            return 1
        if self.before.incomplete or self.after.incomplete or not self.after.verdicts:
            return 2
        return 0

    @cached_property
    def _old(self) -> dict[Key, Verdict]:
        return by_key(self.before)

    @cached_property
    def _new(self) -> dict[Key, Verdict]:
        return by_key(self.after)

    @cached_property
    def _changes(self) -> list[Change]:
        """What both runs judged, in the order of the later one."""
        both = [key for key in self._new if key in self._old]
        return [Change(self._old[key], self._new[key]) for key in both]

    @cached_property
    def _failing(self) -> list[Verdict]:
        return sorted(filter(_fails, self._new.values()), key=severity)

    def _failed_before(self, verdict: Verdict) -> bool:
        before = self._old.get(key_of(verdict))
        return before is not None and _fails(before)


@dataclass(frozen=True)
class Block:
    """A part of a comparison, as text. count: how many verdicts, or other things, it is about."""

    title: str
    count: int
    entries: list[str]

    @property
    def heading(self) -> str:
        """The title with the count, and the number of causes if several verdicts share one."""
        heading = f"{self.title}: {self.count}"
        if len(self.entries) == self.count:
            return heading
        causes = "one cause" if len(self.entries) == 1 else f"{len(self.entries)} causes"
        return f"{heading}, of {causes}"


def blocks(comparison: Comparison) -> list[Block]:
    """Return the parts of a comparison that have any entry; failures of one cause are one entry."""
    no_longer = [_label([verdict]) for verdict in comparison.no_longer_judged]
    found = [
        _block("new failures", comparison.new_failures, with_message=True),
        _block("fixed", comparison.fixed),
        _block("still failing", comparison.still_failing),
        _one_each("changed", _changed(comparison)),
        _one_each("less accurate", _less_accurate(comparison)),
        _one_each("counts", _counts(comparison)),
        _one_each("slower", _slower(comparison)),
        _one_each("no longer judged", no_longer),
    ]
    return [block for block in found if block.entries]


def _one_each(title: str, entries: Iterable[str]) -> Block:
    """Return the part whose entries are about one thing each."""
    listed = list(entries)
    return Block(title, len(listed), listed)


def describe_changes(comparison: Comparison) -> list[str]:
    """Return a comparison as lines of text."""
    lines = notes(comparison)
    for block in blocks(comparison):
        lines += ["", block.heading]
        lines += [INDENT + entry for entry in block.entries]
    return [*lines, "", unchanged(comparison)]


def unchanged(comparison: Comparison) -> str:
    """Return how many verdicts have the same status in both runs, in words."""
    return f"unchanged: {comparison.unchanged} of {len(comparison.after.verdicts)} verdicts"


def _block(title: str, verdicts: Sequence[Verdict], *, with_message: bool = False) -> Block:
    """Return the part about some verdicts; those that one defect explains are one entry."""
    entries = []
    for same in findings(verdicts):
        message = f": {brief_message(same[0])}" if with_message else ""
        entries.append(f"{_label(same)}{message}")
    return Block(title, len(verdicts), entries)


def _changed(comparison: Comparison) -> Iterator[str]:
    for old, new in comparison.changed:
        yield f"{_label([new])}, {status_of(old)} before"


def _less_accurate(comparison: Comparison) -> Iterator[str]:
    for old, new in comparison.less_accurate:
        yield f"{_label([new])}: error/bound {old.margin:.3g} before, {new.margin:.3g} now"


def _slower(comparison: Comparison) -> Iterator[str]:
    for name, old, new in comparison.slower:
        yield f"{visible_name(name)}: {old:.0f} s before, {new:.0f} s now"


def _counts(comparison: Comparison) -> Iterator[str]:
    """Yield the counts that differ, for each implementation that both runs judged."""
    before = comparison.before.by_implementation
    for name, own in comparison.after.by_implementation.items():
        new = _by_level_and_kind(own)
        changed = []
        for kind, old in _by_level_and_kind(before.get(name, ())).items():
            if kind in new and new[kind] != old:
                changed.append(f"{kind} {old} before, {new[kind]} now")
        if changed:
            yield f"{visible_name(name)}: {'; '.join(changed)}"


def _by_level_and_kind(verdicts: Sequence[Verdict]) -> dict[str, Count]:
    totals = tally(verdicts)
    required: dict[str, Count] = dict(totals.must.items())
    return required | {f"SHOULD {kind}": count for kind, count in totals.should.items()}


def notes(comparison: Comparison) -> list[str]:
    """Return a line for everything else that may explain a change."""
    lines = []
    for name, old, new in comparison.settings:
        lines.append(f"{name}: {visible_line(repr(old))} before, {visible_line(repr(new))} now")
    for which, report in (("first", comparison.before), ("second", comparison.after)):
        if report.incomplete:
            lines.append(f"INCOMPLETE: the {which} run was stopped")
    return lines


def _fails(verdict: Verdict) -> bool:
    return status_of(verdict) not in SATISFIED


def _label(same: Sequence[Verdict]) -> str:
    """Return what verdicts of one finding are about, and its cause where they have a diagnosis."""
    subjects = "; ".join(dict.fromkeys(map(subject, same)))
    statuses = ", ".join(dict.fromkeys(map(status_of, same)))
    label = f"{subjects} ({statuses})"
    if len(clauses_in(same)) == 1:
        label = f"{same[0].clause:7} {label}"
    cause = visible_line(cause_of(same))
    return f"{label}: {cause}" if cause else label
