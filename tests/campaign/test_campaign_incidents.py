"""Whatever a job's process does, only a due verdict counts, and what it started ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from mha.conformance.campaign import jobs
from mha.conformance.campaign.jobs import run_job
from mha.conformance.campaign.plan import Campaign, Job, Limits
from support.acting import ACTING
from support.campaigns import PLAN, verdict_on

CODE = (
    ACTING
    + """
NOTE = Path(__file__).with_name("note")

def once(act):
    def acts():
        if not NOTE.exists():
            NOTE.touch()
            act()
    return acts

def pipes():
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                yield int(name)
        except OSError:
            pass

def verdict(clause):
    where = {"implementation": "forging", "clause": clause, "level": "MUST"}
    where |= {"dtype": "float32", "device": "cpu"}
    return {"verdicts": [{**where, "status": "pass", "examples": 9}]}

def forge():
    lines = [json.dumps(verdict("SHP-1")), json.dumps(verdict("SHP-5")), json.dumps("done")]
    for pipe in pipes():
        try:
            os.write(pipe, ("\\n".join(lines) + "\\n").encode())
        except OSError:
            pass
    time.sleep(1000)

def shout():
    for pipe in pipes():
        try:
            os.write(pipe, b"\\x00\\xff garbage \\n{]\\n")
        except OSError:
            pass

def flood():
    for pipe in pipes():
        try:
            while True:
                os.write(pipe, b"x" * 65536)
        except OSError:
            pass

def close():
    for pipe in [*pipes()]:
        os.close(pipe)
    time.sleep(1000)

def close_and_go_on():
    for pipe in [*pipes()]:
        os.close(pipe)

def fork():
    os.fork()

def leave_children():
    script = "import time; time.sleep(1000)"
    for options in ({}, {"start_new_session": True}):
        child = subprocess.Popen([sys.executable, "-c", script], env={}, **options)
        with NOTE.with_name("children").open("a") as file:
            file.write(f"{child.pid}\\n")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with NOTE.with_name("children").open("a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(1000)
        os._exit(0)
    time.sleep(0.3)

def leave_children_and_die():
    leave_children()
    os.kill(os.getpid(), signal.SIGSEGV)

def leave_children_and_hang():
    leave_children()
    time.sleep(1000)

forging, shouting = Bad("forging", once(forge)), Bad("shouting", once(shout))
flooding = Bad("flooding", once(flood))
closing, deaf = Bad("closing", once(close)), Bad("deaf", once(close_and_go_on))
forking = Bad("forking", once(fork))
leaving, dying = Bad("leaving", once(leave_children)), Bad("dying", once(leave_children_and_die))
hanging = Bad("hanging", once(leave_children_and_hang))
"""
)


def job_of(folder: Path, name: str) -> Job:
    (folder / "bad_judged.py").write_text(CODE)
    target = f"{folder}/bad_judged.py:{name}"
    plan = replace(
        PLAN, implementations=(target,), clauses=("SHP-1", "SHP-5"), seeds=1, group="all"
    )
    (job,) = Campaign.of(plan).jobs()
    return job


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("forging", "wrote to the pipe of its verdicts what is not one"),
        ("shouting", "wrote to the pipe of its verdicts what is not one"),
        ("flooding", "wrote to the pipe of its verdicts what is not one"),
        ("closing", "its process closed its output"),
        ("deaf", "its process closed its output"),
    ],
)
def test_what_judged_code_does_to_the_pipe_is_a_crash_of_that_clause_alone(
    tmp_path: Path, name: str, reason: str
) -> None:
    begun = monotonic()
    outcome = json.loads(run_job(job_of(tmp_path, name), Limits(300, 8)))
    assert monotonic() - begun < 120
    assert list(outcome["stops"]) == ["SHP-1"]
    assert reason in outcome["stops"]["SHP-1"]
    assert [(verdict["clause"], verdict["status"]) for verdict in outcome["verdicts"]] == [
        ("SHP-5", "pass")
    ]


@pytest.mark.slow
def test_fork_that_goes_on_says_nothing(tmp_path: Path) -> None:
    outcome = json.loads(run_job(job_of(tmp_path, "forking"), Limits(300, 8)))
    assert [verdict["clause"] for verdict in outcome["verdicts"]] == ["SHP-1", "SHP-5"]
    assert not outcome["stops"]


@pytest.mark.slow
@pytest.mark.mostly_slow(1)
@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
@pytest.mark.parametrize("name", ["leaving", "dying", "hanging"])
def test_what_a_job_started_ends_with_it(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, name)
    run_job(replace(job, clauses=("SHP-1",)), Limits(15 if name == "hanging" else 300, 8))
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 3
    deadline = monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children) and monotonic() < deadline:
        sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def saying(*messages: object, token: str = "task['token']") -> tuple[str, ...]:
    """Return a command that says messages as the process of a job does, then that it is done."""
    code = (
        "import json, sys\n"
        "task = json.loads(sys.stdin.readline())\n"
        f"for message in json.loads({json.dumps(json.dumps(messages))}):\n"
        f"    print({token}, json.dumps(message), flush=True)\n"
        f"print({token}, json.dumps('done'), flush=True)\n"
    )
    return sys.executable, "-c", code


def forged(job: Job, clause: str, **changes: Any) -> dict[str, Any]:
    return {"verdicts": [asdict(verdict_on(job, clause)) | changes]}


BEGIN: tuple[dict[str, Any], ...] = ({"imported": True}, {"torch_changes": []})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("SHP-5", {})], "gave a verdict on 'SHP-5' where that on SHP-1 was due"),
        ([("SHP-1", {}), ("SHP-1", {})], "gave a verdict on 'SHP-1' where that on SHP-5 was due"),
        ([("SHP-1", {}), ("SHP-5", {}), ("SHP-5", {})], ""),
        ([("MSK-1", {})], "gave a verdict on 'MSK-1'"),
        (
            [("SHP-1", {"implementation": "sdpa"})],
            "for the implementation 'sdpa' instead of 'loop'",
        ),
        ([("SHP-1", {"dtype": "float64"})], "for the dtype 'float64' instead of 'float32'"),
        ([("SHP-1", {"device": "cuda"})], "for the device 'cuda' instead of 'cpu'"),
        ([("SHP-1", {"status": "perfect"})], "gave what is not a verdict: verdicts.0.status"),
        ([("SHP-1", {"examples": "many"})], "gave what is not a verdict: verdicts.0.examples"),
        ([], "gave no verdict"),
    ],
)
def test_only_a_verdict_that_is_due_is_taken(
    monkeypatch: pytest.MonkeyPatch, messages: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    plan = replace(
        PLAN, implementations=("loop",), clauses=("SHP-1", "SHP-5"), seeds=1, group="all"
    )
    (job,) = Campaign.of(plan).jobs()
    said = [forged(job, clause, **changes) for clause, changes in messages]
    monkeypatch.setattr(jobs, "COMMAND", saying(*BEGIN, *said))
    outcome = json.loads(run_job(job, Limits(60, 0)))
    if reason:
        assert any(reason in stop for stop in outcome["stops"].values()), outcome
    known = [verdict["clause"] for verdict in outcome["verdicts"]] + list(outcome["stops"])
    assert sorted(known) == ["SHP-1", "SHP-5"]
    assert {verdict["implementation"] for verdict in outcome["verdicts"]} <= {"loop"}


@pytest.mark.parametrize(
    "said", [None, 3, ["SHP-1"], {"verdicts": 3}, {"stops": ["SHP-1"]}, {"stops": {"X": "y"}}]
)
def test_messages_of_no_known_form_are_refused(
    monkeypatch: pytest.MonkeyPatch, said: object
) -> None:
    plan = replace(PLAN, implementations=("loop",), clauses=("SHP-1",), seeds=1)
    (job,) = Campaign.of(plan).jobs()
    monkeypatch.setattr(jobs, "COMMAND", saying(*BEGIN, said))
    outcome = json.loads(run_job(job, Limits(60, 0)))
    assert list(outcome["stops"]) == ["SHP-1"]
    assert not outcome["verdicts"]


def test_messages_without_the_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, implementations=("loop",), clauses=("SHP-1",), seeds=1)
    (job,) = Campaign.of(plan).jobs()
    monkeypatch.setattr(jobs, "COMMAND", saying(*BEGIN, forged(job, "SHP-1"), token="'0' * 32"))
    outcome = json.loads(run_job(job, Limits(60, 0)))
    assert not outcome["verdicts"]
    assert outcome["error"] or list(outcome["stops"]) == ["SHP-1"]


@pytest.mark.slow
def test_killed_command_leaves_nothing_that_has_left_its_group(tmp_path: Path) -> None:
    job_of(tmp_path, "hanging")
    (tmp_path / "plan.toml").write_text(
        'implementations = ["bad_judged.py:hanging"]\ndtypes = ["float32"]\nclauses ='
        ' ["SHP-1"]\nprofile = "quick"\n'
    )
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
    children = tmp_path / "children"
    with subprocess.Popen(command, cwd=tmp_path) as driver:
        deadline = monotonic() + 120
        while (
            not (children.exists() and len(children.read_text().split()) == 3)
            and monotonic() < deadline
        ):
            sleep(0.1)
        driver.kill()
    for child in map(int, children.read_text().split()):
        while Path(f"/proc/{child}").exists() and monotonic() < deadline:
            sleep(0.1)
        assert not os.path.exists(f"/proc/{child}")
