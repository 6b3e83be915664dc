"""What MkDocs does beside copying: generated pages, links of the repository, figures, a report."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

from generated import assembled, pages
from generated.figures import FIGURES, svg
from generated.links import ROOT, repository, with_clauses_linked
from generated.navigation import navigation
from mha.conformance.reports.html import to_html
from mha.conformance.results import Report

# What `make docs` judges as an example, and what `make report` judges.
REPORT = ROOT / "build" / "report.json"
NO_REPORT = "<!doctype html><title>No report</title><p>This build has none: make report."


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, and the address of the repository, if it has one."""
    config.nav = navigation()
    config.repo_url = repository() or None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated."""
    for path, made in pages().items():
        files.append(File.generated(config, path, content=made()))
    for name in FIGURES:
        files.append(File.generated(config, f"figures/{name}.svg", content=svg(name)))
    files.append(File.generated(config, "report.html", content=_report()))
    return files


def _report() -> str:
    """Return the example of a report, whose clauses link to their pages."""
    if not REPORT.exists():
        return NO_REPORT
    report = Report.from_json(REPORT.read_text(encoding="utf-8"))
    return to_html(report, clause_pages="clauses/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is made of the code, and let links hold on the site."""
    return assembled(markdown, page.file.src_uri, {file.src_uri for file in files})


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link ids of clauses to their pages."""
    depth = page.url.count("/")
    return with_clauses_linked(html, "../" * depth)
