"""The contract as it is read: the document, the pages, and the command that prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.properties.registry import properties
from mha.conformance.reports.contract import RENEW, document, index, page
from mha.spec.clauses import CLAUSES, FAMILIES, Clause

DOCUMENT = Path(__file__).resolve().parent.parent / "spec" / "CONTRACT.md"
clauses = pytest.mark.parametrize("clause", CLAUSES.values(), ids=lambda clause: clause.id)


def test_document_is_in_step() -> None:
    same = DOCUMENT.read_text(encoding="utf-8") == document()
    assert same, f"{DOCUMENT} is not what the clauses and properties say: run `{RENEW}` in the root of the repository"


@clauses
def test_clause_says_why_and_shows_a_violation(clause: Clause) -> None:
    told = [clause.title, clause.statement, clause.why, clause.source, clause.violation]
    assert all(text.strip() for text in told)
    assert len({text.casefold() for text in told}) == len(told)
    for text in (clause.statement, clause.why, clause.violation):
        assert text.endswith((".", ".)"))
        assert text.count("`") % 2 == 0


@clauses
def test_page_has_everything(clause: Clause) -> None:
    text = page(clause.id)
    words = " ".join(text.split())
    assert text.startswith(f"{clause.id} ({clause.level}): {clause.title}\n")
    for said in (clause.statement, clause.why, clause.differs, clause.source, clause.violation, clause.deferred):
        assert said in words
    for member in properties().get(clause.id, ()):
        assert f"conformance/properties/{member.module}.py: {member.name}" in words
    assert clause.id in properties() or "No property yet." in words or clause.deferred


def test_deferred_clause_has_no_property() -> None:
    deferred = [clause.id for clause in CLAUSES.values() if clause.deferred]
    assert not set(deferred) & set(properties())


def test_pages_fit_their_width() -> None:
    for clause_id in CLAUSES:
        text, _, _ = page(clause_id, 60).partition("Properties that test it")
        assert max(map(len, text.splitlines()[1:])) <= 60


def test_families_are_those_of_the_clauses() -> None:
    assert list(FAMILIES) == list(dict.fromkeys(clause.family for clause in CLAUSES.values()))
    assert re.findall(r"^    ([A-Z]{3}-\d+) ", index(), flags=re.MULTILINE) == list(CLAUSES)


def test_links_of_the_document_lead_somewhere() -> None:
    text = document()
    anchors = re.findall(r'<a id="([^"]*)">', text)
    assert len(anchors) == len(set(anchors)) == len(CLAUSES) + len(FAMILIES)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= set(anchors)
    for path in re.findall(r"\]\((\.\./[^)]*)\)", text):
        assert (DOCUMENT.parent / path).is_file()


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (["MSK-1"], "MSK-1 (MUST): Masked keys have no influence", "masked_keys_have_no_influence"),
        (["msk-1"], "MSK-1 (MUST): Masked keys have no influence", "masked_keys_have_no_influence"),
        (["MSK"], "MSK  Masks.", "MSK-12  MUST    Unfit masks raise"),
        ([], "CFG  Configuration.", "More about one: mha spec MSK-1"),
        (["--markdown"], "# The contract of multi-head attention", "an implementation that claims it."),
    ],
)
def test_spec_prints(arguments: list[str], first: str, last: str) -> None:
    done = CliRunner().invoke(app, ["spec", *arguments])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(first)
    assert done.stdout.rstrip("\n").endswith(last)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MSK-99"], "'MSK-99' is neither a clause, such as MSK-1, nor a family, such as MSK; did you mean MSK-9"),
        (["?"], "'?' is neither a clause, such as MSK-1, nor a family, such as MSK; `mha spec` lists them"),
        (["MSK-1", "--markdown"], "--markdown prints the whole contract: leave out 'MSK-1'"),
    ],
)
def test_spec_refuses_in_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["spec", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"mha: {said}")
    assert done.stderr.count("\n") == 1
