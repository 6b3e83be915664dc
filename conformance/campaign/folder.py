"""The folder of a campaign: its plan and versions, and a file for the result of each job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mha.conformance.campaign.plan import Campaign
from mha.conformance.reports.writing import make_own_folder, write_own
from mha.conformance.results import Report
from mha.conformance.sources import Sources, digest_of

PLAN, RESULTS = "plan.json", "results"
# What may change between runs into one folder: it stops jobs, and is no part of them.
LIMITS = ("timeout", "memory")


# Of a job, as in `Job.key`; it names the file of its result.
KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Content:
    """What the file of a result holds, beside its digest."""

    key: str
    stops: dict[str, str]
    retried: dict[str, str]
    report: dict[str, Any]


class CorruptError(ValueError):
    """A result that is not what was written; it counts as if it were not there."""


@dataclass(frozen=True)
class Result:
    """What came of a job. stops: why clauses were not judged to the end, by clause: a crash, or a
    limit.

    retried: the stops of the result that it replaces.
    """

    key: str
    report: Report
    stops: Mapping[str, str] = field(default_factory=dict)
    retried: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stamp:
    """What a folder is for. keys: of all jobs, in the order of the plan.

    sources: for each target, the files that it is made of, with their digests, by the places where
        they were.
    broken: as in `Report`. Other machines may have these elsewhere.
    """

    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    keys: tuple[str, ...]
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict, compare=False)
    broken: Mapping[str, str] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(campaign: Campaign) -> Stamp:
        """Return that of a campaign, as JSON gives it back."""
        plan = json.loads(json.dumps(asdict(campaign.plan)))
        for name in LIMITS:
            del plan[name]
        keys = tuple(job.key for job in campaign.jobs())
        sources = {target: placed(own) for target, own in campaign.sources.items()}
        return Stamp(plan, dict(campaign.versions), keys, sources, dict(campaign.broken))


@dataclass(frozen=True)
class Folder:
    """A folder of results, each of which is written in one step and checked when it is read."""

    path: Path

    def claim(self, stamp: Stamp) -> None:
        """Make it the folder of a campaign; raises ValueError if it is that of another one."""
        if (self.path / PLAN).exists():
            self._require_same(stamp)
            return
        is_free = not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))
        if not is_free:
            raise ValueError(
                f"{str(self.path)!r} is neither empty nor the folder of a campaign; name another"
                " folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_own(self.path / PLAN, json.dumps(asdict(stamp), indent=1))
        except OSError as error:
            raise ValueError(f"{str(self.path)!r} cannot be written: {error.strerror}") from None

    def _require_same(self, stamp: Stamp) -> None:
        """Raise ValueError, which names what differs, unless the folder is of this campaign."""
        theirs = self.stamp()
        self._require_sources(theirs, stamp)
        for what in ("plan", "versions"):
            old, new = getattr(theirs, what), getattr(stamp, what)
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    there = f"{name} is {old.get(name)!r} there, but {new.get(name)!r} now"
                    raise self._of_another(there)
        if theirs.keys != stamp.keys:
            raise self._of_another(
                "[tool.mha] in pyproject.toml, its waivers, or a report in `known` is not what it"
                " was"
            )

    def _require_sources(self, theirs: Stamp, stamp: Stamp) -> None:
        """Raise ValueError if results are of other files than those that there are now."""
        changed = changed_files(theirs.sources, stamp.sources)
        if not changed or dict(theirs.plan) != dict(stamp.plan):
            return
        keys = frozenset(stamp.keys)
        count = sum(key not in keys for key in self.result_keys())
        if count:
            results = results_in_words(count)
            raise self._of_another(f"{results} of an earlier version of {named(changed)}")

    def _of_another(self, difference: str) -> ValueError:
        """Return the error of a folder that is that of another campaign."""
        return ValueError(
            f"{str(self.path)!r} is the folder of another campaign: {difference}; name another"
            " folder"
        )

    def result_keys(self) -> Iterator[str]:
        """Yield the keys of the results that are there, whatever they are of."""
        for file in sorted((self.path / RESULTS).glob("??/*.json")):
            yield file.stem

    def stamp(self) -> Stamp:
        """Return what the folder is for; raises ValueError, in one line, if it is not that of a
        campaign.
        """
        try:
            data = json.loads((self.path / PLAN).read_text(encoding="utf-8"))
            stamp: Stamp = _stamps().validate_python(data)
            if all(map(KEY.fullmatch, stamp.keys)):
                return stamp
            raise ValueError("a key is not a hash")
        except (OSError, ValueError, RecursionError):
            raise ValueError(
                f"{str(self.path)!r} is not the folder of a campaign: it has no valid {PLAN}"
            ) from None

    def put(self, result: Result) -> None:
        """Write a result in the place of an earlier one; raises OSError, and leaves no part of it,
        if it cannot.
        """
        ends = {"stops": dict(result.stops), "retried": dict(result.retried)}
        content = json.dumps(
            {"key": result.key, **ends, "report": json.loads(result.report.to_json())}
        )
        place = self._place(result.key)
        make_own_folder(place.parent.parent)
        make_own_folder(place.parent)
        write_own(place, f"{_digest(content)}\n{content}\n")

    def get(self, key: str) -> Result | None:
        """Return the result of a job, None if there is none; raises CorruptError."""
        data = self._read(key)
        if data is None:
            return None
        try:
            return Result(key, Report.from_json(json.dumps(data.report)), data.stops, data.retried)
        except ValueError as error:
            raise CorruptError(f"{self._place(key)}: {error}") from None

    def stops(self, key: str) -> Mapping[str, str] | None:
        """Return only the stops of a result, None if there is no result; raises CorruptError."""
        data = self._read(key)
        return None if data is None else data.stops

    def _read(self, key: str) -> Content | None:
        place = self._place(key)
        try:
            digest, _, content = place.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CorruptError(f"{place}: {error}") from None
        if digest != _digest(content.removesuffix("\n")):
            raise CorruptError(f"{place}: its content is not what was written")
        try:
            data: Content = _contents().validate_python(json.loads(content))
        except (ValueError, RecursionError):
            raise CorruptError(f"{place}: its content is not a result") from None
        if data.key != key:
            raise CorruptError(f"{place}: it is the result of another job, {data.key!r:.80}")
        return data

    def _place(self, key: str) -> Path:
        return self.path / RESULTS / key[:2] / f"{key}.json"


@cache
def _stamps() -> Any:
    return TypeAdapter(Stamp)


@cache
def _contents() -> Any:
    return TypeAdapter(Content)


def placed(sources: Sources) -> dict[str, str]:
    """Return the digests of files by where they are here."""
    return {place: sources.files[name] for name, place in sources.paths.items()}


def changed_files(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return the files that both have, with different content."""
    changed = []
    for target, files in before.items():
        now = after.get(target, {})
        changed += [place for place, digest in files.items() if now.get(place, digest) != digest]
    return list(dict.fromkeys(changed))


def changed_since(stamp: Stamp) -> dict[str, list[str]]:
    """Return by the target the files that are there, and are not what they were."""
    found = {}
    for target, files in stamp.sources.items():
        changed = []
        for place, digest in files.items():
            if _digest_of(place) not in ("", digest):
                changed.append(place)
        if changed:
            found[target] = changed
    return found


def _digest_of(place: str) -> str:
    """Return the digest of a file; "" where it is not there, as on another machine."""
    try:
        return digest_of(Path(place))
    except OSError:
        return ""


def named(files: Sequence[str]) -> str:
    """Return the names of files, as a user knows them."""
    return ", ".join(dict.fromkeys(Path(file).name for file in files))


def results_in_words(count: int) -> str:
    """Return how many results there are, with the verb.

    >>> results_in_words(1), results_in_words(3)
    ('1 result is', '3 results are')
    """
    return "1 result is" if count == 1 else f"{count} results are"


def _digest(content: str) -> str:
    return sha256(content.encode()).hexdigest()
