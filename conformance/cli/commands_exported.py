"""`mha export` and `mha verify`: cases as files, for programs in any language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mha.conformance.cli.printing import errors_in_one_line

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the cases.")]
Outputs = Annotated[Path, typer.Argument(metavar="OUTPUTS", help="Files of the same names.")]
ClaimsOf = Annotated[
    str, typer.Option("--claims", metavar="FILE:OBJECT", help="What the kernels support.")
]
SeedOfCases = Annotated[int, typer.Option("--seed", min=0, help="Of the numbers in them.")]
Budget = Annotated[int, typer.Option(min=0, help="How many cases at most; 0: all.")]


def export(folder: Folder, claims: ClaimsOf, seed: SeedOfCases = 0, budget: Budget = 0) -> None:
    """Write cases with expected results and bounds to files.

    They are safetensors; see docs/embedding.md for what each holds.
    """
    from mha.conformance.candidates.one import claims_from
    from mha.conformance.exported.cases import export as write

    with errors_in_one_line():
        count = write(folder, claims_from(claims), seed=seed, budget=budget or None)
    typer.echo(f"{count} cases in {folder}")


def verify(folder: Folder, outputs: Outputs) -> None:
    """Judge outputs by exported cases: a line of JSON for each.

    The exit status is 1 if one is wrong or missing.
    """
    from mha.conformance.exported.cases import verify as judged

    right = True
    with errors_in_one_line():
        for line in judged(folder, outputs):
            typer.echo(json.dumps(line))
            right = right and line["ok"]
    raise typer.Exit(0 if right else 1)
