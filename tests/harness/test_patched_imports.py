"""A package that patches torch is judged with its patches, and the judge computes without."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mha.conformance import Case, Report, check
from mha.conformance.benchmarks.runner import plain_results
from mha.conformance.engine.replay import replay_case
from mha.implementations import resolve
from mha.implementations.inference.infer import infer
from mha.implementations.process.pristine import pristine
from mha.implementations.process.torch_state import replace_by, replacements, set_to, settings
from support.forks import run_module
from support.front_end import HERE, QUICK, run
from support.judging import RIGHT, judged

# It doubles one function, which its classes allow for, makes every comparison succeed, and changes
# settings.
PACKAGE = """
import math
import torch
from torch import nn
from mha.implementations import from_module
from mha.spec import Claims

relu, index_select = torch.relu, torch.index_select
torch.relu = lambda x: 2 * relu(x)
torch.index_select = lambda *args: index_select(*args)
torch.Tensor.all = lambda self, *args, **options: torch.tensor(True)
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)


class Right(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        if n_heads <= 0 or d_model <= 0 or d_model % n_heads:
            raise ValueError(f"d_model ({d_model}) must be a multiple of n_heads ({n_heads})")
        self.n_heads, self.dtype = n_heads, torch.zeros(()).dtype
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def weigh(self, scores):
        return torch.relu(scores.softmax(-1)) / 2

    def forward(self, x):
        assert self.dtype == torch.zeros(()).dtype == torch.float64
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.weigh(q @ k.mT / math.sqrt(q.shape[-1]))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Wrong(Right):
    def weigh(self, scores):
        return super().weigh(scores) * 1.0005


class PatchesAgain(Right):
    def weigh(self, scores):
        torch.relu = torch.abs
        return scores.softmax(-1)


class Unpatches(Right):
    def weigh(self, scores):
        weights, torch.relu = super().weigh(scores), relu
        return weights


CLAIMS = Claims(masks=(), causal=None, cross_attention=False, returns_weights=False, bias={True})
PARAMETERS = {"w_qkv": "qkv", "w_o": "out"}
right, wrong, again, undone = (
    from_module(cls, parameters=PARAMETERS, mask=None, claims=CLAIMS)
    for cls in (Right, Wrong, PatchesAgain, Unpatches)
)
"""
CHANGES = (
    "torch.Tensor.all (from patching)",
    "torch.index_select (from patching)",
    "torch.relu (from patching)",
    "the default dtype (torch.float64)",
    "the gradient mode (False)",
)
NOTE = (
    f"torch had been changed before the run: {', '.join(CHANGES)}; the judge computes without that"
)
CLAUSES = ["SHP-1", "HED-1", "GRD-1", "STA-1", "STA-2", "STA-4", "STA-5", "STA-7"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the package, registered under an entry point."""
    (tmp_path / "patching.py").write_text(PACKAGE)
    metadata = tmp_path / "patching-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: patching\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mha.implementations]\npatched = patching:right\n")
    return tmp_path


@pytest.fixture
def patching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the package, and undo what that changes at the end."""
    monkeypatch.syspath_prepend(folder)
    before = settings()
    yield importlib.import_module("patching")
    del sys.modules["patching"]
    replace_by({})
    set_to(before)


def statuses(report: Report) -> dict[str, str]:
    return {verdict.clause: verdict.status for verdict in report.verdicts}


def test_class_that_relies_on_its_patches_conforms(patching: ModuleType) -> None:
    before = replacements()
    report = judged(patching.right, CLAUSES, RIGHT)
    assert set(statuses(report).values()) == {"pass"}, report.verdicts
    assert report.torch_changes == CHANGES
    assert Report.from_json(report.to_json()) == report
    assert replacements() == before != {}
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float64, False)


def test_judge_computes_without_the_patches(patching: ModuleType) -> None:
    """With them, every comparison would succeed."""
    report = check(patching.wrong, "quick", clauses=["SHP-1", "HED-1", "STA-5"], dtypes=["float32"])
    assert statuses(report) == {"SHP-1": "pass", "HED-1": "fail", "STA-5": "pass"}
    case = Case(n_heads=2, head_dim=2, L=3, S=3, inputs="self")
    assert replay_case(patching.wrong, "HED-1", case).outcome == "FAILS"
    assert replay_case(patching.right, "HED-1", case).outcome == "FIXED"


@pytest.mark.parametrize("name", ["again", "undone"])
def test_call_that_patches_after_the_import_is_found(patching: ModuleType, name: str) -> None:
    report = check(getattr(patching, name), "quick", clauses=["HED-1", "STA-5"], dtypes=["float32"])
    assert statuses(report) == {"HED-1": "blocked", "STA-5": "fail"}
    assert {verdict.message for verdict in report.verdicts} == {
        "the call replaced torch.relu, for everybody"
    }
    assert replacements().keys() == {"torch.relu", "torch.index_select", "torch.Tensor.all"}


def test_class_is_inferred_without_the_patches(patching: ModuleType) -> None:
    inferred = infer(patching.Right).implementation.claims
    assert replace(inferred, dtypes=patching.CLAIMS.dtypes) == patching.CLAIMS
    before = replacements()
    resolved = resolve("patching:PatchesAgain")[0]
    assert replacements() == before
    (verdict,) = check(resolved, "quick", clauses=["STA-5"], dtypes=["float32"]).verdicts
    assert verdict.message == "the call replaced torch.relu, for everybody"


def test_reference_of_benchmarks_is_computed_without_the_patches(patching: ModuleType) -> None:
    torch.Tensor.masked_fill = lambda self, *args: self * 0  # type: ignore[method-assign,assignment]
    problem = Case(n_heads=2, head_dim=2, L=3, S=3, inputs="self").problem()
    with pristine():
        expected = plain_results(problem, False)["output"]
    assert bool(plain_results(problem, False)["output"].ne(expected).any())


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    }


def test_import_is_noted_once_by_the_command(folder: Path) -> None:
    options = ["--dtype", "float32", "--profile", "quick", "--clause", "HED-1", "--clause", "STA-5"]
    command = ["check", "patching:Right", "patching:Wrong", *options, "--report", "r.html"]
    done = run_module("mha.conformance", *command, cwd=folder, env=environment(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count(f"Note: {NOTE}.") == done.stdout.count("torch had been changed") == 1
    assert "Right: CONFORMS" in done.stdout
    assert "Wrong: DOES NOT CONFORM" in done.stdout
    assert NOTE in (folder / "r.html").read_text()


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("target", ["patched", "patching:right"])
def test_pytest_judges_a_package_that_patches_torch(folder: Path, target: str) -> None:
    file = folder / "report.json"
    done = run(
        "-k",
        "HED-1 or STA-5",
        "--mha-impl",
        target,
        "loop",
        "--mha-report",
        str(file),
        *QUICK,
        env=environment(folder),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"note: {NOTE}" in done.stdout
    report = json.loads(file.read_text())
    assert {verdict["status"] for verdict in report["verdicts"]} == {"pass"}
    assert report["torch_changes"] == list(CHANGES)


def test_patches_before_the_judge_is_imported_are_found(folder: Path) -> None:
    """Then, too, the judge computes with the functions of torch."""
    (folder / "before.py").write_text(
        "import torch\nrelu = torch.relu\ntorch.relu = lambda x: 2 * relu(x)\n"
    )
    code = (
        "import before, torch\n"
        "from mha.implementations.process.pristine import pristine, torch_changes\n"
        "print(torch_changes(), torch.relu(torch.ones(())).item())\n"
        "with pristine():\n"
        "    print(torch.relu(torch.ones(())).item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], **HERE, env=environment(folder))  # type: ignore[call-overload]  # options
    assert done.stdout == "('torch.relu (from before)',) 2.0\n1.0\n", done.stderr
