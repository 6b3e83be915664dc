"""The texts of the contract: the document, the pages of the clauses, and `mha spec`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.conformance.properties.registry import properties
from mha.conformance.reports.contract import REGENERATE, document, index, page
from mha.spec.clauses import CLAUSES, FAMILIES, KINDS, Clause
from support.folders import ROOT

DOCUMENT = ROOT / "spec" / "CONTRACT.md"


def test_document_is_up_to_date() -> None:
    up_to_date = DOCUMENT.read_text(encoding="utf-8") == document()
    assert up_to_date, (
        f"{DOCUMENT} is out of date: run `{REGENERATE}` in the root of the repository"
    )


def is_complete(clause: Clause) -> bool:
    """Return whether each text says something of its own, in whole sentences."""
    sentences = [clause.statement, clause.why, clause.violation, clause.fix]
    texts = [clause.title, clause.source, *sentences]
    if not all(text.strip() for text in texts):
        return False
    if len({text.casefold() for text in texts}) < len(texts):
        return False
    return all(text.endswith((".", ".)")) and text.count("`") % 2 == 0 for text in sentences)


def test_texts_of_each_clause_are_complete() -> None:
    assert [clause.id for clause in CLAUSES.values() if not is_complete(clause)] == []


def parts(clause: Clause) -> Iterator[str]:
    """Yield what the page of a clause must contain."""
    yield from (clause.statement, clause.why, clause.differs, clause.source)
    yield from (clause.violation, clause.fix)
    yield f"Kind {clause.kind.capitalize()}: {KINDS[clause.kind]} Why it matters"
    for tested in properties()[clause.id]:
        yield f"conformance/properties/{tested.module}.py"
        yield tested.name


def test_page_of_each_clause_contains_everything() -> None:
    missing = []
    for clause in CLAUSES.values():
        text = page(clause.id)
        assert text.startswith(f"{clause.id} ({clause.level}): {clause.title}\n")
        words = " ".join(text.split())
        missing += [(clause.id, part) for part in parts(clause) if part not in words]
    assert missing == []


def test_page_of_each_clause_fits_its_width() -> None:
    wide = []
    for clause in CLAUSES:
        text, _, _ = page(clause, 60).partition("Tested by")
        wide += [(clause, line) for line in text.splitlines()[1:] if len(line) > 60]
    assert wide == []


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
