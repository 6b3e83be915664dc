"""`mha show`: what the last run found about a clause, without another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mha.conformance.cli.check import Printer, print_verdict
from mha.conformance.reports.files import read
from mha.conformance.settings import clauses_of


def show_verdicts(words: Sequence[str], file: Path) -> None:
    """Print what a report says about clauses: each failure in full, with its script, and any other verdict in a line.

    words: ids or families. Raises ValueError for an unknown one, a report that cannot be read, and one without verdicts
    on these clauses.
    """
    clauses = clauses_of(words)
    verdicts = [verdict for verdict in read(file).verdicts if verdict.clause in clauses]
    if not verdicts:
        raise ValueError(f"{', '.join(clauses)} was not judged in the run of {str(file)!r}; see mha report")
    printer = Printer(Console(highlight=False))
    for verdict in verdicts:
        print_verdict(printer, verdict, in_full=True)
