"""Arguments and options that several verbs of `mha` have, with their help.

Those that only one verb has stand above it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# That of `reports.files`, whose import would load the renderers of reports.
LAST = Path(".mha") / "last.json"

Run = Annotated[
    Path,
    typer.Option(
        metavar="FILE", show_default=False, help="The JSON report. Default: the last run."
    ),
]
WrittenReports = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Write a .html, .json or .md report. Repeatable."),
]
Seed = Annotated[
    int, typer.Option(min=0, metavar="N", help="Seed of the cases, which repeats a run.")
]
WaiverFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Known failures to accept; see mha waive.")
]
