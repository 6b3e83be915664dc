"""Campaigns: a run that ends early loses nothing and counts nothing twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from typer.testing import CliRunner

from mha.conformance.campaign import jobs, local
from mha.conformance.campaign.folder import Folder
from mha.conformance.campaign.jobs import Outcome, run_job, tried_again
from mha.conformance.campaign.plan import Campaign, Job, Limits, read_plan
from mha.conformance.campaign.report import campaign_report, rows
from mha.conformance.campaign.run import Shard
from mha.conformance.cli.app import app
from mha.conformance.reports.merge import merge
from mha.conformance.results import Report, Verdict
from support.campaigns import KILLING, PLAN, report_of, run, verdict_on

RARE = """
from mha.implementations.loop import implementation as loop
from mha.spec import Output

class Rare:
    name, claims = "rare", loop.claims

    def build(self, config, weights, *, dtype, device):
        attention = loop.build(config, weights, dtype=dtype, device=device)
        attention.register_forward_hook(lambda module, inputs, output: cut(inputs[0], output))
        return attention

def cut(query, output):
    return Output(output.output[:, :-1], output.weights) if query.shape[1] == 77 else output

rare = Rare()
"""

# The process of a job, as if a kernel had failed on its GPU once there is a file with its number.
LOSING = """
import os
from pathlib import Path
from mha.conformance.harness import isolation

def synchronize():
    flag = Path({flag!r})
    if flag.exists() and flag.read_text() == str(os.getpid()):
        raise RuntimeError("CUDA error: misaligned address")

isolation.GPU.is_initialized, isolation.GPU.synchronize = lambda: True, synchronize
from mha.conformance.campaign.jobs import work
work()
"""


def judged(job: Job, *_: object) -> bytes:
    return Outcome([asdict(verdict_on(job, clause)) for clause in job.clauses]).to_json()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Judge nothing; return the list of the jobs that were run."""
    ran: list[Job] = []

    def run_jobs(jobs: Iterable[Job], limits: Limits, workers: int) -> Iterator[tuple[Job, bytes]]:
        for job in jobs:
            ran.append(job)
            yield job, judged(job)

    monkeypatch.setattr(local, "run_jobs", run_jobs)
    return ran


def test_interrupted_and_divided_campaigns_give_the_report_of_a_whole_one(
    tmp_path: Path, done: list[Job]
) -> None:
    whole, halves, *parts = (Folder(tmp_path / name) for name in "abcde")
    run(whole)
    keys = {job.key for job in done}
    assert len(keys) == len(done) == 12
    done.clear()
    run(halves, most=5)
    assert campaign_report([halves])[0].incomplete
    with pytest.raises(ValueError, match="has results of 5 of these 12 jobs; add --resume"):
        run(halves)
    assert run(halves, resume=True).earlier == 5
    assert len(done) == 12
    assert {job.key for job in done} == keys
    done.clear()
    for number, part in enumerate((*parts, halves), 1):
        run(part, shard=Shard(number, 4), resume=True)
    last = {key for key in keys if key in Shard(4, 4)}
    assert sorted(job.key for job in done) == sorted(keys - last)
    run(parts[0], shard=Shard(4, 4), resume=True)
    expected = report_of(whole)
    assert not expected.incomplete
    assert report_of(halves) == report_of(*parts) == expected
    assert {verdict.seeds for verdict in expected.verdicts if verdict.status == "fail"} == {(2,)}
    assert sum(verdict.examples for verdict in expected.verdicts) == 2 * 3 * (10 + 11 + 12)


@pytest.mark.parametrize("damage", ["cut", "changed", "of another job", "no text", "empty"])
def test_corrupt_result_is_reported_and_run_again(
    tmp_path: Path, done: list[Job], damage: str
) -> None:
    folder = Folder(tmp_path / "a")
    run(folder)
    expected, one, other = report_of(folder), done[0], done[1]
    place, second = (
        tmp_path / "a" / "results" / job.key[:2] / f"{job.key}.json" for job in (one, other)
    )
    content = place.read_bytes()
    damaged = {
        "cut": content[:-20],
        "changed": content.replace(b'"pass"', b'"fail"'),
        "no text": b"\xff",
        "empty": b"",
    }
    place.write_bytes(damaged.get(damage, second.read_bytes()))
    report, jobs = campaign_report([folder])
    assert (report.incomplete, jobs.done, len(jobs.corrupt)) == (True, 11, 1)
    done.clear()
    state = run(folder, resume=True)
    assert (done, len(state.corrupt)) == ([one], 1)
    assert report_of(folder) == expected


def test_full_disk_stops_the_run_and_leaves_whole_results(
    tmp_path: Path, done: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    run(folder, most=3)
    with monkeypatch.context() as full:
        full.setattr(
            os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
        )
        with pytest.raises(
            ValueError,
            match="cannot be written: No space left; earlier ones are kept: add --resume",
        ):
            run(folder, resume=True)
    assert not list(tmp_path.rglob("*.part"))
    assert run(folder, resume=True).earlier == 3
    run(whole)
    assert report_of(folder) == report_of(whole)


def test_job_that_is_judged_differently_twice_is_a_fault_of_the_judge(
    tmp_path: Path, done: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Folder(tmp_path / "a"), Folder(tmp_path / "b")
    run(one)
    monkeypatch.setattr(
        sys.modules[__name__], "verdict_on", lambda *given, on=verdict_on: on(*given, margin=0.5)
    )
    run(other, most=1)
    report, jobs = campaign_report([one, other])
    assert [(verdict.status, verdict.seeds) for verdict in report.verdicts[:2]] == [
        ("harness_error", (0,))
    ] * 2
    assert report.exit_status == 2
    assert len(jobs.flaky) == 2


def test_merging_keeps_the_worst_verdict_and_its_smallest_case_in_any_order() -> None:
    where: dict[str, Any] = {
        "implementation": "x",
        "clause": "MSK-1",
        "level": "MUST",
        "dtype": "float32",
    }
    found = {
        0: ("pass", None),
        1: ("fail", "Case(L=23)"),
        2: ("fail", "Case(L=2)"),
        4: ("fail", "Case(S=3)"),
    }
    given = [
        Report(
            verdicts=(
                Verdict(
                    **where, device="cpu", status=status, case=case, examples=10, margin=seed / 10
                ),
            ),
            profile="quick",
            seed=seed,
            versions={},
        )
        for seed, (status, case) in found.items()
    ]
    merged = merge(given, across_seeds=True)
    (verdict,) = merged.verdicts
    assert (verdict.case, verdict.seeds, verdict.examples, verdict.margin) == (
        "Case(L=2)",
        (2, 1, 4),
        40,
        0.4,
    )
    assert merged.seeds == (0, 1, 2, 4)
    assert Report.from_json(merged.to_json()) == merged
    assert merge(given[::-1], across_seeds=True) == merged
    halves = [merge(half, across_seeds=True) for half in (given[:2], given[2:])]
    assert merge(halves, across_seeds=True) == merged
    assert [row[5] for row in rows(merged)] == ["3 of 4, first 2"]
    with pytest.raises(
        ValueError, match="not shards of one run: seed is 0 in one and 1 in another"
    ):
        merge(given)


def test_waiver_that_one_seed_needs_is_not_stale() -> None:
    where: dict[str, Any] = {
        "implementation": "x",
        "clause": "MSK-1",
        "level": "MUST",
        "dtype": "float32",
    }
    given = [
        Report(
            verdicts=(Verdict(**where, device="cpu", status=status),),
            profile="quick",
            seed=seed,
            versions={},
        )
        for seed, status in enumerate(("stale_waiver", "waived", "pass"))
    ]
    assert [verdict.status for verdict in merge(given[:1], across_seeds=True).verdicts] == [
        "stale_waiver"
    ]
    assert [verdict.status for verdict in merge(given, across_seeds=True).verdicts] == ["waived"]


@pytest.mark.slow
def test_crash_timeout_and_lack_of_memory_are_results(tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(KILLING)
    names = [f"{tmp_path}/killing.py:{name}" for name in ("dying", "hungry")]
    plan = replace(
        PLAN,
        implementations=tuple(names),
        clauses=("SHP-1", "SHP-5"),
        seeds=1,
        group="all",
        memory=4.0,
    )
    folder = Folder(tmp_path / "a")
    state = run(folder, plan=plan, workers=1)
    assert dict(state.stops) == {"its process was ended by SIGSEGV": 1, "memory": 2}
    statuses = {
        (verdict.implementation, verdict.clause): verdict.status
        for verdict in report_of(folder).verdicts
    }
    assert statuses == {
        ("dying", "SHP-1"): "fail",
        ("dying", "SHP-5"): "pass",
        ("hungry", "SHP-1"): "harness_error",
        ("hungry", "SHP-5"): "harness_error",
    }
    only = replace(plan, implementations=(names[0],), timeout=0.1)
    late = Folder(tmp_path / "b")
    run(late, plan=only)
    assert {verdict.message for verdict in report_of(late).verdicts} == {
        "judging did not end: it took longer than the 0.1 s of the plan"
    }
    assert run(late, plan=replace(only, timeout=600), retry=True).done == 1
    report, jobs = campaign_report([late])
    assert report.conforms
    assert jobs.retried == {"timeout": 2}


@pytest.mark.slow
def test_clause_that_ends_the_use_of_the_gpu_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = LOSING.format(flag=str(tmp_path / "killing.flag"))
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-P", "-c", code))
    (tmp_path / "killing.py").write_text(KILLING)
    names = (f"{tmp_path}/killing.py:losing",)
    plan = replace(PLAN, implementations=names, clauses=("SHP-1", "SHP-5"), seeds=1, group="all")
    (job,) = Campaign.of(plan).jobs()
    outcome = json.loads(run_job(job, plan.limits))
    assert not outcome["stops"]
    lost, passed = outcome["verdicts"]
    assert (lost["clause"], lost["status"], passed["status"]) == ("SHP-1", "fail", "pass")
    assert "its process can no longer use the GPU" in lost["message"]


def test_process_that_is_killed_from_outside_is_not_blamed_and_run_again(
    tmp_path: Path, done: list[Job]
) -> None:
    plan = replace(PLAN, implementations=("loop",), clauses=("SHP-1", "SHP-5"), seeds=1)
    job = next(Campaign.of(plan).jobs())
    ended = run_job(job, plan.limits, started=lambda process: process.kill())
    assert json.loads(ended)["stops"] == {"SHP-1": "killed", "SHP-5": "killed"}
    folder = Folder(tmp_path / "a")
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(local, "run_jobs", lambda jobs, *_: ((job, ended) for job in jobs))
        assert run(folder, plan=plan).stops == {"killed": 2}
    assert {verdict.status for verdict in report_of(folder).verdicts} == {"harness_error"}
    assert run(folder, plan=plan, resume=True).done == 0
    assert run(folder, plan=plan, retry=True).done == 1
    assert report_of(folder).conforms


def test_killed_run_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    killing, flag = tmp_path / "killing.py", tmp_path / "killing.flag"
    killing.write_text(KILLING)
    (tmp_path / "plan.toml").write_text(
        'implementations = ["killing.py:slow"]\ndtypes = ["float32"]\nclauses = ["SHP-1"]\nprofile'
        ' = "quick"\n'
    )
    flag.touch()
    command = [
        sys.executable,
        "-m",
        "mha.conformance",
        "campaign",
        "run",
        "plan.toml",
        "--out",
        "a",
    ]
    with subprocess.Popen(command, cwd=tmp_path) as driver:
        deadline = monotonic() + 120
        while not flag.read_text() and driver.poll() is None and monotonic() < deadline:
            sleep(0.1)
        driver.kill()
    job = int(flag.read_text())
    while Path(f"/proc/{job}").exists() and monotonic() < deadline:
        sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(job, signal.SIG_DFL)
    assert not list((tmp_path / "a").rglob("results"))


def test_known_failures_are_tried_first_and_count(tmp_path: Path) -> None:
    (tmp_path / "rare.py").write_text(RARE)
    plan = replace(
        PLAN,
        implementations=("loop", f"{tmp_path}/rare.py:rare"),
        clauses=("SHP-1", "MSK-1"),
        seeds=2,
    )
    failed = Verdict(
        implementation="rare",
        clause="SHP-1",
        level="MUST",
        dtype="float32",
        device="cpu",
        status="fail",
        violated="shapes",
        case="Case(L=77)",
    )
    file = tmp_path / "failures.json"
    file.write_text(Report(verdicts=(failed,), profile="quick", seed=0, versions={}).to_json())
    assert not any(job.cases for job in Campaign.of(plan).jobs())
    campaign = Campaign.of(replace(plan, known=(str(file),)))
    first, *others = campaign.jobs()
    assert (first.target, first.clauses, first.seed, len(first.cases)) == (
        plan.implementations[1],
        ("SHP-1",),
        0,
        1,
    )
    assert not any(job.cases for job in others)
    resolved = campaign.resolved["rare"]
    passed = replace(failed, status="pass", case=None, examples=10)
    assert tried_again(resolved, first, passed).case == "Case(L=77)"
    fixed = tried_again(campaign.resolved["loop"], first, passed)
    assert (fixed.status, fixed.examples) == ("pass", 11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("implementations = []", "implementations is empty"),
        ("seed = 3", "unknown key 'seed'; did you mean seeds?"),
        ("dtypes = ['float32']", "implementations: "),
        ("implementations = ['loop']\nseeds = ['x']", "seeds"),
        ("implementations = ['loop']\nseeds = 0", "seeds must be how many there are"),
        ("implementations = ['loop']\ntimeout = -1", "timeout and memory must not be negative"),
    ],
)
def test_plan_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_plan(file)
    assert str(error.value).startswith(str(file))


def test_key_holds_all_that_the_verdicts_depend_on(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text(KILLING)
    campaign = Campaign.of(
        replace(PLAN, implementations=(f"{place}:dying",), seeds=(4,), packages=("hypothesis",))
    )
    job = next(campaign.jobs())
    assert {*job.versions} == {
        "mha-conformance",
        "torch",
        "python",
        "hypothesis",
        "contract",
        "package",
    }
    assert job.versions["package"].startswith("mine.py ")
    others: list[dict[str, Any]] = [
        {"seed": 5},
        {"dtype": "float64"},
        {"versions": job.versions | {"torch": "1.0"}},
    ]
    assert len({job.key, *(replace(job, **change).key for change in others)}) == 4


def test_command_runs_reports_and_compares(
    tmp_path: Path, done: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(
        'implementations = ["loop"]\ndtypes = ["float32"]\nseeds = 3\nclauses = ["SHP-5"]\n'
    )
    for name in "ab":
        ended = CliRunner().invoke(app, ["campaign", "run", "plan.toml", "--out", name])
        assert ended.exit_code == 0, ended.output
        assert "3 of 3 jobs are done" in ended.output
        assert ended.output.count("fail ") == 1
    shown = CliRunner().invoke(
        app, ["campaign", "report", "a", "--to", "r.html", "--to", "r.md", "--to", "r.json"]
    )
    assert shown.exit_code == 1
    assert "seeds: 1 of 3, first 2" in shown.output
    assert (
        "| SHP-5 | fail | wrong | loop | float32 | 1 of 3, first 2 | Case(L=2) |"
        in Path("r.md").read_text()
    )
    assert Report.from_json(Path("r.json").read_text()).seeds == (0, 1, 2)
    assert "3 seeds from 0 to 2" in Path("r.html").read_text()
    compared = CliRunner().invoke(app, ["campaign", "report", "a", "--before", "b"])
    assert compared.exit_code == 0
    assert "still failing: 1" in compared.output
    (failing,) = Report.from_json(Path("a/failures.json").read_text()).verdicts
    assert failing.clause == "SHP-5"
