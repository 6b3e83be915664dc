"""Text put into lines and lists: folded to a width, counted, and cut where it is long."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import IO

# In columns, of a line, unless the terminal is narrower.
WIDTH = 110
INDENT = " " * 4


def width_of(stream: IO[str]) -> int:
    """Return how many columns to use: at most `WIDTH`, and all of these for a file or pipe."""
    if not stream.isatty():
        return WIDTH
    return min(shutil.get_terminal_size().columns, WIDTH)


def fitted(text: str, stream: IO[str], indent: str = INDENT) -> str:
    """Return a text whose lines fit a terminal, except code, which is indented.

    It is unchanged for a file or pipe, where one may search for a line.
    """
    if not stream.isatty():
        return text
    width = width_of(stream)
    lines = []
    for line in text.split("\n"):
        is_code = line.startswith(" ")
        lines.append(line if is_code else wrapped(line, width, "", indent))
    return "\n".join(lines)


def wrapped(text: str, width: int, first: str, rest: str | None = None) -> str:
    """Return a text in lines of at most `width` columns.

    Long words and code are never broken. first, rest: what the first line and the others begin
    with.

    >>> wrapped("one two three", 8, "", "  ")
    'one two\\n  three'
    """
    if rest is None:
        rest = first
    filler = textwrap.TextWrapper(
        width, first, rest, break_long_words=False, break_on_hyphens=False
    )
    return filler.fill(text)


def shortened(text: str, longest: int) -> str:
    """Return a text in one line of at most `longest` characters, cut between words."""
    return textwrap.shorten(text, longest, placeholder=" ...")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "case"), counted(2, "case")
    ('1 case', '2 cases')
    """
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def first_few(names: Sequence[str], most: int, *, least_left_out: int = 1) -> str:
    """Return the first `most` names and how many more there are.

    least_left_out: names are left out only where they are so many.

    >>> first_few(["a", "b", "c"], 2), first_few(["a", "b", "c"], 2, least_left_out=2)
    ('a, b and 1 more', 'a, b, c')
    """
    left_out = len(names) - most
    if left_out < least_left_out:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {left_out} more"
