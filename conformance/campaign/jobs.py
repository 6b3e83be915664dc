"""One job: judged by a process of its own, in its own process group, within limits of time and memory.

The process gets the job through standard input and prints a verdict on each clause as a line of JSON. Where it ends
early, the clause that it was judging gets no verdict but the reason, and another process judges the clauses after it.
So does one after a clause that ended the use of the GPU.
Nothing here imports torch except the process itself, so that many jobs can be looked after at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from subprocess import PIPE
from tempfile import TemporaryFile
from threading import Thread, Timer
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha.conformance.campaign.plan import Job, Limits
    from mha.conformance.results import Verdict
    from mha.implementations import Resolved

Process = subprocess.Popen[bytes]
COMMAND = (sys.executable, "-P", "-c", "from mha.conformance.campaign.jobs import work; work()")
# What the allocators of Python, C++ and torch say; the last on GPUs.
OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|can't allocate memory|Cannot allocate memory|out of memory", re.I)
# Why a process ended early where the limits, or the memory of the machine, may be to blame.
TIMEOUT, MEMORY, KILLED = "timeout", "memory", "killed"


@dataclass
class Outcome:
    """What the processes of a job printed: verdicts, as `Verdict` takes them, and why others are missing, by clause.

    error: why the job cannot be run here at all, as where another version of torch is installed.
    """

    verdicts: list[dict[str, Any]] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)
    torch_changes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def known(self) -> set[str]:
        """The clauses about which something is known."""
        return {verdict["clause"] for verdict in self.verdicts} | set(self.stops)

    def to_json(self) -> bytes:
        """Return what an engine yields."""
        return json.dumps(asdict(self)).encode()


def run_job(job: Job, limits: Limits, started: Callable[[Process], object] = id) -> bytes:
    """Run a job, and return its `Outcome` as JSON; started: is given each process."""
    outcome = Outcome()
    while left := tuple(clause for clause in job.clauses if clause not in outcome.known):
        is_ready, stop = _run_process(replace(job, clauses=left), limits, outcome, started)
        if outcome.error:
            break
        missing = [clause for clause in left if clause not in outcome.known]
        if stop:
            outcome.stops |= dict.fromkeys(missing[:1] if is_ready else missing, stop)
    return outcome.to_json()


def _run_process(job: Job, limits: Limits, outcome: Outcome, started: Callable[[Process], object]) -> tuple[bool, str]:
    """Add what a process prints; return whether it came as far as judging, and why it ended if that was too early.

    The reason is empty where it has a verdict, but no GPU any more.
    """
    is_ready, lost, late = False, False, []
    with TemporaryFile() as errors:
        # Jobs share the cores: threads of torch would only wait for one another.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        process = subprocess.Popen(
            COMMAND, stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True, env=environment
        )

        def expire() -> None:
            late.append(True)
            kill_group(process)

        timer = Timer(limits.seconds, expire)
        if limits.seconds:
            timer.start()
        try:
            started(process)
            for message in _messages(process, {"job": asdict(job), "memory": limits.memory}):
                is_ready, lost = True, message.get("lost", False)
                outcome.error = outcome.error or message.get("error", "")
                outcome.torch_changes = message.get("torch_changes", outcome.torch_changes)
                outcome.stops |= message.get("stops", {})
                outcome.verdicts += message.get("verdicts", [])
        finally:
            timer.cancel()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0 if late else 2)
            kill_group(process)
            process.wait()
        if lost:
            return is_ready, ""
        return is_ready, TIMEOUT if late else _reason(process.returncode, errors)


def _messages(process: Process, task: object) -> Iterator[dict[str, Any]]:
    """Send a task to a process, and yield what it prints until it says that it is done, or dies."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
    with process.stdout:
        for line in process.stdout:
            if not line.endswith(b"\n"):
                break
            message = json.loads(line)
            if message == "done":
                break
            yield message
    with suppress(OSError):
        process.stdin.close()


def kill_group(process: Process) -> None:
    """Kill a process and all that it started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _reason(status: int, errors: IO[bytes]) -> str:
    """Return why a process ended early; its last words say more where it exited by itself."""
    if status < 0:
        with suppress(ValueError):  # a number without a name
            name = signal.Signals(-status).name
            return KILLED if name == "SIGKILL" else f"its process was ended by {name}"
        return f"its process was ended by signal {-status}"
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
    last = (errors.read().decode(errors="replace").strip() or " ").splitlines()[-1]
    if OUT_OF_MEMORY.search(last):
        return MEMORY
    return f"its process exited with status {status}: {last:.300}".rstrip(": ")


def work() -> None:
    """Be the process of a job."""
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    task = json.loads(tasks.readline())
    Thread(target=_die_at_end, args=(tasks,), daemon=True).start()
    _limit_memory(task["memory"])

    def say(message: object) -> None:
        answers.write(json.dumps(message, ensure_ascii=True) + "\n")
        answers.flush()

    for message in _judged(task["job"]):
        say(message)
    say("done")


def _die_at_end(tasks: IO[bytes]) -> None:
    """End the process, and all that it started, when whoever gave it its task is gone."""
    tasks.read()
    os.killpg(0, signal.SIGKILL)


def _limit_memory(gibibytes: float) -> None:
    """Limit what the process may allocate; address space that is only reserved, as CUDA does, does not count."""
    if gibibytes and sys.platform == "linux":
        import resource

        size = int(gibibytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _judged(data: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Yield, for each clause of a job, its verdict or why there is none."""
    from mha.conformance.campaign.plan import Job
    from mha.conformance.engine.judge import judge
    from mha.conformance.harness.isolation import gpu_is_lost
    from mha.implementations import resolve
    from mha.implementations.pristine import torch_changes

    tuples = {name: tuple(data[name]) for name in ("clauses", "require", "waivers")}
    job = Job(**data | tuples | {"cases": tuple(map(tuple, data["cases"]))})
    if difference := _difference(job):
        yield {"error": difference}
        return
    try:
        (resolved,) = resolve(job.target)
    except ValueError as error:
        yield {"error": str(error)}
        return
    yield {"torch_changes": list(torch_changes())}
    for clause in job.clauses:
        verdict = tried_again(resolved, job, judge(resolved, clause, job.dtype, job.device, job.settings))
        if verdict.status in ("fail", "refused", "harness_error") and OUT_OF_MEMORY.search(verdict.message):
            yield {"stops": {clause: MEMORY}}
        else:
            yield {"verdicts": [asdict(verdict)]}
        if gpu_is_lost():
            yield {"lost": True}
            return


def tried_again(resolved: Resolved, job: Job, verdict: Verdict) -> Verdict:
    """Return the verdict on a clause; one that is a pass fails if a known case still does, and no waiver covers it."""
    from mha.conformance.cases.parsing import read_case
    from mha.conformance.engine.replay import replay_case
    from mha.conformance.waivers import waivers_for

    implementation, where = resolved.implementation, (verdict.clause, job.dtype, job.device)
    waivers = waivers_for(job.settings.waivers_of(implementation), implementation.name, *where)
    for _, violated, text in (known for known in job.cases if known[0] == verdict.clause and verdict.status == "pass"):
        case = replace(read_case(text), dtype=job.dtype, device=job.device)
        outcome, message = replay_case(implementation, verdict.clause, case, violated=violated)
        if outcome == "FAILS" and not any(waiver.covers(case, message) for waiver in waivers):
            found = f"{message} (a case that failed before)"
            return replace(verdict, status="fail", case=text, violated=violated, message=found)
        verdict = replace(verdict, examples=verdict.examples + (outcome != "INAPPLICABLE"))
    return verdict


def _difference(job: Job) -> str:
    """Return which version is not that of the job, as on another node; empty if all are."""
    from mha.conformance.campaign.plan import judge_versions, target_version
    from mha.conformance.results import versions

    packages = set(job.versions) - {*versions(), "contract", "package"}
    own = target_version(job.target)
    here = judge_versions(job.versions["contract"], packages) | ({"package": own} if own else {})
    different = [name for name, number in job.versions.items() if here.get(name) != number]
    return "; ".join(f"{name} is {here.get(name)} where the job runs, not {job.versions[name]}" for name in different)
