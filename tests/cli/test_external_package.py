"""Implementations of other packages are judged, from a checkout and from an installed wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mha.implementations import ImplementationError, resolve
from support.folders import ROOT

CHECKOUT = ROOT
ONE_CLAUSE = (
    "-k",
    "SMX-6",
    "--mha-profile",
    "quick",
    "--mha-dtype",
    "float32",
    "-p",
    "no:cacheprovider",
)

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "my-attention"
version = "1"

[project.entry-points."mha.implementations"]
my-attention = "my_attention:implementation"
my-mistake = "my_attention:mistake"
my-broken-plugin = "my_broken_plugin:implementation"

[tool.setuptools]
py-modules = ["my_attention", "my_broken_plugin"]
"""
MODULE = """\
import torch
from mha.implementations import from_kernel
from mha.spec import Claims


def attend(q, k, v, scale):
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v


def scaled(q, k, v):
    return attend(q, k, v, q.shape[-1] ** -0.5)


def unscaled(q, k, v):
    return attend(q, k, v, 1.0)


implementation = from_kernel(scaled, mask=None)
mistake = from_kernel(unscaled, mask=None)
"""


# Runs pytest, with a status of its own if a file was imported as two modules.
NO_MODULE_TWICE = """\
import sys, pytest
status = pytest.main(sys.argv[1:])
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
files = [file for file in files if "mha" in file]
twice = {file for file in files if files.count(file) > 1}
print(f"imported twice: {twice}" if twice else "no module twice")
sys.exit(9 if twice else int(status))
"""


def pip(python: Path | str, *arguments: str | Path) -> None:
    """Run pip without the network."""
    command = [
        str(python),
        "-m",
        "pip",
        *map(str, arguments),
        "--no-deps",
        "--no-build-isolation",
        "-q",
    ]
    subprocess.run(command, check=True, timeout=300)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of a package of three implementations: right, faulty, and not loadable."""
    source = tmp_path_factory.mktemp("my-attention")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "my_attention.py").write_text(MODULE)
    (source / "my_broken_plugin.py").write_text(
        "raise RuntimeError('the kernel library is missing')\n"
    )
    pip(sys.executable, "wheel", source, "-w", source / "dist")
    return next((source / "dist").glob("*.whl"))


def run(*command: object, folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with this PYTHONPATH instead of that of the tests."""
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


def expect_verdicts(
    python: Path | str, folder: Path, file: Path, *arguments: str, path: str = ""
) -> None:
    """Expect that the right one passes, the faulty one fails, and the broken one is reported."""
    once, options = file.with_name("once.py"), (*arguments, *ONE_CLAUSE)
    once.write_text(NO_MODULE_TWICE)
    named = run(
        python, once, *options, "--mha-impl", "my-mistake", "my-attention", folder=folder, path=path
    )
    assert named.returncode == 1, named.stdout + named.stderr
    assert "no module twice" in named.stdout
    assert "my-attention: CONFORMS: 1 answer right" in named.stdout
    assert "my-mistake: DOES NOT CONFORM: 1 of 1 answers is wrong" in named.stdout
    assert "SMX-6 (MUST)" in named.stdout
    assert "from my_attention import mistake as implementation" in named.stdout
    broken = run(
        python, "-m", "pytest", *options, "--mha-impl", "my-broken-plugin", folder=folder, path=path
    )
    assert broken.returncode == 2
    assert (
        "cannot be used: RuntimeError: the kernel library is missing"
        in broken.stdout + broken.stderr
    )
    every = run(
        python, "-m", "pytest", *options, "-n", "2", "--mha-report", file, folder=folder, path=path
    )
    assert every.returncode == 2
    report = json.loads(file.read_text())
    broken = report["broken"].pop("my-broken-plugin")
    assert broken.startswith(
        "RuntimeError: the kernel library is missing (my_broken_plugin.py, line 1"
    )
    assert not report["broken"]
    assert not report["conforms"]
    assert (
        "unavailable: my-broken-plugin (my_broken_plugin:implementation): RuntimeError"
        in every.stdout
    )
    for line in (
        "judging: my-attention, my-mistake\n",
        "my-attention: CONFORMS",
        "my-mistake: DOES NOT CONFORM",
    ):
        assert line in every.stdout


@pytest.mark.slow
def test_external_package_is_judged_from_a_checkout(package: Path, tmp_path: Path) -> None:
    pip(sys.executable, "install", package, "--target", tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    expect_verdicts(sys.executable, CHECKOUT, tmp_path / "report.json", "conformance", path=path)


def test_external_package_is_judged_from_the_wheel_of_a_release(
    package: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=unwanted)
    built = run(
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "-o",
        tmp_path / "dist",
        source,
        folder=tmp_path,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pip(sys.executable, "wheel", *(tmp_path / "dist").glob("*.tar.gz"), "-w", tmp_path / "dist")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    # Everything except the two wheels comes from the environment of these tests.
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(sys.executable, "install", *(tmp_path / "dist").glob("*.whl"), package, "--target", site)
    folder = tmp_path / "empty"
    folder.mkdir()
    expect_verdicts(python, folder, tmp_path / "report.json", "--pyargs", "mha.conformance")
    imported = run(
        python, "-c", "import mha.conformance; print(mha.conformance.__file__)", folder=folder
    )
    assert str(site) in imported.stdout


def test_package_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_package").mkdir()
    code = "from mha.conformance.faults.base import correct as implementation\n"
    (tmp_path / "a_package" / "neighbour.py").write_text(code)
    file = tmp_path / "a_package" / "attention.py"
    file.write_text("from .neighbour import implementation\n")
    with pytest.raises(ImplementationError, match="name it as part of its package"):
        resolve(f"{file}:implementation")
    before = list(sys.path)
    monkeypatch.chdir(tmp_path)
    (resolved,) = resolve("a_package.attention:implementation")
    assert (resolved.implementation.name, sys.path) == ("Correct", before)
