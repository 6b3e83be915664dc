"""The implementations of a plan, found by other processes: the campaign runs none of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mha.conformance.campaign.supervised import TIMEOUT, Processes, Supervised, serve
from mha.conformance.engine import subjects
from mha.conformance.engine.workers import all_cores
from mha.conformance.sources import Sources, loaded_sources, packages_of, watching_files
from mha.implementations import Registered, Resolved, UnavailableError, resolve
from mha.implementations.discovery.loaded import file_of, module_named
from mha.implementations.discovery.resolve import GROUP, split_name

COMMAND = (sys.executable, "-P", "-c", "from mha.conformance.campaign.targets import work; work()")
# In seconds: for a process to import torch, and then for it to import and build an implementation.
START, PATIENCE = 600.0, 120.0
OURS = "mha."


@dataclass(frozen=True)
class Found:
    """What a target names, and its sources, or why it cannot be used.

    broken: as of `Registered`.
    """

    resolved: Resolved | None = None
    sources: Sources = field(default_factory=Sources)
    error: str = ""
    broken: bool = True


@dataclass(frozen=True)
class Targets:
    """What a plan names.

    sources: by target. unavailable: what "all" names, and cannot be used.
    """

    resolved: list[Resolved]
    sources: Mapping[str, Sources]
    unavailable: tuple[Registered, ...]


def find(target: str) -> Found:
    """Load what a target names, in this process, and look at what that loads."""
    before = frozenset(sys.modules)
    try:
        with watching_files():
            (resolved,) = resolve(target)
    except ValueError as error:
        return Found(error=str(error), broken=not isinstance(error, UnavailableError))
    place = place_of(target)
    if place.startswith(OURS):
        return Found(resolved, packages_of(Path(file_of(module_named(place)))))
    return Found(resolved, loaded_sources(Path(place) if place.endswith(".py") else None, before))


def place_of(target: str) -> str:
    """Return the file or module that a target is in.

    >>> place_of("mine=sdpa"), place_of("a/b.py:C")
    ('mha.implementations.sdpa', 'a/b.py')
    """
    _, plain = split_name(target)
    if ":" not in plain:
        for point in entry_points(group=GROUP, name=plain):
            return point.value.rpartition(":")[0]
    return plain.rpartition(":")[0]


def find_all(targets: Collection[str], memory: float) -> Targets:
    """Find what targets name, each that is not of this package in a process of its own.

    memory: of each process, in GiB; 0 for no limit. Raises ValueError, in one line, for one that
    cannot be used; among those that "all" names, that is no error.
    """
    named: list[tuple[str, bool]] = []
    for target in targets:
        named += [(each, target == "all") for each in _expanded(target)]
    found: dict[str, Found] = {}
    others = []
    for target, _ in named:
        if not place_of(target).startswith(OURS):
            others.append(target)
        elif target not in found:
            # In this thread: what an import replaces is found by looking before and after it.
            found[target] = find(target)
    running = Processes()
    with ThreadPoolExecutor(min(4, all_cores())) as threads:
        try:
            apart = threads.map(lambda target: _find_apart(target, memory, running), others)
            found |= zip(others, apart, strict=True)
        finally:
            running.kill()
    resolved, sources, unavailable = [], {}, []
    for target, is_optional in named:
        each = found[target]
        if each.resolved:
            resolved.append(each.resolved)
            sources[target] = each.sources
        elif is_optional:
            reason = each.error.partition(" cannot be used: ")[2] or each.error
            place = place_of(target)
            unavailable.append(Registered(target, place, error=reason, broken=each.broken))
        else:
            raise ValueError(each.error)
    return Targets(resolved, sources, tuple(unavailable))


def _expanded(target: str) -> list[str]:
    """Return the registered names for "all"."""
    if target != "all":
        return [target]
    return sorted({point.name for point in entry_points(group=GROUP)})


def _find_apart(target: str, memory: float, running: Processes) -> Found:
    """Find what a target names by a process that may crash, hang or exit."""
    process = Supervised(COMMAND, START)
    answer: dict[str, Any] = {}
    try:
        running.add(process.process)
        for message in process.messages({"target": target, "memory": memory}):
            process.allow(PATIENCE)
            answer |= message
    finally:
        process.end()
    if process.stop:
        reason = process.stop
        if reason == TIMEOUT:
            reason = f"it took longer than {PATIENCE:g} s"
        return Found(error=f"{target!r} cannot be loaded: {reason}")
    return _received(target, answer)


def _received(target: str, answer: Mapping[str, Any]) -> Found:
    """Return what a process has found."""
    if answer.get("error"):
        return Found(error=str(answer["error"]), broken=bool(answer["broken"]))
    try:
        sources = Sources(**answer["sources"])
        (resolved,) = subjects.read(answer["found"])
    except (KeyError, TypeError, ValueError) as error:
        return Found(error=f"{target!r} cannot be loaded: its claims cannot be read: {error}")
    return Found(resolved, sources)


def work() -> None:
    """Be the process that finds what a target names."""
    serve(_found)


def _found(task: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    # As in the process of a job: what the judge loads does not count as loaded by the target.
    import mha.conformance.engine.judge
    import mha.conformance.harness.isolation  # noqa: F401  so that it is loaded

    yield {"imported": True}
    found = find(str(task["target"]))
    if found.resolved is None:
        yield {"error": found.error, "broken": found.broken}
        return
    yield {"found": subjects.written([found.resolved]), "sources": asdict(found.sources)}


def changed(expected: Mapping[str, str], here: Sources) -> str:
    """Return which sources are known not to be those that a job was planned for, or ""."""
    known = {**here.packages, **here.files}
    different = []
    for name, text in expected.items():
        if known.get(name, text) != text:
            different.append(f"{name} is {known[name]}, not {text}, where the job runs")
    return "; ".join(different)
