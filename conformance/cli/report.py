"""`mha report`: reports rendered, merged and compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mha.conformance.reports.compare import differences, merged
from mha.conformance.reports.files import read, validate_file, write
from mha.conformance.reports.terminal import matrix, needs_plain
from mha.conformance.reports.text import summarise
from mha.conformance.results import Report


def report_on(files: Sequence[Path], *, merge: bool, to: Sequence[Path], schema: bool) -> tuple[list[str], int]:
    """Return the lines to print and the exit status; write what is asked for.

    One report is shown, several are merged if `merge` is set, and two are compared otherwise. Raises ValueError for
    anything else, and for what cannot be read or written.
    """
    if schema:
        return [json.dumps(Report.schema(), indent=2)], 0
    if len(files) > 2 and not merge:
        raise ValueError(f"two reports are compared, but there are {len(files)}; add --merge for the shards of one run")
    if len(files) == 2 and not merge and to:
        raise ValueError("--to writes one report: name one, or add --merge for the shards of one run")
    for file in to:
        validate_file(file, "--to")
    found = [read(file) for file in files]
    if len(found) == 2 and not merge:
        return differences(*found)
    whole = merged(found)
    unwritten = [why for file in to if (why := write(whole, file))]
    if unwritten:
        raise ValueError(unwritten[0])
    if to:
        return [f"wrote {file}" for file in to], 0
    drawn = matrix(whole.verdicts, plain=needs_plain(sys.stdout.encoding)) if whole.verdicts else []
    return [*drawn, "", *summarise(whole.verdicts, incomplete=whole.incomplete)], whole.exit_status
