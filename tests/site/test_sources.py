"""The sources of the site: every page is reached, every link holds, every clause has a page."""

from __future__ import annotations

import importlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from generated import MARKER, PARTS, api, files, made_pages, page
from generated.clauses import waivers
from generated.figures import FIGURES, table_of
from generated.links import DOCS, PAGES_OF_DOCUMENTS, outside_code, path_of_clause, relocated
from generated.navigation import NAVIGATION
from mha.conformance.faults.registry import FAULTS
from mha.spec import CLAUSES
from mha.spec.clauses import FAMILIES
from support.folders import ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)|<a href=\"([^\"]+)\"")
HEADING = re.compile(r"(?m)^#+ (.*)$")


@cache
def texts() -> dict[str, str]:
    """Return the Markdown of every page of the site."""
    known = files()
    return {path: page(path, known) for path in sorted(known) if path.endswith(".md")}


def anchors(markdown: str) -> set[str]:
    """Return the anchors of the headings of a page, and those that it sets itself."""
    found = set(re.findall(r'<a id="([\w-]+)">', markdown))
    outside_code(markdown, lambda part: found.update(map(slug, HEADING.findall(part))) or "")
    return found


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def links(markdown: str) -> Iterator[str]:
    """Yield the targets of the links of a page that are not elsewhere in the web."""
    found: list[str] = []

    def collect(part: str) -> str:
        prose = re.sub(r"`[^`]*`", "", part)
        found.extend(target or href for target, href in LINK.findall(prose))
        return ""

    outside_code(markdown, collect)
    for target in found:
        if not re.match(r"[a-z]+:", target):
            yield target


def test_every_page_is_in_the_navigation() -> None:
    listed = {path for pages in NAVIGATION.values() for path in pages.values()}
    below = {path for path in texts() if path.startswith("clauses/")}
    assert listed | below == set(texts()) - {"index.md"}
    index = texts()["clauses/index.md"]
    for letters in FAMILIES:
        assert f"\n{letters.lower()}.md\n" in index
    assert "```{toctree}" in texts()["index.md"]


def test_links_of_the_site_hold() -> None:
    broken = []
    for path, text in texts().items():
        for target in links(text):
            file, _, anchor = target.partition("#")
            place = path
            if file:
                place = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
            if place not in files() or (anchor and anchor not in anchors(texts()[place])):
                broken.append(f"{path} links to {target}")
    assert broken == []


def test_links_of_the_repository_hold() -> None:
    """Those that people read there, where what the site makes of the code is not."""
    broken = []
    contract = ROOT / "spec" / "CONTRACT.md"
    for document in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), contract):
        for target in links(document.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            place = (document.parent / file).resolve() if file else document
            if not place.exists():
                inside = place.relative_to(ROOT).as_posix().removeprefix("docs/")
                is_readme = document.parent == ROOT
                if is_readme or inside not in files():
                    broken.append(f"{document.name} links to {target}")
            elif anchor and anchor not in anchors(place.read_text(encoding="utf-8")):
                broken.append(f"{document.name} links to {target}")
    assert broken == []


def test_every_clause_has_a_page_with_all_that_is_known_of_it() -> None:
    for clause in CLAUSES.values():
        text = texts()[path_of_clause(clause.id)]
        assert f"# {clause.id}: " in text
        for part in (
            f"**{clause.level}**",
            "## Why it matters",
            "## Usual fix",
            "conformance/",
        ):
            assert part in text, clause.id
        assert f"({clause.id.lower()}.md)" in texts()[f"clauses/{clause.family.lower()}.md"]
    text = texts()["clauses/msk-8.md"]
    assert "`torch_mha`" in text
    assert "FiniteFill" in text
    assert {clause for clause in waivers() if clause not in CLAUSES} == set()


def test_every_fault_is_listed_with_its_clause() -> None:
    listed = texts()["faults.md"]
    for fault in FAULTS:
        assert fault.name in listed
        assert fault.name in texts()[path_of_clause(fault.clause)]


def test_every_public_name_every_verb_and_every_claim_is_described() -> None:
    for package in api.PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert f"\n## {name}\n" in texts()[api.path_of(package)]
    verbs = texts()["reference/cli.md"]
    for part in ("## mha check\n", "--exitfirst", "## mha campaign run\n"):
        assert part in verbs
    for part in ("- `empty_row`: ", "| `decodes` |", "**Uses**"):
        assert part in texts()["reference/claims.md"]


def test_markers_are_filled_and_figures_have_their_tables() -> None:
    for path, text in texts().items():
        assert not MARKER.search(text), path
    sources = " ".join(file.read_text(encoding="utf-8") for file in DOCS.rglob("*.md"))
    marked = {(found["kind"], found["name"]) for found in MARKER.finditer(sources)}
    made = {("made", name) for name in PARTS}
    assert marked == made | {("figure", name) for name in FIGURES}
    for name, figure in FIGURES.items():
        table = table_of((DOCS / f"{name}.md").read_text(encoding="utf-8"), figure.heading)
        assert len(table) > 3


def test_links_lead_to_pages_or_are_left_out() -> None:
    text = "[a](../../spec/CONTRACT.md#msk-1) [b](../../spec/core.py) [c](claims.md) `[d](e.py)`"
    moved = relocated(text, "docs/reference/x.md", "reference/x.md", {"reference/claims.md"})
    assert moved == "[a](../clauses/msk-1.md) b [c](claims.md) `[d](e.py)`"
    assert set(PAGES_OF_DOCUMENTS.values()) <= set(texts())
    assert set(made_pages()) <= set(texts())


def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo", "matplotlib"):
        pytest.importorskip(name)

    from generated.__main__ import main

    main(tmp_path / "sources")
    sources, site = tmp_path / "sources", tmp_path / "site"
    # In a process of its own, in which warnings of Sphinx about its extensions are no errors.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(sources), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (site / "clauses" / "msk-1.html").exists()
    assert (site / "report.html").exists()
    assert "MSK" in (site / "searchindex.js").read_text(encoding="utf-8").upper()
