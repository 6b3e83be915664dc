"""The files that `mha watch` looks at, and how they were when it last did."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import sleep

from mha.conformance.imported import located
from mha.conformance.sources import is_own, name_of, with_imports
from mha.implementations.discovery.resolve import split_name

# In seconds, between two looks.
POLL = 0.05
# Of a file: when it was last written, its length, and its number, which another file of the same
# name does not have.
Stamp = tuple[int, int, int]


class WatchedFiles:
    """The files of a target, and of what it imports, with the stamps that they had.

    first: the file that the target names.
    """

    def __init__(self, target: str) -> None:
        """Raise ValueError for a target in which no file of the user's is named."""
        places = places_of(target)
        self.first = Path(*places)
        self.stamps: dict[str, Stamp | None] = {}
        self.add(places)

    def add(self, places: Mapping[str, str], since: int | None = None) -> None:
        """Watch files too, and those that they import.

        places: by file, its place in its package.
        since: when the files were read, in nanoseconds of the clock; one that was written later
            counts as saved. None where nothing has read them.
        """
        for file in with_imports(places) | set(places):
            if file in self.stamps:
                continue
            stamp = stamp_of(file)
            is_newer = since is not None and stamp is not None and stamp[0] > since
            self.stamps[file] = None if is_newer else stamp

    def saved(self) -> list[str]:
        """Return the files that are there, and are not as they were."""
        changed = list[str]()
        for file, before in self.stamps.items():
            stamp = stamp_of(file)
            if stamp is not None and stamp != before:
                changed.append(file)
        return changed

    def settle(self) -> None:
        """Wait until nobody writes the files, and take them as they are then."""
        before: dict[str, Stamp | None] = {}
        while (now := {file: stamp_of(file) for file in self.stamps}) != before:
            before = now
            sleep(POLL)
        self.stamps = now

    def names(self) -> str:
        """Return the file of the target, and how many others there are."""
        others = len(self.stamps) - 1
        if not others:
            return self.first.name
        return (
            f"{self.first.name} and {others} {'file' if others == 1 else 'files'} that it imports"
        )


def places_of(target: str) -> dict[str, str]:
    """Return the file that a target names, with its place in its package; raise ValueError."""
    _, plain = split_name(target)
    place, _, name = plain.rpartition(":")
    if not place or not name:
        raise ValueError(
            f"{target!r} names no file to watch; give file.py:NAME, or package.module:NAME"
        )
    if place.endswith(".py"):
        return {os.path.realpath(place): Path(place).name}
    file = located(place, [os.getcwd()])
    if not file or not is_own(os.path.realpath(file)):
        raise ValueError(f"there is no file of yours behind {target!r} to watch")
    return {os.path.realpath(file): name_of(place, file)}


def stamp_of(file: str) -> Stamp | None:
    """Return the stamp of a file; None without one."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def shown(files: Iterable[str]) -> str:
    """Return the names of files, as they are said to have been saved."""
    return ", ".join(sorted(Path(file).name for file in files))
