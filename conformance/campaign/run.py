"""A campaign, or a shard of it, run to the end: what has a result is not run again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace

from mha.conformance.campaign import local
from mha.conformance.campaign import ray as cluster
from mha.conformance.campaign.folder import CorruptError, Folder, Result, Stamp
from mha.conformance.campaign.jobs import BEFORE, verdicts_of
from mha.conformance.campaign.plan import Campaign, Job
from mha.conformance.campaign.supervised import KILLED, MEMORY, TIMEOUT
from mha.conformance.engine.judge import stopped
from mha.conformance.engine.report import report_of_run
from mha.conformance.ranges import SHARDS, WORKERS
from mha.conformance.results import Status, now
from mha.conformance.settings import Task
from mha.implementations import Resolved

# Why a clause was not judged to the end, in words; for these, the implementation is not to blame.
UNFINISHED = {
    TIMEOUT: "it took longer than the {timeout:g} s of the plan",
    MEMORY: "it needed more memory than the {memory:g} GiB of the plan",
    KILLED: "its process was killed, as where the memory of the machine runs out",
}


@dataclass(frozen=True)
class Shard:
    """One of so many parts, from 1 on, into which the keys of the jobs are divided."""

    number: int = 1
    of: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Return the shard that "2/3" names; raises ValueError for one that does not exist."""
        number, _, of = text.partition("/")
        is_short = len(text) <= 2 * len(str(SHARDS.most)) + 1
        is_shard = (
            is_short and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)
        )
        if not (is_shard and SHARDS.has(int(of))):
            raise ValueError(
                f"--shard takes I/N with I from 1 to N, such as 1/3, and N up to {SHARDS.most}, but"
                f" was given {text!r:.80}"
            )
        return Shard(int(number), int(of))

    def __contains__(self, key: object) -> bool:
        """Whether a key is of this part."""
        return int(str(key)[:16], 16) % self.of == self.number - 1


@dataclass(frozen=True)
class RunOptions:
    """How a campaign is run. workers: 0 for one a core or, on a cluster, as many as it takes.

    resume: go on in a folder that has results. retry: run jobs again that crashed or came to a
    limit.
    """

    shard: Shard = Shard()
    engine: str = "local"
    address: str = ""
    workers: int = 0
    resume: bool = False
    retry: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for more processes than a machine can start."""
        WORKERS.require("--jobs", self.workers)


@dataclass
class RunState:
    """How far a run is: the number of its jobs, those that had a result, and what came of the
    others.
    """

    total: int = 0
    earlier: int = 0
    done: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    corrupt: list[str] = field(default_factory=list)


def run_campaign(
    campaign: Campaign, folder: Folder, options: RunOptions, state: RunState
) -> Generator[Result]:
    """Run the jobs that have no result yet, and yield each result once it is written.

    state: is kept up to date.
    Raises ValueError: before anything is run, for options that cannot be followed and for the
        folder of another campaign; later, for a result that cannot be written, or a job that
        another node cannot run.
    """
    engine = _engine(options)
    folder.claim(Stamp.of(campaign))
    jobs, replaced = _to_run(campaign, folder, options, state)
    by_target = {resolved.target: resolved for resolved in campaign.resolved.values()}
    with closing(engine(jobs, campaign.plan.limits, options.workers)) as done:
        for job, text in done:
            result = _result(campaign, by_target[job.target], job, text)
            result = replace(result, retried=replaced.get(job.key, {}))
            try:
                folder.put(result)
            except OSError as error:
                raise ValueError(
                    f"the result of {job} cannot be written: {error.strerror}; earlier ones are"
                    " kept: add --resume"
                ) from None
            state.done += 1
            state.stops.update(result.stops.values())
            yield result


def _engine(options: RunOptions) -> Callable[..., Generator[tuple[Job, bytes]]]:
    """Return the engine, ready to run."""
    if options.engine == "ray":
        cluster.connect(options.address or "local", options.workers)
        return cluster.run_jobs
    if options.engine != "local":
        raise ValueError(f"unknown engine {options.engine!r}; known: local, ray")
    if options.address:
        raise ValueError("--address is of a Ray cluster: add --engine ray")
    return local.run_jobs


def _to_run(
    campaign: Campaign, folder: Folder, options: RunOptions, state: RunState
) -> tuple[list[Job], dict[str, Mapping[str, str]]]:
    """Return the jobs of the shard to run, and how those ended that are run again."""
    jobs, replaced = [], {}
    for job in campaign.jobs():
        key = job.key
        if key not in options.shard:
            continue
        state.total += 1
        try:
            stops = folder.stops(key)
        except CorruptError as error:
            state.corrupt.append(str(error))
            stops = None
        if stops and options.retry:
            replaced[key] = stops
        if stops is None or key in replaced:
            jobs.append(job)
        else:
            state.earlier += 1
    if state.earlier and not (options.resume or options.retry):
        raise ValueError(
            f"{str(folder.path)!r} has results of {state.earlier} of these {state.total} jobs; add"
            " --resume to keep them and run the others"
        )
    return jobs, replaced


def _result(campaign: Campaign, resolved: Resolved, job: Job, text: bytes) -> Result:
    """Return the result of a job for what its processes printed."""
    data = json.loads(text)
    if data["error"]:
        raise ValueError(f"{job}: {data['error']}")
    verdicts = verdicts_of(data["verdicts"])
    plan = asdict(campaign.plan)
    for clause, stop in data["stops"].items():
        reason = UNFINISHED.get(stop, stop).format(**plan)
        is_blameless = stop in UNFINISHED or stop.startswith(BEFORE)
        status: Status = "harness_error" if is_blameless else "fail"
        task = Task(clause, job.dtype, job.device)
        verdicts.append(stopped(resolved, task, job.settings, reason, status=status))
    targets = {resolved.implementation.name: job.target}
    report = report_of_run(job.settings, verdicts, targets=targets, started=now())
    common = {name: number for name, number in job.versions.items() if name != "package"}
    changes = tuple(data["torch_changes"])
    return Result(job.key, replace(report, versions=common, torch_changes=changes), data["stops"])
