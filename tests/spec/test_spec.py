"""The package `mha.spec`: its names are imported lazily."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import mha.spec

# Modules that programs read before torch is imported, or without it.
WITHOUT_TORCH = (
    "mha.spec",
    "mha.spec.claims",
    "mha.spec.clauses",
    "mha.spec.config",
    "mha.spec.dtypes",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output == "False\n"


def test_every_name_is_there() -> None:
    assert set(mha.spec.__all__) <= set(dir(mha.spec))
    assert all(hasattr(mha.spec, name) for name in mha.spec.__all__)


def test_no_module_hides_a_name() -> None:
    """Importing a module `mha.spec.oracle` would replace the function `mha.spec.oracle`."""
    for name in mha.spec.__all__:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"mha.spec.{name}")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"mha\.spec.*attention"):
        _ = mha.spec.attention
