"""The report of a run, assembled from its verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mha.conformance.results import Report, Verdict, settled, this_host, versions
from mha.conformance.settings import Settings
from mha.implementations import Resolved
from mha.spec import CLAUSES


def report_of_run(
    settings: Settings,
    verdicts: Iterable[Verdict],
    *,
    targets: Mapping[str, str],
    started: str,
    incomplete: bool = False,
    broken: Mapping[str, str] | None = None,
) -> Report:
    """Return the report of a run; the verdicts may come in any order.

    targets: every implementation of the run, in order, and how it was named ("" if it was not
        named).
    started, incomplete, broken: see `Report`.
    """
    names, clauses = list(targets), list(CLAUSES)

    def place(verdict: Verdict) -> tuple[int, int, int, int]:
        return (
            names.index(verdict.implementation),
            settings.devices.index(verdict.device),
            settings.dtypes.index(verdict.dtype),
            clauses.index(verdict.clause),
        )

    return Report(
        verdicts=settled(sorted(verdicts, key=place)),
        profile=settings.profile,
        seed=settings.seed,
        versions=versions() | {"contract": settings.contract},
        targets={name: target for name, target in targets.items() if target},
        strict=settings.strict,
        incomplete=incomplete,
        broken=dict(broken or {}),
        started=started,
        host=this_host(),
    )


def not_covered(chosen: Iterable[Resolved]) -> dict[str, tuple[str, ...]]:
    """Return by implementation the options that no clause judges, as far as they are known."""
    options = {}
    for each in chosen:
        if each.inference and each.inference.not_covered:
            options[each.implementation.name] = each.inference.not_covered
    return options
