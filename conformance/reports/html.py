"""A report as one HTML page that loads nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, Template

from mha.conformance.harness.known_bad.sources import seen_in
from mha.conformance.reports.html_verdicts import (
    CLASSES,
    ByName,
    causes,
    code,
    family_matrix,
    headline,
)
from mha.conformance.reports.links import clause_base
from mha.conformance.reports.summary import (
    SIGNS,
    cell_of,
    clauses_in,
    conforms,
    legend,
    outcome,
    tally,
    total_rejections,
)
from mha.conformance.reports.text import (
    LONGEST_SCRIPT,
    seeds_of,
    visible,
    visible_name,
    where,
)
from mha.conformance.results import Report, Verdict, status_of
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause

# What the page says about a clause.
CLAUSE_FIELDS = ("id", "level", "kind", "title", "statement", "why", "fix", "differs", "source")
# The plot of error/bound: where its logarithmic scale begins, and its width.
LEAST_MARGIN, WIDTH = 1e-3, 300


class Section(NamedTuple):
    """A further section of the page.

    id: of its heading. html: its body, with all text in it escaped.
    """

    title: str
    id: str
    html: str


def to_html(
    report: Report, sections: Sequence[Section] = (), clause_pages: str | None = None
) -> str:
    """Return the page.

    sections: further ones, after the summary.
    clause_pages: the address below which each clause has a page; that of the site by default.
    """
    if clause_pages is None:
        clause_pages = clause_base()
    by_name = _by_name(report)
    families = list(_families(by_name))
    data = {
        "clauses": _clauses(report),
        "names": list(by_name),
        "verdicts": _evidence(by_name),
        "pages": clause_pages,
    }
    rows = [*chain.from_iterable(family["rows"] for family in families)]
    passing = sum(row["passes"] for row in rows)
    signs = set[str]().union(*(row["signs"] for row in rows))
    one_line = json.dumps(json.loads(report.to_json()))  # since the page is long
    return page("page.html.j2").render(
        title="Multi-head attention conformance report",
        headline=headline(report, by_name),
        matrix=family_matrix(by_name),
        facts=_facts(report),
        kinds=KINDS,
        summary=[_summary(name, own) for name, own in by_name.items()],
        sections=sections,
        families=families,
        passing=passing,
        classes=CLASSES,
        legend=legend(signs),
        clause_pages=clause_pages,
        causes=causes(report, by_name),
        margins=list(_margins(by_name)),
        unclaimed=_unclaimed(by_name),
        css=resource("page.css"),
        script=resource("page.js"),
        data=_in_script(json.dumps(data)),
        report=_in_script(one_line),
    )


def page(name: str) -> Template:
    """Return a template beside this module, which escapes all text."""
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["code"] = code
    return environment.from_string(resource(name))


def resource(name: str) -> str:
    """Return the text of a file beside this module."""
    return (files("mha.conformance.reports") / name).read_text(encoding="utf-8")


def _in_script(text: str) -> str:
    """Return JSON for a script element, which no text in it may end."""
    return text.replace("<", "\\u003c")


def _by_name(report: Report) -> dict[str, list[Verdict]]:
    """Return the verdicts by implementation; names that look alike once cut get a number."""
    named: dict[str, list[Verdict]] = {}
    for name, own in report.by_implementation.items():
        label, number = visible_name(name), 1
        while label in named:
            number += 1
            label = f"{visible_name(name)} ({number})"
        named[label] = own
    return named


def _facts(report: Report) -> list[str]:
    places = sorted({where(verdict) for verdict in report.verdicts})
    versions = [f"{name} {number}" for name, number in report.versions.items()]
    facts = [", ".join(places), f"profile {report.profile}", seeds_of(report), *versions]
    return [visible_name(fact) for fact in (*facts, report.started, report.host) if fact]


def _summary(name: str, own: Sequence[Verdict]) -> dict[str, Any]:
    """Return the row of an implementation in the table of implementations."""
    totals, rejections = tally(own), total_rejections(own)
    counts = [(totals.must.get(kind, ""), totals.should.get(kind, "")) for kind in KINDS]
    rejected = ""
    if rejections.tried:
        rejected = f"{rejections.rejected / rejections.tried:.0%} of {rejections.tried}"
    examples = sum(verdict.examples for verdict in own)
    seconds = sum(verdict.seconds for verdict in own)
    return {
        "name": name,
        "sign": "✓" if conforms(own) else "✗",
        "outcome": outcome(own),
        "judged": f"{totals.judged} of {totals.clauses}",
        "counts": counts,
        "rejected": rejected,
        "examples": examples,
        "seconds": f"{seconds:.0f}",
    }


def _families(by_name: ByName) -> Iterator[dict[str, Any]]:
    """Yield each family with a row for each of its clauses that was judged."""
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            cells.setdefault(verdict.clause, {}).setdefault(name, []).append(verdict)
    for letters, family in FAMILIES.items():
        rows = []
        for clause in CLAUSES.values():
            if clause.family == letters and clause.id in cells:
                members = [cells[clause.id].get(name, []) for name in by_name]
                rows.append(_clause_row(clause, members))
        if rows:
            yield {"letters": letters, "title": family.title, "rows": rows}


def _clause_row(clause: Clause, members: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    """Return the row of a clause in the matrix; members: the verdicts of each implementation."""
    signs = [cell_of(verdicts).sign if verdicts else "" for verdicts in members]
    passes = set(signs) <= {"✓", "-", ""}
    about = {"id": clause.id, "title": clause.title, "level": clause.level, "kind": clause.kind}
    return about | {"signs": signs, "passes": passes}


def _clauses(report: Report) -> dict[str, dict[str, str]]:
    """Return what the page says about each clause that was judged."""
    judged = set(clauses_in(report.verdicts))
    texts = {}
    for clause in CLAUSES.values():
        if clause.id in judged:
            texts[clause.id] = {name: getattr(clause, name) for name in CLAUSE_FIELDS}
    return texts


def _evidence(by_name: ByName) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what each cell opens to, by clause and implementation, without empty values."""
    evidence: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            values = {field: value for field, value in _details(verdict).items() if value}
            evidence.setdefault(verdict.clause, {}).setdefault(name, []).append(values)
    return evidence


def _details(verdict: Verdict) -> dict[str, Any]:
    """Return what a cell says about a verdict, by the names that `page.js` has."""
    status = status_of(verdict)
    return {
        "sign": SIGNS[status][0],
        "status": status,
        "dtype": visible_name(verdict.dtype),
        "device": visible_name(verdict.device),
        "message": visible(verdict.message),
        "diagnosis": visible(verdict.diagnosis),
        "usual_fix": visible(verdict.fix),
        "seen_in": seen_in(verdict.diagnosis),
        "steps": visible(verdict.steps),
        "case": visible(verdict.case or ""),
        "arguments": visible(verdict.arguments),
        "examples": verdict.examples,
        "seeds": ", ".join(map(str, verdict.seeds)),
        "margin": f"{verdict.margin:.3g}" if verdict.margin else "",
        "rejected": _rejected(verdict),
        "violated": visible_name(verdict.violated),
        "blocked_by": visible_name(verdict.blocked_by or "") if verdict.status == "blocked" else "",
        "seconds": verdict.seconds,
        "script": visible(verdict.script or "", LONGEST_SCRIPT),
    }


def _rejected(verdict: Verdict) -> str:
    """Return how often each known-bad answer was rejected, in words."""
    counts = []
    for name, each in verdict.rejections.items():
        counts.append(f"{visible_name(name)} {each.rejected} of {each.tried}")
    return ", ".join(counts)


def _margins(by_name: ByName) -> Iterator[dict[str, str]]:
    """Yield the row of each implementation, dtype and device in the table of error/bound."""
    for name, own in by_name.items():
        passing: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in own:
            same = passing.setdefault((verdict.dtype, verdict.device), [])
            if verdict.status == "pass" and verdict.margin > 0:
                same.append(verdict)
        for same in filter(None, passing.values()):
            yield {"name": name, "where": where(same[0]), **_spread(same)}


def _spread(passing: Sequence[Verdict]) -> dict[str, str]:
    """Return the spread of error/bound over verdicts, and the clause with the largest."""
    margins = [verdict.margin for verdict in passing]
    largest = max(margins)
    spread = {"clause": passing[margins.index(largest)].clause}
    for label, value in (("low", min(margins)), ("median", median(margins)), ("high", largest)):
        spread |= {label: f"{value:.2g}", f"x_{label}": _position(value)}
    return spread


def _position(margin: float) -> str:
    """Return where a value of error/bound is in the plot, in pixels from the left."""
    decades = -math.log10(LEAST_MARGIN)
    shown = min(max(margin, LEAST_MARGIN), 1.0)
    return f"{WIDTH * (1 + math.log10(shown) / decades):.1f}"


def _unclaimed(by_name: ByName) -> dict[str, dict[str, list[str]]]:
    """Return the clauses that an implementation does not claim, by the reason.

    The most frequent reasons come first.
    """
    unclaimed = {}
    for name, own in by_name.items():
        reasons: dict[str, list[Verdict]] = {}
        for verdict in own:
            if verdict.status == "not_claimed":
                reasons.setdefault(visible(verdict.message), []).append(verdict)
        clauses = {reason: clauses_in(same) for reason, same in reasons.items()}
        if clauses:
            unclaimed[name] = dict(sorted(clauses.items(), key=lambda entry: -len(entry[1])))
    return unclaimed
