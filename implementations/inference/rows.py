"""The rows of a report on how a class or a kernel was understood."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper
from typing import NamedTuple

WIDTH = 110


class Row(NamedTuple):
    """One row of the table: a topic, what was found, and how."""

    topic: str
    finding: str
    evidence: str = "tested"


def table(rows: Sequence[Row], width: int = WIDTH) -> str:
    """Return rows as aligned text of at most `width` columns."""
    topic = max(len(row.topic) for row in rows)
    filler = TextWrapper(
        width, subsequent_indent=" " * (topic + 2), break_long_words=False, break_on_hyphens=False
    )
    lines = (f"{row.topic:<{topic}}  {row.finding}  [{row.evidence}]" for row in rows)
    return "\n".join(map(filler.fill, lines))
