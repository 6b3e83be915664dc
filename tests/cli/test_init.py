"""`mha init` and `mha list`: the files that init writes run in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.cli import ci
from mha.conformance.cli import list as listing
from mha.conformance.cli.app import app
from mha.implementations import Registered
from support.folders import CLASSES
from support.forks import run_module


def run(*arguments: str) -> tuple[int, str]:
    """Run `mha`; return its exit status and all output."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "cross"
version = "1"
"""
PIP = """\
#!/bin/sh
echo "$@" >> pip.log
"""


def steps() -> list[str]:
    """Return the commands of the job that was written."""
    job = Path(".github/workflows/mha-conformance.yml").read_text()
    return [line.strip() for line in re.findall(r"- run: \|\n(.*)\n", job)]


@pytest.mark.slow
def test_steps_of_the_written_job_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cross.py").write_text((CLASSES / "einops_kv_fused.py").read_text())
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    status, output = run("init", "cross.py:CrossAttention")
    assert status == 0, output
    assert output.startswith(
        "wrote _mha_declaration.py\nwrote .github/workflows/mha-conformance.yml\nwrote"
        " mha_waivers.toml\n"
    )
    pip = tmp_path / "bin" / "pip"  # which notes what it would install
    pip.parent.mkdir()
    pip.write_text(PIP)
    pip.chmod(0o755)
    path = os.pathsep.join([str(pip.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTEST_ADDOPTS": "-k SHP-1 -p no:cacheprovider"}
    environment |= {
        "MHA_CONFORMANCE": "git+https://example.org/mha",
        "MHA_OPTIONS": "--mha-profile quick",
    }
    for step in steps():
        done = subprocess.run(
            ["bash", "-ec", step], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "CrossAttention: CONFORMS: 1 answer right" in done.stdout
    assert (tmp_path / "mha-report.html").exists()
    torch, project, suite = (tmp_path / "pip.log").read_text().splitlines()
    assert torch.startswith("install torch --index-url ")
    assert (project, suite) == (
        "install .",
        "install mha-conformance[parallel] @ git+https://example.org/mha",
    )
    environment.pop("MHA_CONFORMANCE")
    unset = subprocess.run(
        ["bash", "-ec", steps()[0]], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (unset.returncode, unset.stdout[:9]) == (1, "::error::")
    assert "set the variable MHA_CONFORMANCE of your repository" in unset.stdout
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        "wheels",
    ]
    subprocess.run(
        wheel, check=True, timeout=300
    )  # the new files do not keep the project from being built


def test_class_of_a_package_is_declared_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "cross.py").write_text((CLASSES / "einops_kv_fused.py").read_text())
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'x'\nversion = '1'\ndependencies = ['einops>=0.8']\n"
    )
    status, output = run("init", "of_mine.cross:CrossAttention")
    assert status == 0, output
    assert 'CrossAttention = "of_mine._mha_declaration:implementation"' in output
    assert (tmp_path / "of_mine" / "_mha_declaration.py").exists()
    workflow = (tmp_path / ".github/workflows/mha-conformance.yml").read_text()
    assert "pip install 'einops>=0.8'" in steps()
    assert "--mha-impl of_mine._mha_declaration:implementation " in workflow


CLASS = """\
from torch import nn


class Mine(nn.MultiheadAttention):
    pass
"""
NAMES = (
    'it\'s "mine".py',
    "deep/er, and/with spaces/- $HOME/attention.py",
    pytest.param("my attention-v2.final.py", marks=pytest.mark.slow),
    pytest.param("2nd.py", marks=pytest.mark.slow),
    pytest.param("class.py", marks=pytest.mark.slow),
    pytest.param("random.py", marks=pytest.mark.slow),
    pytest.param("-dashed/a.py", marks=pytest.mark.slow),
)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", NAMES)
def test_files_run_for_any_file_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(CLASS)
    status, output = run("init", f"./{name}:Mine")
    assert status == 0, output
    printed = next(line for line in output.splitlines() if line.startswith("    pytest "))
    for command in (
        printed,
        steps()[-1].replace("$MHA_OPTIONS", "--mha-profile quick").replace("-n auto", ""),
    ):
        words = [
            *shlex.split(command),
            "-k",
            "SHP-1",
            "--mha-dtype",
            "float32",
            "-p",
            "no:cacheprovider",
        ]
        done = run_module(*words, env=os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Mine: CONFORMS: 1 answer right" in done.stdout


def test_job_runs_more_every_night_and_init_prints_its_badge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "remote", "add", "origin", "git@github.com:me/my.repo.git"], check=True)
    Path("mine.py").write_text(CLASS)
    status, output = run("init", "mine.py:Mine", "--source", "git+https://example.org/mha")
    assert status == 0, output
    workflow = "https://github.com/me/my.repo/actions/workflows/mha-conformance.yml"
    assert (
        f"    [![attention conformance]({workflow}/badge.svg?event=schedule)]({workflow})\n"
        in output
    )
    job = Path(".github/workflows/mha-conformance.yml").read_text()
    assert '  MHA_CONFORMANCE: "git+https://example.org/mha"\n' in job
    assert "  schedule:\n    - cron: " in job
    assert (
        "'--mha-profile default --mha-dtype float32 float64 bfloat16 float16' || '--mha-profile"
        " quick' }}" in job
    )
    assert "MHA_CONFORMANCE of your repository" not in output


def test_badge_of_a_folder_that_is_no_clone_names_what_to_put_in(tmp_path: Path) -> None:
    assert "github.com/OWNER/REPOSITORY/actions" in ci.badge(tmp_path)


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (
            {"url": "https://x.org/m", "vcs_info": {"vcs": "git", "commit_id": "ab1"}},
            "git+https://x.org/m@ab1",
        ),
        ({"url": "file:///clone", "dir_info": {}}, "git+https://example.org/clone"),
        ({"url": "https://x.org/m.whl", "archive_info": {}}, ""),
        (None, ""),
    ],
)
def test_job_installs_from_where_this_package_was_installed_from(
    origin: object, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin else None

    monkeypatch.setattr(ci, "distribution", lambda name: Installed())
    monkeypatch.setattr(ci, "_remote", lambda folder: "https://example.org" + str(folder))
    assert ci.installed_from() == source


def test_files_are_overwritten_only_by_force_and_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cross.py").write_text((CLASSES / "einops_kv_fused.py").read_text())
    (tmp_path / ".github").write_text("not a folder")
    status, output = run("init", "cross.py:CrossAttention")
    assert (status, "'.github/workflows' cannot be written: " in output) == (2, True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"__pycache__"} == {".github", "cross.py"}
    (tmp_path / ".github").unlink()
    (tmp_path / "_mha_declaration.py").write_text("an earlier one")
    (tmp_path / "mha_waivers.toml").write_text("# mine\n")
    status, output = run("init", "cross.py:CrossAttention")
    assert (status, "_mha_declaration.py would be overwritten" in output) == (2, True)
    assert run("init", "cross.py:CrossAttention", "--force")[0] == 0
    assert "from_module" in (tmp_path / "_mha_declaration.py").read_text()
    assert (tmp_path / "mha_waivers.toml").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sdpa", "'sdpa' is already declared; init takes a plain class"),
        ("nowhere.py:Class", "there is no file 'nowhere.py'"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(target: str, message: str) -> None:
    status, output = run("init", target)
    assert status == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_list_names_registered_implementations() -> None:
    status, output = run("list")
    assert status == 0
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert {"loop", "sdpa", "triton"} <= set(lines)
    assert "mha.implementations.loop:implementation" in lines["loop"]
    assert "float32" in lines["loop"]


def test_list_is_aligned() -> None:
    lines = run("list")[1].splitlines()
    rows = [re.match(r"(\S+ +)(\S+ +)", line) for line in lines]
    assert {row.end(1) for row in rows if row} == {len("context_parallel ")}
    assert len({row.end(2) for row in rows if row}) == 1
    assert all(rows)


def test_list_of_a_broken_plugin_has_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Registered(
        "plugin", "plugin:implementation", error="RuntimeError: no library", broken=True
    )
    monkeypatch.setattr(listing, "discover", lambda: [broken])
    status, output = run("list")
    assert status == 2
    assert output.rstrip().endswith("unavailable: RuntimeError: no library")
