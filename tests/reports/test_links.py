"""Where reports lead: to the page of a clause, or to the contract; scripts name files from here."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

import pytest

from mha.conformance.reports import links
from mha.conformance.reports.html import to_html
from mha.conformance.reports.text import describe
from mha.conformance.scripts.terms import from_here, path_line
from support.reports_made import two_implementations, verdict


def test_without_a_site_reports_lead_to_the_contract() -> None:
    text = describe(verdict("x", "MSK-8", "fail"))
    assert "more       mha spec MSK-8, or spec/CONTRACT.md#msk-8" in text
    assert '"pages": ""' in to_html(two_implementations())


def test_with_a_site_reports_lead_to_the_page_of_a_clause(monkeypatch: pytest.MonkeyPatch) -> None:
    about = Message()
    about["Project-URL"] = "Documentation, https://docs.example.org/mha"
    monkeypatch.setattr(links, "metadata", lambda name: about)
    page = "https://docs.example.org/mha/clauses/"
    assert f"or {page}msk-8.html" in describe(verdict("x", "MSK-8", "fail"))
    report = to_html(two_implementations())
    assert f'"pages": "{page}"' in report
    assert f'<a href="{page}msk-8.html">MSK-8</a>' in report


def test_scripts_name_files_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "src" / "mine.py") == "src/mine.py"
    assert from_here(tmp_path) == "."
    assert from_here(tmp_path.parent) == str(tmp_path.parent)
    assert path_line("src") == "sys.path.insert(0, 'src')  # run it where it was judged"
    assert path_line("/src") == "sys.path.insert(0, '/src')"
