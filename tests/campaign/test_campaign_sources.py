"""A job's key has all code that its target loads, and no other; what no longer matches is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mha.conformance.campaign import local, targets
from mha.conformance.campaign.folder import Folder
from mha.conformance.campaign.jobs import Outcome, run_job
from mha.conformance.campaign.plan import Campaign, Job, Plan
from mha.conformance.campaign.report import campaign_report
from mha.conformance.cli.app import app
from mha.conformance.cli.bench import place_of
from mha.conformance.settings import Settings
from mha.conformance.sources import watching_files
from mha.implementations import resolve
from support.campaigns import PLAN, run, verdict_on

MINE = """
import importlib
from pathlib import Path
import helper
from parts import core
from mha.implementations.loop import implementation as loop

TABLE = Path(__file__).with_name("table.txt").read_text()

class Mine:
    name, claims = "mine", loop.claims

    def build(self, config, weights, *, dtype, device):
        import lazy
        importlib.import_module("named")
        self.weights = Path(__file__).with_name("weights.bin").read_bytes()
        attention = loop.build(config, weights, dtype=dtype, device=device)
        attention.register_forward_pre_hook(lambda *_: self.before())
        return attention

    def before(self):
        from parts.late import thing

mine = Mine()
"""
FILES = {
    "mine.py": MINE,
    "helper.py": "import deeper\n",
    "deeper.py": "x = 1\n",
    "lazy.py": "x = 1\n",
    "named.py": "x = 1\n",
    "table.txt": "1\n",
    "weights.bin": "1\n",
    "parts/__init__.py": "",
    "parts/core.py": "from . import beside\nfrom .inner.deep import y\n",
    "parts/beside.py": "x = 1\n",
    "parts/inner/__init__.py": "",
    "parts/inner/deep.py": "y = 1\n",
    "parts/late.py": "thing = 1\n",
    "parts/inner/kernel.so": "not loaded yet\n",
    "other.py": "x = 1\n",
    "parts/unused.py": "x = 1\n",
    "README.md": "words\n",
}
UNUSED = ("other.py", "parts/unused.py", "README.md")


def write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def plan_of(target: str) -> Plan:
    return replace(PLAN, implementations=(target,), clauses=("SHP-1",), seeds=1)


def job_of(target: str) -> Job:
    return next(Campaign.of(plan_of(target)).jobs())


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an implementation of many files, in a current folder that modules are imported from."""
    folder = tmp_path / "code"
    write(folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_every_file_that_is_loaded_changes_the_key_and_no_other_does(code: Path) -> None:
    before = job_of("mine.py:mine")
    assert {*before.sources} >= {*FILES} - {*UNUSED}
    assert not {*before.sources} & {*UNUSED}
    for name, change in {
        "helper.py": "# changed\n",
        "parts/late.py": "# changed\n",
        "weights.bin": "2",
    }.items():
        (code / name).write_text(FILES[name] + change)
        after = job_of("mine.py:mine")
        assert after.key != before.key
        different = [each for each in before.sources if after.sources[each] != before.sources[each]]
        assert different == [name]
        (code / name).write_text(FILES[name])
    for name in UNUSED:
        (code / name).write_text("changed\n")
    assert job_of("mine.py:mine").key == before.key


@pytest.mark.slow
def test_what_cannot_matter_does_not_change_the_key(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = job_of("mine.py:mine")
    for file in code.rglob("*.py"):
        os.utime(file, (1, 1))
    subprocess.run([sys.executable, "-m", "compileall", "-q", "."], check=True, cwd=code)
    (code / "results").mkdir()
    (code / "results" / "plan.json").write_text("{}")
    assert job_of("mine.py:mine").key == before.key
    elsewhere = tmp_path / "another checkout" / "of the same"
    shutil.copytree(code, elsewhere)
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    assert job_of("mine.py:mine").key == before.key


@pytest.mark.slow
def test_installed_packages_count_by_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "dep").mkdir(parents=True)
    (site / "dep" / "__init__.py").write_text("x = 1\n")
    info = site / "dep-1.0.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: dep\nVersion: {}\n"
    (info / "METADATA").write_text(metadata.format("1.0"))
    (info / "top_level.txt").write_text("dep\n")
    file = tmp_path / "uses.py"
    file.write_text(
        "from mha.implementations.loop import implementation\n\ndef later():\n    import dep\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    before = job_of(f"{file}:implementation")
    assert before.sources["dep"] == "1.0"
    (site / "dep" / "__init__.py").write_text("x = 2\n")
    assert job_of(f"{file}:implementation").key == before.key
    (info / "METADATA").write_text(metadata.format("1.1"))
    assert job_of(f"{file}:implementation").key != before.key


@pytest.mark.slow
def test_reports_that_benchmarks_keep_are_of_the_same_files(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(code))
    known = {*sys.modules}
    with watching_files():
        (resolved,) = resolve("mine.py:mine")
    settings = Settings.of("quick")
    before = place_of(resolved.target, settings)
    for name in ("helper.py", "parts/late.py", "weights.bin"):
        (code / name).write_text(f"{FILES[name]}# changed\n")
        assert place_of(resolved.target, settings) != before
        (code / name).write_text(FILES[name])
    (code / "other.py").write_text("changed\n")
    assert place_of(resolved.target, settings) == before
    for name in {*sys.modules} - known:
        del sys.modules[name]


@pytest.mark.slow
def test_the_process_of_a_job_knows_the_same_sources(code: Path) -> None:
    job = job_of("mine.py:mine")
    assert b'"status": "pass"' in run_job(job, PLAN.limits)
    (code / "deeper.py").write_text("x = 2\n")
    assert b"deeper.py is" in run_job(job, PLAN.limits)


def judged(jobs: Iterable[Job], *_: object) -> Iterator[tuple[Job, bytes]]:
    """Judge nothing."""
    for job in jobs:
        yield job, Outcome([asdict(verdict_on(job, "SHP-1", implementation="mine"))]).to_json()


@pytest.mark.slow
def test_results_of_earlier_files_are_named_and_not_kept(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "run_jobs", judged)
    folder, plan = Folder(tmp_path / "a"), replace(plan_of("mine.py:mine"), seeds=3)
    run(folder, plan=plan)
    assert not campaign_report([folder])[1].outdated
    (code / "helper.py").write_text("import deeper\nx = 2\n")
    (said,) = campaign_report([folder])[1].outdated
    assert said == "3 results are of an earlier version of helper.py (mine.py:mine)"
    shown = CliRunner().invoke(app, ["campaign", "report", str(tmp_path / "a")])
    assert said in shown.output
    with pytest.raises(
        ValueError, match=r"3 results are of an earlier version of helper\.py; name another folder"
    ):
        run(folder, plan=plan, resume=True)
    other = Folder(tmp_path / "b")
    assert run(other, plan=plan).done == 3
    for file in (tmp_path / "a" / "results").rglob("*.json"):
        copy = tmp_path / "b" / file.relative_to(tmp_path / "a")
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    (left_out,) = campaign_report([other])[1].outdated
    assert left_out.startswith(
        "3 results are of an earlier version or of another plan, and left out: "
    )


BAD = {
    "crashes": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        "its process was ended by SIGSEGV",
    ),
    "exits": ("import os\nos._exit(0)\n", "its process exited with status 0"),
    "leaves": ("raise SystemExit(3)\n", "SystemExit"),
    "hangs": ("import time\ntime.sleep(1000)\n", "it took longer than 3 s"),
    "raises": ("raise RuntimeError('no library')\n", "RuntimeError: no library"),
    "closes": (
        "import os, time\nos.closerange(3, 64)\ntime.sleep(1000)\n",
        "its process closed its output",
    ),
    "claims": (
        (
            "class A:\n    name = 'a'\n    @property\n    def claims(self): raise RuntimeError('no"
            " claims')\n    def build(self, *a, **k): pass\nx = A()\n"
        ),
        "no claims",
    ),
}


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("name", BAD)
def test_target_that_cannot_be_loaded_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, reason = BAD[name]
    monkeypatch.setattr(targets, "PATIENCE", 3.0)
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(text)
    Path("plan.toml").write_text(
        'implementations = ["bad.py:x"]\ndtypes = ["float32"]\nclauses = ["SHP-1"]\n'
    )
    ended = CliRunner().invoke(app, ["campaign", "run", "plan.toml", "--out", "a"])
    assert ended.exit_code == 2, ended.output
    (line,) = " ".join(ended.output.split("\n     ")).strip().splitlines()
    assert line.startswith("mha: ")
    assert "bad.py" in line
    assert reason in line
    assert not Path("a").exists()


def test_judged_code_does_not_run_in_the_process_of_the_campaign(tmp_path: Path) -> None:
    file = tmp_path / "notes.py"
    file.write_text(
        "import os\nfrom pathlib import Path\nfrom mha.implementations.loop import implementation\n"
        "with Path(__file__).with_name('pids').open('a') as pids: pids.write(f'{os.getpid()}\\n')\n"
    )
    campaign = Campaign.of(plan_of(f"{file}:implementation"))
    assert list(campaign.resolved) == ["loop"]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 1
    assert str(os.getpid()) not in pids


def test_claims_pass_through_the_process(tmp_path: Path) -> None:
    file = tmp_path / "claiming.py"
    file.write_text("from mha.implementations.flex import implementation\n")
    (there,) = Campaign.of(plan_of(f"{file}:implementation")).resolved.values()
    (here,) = resolve("flex")
    assert there.implementation.claims == here.implementation.claims
