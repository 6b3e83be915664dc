"""`mha show`: what the last run found about a clause, without another run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mha.conformance.cli.check import line
from mha.conformance.reports.files import read
from mha.conformance.reports.terminal import width_of
from mha.conformance.reports.text import describe, subject
from mha.conformance.settings import clauses_of


def show_verdicts(words: str, file: Path) -> Iterator[str]:
    """Yield what a report says about clauses: each failure in full, with its script, and any other verdict in a line.

    words: ids or families. Raises ValueError for an unknown one, a report that cannot be read, and one without verdicts
    on these clauses.
    """
    clauses = clauses_of(words)
    verdicts = [verdict for verdict in read(file).verdicts if verdict.clause in clauses]
    if not verdicts:
        raise ValueError(f"{', '.join(clauses)} was not judged in the run of {str(file)!r}; see mha report")
    width = width_of(sys.stdout)
    for verdict in verdicts:
        if verdict.status in ("pass", "not_claimed"):
            yield f"{line(verdict, width)} ({subject(verdict)})"
        else:
            yield f"{describe(verdict, width)}\n"
