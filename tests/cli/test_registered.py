"""Registered implementations that cannot be loaded are named, and the exit status is 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mha.conformance import check
from mha.implementations import ImplementationError, discover, resolve
from mha.implementations.discovery import importing
from mha.implementations.discovery.resolve import find

MODULES = {
    "raises": "raise RuntimeError('no library')",
    "leaves": "raise SystemExit(3)",
    "exits": "import os; os._exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "based": "class Odd(BaseException): pass\nraise Odd('odd')",
    "absent": "x = 1",
    "lacks": (
        "from mha.implementations import UnavailableError\nraise UnavailableError('needs foo: pip"
        " install foo')"
    ),
    "claimless": (
        "class A:\n    name = 'claimless'\n    @property\n    def claims(self): raise"
        " RuntimeError('no claims')\n    def build(self, *a, **k): pass\nx = A()"
    ),
    "one": "from mha.implementations.loop import implementation as x",
    "two": "from mha.implementations.loop import implementation as x",
}
BROKEN = {"raises", "leaves", "exits", "interrupts", "based", "claimless", "nothing", "twice"}
REGISTERED = {
    f"my_{name}": f"my_{name}:x" for name in MODULES if name not in ("absent", "one", "two")
}
REGISTERED |= {"my_nothing": "my_absent:y"}
ALONE = ("SHP-1", "quick", "float32")


def register(folder: Path, points: dict[str, str], twice: tuple[str, ...] = ()) -> None:
    """Install a package, as pip does, that registers implementations; twice: what has one name."""
    for name, code in MODULES.items():
        (folder / f"my_{name}.py").write_text(code + "\n")
    info = folder / "my_plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[mha.implementations]", *lines]) + "\n")
    if twice:
        other = folder / "my_others-1.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: my-others\nVersion: 1\n")
        for place, value in ((other, twice[0]), (info, twice[1])):
            with (place / "entry_points.txt").open("a") as file:
                file.write("" if place == info else "[mha.implementations]\n")
                file.write(f"my_twice = {value}\n")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Register implementations that cannot be loaded; return the folder of their package."""
    register(tmp_path, REGISTERED, ("my_one:x", "my_two:x"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python where the package of the plugins is installed."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=500, env=environment
    )


@pytest.mark.slow
def test_each_that_cannot_be_loaded_is_found_with_its_reason(plugins: Path) -> None:
    found = find(["all", "all"])
    assert set(found.broken) == {f"my_{name}" for name in BROKEN}
    notes = {note.partition(" ")[0]: note for note in found.notes}
    assert (
        notes["my_raises"]
        == "my_raises (my_raises:x) cannot be loaded: RuntimeError: no library (my_raises.py,"
        " line 1: "
        "`raise RuntimeError('no library')`)"
    )
    assert notes["my_lacks"] == "my_lacks (my_lacks:x) is not available: needs foo: pip install foo"
    for name, reason in {
        "leaves": "SystemExit",
        "exits": "SystemExit",
        "interrupts": "it raised KeyboardInterrupt",
        "based": "Odd: odd",
        "claimless": "no claims",
        "nothing": "AttributeError",
        "twice": "registered twice",
    }.items():
        assert reason in notes[f"my_{name}"]
    assert "loop" in {each.implementation.name for each in found.resolved}
    with pytest.raises(ValueError, match=r"names \d+ implementations"):
        check("all", "quick", clauses="SHP-1")


def test_interrupt_of_code_ends_nothing_where_ctrl_c_is_ignored(plugins: Path) -> None:
    command = f"trap '' INT; {sys.executable} -m mha.conformance check my_interrupts:x"
    done = subprocess.run(["bash", "-c", command], cwd=plugins, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert "it raised KeyboardInterrupt, as if someone had stopped the run" in done.stderr


def test_claims_that_raise_are_an_error_in_one_line(plugins: Path) -> None:
    for target in ("my_claimless", "my_claimless:x", f"{plugins}/my_claimless.py:x"):
        with pytest.raises(
            ImplementationError, match=r"cannot be used: .*RuntimeError: no claims"
        ) as error:
            resolve(target)
        assert "\n" not in str(error.value)


def test_one_that_hangs_is_named_and_then_counts_as_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(tmp_path, {"my_hanging": "my_hanging:x"})
    (tmp_path / "my_hanging.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importing, "SLOW", 0.2)
    monkeypatch.setattr(importing, "PATIENCE", 1.0)
    entry = next(each for each in discover() if each.name == "my_hanging")
    assert entry.broken
    assert "it took longer than 1 s to load" in entry.error
    assert "my_hanging (my_hanging:x) has been loading for 0.2 s" in capsys.readouterr().err


@pytest.mark.slow
def test_pytest_and_list_say_it(plugins: Path) -> None:
    listed = run(plugins, "mha.conformance", "list")
    assert listed.returncode == 2
    options = (
        "-k",
        "SHP-1",
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
        "-p",
        "no:cacheprovider",
    )
    for given in ((), ("--mha-impl", "all")):
        if given:
            options = (*options, "--collect-only")
        ended = run(plugins, "pytest", "--pyargs", "mha.conformance", *options, *given)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        for name in BROKEN:
            assert f"unavailable: my_{name} (" in ended.stdout
            assert f"my_{name}" in listed.stdout


@pytest.mark.slow
def test_benchmarks_say_it(plugins: Path) -> None:
    arguments = (
        "bench",
        "all",
        "--dtype",
        "float16",
        "--shape",
        "token",
        "--rounds",
        "6",
        "--threads",
        "1",
    )
    code = (
        "import sys\n"
        "from mha.conformance.cli import bench\n"
        "bench.judge_all_quickly = lambda chosen, settings: {}\n"
        "bench.by_name = lambda resolved: {}\n"
        "from mha.conformance.cli.app import app\n"
        f"sys.argv = ['mha', *{arguments!r}]\n"
        "app()\n"
    )
    (plugins / "bench_all.py").write_text(code)
    ended = run(plugins, "bench_all")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    for name in BROKEN:
        assert f"my_{name} (" in ended.stdout


@pytest.mark.slow
def test_campaigns_say_it_and_run_the_others(plugins: Path) -> None:
    (plugins / "plan.toml").write_text(
        'implementations = ["all"]\ndtypes = ["float32"]\nprofile = "quick"\nclauses ='
        ' ["SHP-5"]\ngroup = "all"\n'
    )
    code = (
        "import json, sys\nfrom mha.conformance.campaign import local\nfrom"
        " mha.conformance.campaign.jobs import Outcome\nlocal.run_jobs = lambda jobs, *_: ((j,"
        " Outcome(stops={'SHP-5': 'killed'}).to_json()) for j in jobs)\nfrom"
        " mha.conformance.cli.app import app\nsys.argv = ['mha', 'campaign',"
        " *sys.argv[1:]]\napp()\n"
    )
    (plugins / "run_nothing.py").write_text(code)
    ended = run(plugins, "run_nothing", "run", "plan.toml", "--out", "a")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    shown = run(plugins, "run_nothing", "report", "a", "--to", "a.json")
    assert shown.returncode == 2
    broken = json.loads((plugins / "a.json").read_text())["broken"]
    assert set(broken) == {f"my_{name}" for name in BROKEN}
    assert "needs foo" in ended.stdout
    for name in BROKEN:
        assert f"my_{name} " in ended.stdout
