"""A project that pins a version of the contract is not judged by clauses that came later."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from mha.conformance import check, project, settings
from mha.conformance.project import pinned_contract
from mha.conformance.settings import Settings
from mha.implementations import resolve
from mha.spec import CLAUSES
from mha.spec.clauses import VERSIONS
from support.forks import run_module

PINNED = '[tool.mha]\ncontract = "0.1"\n'
TAKES = r"'.*pyproject.toml', \[tool.mha\]: contract must be '0.1', but is '9.9'"
REFUSED = {
    "an unknown version": ('[tool.mha]\ncontract = "9.9"\n', TAKES),
    "a number": ("[tool.mha]\ncontract = 1\n", r"\[tool.mha\]: contract must be '0.1', but is 1"),
    "no table": ("[tool]\nmha = 1\n", r"\[tool.mha\] must be a table, but is 1"),
    "no TOML": ("[tool.mha\n", "cannot be read as TOML"),
}


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MSK-4 come with version 0.2."""
    clauses = MappingProxyType({**CLAUSES, "MSK-4": replace(CLAUSES["MSK-4"], since="0.2")})
    monkeypatch.setattr(settings, "CLAUSES", clauses)
    for module in (project, settings):
        monkeypatch.setattr(module, "VERSIONS", (*VERSIONS, "0.2"))


def of(clauses: object = ()) -> Settings:
    """Return the settings of a run in the current folder."""
    return Settings.of("quick", 0, clauses, "float32", "cpu", strict=False)


@pytest.mark.usefixtures("newer")
def test_clauses_that_came_later_are_judged_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pinned_contract(Path()) == "0.2"
    assert {"MSK-3", "MSK-4"} <= set(of().judged_clauses)
    assert str(of()) == "profile quick, seed 0"
    Path("pyproject.toml").write_text(PINNED)
    assert "MSK-4" not in of().judged_clauses
    assert str(of()) == "profile quick, seed 0, contract 0.1"
    assert "MSK-3" in of().judged_clauses
    assert of("MSK-4").judged_clauses == ("MSK-4",)
    (tmp_path / "tests").mkdir()
    assert pinned_contract(Path("tests")) == "0.1"
    report = check(resolve("loop")[0], "quick", clauses="SHP-1", dtypes="float32")
    assert report.versions["contract"] == "0.1"


@pytest.mark.parametrize("text", [b"tool = 1\n", b"# mha\n[tool", b"name = '\xe4'\n"])
def test_other_tools_are_left_alone(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(text)
    assert pinned_contract(tmp_path) == VERSIONS[-1]


@pytest.mark.parametrize("what", REFUSED)
def test_table_that_cannot_be_followed_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = REFUSED[what]
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        of()


def test_pytest_refuses_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(REFUSED["an unknown version"][0])
    done = run_module(
        "pytest", "--pyargs", "mha.conformance", "-q", "-p", "no:cacheprovider", cwd=tmp_path
    )
    assert done.returncode == 2
    assert re.fullmatch(f"Exit: mha: {TAKES}\n", done.stdout + done.stderr)
