"""`mha waive`: a waiver written for a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mha.conformance.cases.parsing import read_case
from mha.conformance.project import read_project, shown_path
from mha.conformance.reports.files import read
from mha.conformance.reports.writing import write_text
from mha.conformance.results import Verdict, by_implementation
from mha.conformance.shown import visible
from mha.conformance.waivers import Waiver, read_waivers
from mha.implementations.discovery.resolve import split_name

# A blocked clause is not known to fail, and one with a stale waiver does not fail.
FAILING = ("fail", "refused")


def waive_failure(requested: Waiver, run: Path, file: Path | None) -> str:
    """Add a waiver to a file, for where the clause fails; return what to print.

    requested: its implementation may be empty if only one fails the clause.
    run: the report with the failure.
    file: if None, the one that the next run in this folder reads.
    Raises ValueError if there is no such failure, several implementations fail, the waiver would
        not cover the failure, or the file cannot be written.
    """
    if requested.expired:
        raise ValueError(f"--expires must not be in the past, but is {requested.expires}")
    report = read(run)
    verdicts = [verdict for verdict in report.verdicts if verdict.clause == requested.clause]
    failed = _failures(verdicts, requested, run)
    waiver = _for_failures(requested, failed, verdicts)
    _validate_coverage(waiver, failed)
    name = waiver.implementation
    target = split_name(report.targets.get(name, name))[1]
    file = file or _file_of_project(target, name)
    _append(waiver, file)
    return visible(f"added to {shown_path(file)}:\n\n{waiver.to_toml()}")


def _file_of_project(target: str, name: str) -> Path:
    """Return the waiver file of an implementation; raises ValueError for one elsewhere."""
    project = read_project(Path())
    file, folder = project.waivers_of(target, name), project.folder.resolve()
    if not file.resolve().is_relative_to(folder):
        raise ValueError(
            f"{shown_path(file)} is not in the project, {str(folder)!r}; add --file to write it all"
            " the same"
        )
    return file


def _failures(verdicts: Sequence[Verdict], requested: Waiver, run: Path) -> list[Verdict]:
    """Return the failures of the one implementation that the waiver is for."""
    clause, name = requested.clause, requested.implementation
    failed = [verdict for verdict in verdicts if verdict.status in FAILING]
    if name:
        failed = [verdict for verdict in failed if verdict.implementation == name]
    names = list(by_implementation(failed))
    if not names:
        of_name = f" for {name}" if name else ""
        raise ValueError(f"nothing to waive: {clause} does not fail{of_name} in {str(run)!r}")
    if len(names) > 1:
        raise ValueError(f"{', '.join(names)} fail {clause}; name one of them with --impl")
    return failed


def _for_failures(
    requested: Waiver, failed: Sequence[Verdict], verdicts: Sequence[Verdict]
) -> Waiver:
    """Return the waiver for what failed, limited to where it failed if it passes elsewhere."""
    waiver = replace(requested, implementation=failed[0].implementation)
    own = by_implementation(verdicts)[waiver.implementation]
    if len(failed) == sum(verdict.status != "not_claimed" for verdict in own):
        return waiver
    dtypes = dict.fromkeys(verdict.dtype for verdict in failed)
    devices = dict.fromkeys(verdict.device for verdict in failed)
    return replace(waiver, dtype=tuple(dtypes), device=tuple(devices))


def _validate_coverage(waiver: Waiver, failed: Sequence[Verdict]) -> None:
    """Raise ValueError if a failing case is one that the waiver does not apply to."""
    for verdict in failed:
        if verdict.case and not waiver.covers(read_case(verdict.case), verdict.message):
            raise ValueError(
                f"--where {waiver.where!r} excludes the case that fails: {verdict.case}"
            )


def _append(waiver: Waiver, file: Path) -> None:
    """Add a waiver to a file, below what is in it."""
    known = read_waivers(file) if file.exists() else []
    for each in known:
        if (each.implementation, each.clause) == (waiver.implementation, waiver.clause):
            what = f"{waiver.clause} for {waiver.implementation}"
            raise ValueError(f"{shown_path(file)} already has a waiver of {what}; edit that one")
    text = waiver.to_toml()
    try:
        before = file.read_text(encoding="utf-8").rstrip() if file.exists() else ""
        write_text(file, f"{before}\n\n{text}" if before else text)
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from None
