"""A report as one HTML page, which needs nothing but itself."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment

from mha.conformance.benchmarks.compare import HEADINGS, Timing
from mha.conformance.reports.summary import (
    CONFORMS,
    SIGNS,
    cell_of,
    families_of,
    legend,
    outcome,
    rejections,
    share,
    status_of,
)
from mha.conformance.reports.text import LONGEST_SCRIPT, shown, visible
from mha.conformance.results import Report, Verdict
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES

CLASSES = {"!": "h", "✗": "f", "b": "b", "w": "w", "s": "s", "✓": "p", "-": "n"}
# The plot of margins: where it begins, and its width.
LEAST_MARGIN, WIDTH = 1e-3, 300


def to_html(report: Report, timings: Sequence[Timing] = (), picture: str = "") -> str:
    """Return the page; timings: of `mha bench`, and picture: SVG of them."""
    resources = files("mha.conformance.reports")
    css, script, page = (
        (resources / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html.j2")
    )
    by_name = _by_name(report)
    families = list(_families(by_name))
    data = json.dumps({"clauses": _clauses(report), "names": list(by_name), "verdicts": _evidence(by_name)})
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(page)
        .render(
            title="Conformance of multi-head attention",
            verdict=_verdict(report),
            facts=_facts(report),
            summary=[_summary(name, own) for name, own in by_name.items()],
            families=families,
            kept=sum(row["kept"] for family in families for row in family["rows"]),
            classes=CLASSES,
            legend=legend({sign for family in families for row in family["rows"] for sign in row["signs"]}),
            departures=list(_departures(report)),
            speed=_speed(timings),
            headings=HEADINGS,
            picture=picture,
            margins=[row for name, own in by_name.items() for row in _margins(name, own)],
            unclaimed=_unclaimed(by_name),
            css=css,
            script=script,
            data=data.replace("<", "\\u003c"),  # so that no text in it ends the script
        )
    )


def _by_name(report: Report) -> dict[str, list[Verdict]]:
    """Return the verdicts on each implementation by its name as it is shown, which no two share."""
    found: dict[str, list[Verdict]] = {}
    for name, own in report.by_implementation.items():
        label, number = shown(name), 2
        while label in found:
            label, number = f"{shown(name)} ({number})", number + 1
        found[label] = own
    return found


def _verdict(report: Report) -> str:
    conforming = sum(outcome(own).startswith(CONFORMS) for own in report.by_implementation.values())
    told = f"{conforming} of {len(report.by_implementation)} implementations conform"
    broken = "".join(f" {shown(name)} could not be loaded: {visible(why)}." for name, why in report.broken.items())
    return (f"INCOMPLETE: the run was stopped. So far {told}." if report.incomplete else f"{told}.") + broken


def _facts(report: Report) -> list[str]:
    where = sorted({f"{verdict.dtype} on {verdict.device}" for verdict in report.verdicts})
    versions = [f"{name} {number}" for name, number in report.versions.items()]
    facts = [", ".join(where), f"profile {report.profile}", f"seed {report.seed}", *versions]
    return [shown(fact) for fact in (*facts, report.started, report.host) if fact]


def _summary(name: str, own: Sequence[Verdict]) -> dict[str, Any]:
    met, claimed = share(own)
    bitten, tried = rejections(own)
    counts = Counter(status_of(verdict) for verdict in own)
    return {
        "name": name,
        "sign": "✓" if outcome(own).startswith(CONFORMS) else "✗",
        "outcome": outcome(own),
        "met": met,
        "claimed": claimed,
        "counts": ", ".join(f"{count} {status}" for status, count in sorted(counts.items())),
        "rejected": f"{bitten / tried:.0%} of {tried}" if tried else "",
        "examples": sum(verdict.examples for verdict in own),
        "seconds": f"{sum(verdict.seconds for verdict in own):.0f}",
    }


def _families(by_name: dict[str, list[Verdict]]) -> Iterator[dict[str, Any]]:
    """Yield each family with a row for each of its clauses that was judged."""
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            cells.setdefault(verdict.clause, {}).setdefault(name, []).append(verdict)
    for letters in families_of(verdict for own in by_name.values() for verdict in own):
        rows = []
        for clause in (each for each in CLAUSES.values() if each.family == letters and each.id in cells):
            signs = [cell_of(cells[clause.id][name]).sign if name in cells[clause.id] else "" for name in by_name]
            kept = set(signs) <= {"✓", "-", ""}
            rows.append({"id": clause.id, "title": clause.title, "level": clause.level, "signs": signs, "kept": kept})
        yield {"letters": letters, "title": FAMILIES[letters].title, "rows": rows}


def _clauses(report: Report) -> dict[str, dict[str, str]]:
    named = ("id", "level", "title", "statement", "why", "differs", "source")
    judged = {verdict.clause for verdict in report.verdicts}
    return {id: {name: getattr(CLAUSES[id], name) for name in named} for id in CLAUSES if id in judged}


def _evidence(by_name: dict[str, list[Verdict]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what each cell opens to, by clause and implementation; what is empty is left out."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            told = asdict(verdict) | {"status": status_of(verdict), "sign": SIGNS[status_of(verdict)][0]}
            told |= {"message": visible(verdict.message), "rejected": _rejected(verdict)}
            told |= {"margin": f"{verdict.margin:.3g}" if verdict.margin else "", "case": visible(verdict.case or "")}
            told["script"] = visible(verdict.script or "", LONGEST_SCRIPT)
            for field in ("implementation", "clause", "level", "required", "cases_to_failure", "rejections"):
                del told[field]
            found.setdefault(verdict.clause, {}).setdefault(name, []).append(
                {field: value for field, value in told.items() if value}
            )
    return found


def _rejected(verdict: Verdict) -> str:
    return ", ".join(f"{name} {count.rejected} of {count.tried}" for name, count in verdict.rejections.items())


def _departures(report: Report) -> Iterator[dict[str, str]]:
    """Yield what is not kept, what must be kept first; one that several dtypes or devices show is told once."""
    found: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in sorted(report.verdicts, key=lambda verdict: verdict.conforms and verdict.status != "harness_error"):
        if status_of(verdict) not in ("pass", "not claimed"):
            found.setdefault((verdict.implementation, verdict.clause, status_of(verdict)), []).append(verdict)
    for (name, clause, status), own in found.items():
        yield {
            "name": shown(name),
            "clause": clause,
            "title": CLAUSES[clause].title,
            "sign": SIGNS[status][0],
            "status": status,
            "where": ", ".join(f"{verdict.dtype} on {verdict.device}" for verdict in own),
            "message": visible(own[0].message),
            "case": visible(own[0].case or ""),
        }


def _speed(timings: Sequence[Timing]) -> dict[str, list[dict[str, Any]]]:
    """Return a row for each implementation that was to be timed, by what it was to be timed at."""
    found: dict[str, list[dict[str, Any]]] = {}
    for timing in timings:
        row: dict[str, Any] = {"name": shown(timing.implementation), "wrong": visible(timing.wrong)}
        if not timing.wrong:
            row |= {"cells": timing.cells, "sign": "!" if timing.impossible else ""}
        found.setdefault(timing.work.title, []).append(row)
    return found


def _margins(name: str, own: Sequence[Verdict]) -> Iterator[dict[str, Any]]:
    """Yield for each dtype and device how near to the bound the clauses came."""
    for dtype, device in dict.fromkeys((verdict.dtype, verdict.device) for verdict in own):
        found = [v for v in own if (v.dtype, v.device) == (dtype, device) and v.margin > 0 and v.status == "pass"]
        if found:
            shares = [verdict.margin for verdict in found]
            values = {"low": min(shares), "median": median(shares), "high": max(shares)}
            yield {
                "name": name,
                "where": f"{dtype} on {device}",
                "clause": max(found, key=lambda verdict: verdict.margin).clause,
                **{what: f"{value:.2g}" for what, value in values.items()},
                **{f"x_{what}": _place(value) for what, value in values.items()},
            }


def _place(margin: float) -> str:
    decades = -math.log10(LEAST_MARGIN)
    return f"{WIDTH * (1 + math.log10(min(max(margin, LEAST_MARGIN), 1.0)) / decades):.1f}"


def _unclaimed(by_name: dict[str, list[Verdict]]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            if verdict.status == "not_claimed":
                found.setdefault(name, {}).setdefault(visible(verdict.message), []).append(verdict.clause)
    return found
