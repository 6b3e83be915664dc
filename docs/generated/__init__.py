"""The pages of the site, and the parts of pages, that are made from the code when it is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

from generated import api, clauses, cli, coverage, documents, faults, levels
from generated.figures import FIGURES, figure
from generated.links import relocated
from mha.spec import CLAUSES

# Returns Markdown.
Made = Callable[[], str]
# What a marker in a page stands for.
PARTS: Mapping[str, Made] = {
    "claims": api.claims,
    "cli": cli.verbs,
    "coverage": coverage.matrix,
    "faults": faults.tables,
    "levels": levels.tables,
    "report": api.report_parts,
}
MARKER = re.compile(r"<!-- (?P<kind>made|figure): (?P<name>\w+) -->")


def pages() -> Mapping[str, Made]:
    """Return every page without a source in docs/, by its path within the site."""
    made: dict[str, Made] = {"clauses/index.md": clauses.index}
    for clause in CLAUSES.values():
        made[clauses.path_of(clause.id)] = partial(clauses.page, clause)
    for package in api.PACKAGES:
        made[api.path_of(package)] = partial(api.page, package)
    for path, source in documents.ROOT_DOCUMENTS.items():
        made[path] = partial(documents.page, source)
    return made


def files() -> set[str]:
    """Return everything that the site has beside the files of docs/."""
    return {*pages(), *(f"figures/{name}.svg" for name in FIGURES), "report.html"}


def assembled(markdown: str, path: str, known: Collection[str]) -> str:
    """Return the Markdown of a page as the site shows it.

    path: of the page within the site. known: all files of the site.
    """

    def fill(found: re.Match[str]) -> str:
        if found["kind"] == "made":
            return PARTS[found["name"]]()
        return figure(found["name"], path)

    source = documents.ROOT_DOCUMENTS.get(path, f"docs/{path}")
    return relocated(MARKER.sub(fill, markdown), source, path, known)
