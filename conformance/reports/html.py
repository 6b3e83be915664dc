"""A report as one HTML page that loads nothing else."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment

from mha.conformance.harness.known_bad.sources import seen_in
from mha.conformance.reports.entries import by_section, entries
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import (
    SIGNS,
    cause_of,
    cell_of,
    conforms,
    legend,
    outcome,
    tally,
    total_rejections,
)
from mha.conformance.reports.text import (
    LONGEST_SCRIPT,
    describe_changes,
    seeds_of,
    visible,
    visible_line,
    visible_name,
    where,
)
from mha.conformance.results import Report, Verdict, status_of
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause

# The CSS class of each sign.
CLASSES = {
    "!": "error",
    "✗": "fail",
    "b": "blocked",
    "w": "waived",
    "s": "unmet",
    "✓": "pass",
    "-": "unclaimed",
}
# The plot of error/bound: where its logarithmic scale begins, and its width.
LEAST_MARGIN, WIDTH = 1e-3, 300
# The verdicts on each implementation, under the name that the page shows.
ByName = Mapping[str, Sequence[Verdict]]


class Section(NamedTuple):
    """A further section of the page; id: of its heading. html: its body, with all text in it
    escaped.
    """

    title: str
    id: str
    html: str


def to_html(report: Report, sections: Sequence[Section] = ()) -> str:
    """Return the page, with further sections after the summary."""
    by_name = _by_name(report)
    families = list(_families(by_name))
    rows = [row for family in families for row in family["rows"]]
    signs = {sign for row in rows for sign in row["signs"]}
    summary = [_summary(name, own) for name, own in by_name.items()]
    margins = [row for name, own in by_name.items() for row in _margins(name, own)]
    data = {"clauses": _clauses(report), "names": list(by_name), "verdicts": _evidence(by_name)}
    page = Environment(autoescape=True, trim_blocks=True).from_string(_resource("page.html.j2"))
    return page.render(
        title="Multi-head attention conformance report",
        outcome=_outcome(report, by_name),
        facts=_facts(report),
        kinds=KINDS,
        summary=summary,
        sections=sections,
        families=families,
        passing=sum(row["passes"] for row in rows),
        classes=CLASSES,
        legend=legend(signs),
        failures=_failures(report, by_name),
        margins=margins,
        unclaimed=_unclaimed(by_name),
        css=_resource("page.css"),
        script=_resource("page.js"),
        data=_in_script(json.dumps(data)),
        report=_in_script(
            json.dumps(json.loads(report.to_json()))
        ),  # in one line, as the page is long
    )


def _in_script(text: str) -> str:
    """Return JSON for a script element, which no text in it may end."""
    return text.replace("<", "\\u003c")


def _resource(name: str) -> str:
    return (files("mha.conformance.reports") / name).read_text(encoding="utf-8")


def _by_name(report: Report) -> dict[str, list[Verdict]]:
    """Return the verdicts on each implementation; names that look alike once they are cut get a
    number.
    """
    named: dict[str, list[Verdict]] = {}
    for name, own in report.by_implementation.items():
        label, number = visible_name(name), 2
        while label in named:
            label, number = f"{visible_name(name)} ({number})", number + 1
        named[label] = own
    return named


def _outcome(report: Report, by_name: ByName) -> str:
    conforming = [own for own in by_name.values() if conforms(own)]
    count = f"{len(conforming)} of {len(by_name)} implementations conform"
    if partly := sum(tally(own).few_judged for own in conforming):
        count += f", {partly} of them where judged"
    sentences = [
        f"INCOMPLETE: the run was stopped. So far, {count}." if report.incomplete else f"{count}."
    ]
    for name, why in report.broken.items():
        sentences.append(f"{visible_name(name)} could not be loaded: {visible_line(why)}.")
    sentences += [f"{describe_changes(report.torch_changes)}."] if report.torch_changes else []
    return " ".join(sentences)


def _facts(report: Report) -> list[str]:
    places = sorted({where(verdict) for verdict in report.verdicts})
    versions = [f"{name} {number}" for name, number in report.versions.items()]
    facts = [", ".join(places), f"profile {report.profile}", seeds_of(report), *versions]
    return [visible_name(fact) for fact in (*facts, report.started, report.host) if fact]


def _summary(name: str, own: Sequence[Verdict]) -> dict[str, Any]:
    """Return the row of an implementation in the table of implementations."""
    counted, rejections = tally(own), total_rejections(own)
    counts = [(counted.must.get(kind, ""), counted.should.get(kind, "")) for kind in KINDS]
    rejected = ""
    if rejections.tried:
        rejected = f"{rejections.rejected / rejections.tried:.0%} of {rejections.tried}"
    return {
        "name": name,
        "sign": "✓" if conforms(own) else "✗",
        "outcome": outcome(own),
        "judged": f"{counted.judged} of {counted.clauses}",
        "counts": counts,
        "rejected": rejected,
        "examples": sum(verdict.examples for verdict in own),
        "seconds": f"{sum(verdict.seconds for verdict in own):.0f}",
    }


def _families(by_name: ByName) -> Iterator[dict[str, Any]]:
    """Yield each family with a row for each of its clauses that was judged."""
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            cells.setdefault(verdict.clause, {}).setdefault(name, []).append(verdict)
    for letters, family in FAMILIES.items():
        clauses = [
            clause for clause in CLAUSES.values() if clause.family == letters and clause.id in cells
        ]
        if clauses:
            rows = [
                _clause_row(clause, [cells[clause.id].get(name, []) for name in by_name])
                for clause in clauses
            ]
            yield {"letters": letters, "title": family.title, "rows": rows}


def _clause_row(clause: Clause, members: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    """Return the row of a clause in the matrix; members: the verdicts of each implementation, in
    order.
    """
    signs = [cell_of(verdicts).sign if verdicts else "" for verdicts in members]
    passes = set(signs) <= {"✓", "-", ""}
    about = {"id": clause.id, "title": clause.title, "level": clause.level, "kind": clause.kind}
    return about | {"signs": signs, "passes": passes}


def _clauses(report: Report) -> dict[str, dict[str, str]]:
    """Return what the page says about each clause that was judged."""
    fields = ("id", "level", "kind", "title", "statement", "why", "fix", "differs", "source")
    judged = {verdict.clause for verdict in report.verdicts}
    return {
        id: {name: getattr(CLAUSES[id], name) for name in fields} for id in CLAUSES if id in judged
    }


def _evidence(by_name: ByName) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what each cell opens to, by clause and implementation, without empty values."""
    evidence: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            values = {field: value for field, value in _details(verdict).items() if value}
            evidence.setdefault(verdict.clause, {}).setdefault(name, []).append(values)
    return evidence


def _details(verdict: Verdict) -> dict[str, Any]:
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
    counts = verdict.rejections.items()
    return ", ".join(
        f"{visible_name(name)} {count.rejected} of {count.tried}" for name, count in counts
    )


def _failures(report: Report, by_name: ByName) -> list[dict[str, Any]]:
    """Return what does not pass, by implementation and by section, once for all that has one cause.

    Those that do not conform come first; a single one is open.
    """
    listed = []
    failing = [label for label, own in by_name.items() if not conforms(own)]
    for label, own in sorted(by_name.items(), key=lambda each: conforms(each[1])):
        name = own[0].implementation
        target = report.targets.get(name, name)
        sections = {
            title: [_finding(label, entry.verdicts, target) for entry in found]
            for title, found in by_section(entries(own)).items()
        }
        if sections:
            opened = [label] == failing or len(by_name) == 1
            said = visible(sentence_of(report, name))
            listed.append({"name": label, "open": opened, "summary": said, "sections": sections})
    return listed


def _finding(label: str, same: Sequence[Verdict], target: str) -> dict[str, str]:
    """Return what the page shows of findings of one cause, all of one implementation."""
    first, cause = same[0], visible_line(cause_of(same))
    case = visible_line(first.case or "")
    quoted = f'"{case}"' if not set(case) & set('"$`\\!') else shlex.quote(case)
    command = (
        f"mha replay {quoted} --clause {first.clause} --impl {shlex.quote(visible_name(target))}"
    )
    return {
        "heading": cause or f"{first.clause} {CLAUSES[first.clause].title}",
        "link": f"#{quote(f'{label}/{first.clause}')}",
        "sign": SIGNS[status_of(first)][0],
        "status": status_of(first),
        "where": ", ".join(dict.fromkeys(map(where, same))),
        "message": visible(first.message),
        "fix": visible(first.fix),
        "replay": command if case else "",
    }


def _margins(name: str, own: Sequence[Verdict]) -> Iterator[dict[str, Any]]:
    """Yield for each dtype and device the spread of error/bound over the clauses that pass."""
    for dtype, device in dict.fromkeys((verdict.dtype, verdict.device) for verdict in own):
        passing = [
            v
            for v in own
            if (v.dtype, v.device, v.status) == (dtype, device, "pass") and v.margin > 0
        ]
        if passing:
            margins = [verdict.margin for verdict in passing]
            values = {"low": min(margins), "median": median(margins), "high": max(margins)}
            yield {
                "name": name,
                "where": where(passing[0]),
                "clause": max(passing, key=lambda verdict: verdict.margin).clause,
                **{label: f"{value:.2g}" for label, value in values.items()},
                **{f"x_{label}": _position(value) for label, value in values.items()},
            }


def _position(margin: float) -> str:
    """Return where a value of error/bound is in the plot, in pixels from the left."""
    decades = -math.log10(LEAST_MARGIN)
    return f"{WIDTH * (1 + math.log10(min(max(margin, LEAST_MARGIN), 1.0)) / decades):.1f}"


def _unclaimed(by_name: ByName) -> dict[str, dict[str, list[str]]]:
    """Return the clauses that each implementation does not claim, by the reason, the most frequent
    first.
    """
    grouped: dict[str, dict[str, list[str]]] = {}
    for name, own in by_name.items():
        for verdict in own:
            if verdict.status == "not_claimed":
                reasons = grouped.setdefault(name, {})
                clauses = reasons.setdefault(visible(verdict.message), [])
                if verdict.clause not in clauses:
                    clauses.append(verdict.clause)
    return {
        name: dict(sorted(each.items(), key=lambda entry: -len(entry[1])))
        for name, each in grouped.items()
    }
