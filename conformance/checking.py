"""`mha check`: judge a few implementations, and tell each departure as it is found."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from textwrap import fill, shorten

import typer

from mha.conformance.judge import judged, validate_choice, validate_devices
from mha.conformance.registry import properties
from mha.conformance.report import Verdict
from mha.conformance.search import PROFILES
from mha.conformance.text import describe, status_of, summarise
from mha.conformance.waivers import Waiver, built_in_waivers
from mha.implementations import resolve
from mha.spec import Implementation
from mha.spec.claims import DTYPES

WIDTH = 110


def check_all(
    targets: Sequence[str],
    *,
    clauses: Collection[str],
    dtypes: Sequence[str],
    devices: Sequence[str],
    profile: str,
    seed: int,
    strict: bool,
    waivers: Sequence[Waiver],
) -> int:
    """Judge all targets and tell what was found; return the exit status.

    Raises ValueError, before anything is judged, for a word that is not known or a target that cannot be used.
    """
    validate_choice("profile", [profile], PROFILES)
    validate_choice("dtype", dtypes, DTYPES)
    validate_choice("clause", clauses, properties())
    validate_devices(devices)
    chosen = [clause for clause in properties() if not clauses or clause in clauses]
    status = 0
    for implementation in [found for target in targets for found in resolve(target)]:
        announce(implementation)
        verdicts = []
        every = judged(
            implementation,
            chosen,
            dtypes,
            devices,
            profile=profile,
            seed=seed,
            strict=strict,
            waivers=(*built_in_waivers(), *waivers),
        )
        for verdict in every:
            verdicts.append(verdict)
            progress(f"{len(verdicts)} of {len(chosen) * len(dtypes) * len(devices)}: {verdict.clause}")
            if verdict.status not in ("pass", "not_claimed", "blocked"):
                progress("")
                typer.echo(describe(verdict) + "\n" if clauses else line(verdict))
        progress("")
        typer.echo("\n".join(["", *summarise(verdicts)[:1]]))
        if not clauses and any(verdict.script for verdict in verdicts):
            first = next(verdict for verdict in verdicts if verdict.script)
            typer.echo(f"The whole of one, with a script that shows it: add --clause {first.clause}")
        status = max(status, status_code(verdicts))
    return status


def announce(implementation: Implementation) -> None:
    """Say what is judged, and what was inferred of it."""
    told = getattr(implementation, "told", ())
    typer.echo(f"{implementation.name}" + (", as it was understood:\n" if told else "\n"))
    typer.echo("\n".join([*told, ""]) if told else "", nl=bool(told))


def progress(text: str) -> None:
    """Show where the run is, on a terminal; nothing erases it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def line(verdict: Verdict) -> str:
    """Return a departure in a line or two."""
    told = shorten(verdict.message.splitlines()[0], 200, placeholder=" ...")
    first = f"{status_of(verdict):15} {verdict.clause:7} {verdict.dtype}: "
    return fill(first + told, WIDTH, subsequent_indent=" " * 24, break_long_words=False)


def status_code(verdicts: Collection[Verdict]) -> int:
    """Return 0 if everything that must be kept is, 1 if not, 2 if the judge failed or nothing was judged."""
    statuses = {verdict.status for verdict in verdicts}
    if "harness_error" in statuses or statuses <= {"not_claimed"}:
        return 2
    return 0 if all(verdict.conforms for verdict in verdicts) else 1
