"""Numbers that users give are in a range, or refused in a line; no job is blamed for a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.campaign import jobs
from mha.conformance.campaign.folder import Folder
from mha.conformance.campaign.jobs import memory_shortage, run_job
from mha.conformance.campaign.plan import Campaign, Limits, Plan, read_plan
from mha.conformance.campaign.run import RunOptions, Shard
from mha.conformance.cli.bench import BenchOptions
from mha.conformance.ranges import JOBS, SECONDS, Range
from mha.conformance.settings import Settings
from support.campaigns import PLAN, run

HUGE = ["inf", "-inf", "nan", "1e300", "-1"]


@pytest.mark.parametrize(
    "line",
    [
        *map("timeout = {}".format, HUGE),
        *map("memory = {}".format, [*HUGE, "0.0001"]),
        "timeout = 1e-9",
        "timeout = true",
        "seeds = 1000000000000",
        f"seeds = {10**30}",
        "seeds = -3",
        "seeds = 0",
        "seeds = 1.5",
        "seeds = inf",
        "seeds = []",
        "seeds = [-1]",
        f"seeds = [{10**30}]",
        f"seeds = {list(range(20_000))}",
        f"clauses = {['MSK-1'] * 20_000}",
        f"dtypes = {['float32'] * 20_000}",
        f"devices = {['cpu'] * 20_000}",
        f"packages = {['torch'] * 20_000}",
        f"known = {['a'] * 20_000}",
        f"seeds = 1{'0' * 5000}",
        f"memory = {'[' * 5000}",
    ],
)
def test_numbers_and_lists_of_a_plan_are_refused_in_a_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(f"implementations = ['loop']\n{line}\n")
    with pytest.raises(ValueError, match=r"plan\.toml") as error:
        read_plan(file)
    text, name = str(error.value), line.partition(" ")[0]
    assert "\n" not in text
    assert len(text) < 600
    assert name in text or "not valid TOML" in text


def test_huge_list_of_targets_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(f"implementations = {['loop'] * 20_000}\n")
    with pytest.raises(
        ValueError, match="implementations must have at most 10000 entries, but has 20000"
    ):
        read_plan(file)


def test_sensible_numbers_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        "implementations = ['loop']\ntimeout = 0\nmemory = 0.5\nseeds = [0, 9223372036854775807]\n"
    )
    plan = read_plan(file)
    assert (plan.timeout, plan.memory, plan.all_seeds) == (0, 0.5, (0, 2**63 - 1))


def test_jobs_of_a_plan_are_counted_before_they_are_made() -> None:
    plan = replace(PLAN, implementations=("loop", "sdpa"), seeds=600_000, group="all")
    with pytest.raises(
        ValueError,
        match="the plan makes 1200000 jobs, but a campaign has at most 1000000; divide it",
    ):
        Campaign.of(plan)


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "1/0", "1/100001", f"1/{'9' * 5000}", f"{'9' * 5000}/1", "a/b", "1", ""]
)
def test_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--shard takes I/N") as error:
        Shard.parse(text)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("workers", [-1, 4097, 10**30])
def test_number_of_processes_of_a_campaign_is_limited(workers: int) -> None:
    with pytest.raises(
        ValueError, match="--jobs must be a whole number from 1 to 4096, or 0 for one a core"
    ):
        RunOptions(workers=workers)


@pytest.mark.parametrize(
    ("name", "value"), [("rounds", 10**12), ("rounds", 5), ("threads", 10**6), ("threads", -1)]
)
def test_numbers_of_a_benchmark_are_limited(name: str, value: int) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"--{name} must be a whole number from") as error:
        BenchOptions(targets=("loop",), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30, 10**4000])
def test_seed_is_limited(seed: int) -> None:
    with pytest.raises(
        ValueError, match="seed must be a whole number from 0 to 9223372036854775807"
    ):
        Settings.of("quick", seed)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("seed", ["1" * 30, "9" * 5000, "-1", "1.5", "inf"])
def test_seed_of_pytest_is_limited(seed: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--mha-seed={seed}",
        "--mha-impl=loop",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 2
    assert "seed must be a whole number" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e300, True, "3", None])
def test_range_takes_finite_numbers_alone(value: object) -> None:
    with pytest.raises(
        ValueError, match=r"--max-time must be a number from 0\.001 to 31536000 seconds"
    ):
        SECONDS.require("--max-time", value)
    with pytest.raises(
        ValueError, match="--jobs must be a whole number from 1 to 256, or 0 for one a core"
    ):
        JOBS.require("--jobs", value)


def test_range_takes_its_ends_and_its_zero() -> None:
    assert [Range(2, 4).has(value) for value in (0, 1, 2, 4, 5)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert JOBS.has(0)
    assert SECONDS.has(0.0)


def test_memory_that_torch_does_not_fit_into_is_an_error_of_the_plan(tmp_path: Path) -> None:
    for plan in (replace(PLAN, memory=0.1, seeds=1), replace(PLAN, memory=0.01, seeds=1)):
        with pytest.raises(ValueError, match="is too small to import torch, which takes about 0"):
            run(Folder(tmp_path / "a"), plan=plan)
    assert not (tmp_path / "a").exists()
    assert memory_shortage(0.0) == memory_shortage(100.0) == ""


@pytest.mark.parametrize("memory", [0.01, 0.05, 0.1, 0.15])
def test_job_that_cannot_import_torch_is_no_failure(memory: float) -> None:
    (job,) = Campaign.of(
        replace(PLAN, implementations=("sdpa",), clauses=("SHP-1",), seeds=1)
    ).jobs()
    outcome = json.loads(run_job(job, Limits(300, memory)))
    assert "is too small to import torch" in outcome["error"]
    assert not outcome["stops"]
    assert not outcome["verdicts"]


def test_process_that_ends_before_it_judges_is_not_blamed_on_the_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(implementations=("loop",), dtypes=("float32",), clauses=("SHP-1",), profile="quick")
    (job,) = Campaign.of(plan).jobs()
    begun = "import json, sys; token = json.loads(sys.stdin.readline())['token']; "
    for end in ("sys.exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"):
        monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-c", f"{begun}{end}"))
        error = json.loads(run_job(job, Limits(60, 0)))["error"]
        assert error.startswith("its process cannot import torch and the judge: its process ")
        imported = f"""{begun}print(token, '{{"imported": true}}', flush=True); {end}"""
        monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-c", imported))
        (stop,) = json.loads(run_job(job, Limits(60, 0)))["stops"].values()
        assert stop.startswith("before it judged anything, its process ")
        folder = Folder(tmp_path / end[:3])
        run(folder, plan=plan)
        (verdict,) = (folder.get(job.key) or pytest.fail("no result")).report.verdicts
        assert verdict.status == "harness_error"
