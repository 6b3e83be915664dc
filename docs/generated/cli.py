"""The verbs of `mha`, with every option, read from the command itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from mha.conformance.cli.app import app


def verbs() -> str:
    """Return a section for each verb."""
    return "\n".join(_group("mha", typer.main.get_command(app)))


def _group(name: str, group: Any) -> Iterator[str]:
    """Yield a section for each verb of a group, and of the groups within it."""
    for verb, command in group.commands.items():
        if command.hidden:
            continue
        full_name = f"{name} {verb}"
        yield f"## {full_name}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        if hasattr(command, "commands"):
            yield from _group(full_name, command)
        else:
            yield from _command(full_name, command)


def _command(name: str, command: Any) -> Iterator[str]:
    """Yield how a verb is called: its usage, an example, and its parameters."""
    words = [name]
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        rows.append(_row(parameter))
        if parameter.param_type_name == "argument":
            words.append(parameter.metavar or parameter.name.upper())
    yield f"```\n{' '.join([*words, '[OPTIONS]'])}\n```\n"
    if command.epilog:
        yield f"{_code_after_example(command.epilog)}\n"
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def _row(parameter: Any) -> str:
    """Return the row of an argument or an option."""
    name = parameter.metavar or str(parameter.name).upper()
    if parameter.param_type_name == "option":
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.metavar and not parameter.is_flag:
            name += f" {parameter.metavar}"
    text = inspect.cleandoc(parameter.help or "").replace("|", "\\|").replace("\n", " ")
    return f"| `{name}` | {text} |"


def _code_after_example(epilog: str) -> str:
    """Return an epilog whose example is marked as code."""
    head, colon, example = epilog.partition("Example: ")
    return f"{head}Example: `{example}`" if colon else epilog
