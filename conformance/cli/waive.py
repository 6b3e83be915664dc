"""`mha waive`: a waiver written from a failure."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from mha.conformance.cases.parsing import read_case
from mha.conformance.reports.files import read
from mha.conformance.waivers import Waiver, read_waivers, validate_where
from mha.spec import CLAUSES

# A clause that is blocked is not known to fail, and one with a stale waiver does not.
FAILING = ("fail", "refused")


def waive_failure(
    clause: str, reason: str, name: str, url: str, where: str, expires: date | None, run: Path, file: Path
) -> str:
    """Add a waiver to a file, for the dtypes and devices in which the clause failed; return what was written.

    Raises ValueError where there is no such failure, or not one alone, or the file cannot be written.
    """
    if clause not in CLAUSES:
        raise ValueError(f"there is no clause {clause!r}; `mha spec` lists them")
    if not reason.strip():
        raise ValueError("a waiver needs a reason: say why it is accepted that the clause is not kept")
    if where:
        validate_where(where)
    judged = [verdict for verdict in read(run).verdicts if verdict.clause == clause]
    failed = [v for v in judged if v.status in FAILING and name in ("", v.implementation)]
    names = list(dict.fromkeys(verdict.implementation for verdict in failed))
    if not names:
        raise ValueError(f"nothing to waive: {clause} does not fail{' for ' + name if name else ''} in {str(run)!r}")
    if len(names) > 1:
        raise ValueError(f"{', '.join(names)} fail {clause}: name one of them with --impl")
    own = [v for v in judged if v.implementation == names[0] and v.status != "not_claimed"]
    kept = [verdict for verdict in own if verdict not in failed]
    waiver = Waiver(
        implementation=names[0],
        clause=clause,
        reason=reason,
        url=url,
        dtype=tuple(dict.fromkeys(v.dtype for v in failed)) if kept else (),
        device=tuple(dict.fromkeys(v.device for v in failed)) if kept else (),
        where=where,
        expires=expires,
    )
    if waiver.expired:
        raise ValueError(f"the last day of a waiver must be to come, but is {expires}")
    outside = [v for v in failed if v.case and not waiver.covers(read_case(v.case), v.message)]
    if outside:
        raise ValueError(f"where {where!r} leaves out the case that fails: {outside[0].case}")
    known = read_waivers(file) if file.exists() else []
    if any((each.implementation, each.clause) == (waiver.implementation, clause) for each in known):
        raise ValueError(f"{file} has a waiver of {clause} for {waiver.implementation} already; change that one")
    try:
        before = file.read_text(encoding="utf-8").rstrip() if file.exists() else ""
        file.write_text(f"{before}\n\n{waiver.to_toml()}" if before else waiver.to_toml(), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from None
    return f"added to {file}:\n\n{waiver.to_toml()}"
