"""The texts of the contract: the document, the pages of the clauses, and the command that prints
them.
"""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.properties.registry import properties
from mha.conformance.reports.contract import REGENERATE, document, index, page
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause
from support.folders import ROOT

DOCUMENT = ROOT / "spec" / "CONTRACT.md"
each_clause = pytest.mark.parametrize("clause", CLAUSES.values(), ids=lambda clause: clause.id)


def test_document_is_up_to_date() -> None:
    up_to_date = DOCUMENT.read_text(encoding="utf-8") == document()
    assert up_to_date, (
        f"{DOCUMENT} is out of date: run `{REGENERATE}` in the root of the repository"
    )


@each_clause
def test_clause_texts_are_complete(clause: Clause) -> None:
    texts = [
        clause.title,
        clause.statement,
        clause.why,
        clause.source,
        clause.violation,
        clause.fix,
    ]
    assert all(text.strip() for text in texts)
    assert len({text.casefold() for text in texts}) == len(texts)
    for text in (clause.statement, clause.why, clause.violation, clause.fix):
        assert text.endswith((".", ".)"))
        assert text.count("`") % 2 == 0


@each_clause
def test_page_contains_everything(clause: Clause) -> None:
    text = page(clause.id)
    words = " ".join(text.split())
    assert text.startswith(f"{clause.id} ({clause.level}): {clause.title}\n")
    for part in (
        clause.statement,
        clause.why,
        clause.differs,
        clause.source,
        clause.violation,
        clause.fix,
    ):
        assert part in words
    assert f"Kind {clause.kind.capitalize()}: {KINDS[clause.kind]} Why it matters" in words
    for tested in properties().get(clause.id, ()):
        assert f"conformance/properties/{tested.module}.py" in words
        assert tested.name in words


@each_clause
def test_clause_is_tested(clause: Clause) -> None:
    assert clause.id in properties()


@each_clause
def test_page_fits_its_width(clause: Clause) -> None:
    text, _, _ = page(clause.id, 60).partition("Tested by")
    assert max(map(len, text.splitlines()[1:])) <= 60


def test_pages_and_index_fit_a_terminal() -> None:
    for text in (index(), *map(page, CLAUSES)):
        assert max(map(len, text.splitlines())) <= 80


def test_families_match_the_clauses() -> None:
    assert list(FAMILIES) == list(dict.fromkeys(clause.family for clause in CLAUSES.values()))
    assert re.findall(r"^    ([A-Z]{3}-\d+) ", index(), flags=re.MULTILINE) == list(CLAUSES)


def test_links_of_the_document_resolve() -> None:
    text = document()
    anchors = re.findall(r'<a id="([^"]*)">', text)
    assert len(anchors) == len(set(anchors)) == len(CLAUSES) + len(FAMILIES)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= set(anchors)
    for path in re.findall(r"\]\((?!#|https:)([^)]*)\)", text):
        assert (DOCUMENT.parent / path).exists(), path


@pytest.mark.parametrize(
    ("arguments", "start", "end"),
    [
        (
            ["MSK-1"],
            "MSK-1 (MUST): Masked keys have no influence",
            "masked_keys_have_no_influence_on_low_scores",
        ),
        (
            ["msk-1"],
            "MSK-1 (MUST): Masked keys have no influence",
            "masked_keys_have_no_influence_on_low_scores",
        ),
        (
            ["MSK"],
            "MSK: Masks\n",
            "MSK-14  MUST    Float masks of another precision are added or refused",
        ),
        ([], "CFG: Configuration\n", "mha spec MSK-1"),
        (
            ["--markdown"],
            "# The contract of multi-head attention",
            "conformance/properties/sharding.py)",
        ),
    ],
)
def test_spec_prints(arguments: list[str], start: str, end: str) -> None:
    result = CliRunner().invoke(app, ["spec", *arguments])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(start)
    assert result.stdout.rstrip("\n").endswith(end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MSK-99"], "did you mean MSK-9"),
        (["?"], "`mha spec` lists them"),
        (["MSK-1", "--markdown"], "leave out 'MSK-1'"),
    ],
)
def test_spec_rejects_arguments_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["spec", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mha: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
