"""The command `mha`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer

WIDEST = 100  # longer lines are hard to read
LAST = Path(".mha") / "last.json"  # of the last run; a test holds it to that of reports.files

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(epilog="Example: mha check my_file.py:MyAttention")
def mha() -> None:
    """The contract of multi-head attention, and the judge that holds implementations to it."""


@app.command()
def spec(
    clause: Annotated[str | None, typer.Argument(help="A clause (MSK-1) or a family (MSK); all, if none.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole contract as Markdown.")] = False,
) -> None:
    """Say what a clause asks, why, and who departs from it. Example: mha spec MSK-1"""
    from mha.conformance.reports.contract import document, index, page
    from mha.spec.clauses import CLAUSES, FAMILIES

    if markdown and clause is not None:
        _refuse(f"--markdown prints the whole contract: leave out {clause!r}, or leave out --markdown")
    if markdown:
        typer.echo(document(), nl=False)
    elif clause is None:
        typer.echo(f"{index()}\n\n{len(CLAUSES)} clauses. More about one: mha spec MSK-1")
    elif (wanted := clause.strip().upper()) in FAMILIES:
        typer.echo(index(wanted))
    elif wanted in CLAUSES:
        typer.echo(page(wanted, min(shutil.get_terminal_size().columns, WIDEST)))
    else:
        near = get_close_matches(wanted, [*CLAUSES, *FAMILIES], n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`mha spec` lists them"
        _refuse(f"{clause!r} is neither a clause, such as MSK-1, nor a family, such as MSK; {hint}")


@app.command()
def check(
    targets: Annotated[list[str], typer.Argument(help="A registered name, module:object, or file.py:Class.")],
    clause: Annotated[list[str] | None, typer.Option(help="Judge this clause alone, and tell all of it.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="In which dtypes; float32 and float64, if none.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="On which devices; cpu, if none.")] = None,
    profile: Annotated[str, typer.Option(help="quick, default or thorough.")] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Of the cases.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail for a clause of level SHOULD too.")] = False,
    waivers: Annotated[Path | None, typer.Option(help="Known departures, as TOML.")] = None,
    report: Annotated[list[Path] | None, typer.Option(help="Write a report: FILE.html, .json or .md.")] = None,
) -> None:
    """Judge an implementation, or a plain module class as it is. Example: mha check my_file.py:MyAttention"""
    from mha.conformance.cli.check import check_all
    from mha.conformance.settings import DEFAULT_DTYPES, Settings

    with _told():
        settings = Settings(
            profile=profile,
            seed=seed,
            clauses=tuple(word.upper() for word in clause or ()),
            dtypes=tuple(dtype or DEFAULT_DTYPES),
            devices=tuple(device or ("cpu",)),
            strict=strict,
        )
        status = check_all(targets, settings, waivers=waivers, reports=report or ())
    raise typer.Exit(status)


@app.command()
def report(
    files: Annotated[list[Path] | None, typer.Argument(help="JSON reports; that of the last run, if none.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Take them for shards of one run.")] = False,
    to: Annotated[list[Path] | None, typer.Option(help="Write FILE.html, .json or .md.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a report.")] = False,
) -> None:
    """Render a report, merge shards, or compare two runs. Example: mha report before.json after.json"""
    from mha.conformance.cli.report import report_lines

    with _told():
        lines, status = report_lines(files or [LAST], merge_all=merge, to=to or (), schema=schema)
        typer.echo("\n".join(lines))
    raise typer.Exit(status)


@app.command()
def replay(
    what: Annotated[str, typer.Argument(help="A JSON report or a case, as Case(L=2); last run, if none.")] = str(LAST),
    clause: Annotated[list[str] | None, typer.Option(help="Only what fails this clause.")] = None,
    impl: Annotated[str, typer.Option(help="The implementation to try, instead of the one that failed.")] = "",
) -> None:
    """Run what failed again: FIXED, FAILS or INAPPLICABLE? Example: mha replay --clause MSK-8"""
    from mha.conformance.cli.replay import replay_what

    with _told():
        outcomes = set()
        for outcome, line in replay_what(what, [word.upper() for word in clause or ()], impl):
            outcomes.add(outcome)
            typer.echo(line)
    raise typer.Exit(1 if "FAILS" in outcomes else 2 if "INAPPLICABLE" in outcomes else 0)


@app.command()
def waive(
    clause: Annotated[str, typer.Argument(help="The clause that is known not to be kept.")],
    reason: Annotated[str, typer.Option(help="Why that is accepted.")],
    impl: Annotated[str, typer.Option(help="The implementation's name, if several fail the clause.")] = "",
    url: Annotated[str, typer.Option(help="Where it is discussed.")] = "",
    where: Annotated[str, typer.Option(help='The cases, as "L == 0"; all, if none.')] = "",
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], metavar="DATE", help="The last day, as 2030-12-31.")
    ] = None,
    run: Annotated[Path, typer.Option(help="The JSON report with the failure.")] = LAST,
    file: Annotated[Path, typer.Option(help="The waiver file to add it to.")] = Path("waivers.toml"),
) -> None:
    """Write a waiver for a failure of the last run. Example: mha waive MSK-8 --reason \"rows are never empty\""""
    from mha.conformance.cli.waive import waive_failure

    with _told():
        typer.echo(waive_failure(clause.upper(), reason, impl, url, where, expires and expires.date(), run, file))


@app.command()
def bench(
    targets: Annotated[list[str], typer.Argument(help="Implementations; the first is what others are compared with.")],
    shape: Annotated[list[str] | None, typer.Option(help="encoder, long, token, huge; all but huge, if none.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Instead: self-attention of 128 to 8192 tokens.")] = False,
    dtype: Annotated[str, typer.Option(help="In which dtype.")] = "float32",
    device: Annotated[str, typer.Option(help="On which device.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=6, help="How often each is timed; less, if it takes over a minute.")] = 30,
    threads: Annotated[int, typer.Option(min=0, help="Of torch; as it is set, if 0.")] = 0,
    to: Annotated[list[Path] | None, typer.Option(help="Write FILE.html, .json or .svg.")] = None,
) -> None:
    """Time what conforms, side by side. Example: mha bench sdpa vectorized --shape encoder"""
    from mha.conformance.cli.bench import BenchOptions, run_benchmarks

    with _told():
        options = BenchOptions(
            targets=tuple(targets),
            shapes=tuple(shape or ()),
            sweep=sweep,
            dtype=dtype,
            device=device,
            rounds=rounds,
            threads=threads,
            files=tuple(to or ()),
        )
        status = run_benchmarks(options)
    raise typer.Exit(status)


@app.command("list")
def list_all() -> None:
    """Name the implementations that are registered. Example: mha list"""
    from mha.implementations import discover

    found = discover()
    for entry in found:
        claims = entry.implementation.claims if entry.implementation else None
        told = f"unavailable: {entry.error}" if claims is None else ", ".join(sorted(claims.dtypes))
        typer.echo(f"{entry.name:15} {entry.target:48} {told}")
    raise typer.Exit(2 if any(entry.broken for entry in found) else 0)


@app.command()
def init(
    target: Annotated[str, typer.Argument(help="A plain module class: file.py:Class, or module:Class.")],
    folder: Annotated[Path, typer.Option(help="The project's folder.")] = Path(),
) -> None:
    """Write a declaration and a CI job for a class. Example: mha init my_file.py:MyAttention"""
    from mha.conformance.cli.init import entry_point, files_for

    with _told():
        files = files_for(target, folder)
    there = [str(file) for file in files if file.exists()]
    if there:
        _refuse(f"{' and '.join(there)}: there already, and is not overwritten; move it away first")
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            _refuse(f"{str(file)!r} cannot be written: {error.strerror}")
        typer.echo(f"wrote {file}")
    declaration = next(iter(files))
    typer.echo(f"\nJudge it:\n\n    pytest --pyargs mha.conformance --mha-impl {declaration}:implementation")
    told = entry_point(target).replace("\n", "\n    ")
    typer.echo(
        f"\nIf it is part of a package, register it in pyproject.toml, and no --mha-impl is needed:\n\n    {told}"
    )


@app.command()
def faults(
    names: Annotated[list[str] | None, typer.Argument(help="Names of faults; all, if none.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the cases.")] = 0,
    profile: Annotated[str, typer.Option(help="quick, default or thorough.")] = "default",
    every_clause: Annotated[
        bool, typer.Option("--every-clause", help="Judge by every clause, not only by those that must catch the fault.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the matrix to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it as a table.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write it as a picture.")] = None,
) -> None:
    """Run the self-test: is every known fault caught? Example: mha faults --markdown kills.md"""
    from mha.conformance.cli.faults import self_test

    status = 0
    with _told():
        for line, caught in self_test(
            names or (), seed, profile, every_clause=every_clause, json=json, markdown=markdown, svg=svg
        ):
            typer.echo(line)
            status = max(status, int(not caught))
    raise typer.Exit(status)


@contextmanager
def _told() -> Iterator[None]:
    """End with status 2, and say why in one line, for input that cannot be used."""
    try:
        yield
    except ValueError as error:
        _refuse(str(error))


def _refuse(why: str) -> NoReturn:
    """End with status 2, and say why in one line."""
    from mha.conformance.reports.text import visible

    typer.echo(f"mha: {visible(why).replace(chr(10), ' ')}", err=True)
    raise typer.Exit(2)
