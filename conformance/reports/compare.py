"""Two runs compared: what fails now, what is fixed, and what else has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mha.conformance.reports.merge import Key, key_of, setting_changes
from mha.conformance.reports.summary import Count, Tally, cause_of, findings, severity, tally
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
        return [verdict for verdict in self._failing if key_of(verdict) not in self._failed_before]

    @property
    def fixed(self) -> list[Verdict]:
        """What failed in the earlier run, and does not fail in the later one."""
        return [
            verdict
            for key, verdict in self._new.items()
            if key in self._failed_before and not _fails(verdict)
        ]

    @property
    def still_failing(self) -> list[Verdict]:
        """What fails in both runs."""
        return [verdict for verdict in self._failing if key_of(verdict) in self._failed_before]

    @property
    def changed(self) -> list[Change]:
        """What has another status, though it fails in both runs or in neither."""
        return [
            c for c in self._changes if not _is_unchanged(c) and _fails(c.before) == _fails(c.after)
        ]

    @property
    def less_accurate(self) -> list[Change]:
        """What does not fail, but has a much larger error/bound than before."""
        return [
            change
            for change in self._changes
            if not _fails(change.after)
            and change.after.margin > max(LEAST_MARGIN, FACTOR * change.before.margin)
        ]

    @property
    def slower(self) -> list[Slowdown]:
        """The implementations whose verdicts took much longer."""
        slowdowns = []
        for name in dict.fromkeys(change.after.implementation for change in self._changes):
            own = [change for change in self._changes if change.after.implementation == name]
            old, new = sum(c.before.seconds for c in own), sum(c.after.seconds for c in own)
            if old and new > max(LEAST_SECONDS, FACTOR * old):
                slowdowns.append(Slowdown(name, old, new))
        return slowdowns

    @property
    def no_longer_judged(self) -> list[Verdict]:
        """What only the earlier run judged, which is not a failure."""
        return [verdict for key, verdict in self._old.items() if key not in self._new]

    @property
    def unchanged(self) -> int:
        """The number of verdicts that have the same status in both runs."""
        return sum(map(_is_unchanged, self._changes))

    @property
    def settings(self) -> list[tuple[str, object, object]]:
        """The settings that differ: the name, and the values of the earlier and of the later run."""
        return list(setting_changes(self.before, self.after))

    @property
    def exit_status(self) -> int:
        """1 if there are new failures, else 2 if a run is incomplete or the later one is empty,
        else 0.
        """
        if self.new_failures:
            return 1
        return (
            2 if self.before.incomplete or self.after.incomplete or not self.after.verdicts else 0
        )

    @cached_property
    def _old(self) -> dict[Key, Verdict]:
        return {key_of(verdict): verdict for verdict in self.before.verdicts}

    @cached_property
    def _new(self) -> dict[Key, Verdict]:
        return {key_of(verdict): verdict for verdict in self.after.verdicts}

    @cached_property
    def _changes(self) -> list[Change]:
        return [
            Change(self._old[key], verdict)
            for key, verdict in self._new.items()
            if key in self._old
        ]

    @cached_property
    def _failing(self) -> list[Verdict]:
        return sorted((verdict for verdict in self._new.values() if _fails(verdict)), key=severity)

    @cached_property
    def _failed_before(self) -> set[Key]:
        return {key for key, verdict in self._old.items() if _fails(verdict)}


@dataclass(frozen=True)
class Block:
    """A part of a comparison, as text. count: how many verdicts, or other things, it is about."""

    title: str
    count: int
    entries: list[str]

    @property
    def heading(self) -> str:
        """The title with the count, and the number of causes if several verdicts share one."""
        causes = "one cause" if len(self.entries) == 1 else f"{len(self.entries)} causes"
        return f"{self.title}: {self.count}" + (
            f", of {causes}" if len(self.entries) < self.count else ""
        )


def blocks(comparison: Comparison) -> list[Block]:
    """Return the parts of a comparison that have any entry; failures of one cause are one entry."""
    changed = [f"{_label([new])}, {status_of(old)} before" for old, new in comparison.changed]
    less_accurate = [
        f"{_label([new])}: error/bound {old.margin:.3g} before, {new.margin:.3g} now"
        for old, new in comparison.less_accurate
    ]
    slower = [
        f"{visible_name(name)}: {old:.0f} s before, {new:.0f} s now"
        for name, old, new in comparison.slower
    ]
    no_longer = [_label([verdict]) for verdict in comparison.no_longer_judged]
    found = [
        _block("new failures", comparison.new_failures, with_message=True),
        _block("fixed", comparison.fixed),
        _block("still failing", comparison.still_failing),
        _one_each("changed", changed),
        _one_each("less accurate", less_accurate),
        _one_each("counts", list(_counts(comparison))),
        _one_each("slower", slower),
        _one_each("no longer judged", no_longer),
    ]
    return [block for block in found if block.entries]


def _one_each(title: str, entries: list[str]) -> Block:
    return Block(title, len(entries), entries)


def describe_changes(comparison: Comparison) -> list[str]:
    """Return a comparison as lines of text."""
    lines = notes(comparison)
    for block in blocks(comparison):
        lines += ["", block.heading, *(f"    {entry}" for entry in block.entries)]
    return [*lines, "", unchanged(comparison)]


def unchanged(comparison: Comparison) -> str:
    """Return how many verdicts have the same status in both runs, in words."""
    return f"unchanged: {comparison.unchanged} of {len(comparison.after.verdicts)} verdicts"


def _block(title: str, verdicts: Sequence[Verdict], *, with_message: bool = False) -> Block:
    """Return the part about these verdicts; what one defect explains, in any dtype, is one entry."""
    entries = []
    for same in findings(verdicts):
        message = f": {brief_message(same[0])}" if with_message else ""
        entries.append(f"{_label(same)}{message}")
    return Block(title, len(verdicts), entries)


def _counts(comparison: Comparison) -> Iterator[str]:
    """Yield the counts that differ, for each implementation that both runs judged."""
    before = comparison.before.by_implementation
    for name, own in comparison.after.by_implementation.items():
        old, new = (_by_level_and_kind(tally(verdicts)) for verdicts in (before.get(name, ()), own))
        both = ((kind, count, new.get(kind, count)) for kind, count in old.items())
        if changed := [
            f"{kind} {count} before, {now} now" for kind, count, now in both if count != now
        ]:
            yield f"{visible_name(name)}: {'; '.join(changed)}"


def _by_level_and_kind(counted: Tally) -> dict[str, Count]:
    required: dict[str, Count] = dict(counted.must.items())
    return required | {f"SHOULD {kind}": count for kind, count in counted.should.items()}


def notes(comparison: Comparison) -> list[str]:
    """Return a line for everything else that may explain a change."""
    lines = []
    for name, old, new in comparison.settings:
        lines.append(f"{name}: {visible_line(repr(old))} before, {visible_line(repr(new))} now")
    runs = (("first", comparison.before), ("second", comparison.after))
    return lines + [
        f"INCOMPLETE: the {which} run was stopped" for which, report in runs if report.incomplete
    ]


def _fails(verdict: Verdict) -> bool:
    return status_of(verdict) not in SATISFIED


def _is_unchanged(change: Change) -> bool:
    return status_of(change.before) == status_of(change.after)


def _label(same: Sequence[Verdict]) -> str:
    """Return what verdicts of one finding are about, and its cause where they have a diagnosis."""
    subjects = "; ".join(dict.fromkeys(map(subject, same)))
    statuses = ", ".join(dict.fromkeys(map(status_of, same)))
    clause = f"{same[0].clause:7} " if len({verdict.clause for verdict in same}) == 1 else ""
    cause = visible_line(cause_of(same))
    return f"{clause}{subjects} ({statuses})" + (f": {cause}" if cause else "")
