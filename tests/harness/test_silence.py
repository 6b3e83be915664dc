"""What code that is judged prints."""

from __future__ import annotations

import pdb
import sys

import pytest
from torch import Tensor

from mha.conformance import check
from mha.implementations.process.pristine import silenced
from support.right_classes import Heads


class Prints(Heads):
    """It says so when it is built, and when it is called."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        print("built")
        super().__init__(d_model, n_heads)

    def forward(self, x: Tensor) -> Tensor:
        print("called")
        print("wrong", file=sys.stderr)
        return self.of(x, x, x)


def test_prints_do_not_reach_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(Prints, "quick", clauses="SHP-1", dtypes="float32").conforms
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("wrong\n")


def test_the_debugger_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with silenced(), silenced():
        print("hidden")
        pdb.Pdb(nosigint=True).message("shown")
        assert sys.stdout.encoding
    print("after")
    assert capsys.readouterr().out == "shown\nafter\n"
