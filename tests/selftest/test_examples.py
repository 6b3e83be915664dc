"""The examples in docstrings run, and give what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

from support.folders import ROOT

FOLDERS = ("spec", "implementations", "conformance")
MODULES = [
    f"mha.{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}"
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module.removesuffix(".__init__")))
    assert results.attempted > 0
    assert results.failed == 0
