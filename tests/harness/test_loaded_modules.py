"""What stands in `sys.modules`, and in a file, may raise when it is looked at: it is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mha.conformance import check
from mha.conformance.engine.constants import PLACE, only_readable_modules
from mha.implementations import ImplementationError, resolve
from mha.implementations.discovery.loaded import (
    attribute,
    every_module,
    file_of,
    module_named,
    names_of,
    variables_of,
)
from mha.implementations.discovery.resolve import as_resolved
from support.plain import Plain
from support.raising_objects import NoClass, NoTruth, Raises, attend


class Skips(ModuleType):
    """Raises what is no `Exception`, as `pytest.importorskip` does."""

    def __getattr__(self, name: str) -> Any:
        pytest.skip("an optional part is missing")


class NoVariables(ModuleType):
    """Raises when its file or its variables are read."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # as a lazy import may
        raise OSError("variables")

    @property
    def __file__(self) -> Any:  # type: ignore[override]  # as a lazy import may
        raise OSError("file")


def modules() -> dict[str, Any]:
    holder = ModuleType("a_holder")
    vars(holder).update(
        raises=Raises(), truth=NoTruth("truth"), lazy=NoClass(), SomeConfig=NoClass()
    )
    objects = {
        "raises": Raises(),
        "skips": Skips("a_skips"),
        "truth": NoTruth("a_truth"),
        "holder": holder,
    }
    objects |= {
        "variables": NoVariables("a_variables"),
        "mock": MagicMock(),
        "space": SimpleNamespace(__file__=3),
    }
    return {f"a_{name}": value for name, value in objects.items()} | {"a_none": None}


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    every = modules()
    for name, value in every.items():
        monkeypatch.setitem(sys.modules, name, value)
    yield every
    monkeypatch.undo()  # before pytest looks at them


# Of a hundred random cases each, and of what reads all modules: NumPy's state, and the ranks.
CLAUSES = ["HED-1", "NUM-1", "STA-5"]


@pytest.mark.slow
def test_modules_that_raise_change_no_verdict(hostile: dict[str, Any]) -> None:
    report = check(attend, "quick", clauses=CLAUSES, dtypes=["float32"])
    assert {verdict.clause: verdict.status for verdict in report.verdicts} == dict.fromkeys(
        CLAUSES, "pass"
    )


def test_lazy_import_of_numpy_that_raises_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy.random", Raises())
    (verdict,) = check(attend, "quick", clauses=["STA-5"], dtypes=["float32"]).verdicts
    monkeypatch.undo()
    assert verdict.status == "pass"


def test_hypothesis_reads_the_modules_that_it_can(hostile: dict[str, Any]) -> None:
    @settings(max_examples=50, database=None)
    @given(st.integers())
    def drawn(number: int) -> None:
        pass

    with only_readable_modules():
        sys.modules["a_later_one"] = Raises()  # type: ignore[assignment]  # anything may stand there
        drawn()
    del sys.modules["a_later_one"]


def test_a_version_of_hypothesis_that_reads_no_modules_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, PLACE, ModuleType(PLACE))
    with only_readable_modules():
        assert not vars(sys.modules[PLACE]).get("_get_local_constants")


def test_modules_are_looked_at_without_raising(hostile: dict[str, Any]) -> None:
    found = dict(every_module())
    assert set(hostile) - set(found) == {"a_none"}
    assert [file_of(found[name]) for name in hostile if name in found] == [""] * 7
    assert variables_of(found["a_variables"]) == variables_of(found["a_raises"]) == {}
    assert file_of(sys.modules[__name__]) == __file__
    assert attribute(found["a_skips"], "anything", "default") == "default"
    assert module_named("a_raises") is hostile["a_raises"]
    assert module_named(3) is None


DEFINED_IN = sys.modules[attend.__module__].__file__


def test_names_of_an_object_are_found_among_modules_that_raise(hostile: dict[str, Any]) -> None:
    places = {(__name__, __file__, "attend"), (attend.__module__, DEFINED_IN, "attend")}
    assert set(names_of(attend)) == places
    assert list(names_of(variables_of(hostile["a_holder"])["truth"])) == [("a_holder", "", "truth")]


def test_an_interrupt_is_no_answer_of_a_module() -> None:
    class Interrupted:
        @property
        def part(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribute(Interrupted(), "part")


def test_an_object_of_a_module_that_raises_has_no_target(hostile: dict[str, Any]) -> None:
    def unplaced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    unplaced.__module__ = "a_raises"
    assert as_resolved(unplaced).target == ""


LAZY = """
from support.raising_objects import NoClass, NoTruth, Raises, attend
from torch import nn

truth, raises, lazy = NoTruth("truth"), Raises(), NoClass()
AttentionConfig = NoClass()

def __getattr__(name):
    raise ImportError(f"{name} needs an optional package")
"""


def test_a_file_that_holds_objects_that_raise_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lazily.py"
    file.write_text(LAZY)
    assert resolve(f"{file}:attend")[0].implementation.name == "attend"
    with pytest.raises(
        ImplementationError, match=r":absent' cannot be imported: ImportError: absent needs an opt"
    ):
        resolve(f"{file}:absent")
    with pytest.raises(ImplementationError, match=r"its classes: none"):
        resolve(str(file))


def test_config_class_is_looked_for_among_objects_that_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "AttentionConfig", NoClass())

    class OfConfig(Plain):
        def __init__(self, config: Any) -> None:
            super().__init__(config.n_embd, config.n_head)

    OfConfig.__module__ = __name__
    assert as_resolved(OfConfig).implementation.name == "OfConfig"
