"""Verdicts do not depend on the order, on the selection, or on the number of workers."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mha.conformance import Verdict, check
from mha.conformance.faults.base import CLAIMS, Complete, Direct
from mha.implementations import from_kernel
from mha.spec import Claims
from support.folders import ROOT
from support.forks import run_module

HERE = ROOT / "tests"
CLAUSES = ("SHP-1", "SMX-6", "MSK-10", "PTH-4", "EQV-6", "STA-5", "NUM-6")
FEWER = ("SHP-1", "PTH-4", "STA-5", "NUM-6")
# The first call of flex imports a compiler, which takes seconds in each process.
FEWEST = ("SHP-1", "STA-5")


def noisy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a context (B, H, L, d_k) with noise from torch's own generator."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return weights @ v + 1e-4 * torch.rand(())


NOISY = from_kernel(
    noisy_attention,
    name="noisy",
    mask=None,
    claims=Claims(masks=set(), causal=None, returns_weights=False),
)
TARGETS = {"minimal": FEWER, "flex": FEWEST, "engine.test_order:NOISY": CLAUSES}
FAST = ("minimal", "engine.test_order:NOISY")


def what_counts(verdicts: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return what must be the same in each run, by clause."""
    fields = itemgetter("status", "case", "examples", "margin", "message")
    return {verdict["clause"]: fields(verdict) for verdict in verdicts}


@cache
def runs(target: str) -> list[dict[str, tuple[Any, ...]]]:
    """Return the verdicts in order, in reverse, and clause by clause, each in a fresh process."""
    clauses = TARGETS[target]
    groups = [",".join(clauses), ",".join(reversed(clauses)), *clauses]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    done = run_module("support.judged_in_order", target, *groups, env=environment)
    assert done.returncode == 0, done.stderr
    return [what_counts(verdicts) for verdicts in json.loads(done.stdout)]


@pytest.mark.mostly_slow(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks a process for each clause")
@pytest.mark.parametrize("target", TARGETS)
def test_order_and_selection_change_no_verdict(target: str) -> None:
    in_order, in_reverse, *alone = runs(target)
    assert set(in_order) == set(TARGETS[target])
    assert in_reverse == in_order
    assert {clause: verdict for run in alone for clause, verdict in run.items()} == in_order


def judged_by_pytest(report: Path, *options: str) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return what `pytest conformance` reports, by implementation and clause."""
    command = [
        "conformance",
        "-q",
        "-p",
        "no:cacheprovider",
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
    ]
    command += [
        "-k",
        " or ".join(FEWER),
        "--mha-report",
        str(report),
        *options,
        "--mha-impl",
        *FAST,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    run_module("pytest", *command, env=environment, cwd=HERE.parent)
    verdicts = json.loads(report.read_text())["verdicts"]
    by_name = defaultdict(list)
    for verdict in verdicts:
        by_name[verdict["implementation"]].append(verdict)
    return {name: what_counts(each) for name, each in by_name.items()}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks a process for each clause")
def test_workers_change_no_verdict(tmp_path: Path) -> None:
    judged = judged_by_pytest(tmp_path / "workers.json", "-n", "2")
    for target in FAST:
        in_order, *_ = runs(target)
        name = target.rpartition(":")[2].lower()
        assert judged[name] == {clause: in_order[clause] for clause in FEWER}


class ChangesStateOnce(Complete):
    """Changes global state in the first call of a process."""

    change: ClassVar[Callable[[], object]]
    called: ClassVar[list[int]]

    def drop(self, weights: Tensor) -> Tensor:
        if not self.called:
            type(self).change()
        self.called.append(1)
        return super().drop(weights)


CHANGES: dict[str, Callable[[], object]] = {
    "the precision of float32 products from highest to high": (
        lambda: torch.set_float32_matmul_precision("high")
    ),
    "the default dtype from torch.float32 to torch.float64": lambda: torch.set_default_dtype(
        torch.float64
    ),
    "the warnings filter": lambda: warnings.simplefilter("ignore"),
    "torch's random state": lambda: torch.rand(1),
}


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("clauses", [("STA-5",), ("SHP-1", "HED-1", "STA-5")], ids="-".join)
def test_what_the_first_call_changes_is_found_after_other_clauses_too(
    changed: str, clauses: tuple[str, ...]
) -> None:
    members = {"change": staticmethod(CHANGES[changed]), "called": []}
    implementation = Direct(type("Once", (ChangesStateOnce,), members), CLAIMS)
    verdicts = {verdict.clause: verdict for verdict in check_all(implementation, clauses)}
    assert verdicts.pop("STA-5").message == f"the first call of the process changed {changed}"
    assert {verdict.status for verdict in verdicts.values()} <= {"pass"}


QUIET = (
    "import warnings\nwarnings.filterwarnings('ignore',"
    " message='old')\nwarnings.simplefilter('ignore', append=True)\n"
)


@pytest.mark.parametrize(
    ("then", "message"),
    [(None, ""), ("ignore", "the first call of the process changed the warnings filter")],
    ids=["in an import", "after an import"],
)
def test_filters_that_an_import_adds_are_not_those_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Any, message: str
) -> None:
    """A package that the first call imports may silence warnings, but not the call itself."""
    (tmp_path / "imported_in_a_call.py").write_text(QUIET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_in_a_call", raising=False)

    def change() -> None:
        importlib.import_module("imported_in_a_call")
        if then:
            warnings.simplefilter(then, UserWarning)

    members = {"change": staticmethod(change), "called": []}
    implementation = Direct(type("Once", (ChangesStateOnce,), members), CLAIMS)
    (verdict,) = check_all(implementation, ("STA-5",))
    assert (verdict.status == "fail", verdict.message) == (bool(then), message)
    assert "imported_in_a_call" in sys.modules


def check_all(implementation: Direct, clauses: tuple[str, ...]) -> tuple[Verdict, ...]:
    """Return the quick verdicts on an implementation in float32."""
    return check(implementation, "quick", clauses=clauses, dtypes=["float32"]).verdicts


def test_a_run_leaves_global_state_as_it_was() -> None:
    before = torch.get_rng_state(), torch.get_float32_matmul_precision(), list(warnings.filters)
    members = {
        "change": staticmethod(lambda: torch.set_float32_matmul_precision("medium")),
        "called": [],
    }
    check_all(Direct(type("Once", (ChangesStateOnce,), members), CLAIMS), ("SHP-1",))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_float32_matmul_precision(), list(warnings.filters)) == before[1:]
