"""One job: judged by processes of its own, within limits of time and memory.

A process prints a verdict on each clause. Where it ends early, the clause that it was judging gets
no verdict but the reason, and another process judges the clauses after it. So does one after a
clause that ended the use of the GPU. Nothing here imports torch except the process itself, so that
many jobs can be looked after at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from mha.conformance.campaign.supervised import (
    KILLED,
    MEMORY,
    OUT_OF_MEMORY,
    TIMEOUT,
    Process,
    Supervised,
    serve,
)
from mha.conformance.results import Verdict

if TYPE_CHECKING:
    from mha.conformance.campaign.plan import Job, Limits
    from mha.implementations import Resolved

COMMAND = (sys.executable, "-P", "-c", "from mha.conformance.campaign.jobs import work; work()")
# What the reason begins with where a process had imported torch, but had judged nothing.
BEFORE = "before it judged anything, "
# What a process imports before it sees any code to be judged; and the memory that this takes.
IMPORTS = "import mha.conformance.engine.judge"
SIZE = "import re; print(re.search(r'VmData:\\s*(\\d+)', open('/proc/self/status').read())[1])"


@dataclass
class Outcome:
    """What the processes of a job printed: verdicts, as `Verdict` takes them, and why others are
    missing, by clause.

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


@dataclass(frozen=True)
class Said:
    """A message of the process of a job.

    imported: it has imported torch and the judge. torch_changes: it has loaded what it judges, and
    begins. stops: why there is no verdict on a clause. lost: it can no longer use its GPU. error:
    as in `Outcome`.
    """

    imported: bool = False
    torch_changes: list[str] | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)
    lost: bool = False
    error: str = ""


class Refused(Exception):
    """A process said what was not to be said; the message says why, as the reason of a stop."""


def run_job(job: Job, limits: Limits, started: Callable[[Process], object] = id) -> bytes:
    """Run a job, and return its `Outcome` as JSON; started: is given each process."""
    outcome, left = Outcome(), list(job.clauses)
    while left and not outcome.error:
        run = _Run(replace(job, clauses=tuple(left)), outcome)
        run.listen(limits, started)
        missing = [clause for clause in left if clause not in outcome.known]
        if run.stop and not outcome.error:
            _note(run, missing, limits, outcome)
        elif len(missing) == len(left):
            outcome.stops[left[0]] = "its process gave no verdict"
        left = [clause for clause in left if clause not in outcome.known]
    return outcome.to_json()


def _note(run: _Run, missing: Sequence[str], limits: Limits, outcome: Outcome) -> None:
    """Note why a process ended too early."""
    if run.is_ready:
        outcome.stops |= dict.fromkeys(missing[:1], run.stop)
    elif run.stop in (TIMEOUT, KILLED) or (run.has_imported and run.stop == MEMORY):
        outcome.stops |= dict.fromkeys(missing, run.stop)
    elif run.has_imported:
        outcome.stops |= dict.fromkeys(missing, BEFORE + run.stop)
    else:
        shortage = memory_shortage(limits.memory)
        outcome.error = shortage or f"its process cannot import torch and the judge: {run.stop}"


class _Run:
    """What one process says about the clauses of a job.

    has_imported: whether it has imported torch and the judge. is_ready: whether it came as far as
    judging. stop: why it ended, if that was too early; "" also where it has a verdict, but no GPU
    any more.
    """

    def __init__(self, job: Job, outcome: Outcome) -> None:
        self.job, self.outcome = job, outcome
        self.due = list(job.clauses)
        self.has_imported = self.is_ready = False
        self.stop = ""

    def listen(self, limits: Limits, started: Callable[[Process], object]) -> None:
        """Start the process, and take what it says until it ends."""
        process = Supervised(COMMAND, limits.seconds)
        task = {"job": asdict(self.job), "memory": limits.memory}
        is_lost = False
        try:
            started(process.process)
            for message in process.messages(task):
                is_lost = self._take(message)
            self.stop = "" if is_lost else process.stop
        except Refused as error:
            self.stop = str(error)
        finally:
            process.end()

    def _take(self, message: object) -> bool:
        """Take a message; return whether it says that the GPU is lost. Raises Refused."""
        try:
            said: Said = _said().validate_json(json.dumps(message), strict=True)
        except ValidationError as error:
            raise Refused(f"its process gave what is not a verdict: {_first(error)}") from None
        self.has_imported = True
        self.outcome.error = self.outcome.error or said.error
        if said.torch_changes is not None:
            self.is_ready = True
            self.outcome.torch_changes = said.torch_changes
        for clause, reason in said.stops.items():
            self._expect(clause)
            self.outcome.stops[clause] = reason
        for verdict in said.verdicts:
            self._expect(verdict.clause)
            self._validate(verdict)
            self.outcome.verdicts.append(asdict(verdict))
        return said.lost

    def _expect(self, clause: str) -> None:
        """Raise Refused unless a clause is the next one."""
        if not self.due or clause != self.due[0]:
            due = f"that on {self.due[0]}" if self.due else "none"
            raise Refused(f"its process gave a verdict on {clause!r:.40} where {due} was due")
        self.due.pop(0)

    def _validate(self, verdict: Verdict) -> None:
        """Raise Refused unless a verdict is on what was asked."""
        for what in ("implementation", "dtype", "device"):
            given, due = getattr(verdict, what), getattr(self.job, what)
            if due and given != due:
                other = f"{given!r:.80} instead of {due!r}"
                raise Refused(f"its process gave a verdict for the {what} {other}")


def verdicts_of(data: object) -> list[Verdict]:
    """Return verdicts for their fields; raises ValueError, in one line, for anything else."""
    try:
        verdicts: list[Verdict] = _adapter().validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ValueError(f"what a job has returned are not verdicts: {_first(error)}") from None
    return verdicts


def _first(error: ValidationError) -> str:
    """Return in a line what was not expected first."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


@cache
def _adapter() -> Any:
    return TypeAdapter(list[Verdict])


@cache
def _said() -> Any:
    return TypeAdapter(Said)


def memory_shortage(gibibytes: float) -> str:
    """Return why a process with so much memory cannot start, as far as that is known, or ""."""
    if not gibibytes or sys.platform != "linux":
        return ""
    needed = _memory_of_imports()
    if gibibytes >= needed:
        return ""
    least = f"which takes about {needed:.2f} GiB"
    return f"memory = {gibibytes:g} GiB is too small to import torch, {least}"


@cache
def _memory_of_imports() -> float:
    """Return the memory that the imports of a job take, in GiB; 0 where they fail."""
    command = [sys.executable, "-P", "-c", f"{IMPORTS}; {SIZE}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    is_number = ended.returncode == 0 and ended.stdout.strip().isdecimal()
    return int(ended.stdout) / 2**20 if is_number else 0.0


def work() -> None:
    """Be the process of a job."""
    serve(lambda task: _judged(task["job"]))


def _judged(data: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Yield, for each clause of a job, its verdict or why there is none."""
    from mha.conformance.campaign.plan import Job
    from mha.conformance.campaign.targets import changed, find
    from mha.conformance.engine.judge import judge
    from mha.conformance.harness.isolation import gpu_is_lost
    from mha.implementations.process.pristine import torch_changes

    tuples = {name: tuple(data[name]) for name in ("clauses", "require", "waivers")}
    job = Job(**data | tuples | {"cases": tuple(map(tuple, data["cases"]))})
    yield {"imported": True}
    difference = _difference(job)
    if difference:
        yield {"error": difference}
        return
    found = find(job.target)
    if found.resolved is None:
        yield {"error": found.error}
        return
    resolved = found.resolved
    difference = changed(job.sources, found.sources)
    if difference:
        yield {"error": difference}
        return
    yield {"torch_changes": list(torch_changes())}
    for clause in job.clauses:
        verdict = judge(resolved, clause, job.dtype, job.device, job.settings)
        verdict = tried_again(resolved, job, verdict)
        failed = verdict.status in ("fail", "refused", "harness_error")
        if failed and OUT_OF_MEMORY.search(verdict.message):
            yield {"stops": {clause: MEMORY}}
        else:
            yield {"verdicts": [asdict(verdict)]}
        if gpu_is_lost():
            yield {"lost": True}
            return


def tried_again(resolved: Resolved, job: Job, verdict: Verdict) -> Verdict:
    """Return the verdict on a clause; a pass fails if a known case still does, without a waiver."""
    from mha.conformance.cases.parsing import read_case
    from mha.conformance.engine.replay import replay_case
    from mha.conformance.waivers import waivers_for

    if verdict.status != "pass":
        return verdict
    implementation, where = resolved.implementation, (verdict.clause, job.dtype, job.device)
    waivers = waivers_for(job.settings.waivers_of(implementation), implementation.name, *where)
    for clause, violated, text in job.cases:
        if clause != verdict.clause:
            continue
        case = replace(read_case(text), dtype=job.dtype, device=job.device)
        outcome, message = replay_case(implementation, verdict.clause, case, violated=violated)
        if outcome == "FAILS" and not any(waiver.covers(case, message) for waiver in waivers):
            found = f"{message} (a case that failed before)"
            return replace(verdict, status="fail", case=text, violated=violated, message=found)
        if outcome != "INAPPLICABLE":
            verdict = replace(verdict, examples=verdict.examples + 1)
    return verdict


def _difference(job: Job) -> str:
    """Return which version is not that of the job, as on another node; empty if all are."""
    from mha.conformance.campaign.plan import judge_versions
    from mha.conformance.results import versions

    packages = set(job.versions) - {*versions(), "contract", "package"}
    here = judge_versions(job.versions["contract"], packages)
    different = []
    for name, number in job.versions.items():
        if name != "package" and here.get(name) != number:
            different.append(f"{name} is {here.get(name)} where the job runs, not {number}")
    return "; ".join(different)
