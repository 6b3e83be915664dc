"""`mha judge-all`: many files with a kernel each, a line of JSON for each as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mha.conformance.cli.printing import errors_in_one_line

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Its *.py files are candidates.")]
ClaimsOf = Annotated[
    str,
    typer.Option("--claims", metavar="FILE:OBJECT", help="The Claims that every kernel must keep."),
]
Output = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Where the lines go; those that it has are not made again."),
]
KernelName = Annotated[str, typer.Option("--name", help="Of the kernel in each file.")]
Layout = Annotated[str, typer.Option(help="Of the kernels' tensors, such as 'b l h d'.")]
JobsAtOnce = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Candidates at once.")]
Seconds = Annotated[float, typer.Option(min=0, help="No case is started later.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds after which one is stopped.")]
Memory = Annotated[int, typer.Option(min=0, help="MiB that one may use; 0: no limit.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
UntilFailure = Annotated[
    bool, typer.Option("--until-failure", help="Try a wrong kernel no further after one failure.")
]
SeedOfCases = Annotated[int, typer.Option("--seed", min=0, help="Of the cases.")]


def judge_all(  # noqa: PLR0913  the options of the command
    folder: Folder,
    claims: ClaimsOf,
    output: Output = Path("candidates.jsonl"),
    name: KernelName = "kernel",
    layout: Layout = "b h l d",
    jobs: JobsAtOnce = 1,
    seconds: Seconds = 10.0,
    timeout: Timeout = 60.0,
    memory: Memory = 4096,
    device: Device = "cpu",
    seed: SeedOfCases = 0,
    until_failure: UntilFailure = False,
) -> None:
    """Judge the kernels in many files, each in a process of its own.

    A crash, a hang or a candidate without end costs that candidate alone; it is no sandbox. A run
    that was stopped goes on where it was. See docs/embedding.md.
    """
    from mha.conformance.candidates.one import Terms, claims_from
    from mha.conformance.candidates.pool import judge_into

    with errors_in_one_line():
        terms = Terms(
            claims_from(claims),
            name=name,
            layout=layout,
            seed=seed,
            seconds=seconds,
            device=device,
            timeout=timeout,
            memory=memory,
            until_failure=until_failure,
        )
        summary = judge_into(output, sorted(folder.glob("*.py")), terms, jobs)
    typer.echo(summary)
