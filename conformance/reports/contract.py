"""The contract as text: a page for one clause, an index, and all of it as one Markdown document."""

from __future__ import annotations

from importlib.resources import files

from mha.conformance.properties.source_index import Listed, listing
from mha.conformance.reports.layout import INDENT, wrapped
from mha.conformance.reports.prose import prose_to_markdown
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause

REGENERATE = "mha spec --markdown > spec/CONTRACT.md"
NO_DIFFERENCE = "No differences are known."
PROPERTIES = "conformance/properties"
WIDTH = 80


def page(clause_id: str, width: int = WIDTH) -> str:
    """Return all about a clause as plain text; width: in columns. Raises KeyError.

    >>> print(page("MSK-4").partition("\\n")[0])
    MSK-4 (MUST): An all-True mask equals no mask
    """
    clause = CLAUSES[clause_id]
    parts = [
        wrapped(f"{clause.id} ({clause.level}): {clause.title}", width, ""),
        wrapped(clause.statement, width, ""),
    ]
    sections = {"Kind": f"{clause.kind.capitalize()}: {KINDS[clause.kind]}", **_sections(clause)}
    for heading, text in sections.items():
        parts.append(f"{heading}\n{wrapped(text, width, INDENT)}")
    parts.append(f"Tested by\n{_listing(clause)}")
    return "\n\n".join(parts)


def index(family: str | None = None, width: int = WIDTH) -> str:
    """Return a line for each clause (id, level, title, kind), by family; family: of one only.

    >>> print(index("INC"))
    INC: Incremental decoding
    Decoding with a cache of keys and values that grows token by token.
        INC-1   MAY     Cached decoding equals one causal pass
        INC-2   MAY     Chunks against a cache equal one causal pass
        INC-3   MAY     An edited cache decodes what it then holds
    """
    blocks = []
    for letters, kind in FAMILIES.items():
        if family in (None, letters):
            lines = [f"{letters}: {kind.title}", wrapped(kind.about, width, "")]
            lines += [_index_line(clause, width) for clause in _clauses_of(letters)]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _index_line(clause: Clause, width: int) -> str:
    """Return the line of the index on a clause: the kind is named if it is not that of most."""
    head = f"{INDENT}{clause.id:<8}{clause.level:<8}"
    kind = "" if clause.kind == "answers" else f" ({clause.kind})"
    return wrapped(f"{clause.title}{kind}", width, head, " " * len(head))


def _clauses_of(family: str) -> list[Clause]:
    return [clause for clause in CLAUSES.values() if clause.family == family]


def document() -> str:
    """Return the whole contract as Markdown, a section for each family: spec/CONTRACT.md."""
    contents, sections = [], []
    for letters, kind in FAMILIES.items():
        anchor = letters.lower()
        heading = f"{letters}: {kind.title}"
        contents.append(f"- [{heading}](#{anchor}). {kind.about}")
        sections.append(f'<a id="{anchor}"></a>\n\n## {heading}\n\n{_markdown(kind.about)}\n')
        sections += map(_entry, _clauses_of(letters))
    families = "## Families\n\n" + "\n".join(contents) + "\n"
    return "\n".join([_introduction(), families, *sections])


def _introduction() -> str:
    """Return what the document says before the families."""
    text = (files("mha.conformance.reports") / "page.contract.md").read_text(encoding="utf-8")
    kinds = "\n".join(f"  - *{kind}*: {meaning}" for kind, meaning in KINDS.items())
    return text.format(
        clauses=len(CLAUSES), properties=PROPERTIES, regenerate=REGENERATE, kinds=kinds
    )


def _entry(clause: Clause) -> str:
    """Return the section of the document on one clause."""
    heading = f"{clause.id} ({clause.level}, {clause.kind}): {_markdown(clause.title)}"
    parts = [f'<a id="{clause.id.lower()}"></a>', f"### {heading}", _markdown(clause.statement)]
    for title, text in _sections(clause).items():
        parts.append(f"*{title}:* {_markdown(text)}")
    links = []
    for each in _properties(clause):
        links.append(f"[`{_label(each, clause)}`](../{PROPERTIES}/{each.module}.py)")
    parts.append(f"*Tested by:* {', '.join(links)}")
    return "\n\n".join(parts) + "\n"


def _sections(clause: Clause) -> dict[str, str]:
    """Return the texts that explain a clause, by heading."""
    return {
        "Why it matters": clause.why,
        "Example of a violation": clause.violation,
        "Usual fix": clause.fix,
        "How libraries differ": clause.differs or NO_DIFFERENCE,
        "Source": clause.source,
    }


def _properties(clause: Clause) -> tuple[Listed, ...]:
    """Return the properties that test a clause, in order."""
    return listing().get(clause.id, ())


def _label(tested: Listed, clause: Clause) -> str:
    """Return a property's name, with its level where that differs from the level of the clause."""
    if tested.level in (None, clause.level):
        return tested.name
    return f"{tested.name} ({tested.level})"


def _listing(clause: Clause) -> str:
    """Return the properties of a clause as indented lines, under the files that define them."""
    by_file: dict[str, list[str]] = {}
    for each in _properties(clause):
        file = f"{INDENT}{PROPERTIES}/{each.module}.py"
        by_file.setdefault(file, []).append(f"{2 * INDENT}{_label(each, clause)}")
    lines = []
    for file, names in by_file.items():
        lines += [file, *names]
    return "\n".join(lines)


def _markdown(text: str) -> str:
    """Return a text as Markdown, where ids of clauses link to their sections."""
    return prose_to_markdown(text, lambda clause: f"#{clause.lower()}")
