"""What the HTML report shows first: the verdict, a matrix of families, an entry for each cause."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from mha.conformance.reports.entries import SECTIONS, Entry, entries
from mha.conformance.reports.prose import prose_to_html
from mha.conformance.reports.sentence import sentence_of
from mha.conformance.reports.summary import (
    SIGNS,
    cells_by_family,
    conforms,
    outcome,
    tally,
)
from mha.conformance.reports.text import (
    describe_changes,
    visible,
    visible_line,
    visible_name,
    where,
)
from mha.conformance.results import Report, Verdict, status_of
from mha.spec.clauses import CLAUSES, FAMILIES

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
# The verdicts on each implementation, under the name that the page shows.
ByName = Mapping[str, Sequence[Verdict]]


class Found(NamedTuple):
    """Failures of one cause in one implementation, under its name on the page.

    target: how it is named for `mha replay`.
    """

    label: str
    target: str
    entry: Entry


def cell_link(label: str, clause: str) -> str:
    """Return the address of a cell within the page."""
    return f"#{quote(f'{label}/{clause}')}"


def headline(report: Report, by_name: ByName) -> dict[str, Any]:
    """Return the verdict in words and colour, and the sentences that it rests on."""
    conforming = [own for own in by_name.values() if conforms(own)]
    title = f"{len(conforming)} of {len(by_name)} implementations conform"
    partly = sum(tally(own).few_judged for own in conforming)
    if partly and len(by_name) > 1:
        title += f", {partly} of them where judged"
    if len(by_name) == 1:
        ((name, own),) = by_name.items()
        title = f"{name}: {outcome(own)}"
    is_right = bool(conforming) and len(conforming) == len(by_name) and not report.broken
    state = "pass" if is_right else "fail"
    if report.incomplete:
        state = "waived"
        title = f"INCOMPLETE: the run was stopped. So far, {title}"
    rows = list(_outcomes(report, by_name))
    return {"state": state, "title": title, "rows": rows, "notes": _notes(report)}


def _notes(report: Report) -> list[str]:
    """Return what else a reader must know of a run, each a sentence."""
    notes = []
    for name, why in report.broken.items():
        notes.append(f"{visible_name(name)} could not be loaded: {visible_line(why)}.")
    if report.torch_changes:
        notes.append(f"{describe_changes(report.torch_changes)}.")
    return notes


def _outcomes(report: Report, by_name: ByName) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation that fails, and for the others of each outcome."""
    grouped: dict[str, list[str]] = {}
    for label, own in by_name.items():
        if conforms(own):
            grouped.setdefault(outcome(own), []).append(label)
        else:
            yield _row(report, label, own)
    for shown, labels in grouped.items():
        if len(labels) == 1:
            yield _row(report, labels[0], by_name[labels[0]])
        else:
            yield {"state": "pass", "outcome": shown, "name": ", ".join(labels), "said": ""}


def _row(report: Report, label: str, own: Sequence[Verdict]) -> dict[str, Any]:
    """Return the row of one implementation: its outcome, and the sentence on what decides."""
    judged = {verdict.clause for verdict in own}
    shown = outcome(own)
    said = visible(sentence_of(report, own[0].implementation)).removeprefix(shown).lstrip(":; ")
    said = f"{said[:1].upper()}{said[1:]}"

    def address(clause: str) -> str:
        return cell_link(label, clause) if clause in judged else ""

    return {
        "state": "pass" if conforms(own) else "fail",
        "outcome": shown,
        "name": label,
        "said": prose_to_html(said, address),
    }


def family_matrix(by_name: ByName) -> dict[str, Any]:
    """Return a row of cells for each implementation, a cell for each family that was judged."""
    rows = {}
    given: set[str] = set()
    for label, own in by_name.items():
        rows[label] = cells_by_family(own)
        given.update(rows[label])
    families = [letters for letters in FAMILIES if letters in given]
    return {"families": {letters: FAMILIES[letters].title for letters in families}, "rows": rows}


def causes(report: Report, by_name: ByName) -> dict[str, list[dict[str, Any]]]:
    """Return what does not pass by section: one entry for each cause, in whatever it is found.

    What keeps an implementation from conforming comes first.
    """
    grouped: dict[tuple[str, ...], list[Found]] = {}
    for label, own in sorted(by_name.items(), key=lambda each: conforms(each[1])):
        name = own[0].implementation
        target = report.targets.get(name, name)
        for entry in entries(own):
            cause: tuple[str, ...] = (entry.cause,)
            if not entry.cause:
                cause = ("", entry.first.clause, status_of(entry.first))
            key = (entry.section, *cause)
            grouped.setdefault(key, []).append(Found(label, target, entry))
    sections: dict[str, list[dict[str, Any]]] = {}
    order = list(SECTIONS)
    for key in sorted(grouped, key=lambda key: order.index(key[0])):
        sections.setdefault(SECTIONS[key[0]], []).append(_cause(grouped[key]))
    return sections


def _cause(found: Sequence[Found]) -> dict[str, Any]:
    """Return what the page shows of findings of one cause; the first one has the message."""
    shown = found[0]
    first = shown.entry.first
    sign = SIGNS[status_of(first)][0]
    places: list[str] = []
    for each in found:
        places += map(where, each.entry.verdicts)
    return {
        "heading": visible_line(shown.entry.cause)
        or f"{first.clause} {CLAUSES[first.clause].title}",
        "is_diagnosis": bool(shown.entry.cause),
        "link": cell_link(shown.label, first.clause),
        "sign": sign,
        "state": CLASSES[sign],
        "status": status_of(first),
        "where": ", ".join(dict.fromkeys(places)),
        "found_in": [_found_in(each) for each in found],
        "message": visible(first.message),
        "fix": visible(first.fix),
        "replay": _replay_command(first, shown.target),
    }


def _found_in(found: Found) -> dict[str, Any]:
    """Return an implementation with the clauses that it fails for a cause, as links."""
    links = {clause: cell_link(found.label, clause) for clause in found.entry.clauses}
    return {"name": found.label, "clauses": links}


def _replay_command(verdict: Verdict, target: str) -> str:
    """Return the command that runs the case of a verdict again; empty without one."""
    case = visible_line(verdict.case or "")
    if not case:
        return ""
    # In double quotes, as on all systems, unless a shell would read something in them.
    quoted = f'"{case}"' if not set(case) & set('"$`\\!') else shlex.quote(case)
    implementation = shlex.quote(visible_name(target))
    return f"mha replay {quoted} --clause {verdict.clause} --impl {implementation}"


def code(text: str) -> Markup:
    """Return a text as HTML with its code marked, and without links."""
    return prose_to_html(text, lambda clause: "")
