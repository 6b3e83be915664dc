"""Files written in one step: where that fails, an earlier file is left as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from shutil import copymode

# What replacing a file fails with where writing to it may not.
IRREPLACEABLE = {errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS}


def write_text(file: Path, text: str) -> None:
    """Write a file that the user has named, as a whole or not at all.

    A link is followed. What cannot be replaced is written to as it is: a device, a file that is
    mounted by itself, or one in a folder to which nothing can be added. Raises OSError.
    """
    if file.is_file() or not file.exists():
        try:
            write_together({file.resolve(): text})
            return
        except OSError as error:
            if error.errno not in IRREPLACEABLE or not file.is_file():
                raise
    file.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_own(file: Path, text: str) -> None:
    """Write a file of ours in one step; a link in its place is replaced, and never followed.

    Raises OSError.
    """
    write_together({file: text})


def make_own_folder(folder: Path) -> None:
    """Make a folder of ours; raises OSError, also for a link, since we would write elsewhere."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link; put a folder in its place", str(folder))
    folder.mkdir(exist_ok=True)


def make_ignored_folder(folder: Path) -> None:
    """Make a folder of ours that git ignores; raises OSError."""
    make_own_folder(folder)
    ignore = folder / ".gitignore"
    if ignore.is_symlink() or not ignore.exists():
        write_own(ignore, "*\n")


def write_together(texts: Mapping[Path, str]) -> None:
    """Write files in one step each, and none of them before all are on the disk.

    A link in the place of a file is replaced, and not followed. Raises OSError, with the name of
    the file.
    """
    parts = {place: place.with_name(f".{token_hex(8)}.part") for place in texts}
    try:
        for place, part in parts.items():
            with _about(place):
                _write_new(part, texts[place])
                if place.is_file() and not place.is_symlink():
                    copymode(place, part)
        for place, part in parts.items():
            with _about(place):
                part.replace(place)
    finally:
        for part in parts.values():
            with suppress(OSError):  # its folder may not be one
                part.unlink()


def _write_new(file: Path, text: str) -> None:
    """Write a file that is not there yet, to the disk."""
    with file.open("x", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def _about(place: Path) -> Iterator[None]:
    """Let errors name a file, and not the part of it that is written first."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(place), None
        raise
