"""The command `mha`: its verbs, in the order of the help. A verb imports what it needs when run.

Help, `mha spec` and usage errors must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from mha.conformance.cli.commands_campaign import campaign
from mha.conformance.cli.commands_candidates import judge_all
from mha.conformance.cli.commands_exported import export, verify
from mha.conformance.cli.commands_judging import bench, check, faults, replay, watch
from mha.conformance.cli.commands_project import init, waive
from mha.conformance.cli.commands_reports import list_, report, show, spec
from mha.conformance.cli.printing import HELP_WIDTH

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": HELP_WIDTH},
)
# With an example of each.
COMMANDS: dict[Callable[..., None], str] = {
    spec: "mha spec MSK-1",
    check: "mha check my_file.py:MyAttention",
    watch: "mha watch my_file.py:MyAttention",
    report: "mha report before.json after.json",
    replay: "mha replay --clause MSK-8",
    show: "mha show MSK-8 --script msk8.py",
    waive: 'mha waive MSK-8 --reason "rows are never empty"',
    bench: "mha bench sdpa vectorized --shape encoder",
    list_: "mha list",
    init: "mha init my_file.py:MyAttention",
    faults: "mha faults --markdown kills.md",
    judge_all: "mha judge-all candidates --claims claims.py:CLAIMS",
    export: "mha export cases --claims claims.py:CLAIMS",
    verify: "mha verify cases outputs",
}
for command, example in COMMANDS.items():
    name = command.__name__.removesuffix("_").replace("_", "-")
    app.command(name, epilog=f"Example: {example}")(command)
app.add_typer(campaign, name="campaign")


def _print_version(given: bool) -> None:
    # Some versions of typer and click give "False", which would print the version instead of
    # judging, with exit status 0.
    if isinstance(given, str):
        typer.echo(
            "mha: this version of typer does not read options with this version of click; update"
            " both",
            err=True,
        )
        raise typer.Exit(2)
    if given:
        from importlib.metadata import version

        typer.echo(f"mha-conformance {version('mha-conformance')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback(epilog="Example: mha check my_file.py:MyAttention")
def mha(version: Version = False) -> None:
    """Check implementations of multi-head attention against a contract.

    The contract is a list of clauses, such as MSK-1: masked keys have no influence. To read it, run
    mha spec.
    """
