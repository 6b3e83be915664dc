"""The sources of the site: the pages of docs/, and what is made of the code when it is built.

`python -m generated FOLDER`, with docs/ and tests/ on the path, writes all sources to a folder;
Sphinx, set up by docs/conf.py, builds the site from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial

from generated import api, clauses, cli, coverage, faults, levels
from generated.figures import FIGURES, figure
from generated.links import DOCS, PAGES_OF_DOCUMENTS, ROOT, linked, relocated
from generated.navigation import toctrees
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES

# Returns Markdown.
Made = Callable[[], str]
# What a marker in a page stands for.
PARTS: Mapping[str, Made] = {
    "bounds": api.bounds,
    "claims": api.claims,
    "cli": cli.verbs,
    "coverage": coverage.matrix,
    "faults": faults.tables,
    "known_bad": faults.known_bad,
    "levels": levels.tables,
    "report": api.report_parts,
}
# A marker, with what stands there for those who read the file itself.
MARKER = re.compile(r"<!-- (?P<kind>made|figure): (?P<name>\w+) -->(\n\*On the site .*?\*$)?", re.M)
REPORT = "report.html"


@cache
def made_pages() -> Mapping[str, Made]:
    """Return every page without a source in docs/, by its path within the site."""
    made: dict[str, Made] = {"clauses/index.md": clauses.index}
    for letters in FAMILIES:
        made[clauses.path_of_family(letters)] = partial(clauses.family_page, letters)
    for clause in CLAUSES.values():
        made[clauses.path_of(clause.id)] = partial(clauses.page, clause)
    for package in api.PACKAGES:
        made[api.path_of(package)] = partial(api.page, package)
    return made


@cache
def files() -> frozenset[str]:
    """Return all that the site is built from, by the path within it."""
    found = {*made_pages(), *PAGES_OF_DOCUMENTS.values(), REPORT}
    found.update(f"figures/{name}.svg" for name in FIGURES)
    for file in DOCS.rglob("*"):
        path = file.relative_to(DOCS).as_posix()
        is_script = file.suffix == ".py" and not path.startswith("ecosystem/")
        if file.is_file() and not is_script and "__pycache__" not in path:
            found.add(path)
    return frozenset(found)


def page(path: str, known: Collection[str]) -> str:
    """Return the Markdown of a page as the site has it; known: all files of the site."""
    if path in made_pages():
        return linked(made_pages()[path](), path)
    documents = {place: document for document, place in PAGES_OF_DOCUMENTS.items()}
    source = documents.get(path, f"docs/{path}")
    text = (ROOT / source).read_text(encoding="utf-8")

    def fill(found: re.Match[str]) -> str:
        if found["kind"] == "made":
            return PARTS[found["name"]]()
        return figure(found["name"], path)

    text = relocated(MARKER.sub(fill, text), source, path, known)
    if path == "index.md":
        text += toctrees()
    return linked(text, path)
