"""A page for each clause, and the index of all clauses by family."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache, partial

from generated.faults import table_of
from generated.links import CONTRACT, ROOT, path_of_clause, relocated
from generated.navigation import toctree
from mha.conformance.faults.registry import FAULTS, Fault
from mha.conformance.properties.source_index import listing
from mha.conformance.reports.contract import NO_DIFFERENCE, document
from mha.conformance.reports.prose import prose_to_markdown
from mha.spec import CLAUSES, Clause
from mha.spec.clauses import FAMILIES, KINDS

# Where the failures of packages are that are known and accepted.
WAIVERS = ("implementations/waivers.toml", "implementations/ecosystem/waivers.toml")
LEVELS = {
    "MUST": "a violation fails the run",
    "SHOULD": (
        "advice: a violation is reported, and fails a run only with `--strict` or `--require {id}`"
    ),
    "MAY": "it applies to implementations that claim the capability",
}
# Without a place of its own in the navigation, which every page has: 26 families are enough there.
PAGE = """\
---
orphan: true
---

# {id}: {title}

**{level}** · {kind} · [{family}]({letters}.md) · since contract {since}

{statement}

{sections}
## Level and kind

**{level}**: {level_means}. *{kind}*: {kind_means}

## How it is tested

{tested}

## Faults that it catches

{faults}

## Who violates it

{waived}

## On your own code

```
mha check my_file.py:MyAttention --clause {id}
mha show {id}
```
"""
path_of = path_of_clause
# Between pages of clauses.
linked = partial(prose_to_markdown, address=lambda clause: f"{clause.lower()}.md")


def page(clause: Clause) -> str:
    """Return the page of a clause."""
    return PAGE.format(
        id=clause.id,
        title=linked(clause.title),
        level=clause.level,
        kind=clause.kind,
        family=FAMILIES[clause.family].title,
        letters=clause.family.lower(),
        since=clause.since,
        statement=linked(clause.statement),
        sections="\n".join(_sections(clause)),
        level_means=LEVELS[clause.level].format(id=clause.id),
        kind_means=KINDS[clause.kind],
        tested=_tested(clause),
        faults=_faults(clause),
        waived="\n".join(_waived(clause)),
    )


def _sections(clause: Clause) -> Iterator[str]:
    """Yield what explains a clause, each part under a heading."""
    texts = {
        "Why it matters": clause.why,
        "Example of a violation": clause.violation,
        "Usual fix": clause.fix,
        "How libraries differ": clause.differs or NO_DIFFERENCE,
        "Source": clause.source,
    }
    for heading, text in texts.items():
        yield f"## {heading}\n\n{linked(text)}\n"


def _tested(clause: Clause) -> str:
    """Return the properties that test a clause, a line for each."""
    lines = []
    for tested in listing().get(clause.id, ()):
        line = f"- `{tested.name}` in `conformance/properties/{tested.module}.py`"
        if tested.level not in (None, clause.level):
            line += f" ({tested.level})"
        lines.append(line)
    return "\n".join(lines)


def _faults(clause: Clause) -> str:
    """Return the table of the faults that a clause must catch."""
    caught: dict[str, Fault] = {}
    for fault in FAULTS:
        if fault.clause == clause.id:
            caught.setdefault(fault.name, fault)
    if not caught:
        return "None of the gallery."
    return "\n".join(table_of(caught.values()))


def _waived(clause: Clause) -> Iterator[str]:
    """Yield the packages and the implementations of ours that violate a clause, with the reason."""
    found = waivers().get(clause.id, {})
    if not found:
        yield "No package with an adapter here, in the versions that were tried."
    for reason, names in found.items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {linked(reason)}"


@cache
def waivers() -> dict[str, dict[str, list[str]]]:
    """Return the implementations that violate a clause, by clause and reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in WAIVERS:
        for waiver in tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["waiver"]:
            reasons = found.setdefault(waiver["clause"], {})
            names = reasons.setdefault(waiver["reason"], [])
            if waiver["implementation"] not in names:
                names.append(waiver["implementation"])
    return found


def path_of_family(letters: str) -> str:
    """Return the page of a family."""
    return f"clauses/{letters.lower()}.md"


def family_page(letters: str) -> str:
    """Return the page of a family of clauses."""
    family = FAMILIES[letters]
    lines = [f"# {letters}: {family.title}\n", f"{linked(family.about)}\n", *_rows(letters)]
    return "\n".join(lines) + "\n"


def _rows(letters: str) -> Iterator[str]:
    """Yield the table of the clauses of a family."""
    yield "| clause | | level | kind |"
    yield "|---|---|---|---|"
    for clause in CLAUSES.values():
        if clause.family == letters:
            link = f"[{clause.id}]({clause.id.lower()}.md)"
            yield f"| {link} | {linked(clause.title)} | {clause.level} | {clause.kind} |"


def index() -> str:
    """Return how to read a clause, and all of them, by family."""
    introduction = document().partition("## Families")[0]
    parts = [relocated(introduction, CONTRACT, "clauses/index.md", ())]
    for letters, family in FAMILIES.items():
        parts.append(f"## {letters}: {family.title}\n\n{linked(family.about)}\n")
        parts += [*_rows(letters), ""]
    pages = [f"{letters.lower()}.md" for letters in FAMILIES]
    return "\n".join(parts) + "\n" + toctree(pages)
