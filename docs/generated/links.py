"""Links of Markdown files, as they are in the repository, turned into links of the site."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Collection
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

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_FENCE = re.compile(r"(?ms)^```.*?^```[^\n]*$")
_EXTERNAL = re.compile(r"[a-z]+:")
_CLAUSE = re.compile(r"\b[A-Z]{3}-\d+\b")
# Elements in whose text ids of clauses are left as they are.
_LEFT_ALONE = ("a", "code", "pre", "h1", "h2", "h3", "title", "script", "style")


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
        target, _, anchor = found["target"].partition("#")
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
        relative = posixpath.relpath(file, posixpath.dirname(page) or ".")
        hash_and_anchor = f"#{anchor}" if anchor else ""
        return f"{found['image']}[{found['text']}]({relative}{hash_and_anchor})"

    return outside_code(text, lambda part: _LINK.sub(relocate, part))


def outside_code(text: str, change: object) -> str:
    """Return Markdown whose text outside of fenced code is changed."""
    assert callable(change)
    written = ""
    end = 0
    for fence in _FENCE.finditer(text):
        written += change(text[end : fence.start()]) + fence[0]
        end = fence.end()
    return written + str(change(text[end:]))


def _on_the_site(file: str, anchor: str, files: Collection[str]) -> str:
    """Return where a file of the repository is on the site, with the anchor; "" if it is not."""
    if file == CONTRACT:
        if anchor.upper() in CLAUSES:
            return path_of_clause(anchor)
        anchor = anchor if anchor.upper() in FAMILIES else ""
        return f"clauses/index.md#{anchor}" if anchor else "clauses/index.md"
    place = PAGES_OF_DOCUMENTS.get(file, file.removeprefix("docs/"))
    if place == file and file not in PAGES_OF_DOCUMENTS:  # outside of docs/
        return ""
    if place not in files:
        return ""
    return f"{place}#{anchor}" if anchor else place


def with_clauses_linked(html: str, to_root: str) -> str:
    """Return HTML in whose text each id of a clause links to its page.

    to_root: the address of the site from the page, with a slash at the end.

    >>> with_clauses_linked("<p>MSK-1, <code>MSK-2</code></p>", "../")
    '<p><a href="../clauses/msk-1/">MSK-1</a>, <code>MSK-2</code></p>'
    """

    def link(found: re.Match[str]) -> str:
        if found[0] not in CLAUSES:
            return found[0]
        return f'<a href="{to_root}clauses/{found[0].lower()}/">{found[0]}</a>'

    written = []
    inside = ""
    for part in re.split(r"(<[^>]+>)", html):
        tag = re.match(r"<(/?)([a-z0-9]+)", part)
        if not tag:
            written.append(part if inside else _CLAUSE.sub(link, part))
            continue
        written.append(part)
        if not inside and not tag[1] and tag[2] in _LEFT_ALONE:
            inside = tag[2]
        elif inside == tag[2] and tag[1]:
            inside = ""
    return "".join(written)
