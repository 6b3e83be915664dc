"""Several reports: shards of one run as one, and what changed between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mha.conformance.reports.summary import status_of
from mha.conformance.reports.text import brief, judged, visible
from mha.conformance.results import Report, Verdict
from mha.spec import CLAUSES

Key = tuple[str, str, str, str]
KEPT = ("pass", "waived", "SHOULD not kept", "not claimed")
# A margin that is told as less exact, or a time as slower: so much more than before, and no trifle.
FACTOR, LEAST_MARGIN, LEAST_SECONDS = 2.0, 0.05, 5.0


def merged(reports: Sequence[Report]) -> Report:
    """Return the shards of one run as one report, in the order of the contract.

    Raises ValueError where they are not of one run: another profile, seed or version, or two verdicts on one question.
    """
    first = reports[0]
    for other in reports[1:]:
        for field in ("profile", "seed", "strict", "versions"):
            mine, theirs = getattr(first, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(f"these are no shards of one run: {field} is {mine!r} in one, {theirs!r} in another")
    verdicts: dict[Key, Verdict] = {}
    for verdict in (each for report in reports for each in report.verdicts):
        known = verdicts.setdefault(_key(verdict), verdict)
        if replace(known, seconds=verdict.seconds) != verdict:
            told = visible(" ".join(_key(verdict)))
            raise ValueError(
                f"these are no shards of one run: there are two verdicts on {told}; to compare, leave out --merge"
            )
    order = [dict.fromkeys(key[place] for key in verdicts) for place in range(4)]
    places = [{word: place for place, word in enumerate(words)} for words in order]
    places[3] = {clause: place for place, clause in enumerate(CLAUSES)}
    by_place = sorted(
        verdicts.items(), key=lambda pair: [known[word] for known, word in zip(places, pair[0], strict=True)]
    )
    return replace(
        first,
        verdicts=tuple(verdict for _, verdict in by_place),
        targets={name: target for report in reports for name, target in report.targets.items()},
        incomplete=any(report.incomplete for report in reports),
        broken={name: why for report in reports for name, why in report.broken.items()},
        started=min(report.started for report in reports),
        host=", ".join(dict.fromkeys(report.host for report in reports)),
    )


def differences(before: Report, after: Report) -> tuple[list[str], int]:
    """Return what changed between two runs, in lines, and the exit status: 1 if something broke, 2 if a run is partial.

    What was judged before and is not judged now is told, and breaks nothing.
    """
    old, new = ({_key(verdict): verdict for verdict in report.verdicts} for report in (before, after))
    both = [key for key in new if key in old]
    broken = [key for key in new if not _kept(new[key]) and (key not in old or _kept(old[key]))]
    mended = [key for key in both if not _kept(old[key]) and _kept(new[key])]
    other = [key for key in both if status_of(old[key]) != status_of(new[key]) and key not in {*broken, *mended}]
    less = [key for key in both if _kept(new[key]) and new[key].margin > max(LEAST_MARGIN, FACTOR * old[key].margin)]
    blocks = [
        ("new failures", [f"{_told(new[key])}: {brief(new[key])}" for key in broken]),
        ("mended", [_told(new[key]) for key in mended]),
        ("still failing", [_told(new[key]) for key in both if not _kept(old[key]) and not _kept(new[key])]),
        ("changed", [f"{_told(new[key])}, before: {status_of(old[key])}" for key in other]),
        ("less exact", [f"{_told(new[k])}: error/bound {old[k].margin:.3g}, now {new[k].margin:.3g}" for k in less]),
        ("slower", _slower(before, after, both)),
        ("no longer judged", [_told(old[key]) for key in old if key not in new]),
    ]
    notes = [
        f"{field} differs: {visible(repr(getattr(before, field)))}, now {visible(repr(getattr(after, field)))}"
        for field in ("profile", "seed", "strict", "versions")
        if getattr(before, field) != getattr(after, field)
    ]
    notes += [
        f"INCOMPLETE: {which} was stopped"
        for which, r in (("the first", before), ("the second", after))
        if r.incomplete
    ]
    lines = notes + [
        line for what, found in blocks if found for line in ("", f"{what}: {len(found)}", *_indented(found))
    ]
    same = sum(status_of(old[key]) == status_of(new[key]) for key in both)
    status = 1 if broken else 2 if before.incomplete or after.incomplete or not new else 0
    return [*lines, "", f"{len(new)} verdicts, {same} as before"], status


def _slower(before: Report, after: Report, both: Sequence[Key]) -> list[str]:
    """Return the implementations that took much longer over what both runs judged."""
    lines = []
    for name in dict.fromkeys(key[0] for key in both):
        own = {key for key in both if key[0] == name}
        was, now = (sum(v.seconds for v in report.verdicts if _key(v) in own) for report in (before, after))
        if now > max(LEAST_SECONDS, FACTOR * was) and was:
            lines.append(f"{name}: {now / was:.1f} times the {was:.0f} s that it took to judge")
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _key(verdict: Verdict) -> Key:
    return verdict.implementation, verdict.device, verdict.dtype, verdict.clause


def _kept(verdict: Verdict) -> bool:
    return status_of(verdict) in KEPT


def _told(verdict: Verdict) -> str:
    return f"{verdict.clause:7} {judged(verdict)} ({status_of(verdict)})"
