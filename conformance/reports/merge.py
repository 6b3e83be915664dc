"""Several reports as one: the shards of a run, runs of a campaign, and a run with its update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from mha.conformance.reports.summary import QUIET, SIGNS, clauses_in
from mha.conformance.reports.text import subject
from mha.conformance.results import Rejections, Report, Verdict, settled, status_of
from mha.spec.clauses import CLAUSES

Key = tuple[str, str, str, str]
# What must be equal in reports that are merged, beside the seed in the shards of one run.
SETTINGS = ("profile", "seed", "seeds", "strict", "versions")
# From the worst status to the best. A waiver that one seed needs is not stale, though another finds
# nothing to waive.
RANKS = [status for status in SIGNS if status != "stale waiver"]
RANKS.insert(RANKS.index("waived") + 1, "stale waiver")
NONE = Rejections(0, 0)


def merge(reports: Iterable[Report], *, across_seeds: bool = False) -> Report:
    """Return the shards of one run as one report, in the order of the contract.

    Of many, one is held at a time.

    across_seeds: they may also be runs with different seeds. A verdict is then the worst of its
        clause, implementation, dtype and device, with the smallest case among the worst; it says
        which seeds gave it, and its cases, seconds and rejections are sums.
    Raises ValueError for other reports: they differ in the profile, the seed or a version, or have
        different verdicts of one seed on the same clause, implementation, dtype and device.
    """
    may_differ = ("seed", "seeds") if across_seeds else ()
    merged = _Merged()
    for report in reports:
        first = merged.first or report
        for name, mine, theirs in setting_changes(first, report):
            if name not in may_differ:
                raise ValueError(
                    f"not shards of one run: {name} is {mine!r} in one and {theirs!r} in another"
                )
        merged.add(report)
    return merged.report()


def updated(last: Report, report: Report) -> Report:
    """Return the last report with verdicts of a narrower run in the place of its own.

    Narrower are fewer clauses, of the same targets and with the same profile, seed, strictness and
    versions; verdicts in dtypes and on devices that the last report does not have are left out.
    Otherwise, the new report is returned.
    """
    verdicts, new = by_key(last), by_key(report)
    both = verdicts.keys() & new.keys()
    if not both or not _is_narrower(report, last):
        return report
    for key in both:
        verdicts[key] = new[key]
    assembled = _assembled(last, verdicts.values(), (*last.torch_changes, *report.torch_changes))
    return replace(assembled, since=last.since or last.started, started=report.started)


def key_of(verdict: Verdict) -> Key:
    """Return what a verdict is about."""
    return verdict.implementation, verdict.device, verdict.dtype, verdict.clause


def by_key(report: Report) -> dict[Key, Verdict]:
    """Return the verdicts of a report by what they are about."""
    return {key_of(verdict): verdict for verdict in report.verdicts}


def setting_changes(before: Report, after: Report) -> Iterator[tuple[str, object, object]]:
    """Yield the settings in which two reports differ: the name, and both values."""
    for name in SETTINGS:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield name, old, new


def _is_narrower(report: Report, last: Report) -> bool:
    """Return whether a report is on fewer clauses than the last one, and else on the same."""
    if any(setting_changes(last, report)) or not report.targets.items() <= last.targets.items():
        return False
    return set(clauses_in(report.verdicts)) < set(clauses_in(last.verdicts))


def _assembled(base: Report, verdicts: Iterable[Verdict], torch_changes: Iterable[str]) -> Report:
    """Return a report with verdicts of several, settled again.

    What explains a verdict may be in another report, or may have been in it.
    """
    singly = [settled([verdict])[0] for verdict in verdicts]
    changes = tuple(dict.fromkeys(torch_changes))
    return replace(base, verdicts=settled(_ordered(singly)), torch_changes=changes)


class _Merged:
    """What is kept of the reports that were added."""

    def __init__(self) -> None:
        self.first: Report | None = None
        self.verdicts: dict[Key, Verdict] = {}
        self.seeds_of: dict[Key, set[int]] = {}
        self.seeds: set[int] = set()
        self.targets: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.not_covered: dict[str, tuple[str, ...]] = {}
        self.incomplete = False
        self.started = ""
        self.hosts: dict[str, None] = {}
        self.changes: dict[str, None] = {}

    def add(self, report: Report) -> None:
        """Add a report; raises ValueError where an earlier one of the same seed disagrees."""
        self.first = self.first or replace(report, verdicts=())
        self.seeds |= set(report.all_seeds)
        self.targets |= report.targets
        self.broken |= report.broken
        self.not_covered |= report.not_covered
        self.incomplete |= report.incomplete
        self.started = min(self.started or report.started, report.started)
        self.hosts |= {report.host: None}
        self.changes |= dict.fromkeys(report.torch_changes)
        for verdict in report.verdicts:
            # On its own, since another report may have what explains it.
            (alone,) = settled([verdict])
            alone = replace(alone, seeds=verdict.seeds or report.all_seeds)
            self._add(alone, set(report.all_seeds))

    def _add(self, verdict: Verdict, seeds: set[int]) -> None:
        key = key_of(verdict)
        known = self.verdicts.setdefault(key, verdict)
        if known is verdict:
            self.seeds_of[key] = seeds
        elif not seeds & self.seeds_of[key]:
            self.verdicts[key] = _worst(known, verdict)
            self.seeds_of[key] |= seeds
        elif replace(known, seconds=verdict.seconds) != verdict:
            raise ValueError(
                f"not shards of one run: they disagree about {verdict.clause} for"
                f" {subject(verdict)}; to compare two runs, leave out --merge"
            )

    def report(self) -> Report:
        """Return the report that they add up to."""
        if self.first is None:
            raise ValueError("there is nothing to merge")
        seeds = tuple(sorted(self.seeds))
        several = len(seeds) > 1
        base = replace(
            self.first,
            seed=seeds[0],
            seeds=seeds if several else (),
            targets=self.targets,
            incomplete=self.incomplete,
            broken=self.broken,
            not_covered=self.not_covered,
            started=self.started,
            host=", ".join(self.hosts),
        )
        verdicts = []
        for verdict in self.verdicts.values():
            names_seeds = several and verdict.status not in QUIET
            verdicts.append(verdict if names_seeds else replace(verdict, seeds=()))
        return _assembled(base, verdicts, self.changes)


def _worst(one: Verdict, other: Verdict) -> Verdict:
    """Return the worse of two verdicts of different seeds, with the sums of both."""
    worse, better = sorted((one, other), key=_rank)
    seeds = worse.seeds
    if _rank(worse)[:2] == _rank(better)[:2]:  # both are as bad, and only the cases differ
        first, *others = seeds
        seeds = (first, *sorted({*others, *better.seeds}))
    rejections = {}
    for name in sorted({*one.rejections, *other.rejections}):
        rejections[name] = one.rejections.get(name, NONE) + other.rejections.get(name, NONE)
    return replace(
        worse,
        seeds=seeds,
        examples=one.examples + other.examples,
        seconds=round(one.seconds + other.seconds, 3),
        margin=max(one.margin, other.margin),
        rejections=rejections,
    )


def _rank(verdict: Verdict) -> tuple[int, bool, int, int]:
    """Return a sort key for verdicts of several seeds: the worst first, with the shortest case."""
    status, case = RANKS.index(status_of(verdict)), verdict.case or ""
    return status, verdict.blocked_by is not None, len(case), verdict.seeds[0]


def _ordered(verdicts: Collection[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts by implementation, device, dtype and clause.

    All but the clauses, which have the order of the contract, are in order of appearance.
    """
    names = _places(verdict.implementation for verdict in verdicts)
    devices = _places(verdict.device for verdict in verdicts)
    dtypes = _places(verdict.dtype for verdict in verdicts)
    clauses = _places(CLAUSES)

    def rank(verdict: Verdict) -> tuple[int, ...]:
        return (
            names[verdict.implementation],
            devices[verdict.device],
            dtypes[verdict.dtype],
            clauses[verdict.clause],
        )

    return tuple(sorted(verdicts, key=rank))


def _places(words: Iterable[str]) -> dict[str, int]:
    """Return the place of each word among them, each once."""
    return {word: place for place, word in enumerate(dict.fromkeys(words))}
