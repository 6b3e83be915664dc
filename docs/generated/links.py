"""Links of Markdown files, as they are in the repository, turned into links of the site."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Documents outside of docs/ that are pages of the site.
PAGES_OF_DOCUMENTS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
CONTRACT = "spec/CONTRACT.md"

_LINK = re.compile(r"`[^`]*`(?!\])|(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_FENCE = re.compile(r"(?ms)^```.*?^```[^\n]*$")
_EXTERNAL = re.compile(r"[a-z]+:")
# What is left as it is in prose (headings, code, links, elements of HTML), and ids of clauses.
_CLAUSE = re.compile(
    r"(?m)(?P<kept>^#.*$|`[^`]*`|!?\[[^\[\]]*\]\([^()\s]*\)|<[^<>]+>|^---\n.*?^---$)"
    r"|\b[A-Z]{3}-\d+\b"
)


@cache
def repository() -> str:
    """Return `Repository` in `project.urls` of pyproject.toml, where files can be shown; or ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project.get("urls", {}).get("Repository", "")).rstrip("/")


def path_of_clause(clause: str) -> str:
    """Return the page of a clause.

    >>> path_of_clause("MSK-1")
    'clauses/msk-1.md'
    """
    return f"clauses/{clause.lower()}.md"


def relocated(text: str, source: str, page: str, files: Collection[str]) -> str:
    """Return Markdown whose links hold on the site.

    source: where the text is in the repository, such as "docs/declare.md".
    page: where it is on the site.
    files: all that the site has. What it has not is linked to in the repository, if that has an
        address, and else not linked.
    """

    def relocate(found: re.Match[str]) -> str:
        target, _, anchor = (found["target"] or "").partition("#")
        if not target or _EXTERNAL.match(target):
            return found[0]
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = _on_the_site(inside, anchor, files)
        if not place and repository():
            place = f"{repository()}/blob/main/{inside}"
            return f"{found['image']}[{found['text']}]({place})"
        if not place:
            return found["text"]
        file, _, anchor = place.partition("#")
        href = relative(file, page)
        if file.endswith(".html"):  # which Sphinx would not take for a page
            return f'<a href="{href}">{found["text"]}</a>'
        if anchor:
            href += f"#{anchor}"
        return f"{found['image']}[{found['text']}]({href})"

    return outside_code(text, lambda part: _LINK.sub(relocate, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown whose text outside of fenced code is changed."""
    written = ""
    end = 0
    for fence in _FENCE.finditer(text):
        written += change(text[end : fence.start()]) + fence[0]
        end = fence.end()
    return written + change(text[end:])


def _on_the_site(file: str, anchor: str, files: Collection[str]) -> str:
    """Return where a file of the repository is on the site, with the anchor; "" if it is not."""
    if file == CONTRACT:
        if anchor.upper() in CLAUSES:
            return path_of_clause(anchor)
        return f"clauses/{anchor if anchor.upper() in FAMILIES else 'index'}.md"
    place = PAGES_OF_DOCUMENTS.get(file, file.removeprefix("docs/"))
    if place == file and file not in PAGES_OF_DOCUMENTS:  # outside of docs/
        return ""
    if place not in files:
        return ""
    return f"{place}#{anchor}" if anchor else place


def linked(text: str, page: str) -> str:
    """Return Markdown in whose prose each id of a clause links to its page.

    >>> linked("# MSK-1\\n\\nMSK-1, `MSK-2`", "how-to/class.md").splitlines()[2]
    '[MSK-1](../clauses/msk-1.md), `MSK-2`'
    """

    def link(found: re.Match[str]) -> str:
        if found["kept"] or found[0] not in CLAUSES:
            return found[0]
        place = relative(path_of_clause(found[0]), page)
        return found[0] if place == posixpath.basename(page) else f"[{found[0]}]({place})"

    return outside_code(text, lambda part: _CLAUSE.sub(link, part))


def relative(file: str, page: str) -> str:
    """Return the path of a file of the site from a page."""
    return posixpath.relpath(file, posixpath.dirname(page) or ".")
