"""What a target names: what cannot be resolved is explained, and all of ours are found."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mha import implementations
from mha.conformance.faults import registry as faults
from mha.implementations import (
    ImplementationError,
    discover,
    resolve,
)
from mha.implementations.discovery import resolve as resolving
from support.folders import ROOT


class NoClaims:
    """Has the attributes of an implementation, but its claims are a number."""

    name, claims, build = "no_claims", 3, print


no_claims, MODULE = NoClaims(), faults.Correct(4, 2)


class Blocked:
    """A kernel as an object."""

    def __call__(self, q: object, k: object, v: object, scale: float | None = None) -> object:
        raise NotImplementedError


class BlockedByName:
    def __call__(self, *, q: object, k: object, v: object) -> object:
        raise NotImplementedError


blocked, blocked_by_name = Blocked(), BlockedByName()


UNRESOLVED = {
    f"{__file__}:no_claims": "its name is 'no_claims' and its claims are 3",
    "nonsense": "no implementation is registered as 'nonsense' .registered: .*loop",
    "no.such.module:thing": "cannot be imported: ModuleNotFoundError",
    "mha.implementations.loop:nothing": "does not exist \\(the module defines .*implementation",
    "mha.spec:Config": (
        "is a class, neither a torch.nn.Module class nor an implementation.*from_module"
    ),
    f"{__file__}:blocked": (
        r"name a function that calls it: def attend\(q, k, v, scale=None\): return blocked\(q, k,"
    ),
    f"{__file__}:blocked_by_name": (
        r"def attend\(\*, q, k, v\): return blocked_by_name\(q=q, k=k, v=v\)"
    ),
    f"{__file__}:MODULE": "is of type Correct, .*; name the class Correct instead",
    "mha.spec:CLAUSES": (
        "is of type mappingproxy, neither a torch.nn.Module class nor an implementation"
    ),
    "no/such/file.py:thing": "there is no file",
}


@pytest.mark.parametrize("target", UNRESOLVED)
def test_target_that_cannot_be_resolved_is_explained_in_one_line(target: str) -> None:
    with pytest.raises(ImplementationError, match=UNRESOLVED[target]) as raised:
        resolve(target)
    assert "\n" not in str(raised.value)


def test_all_built_in_implementations_are_found() -> None:
    folder = Path(implementations.__file__).parent
    files = {file.stem for file in folder.glob("*.py")} - {"__init__", "formula"}
    assert files <= {entry.name for entry in discover()}
    assert files - {"triton"} <= {resolved.implementation.name for resolved in resolve("all")}


def test_independence_is_checked_of_every_built_in_implementation() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each
        for each in settings["tool"]["importlinter"]["contracts"]
        if each["type"] == "independence"
    )
    entry_points = settings["project"]["entry-points"]["mha.implementations"].values()
    assert set(contract["modules"]) == {target.partition(":")[0] for target in entry_points}


def test_unavailable_implementation_is_not_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = {
        "lacking": "UnavailableError",
        "misread": "ImplementationError",
        "crashing": "RuntimeError",
    }
    for name, error in errors.items():
        code = f"from mha.implementations import *\nraise {error}('it needs a kernel library')\n"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint(name, f"{name}:implementation", resolving.GROUP) for name in errors]
    monkeypatch.setattr(resolving, "entry_points", lambda group: points)
    entries = {entry.name: (entry.broken, entry.error) for entry in discover()}
    assert entries["lacking"] == (False, "it needs a kernel library")
    assert entries["misread"] == (True, "it needs a kernel library")
    shown = "(crashing.py, line 2: `raise RuntimeError('it needs a kernel library')`)"
    assert entries["crashing"] == (True, f"RuntimeError: it needs a kernel library {shown}")


def test_file_may_warn_while_it_is_imported(tmp_path: Path) -> None:
    text = "import warnings\nwarnings.warn('old', DeprecationWarning)\n"
    (tmp_path / "warns.py").write_text(
        text + "from mha.implementations.loop import implementation\n"
    )
    with pytest.warns(DeprecationWarning, match="old"):
        (resolved,) = resolve(f"{tmp_path}/warns.py:implementation")
    assert resolved.implementation.name == "loop"
