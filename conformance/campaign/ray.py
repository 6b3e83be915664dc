"""The engine of a cluster: Ray places the jobs, and runs one again whose node is lost."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from mha.conformance.campaign.jobs import Outcome, run_job
from mha.conformance.campaign.plan import Job, Limits
from mha.conformance.campaign.supervised import KILLED

# How often a job is run again whose node or Ray worker is lost.
RETRIES = 3
# In seconds, for a cluster to answer.
PATIENCE = 10.0


def connect(address: str, workers: int) -> None:
    """Join a cluster, or start one on this machine ("local") with so many CPUs, 0 for all.

    Raises ValueError, in one line, where Ray is not installed or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("the engine ray needs Ray: pip install 'mha-conformance[ray]'") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        ray.init(address="local", num_cpus=workers or None, include_dashboard=False, **quiet)
        return
    try:
        _reach(address)
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"no Ray cluster at the address {address!r}: {reason}") from None


def _reach(address: str) -> None:
    """Raise OSError if nothing answers at an address: Ray itself finds out in minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), PATIENCE).close()


def run_jobs(jobs: Iterable[Job], limits: Limits, workers: int) -> Generator[tuple[Job, bytes]]:
    """Yield each job when it is done, with what `run_job` returned; closing the iterator cancels
    the others.

    workers: how many run at once, 0 for as many as the cluster takes.
    """
    import ray

    task = ray.remote(run_job)
    running, waiting = dict[Any, Job](), iter(jobs)
    try:
        while True:
            # Some more than fit, so that a node that joins, or is free, finds one.
            most = workers or 4 + 2 * int(ray.cluster_resources().get("CPU", 1))
            for job in islice(waiting, max(0, most - len(running))):
                gpus = 1 if job.device == "cuda" else 0
                placed = task.options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, name=str(job))
                running[placed.remote(job, limits)] = job
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                job = running.pop(reference)
                try:
                    text = ray.get(reference)
                except (
                    ray.exceptions.RayTaskError
                ) as error:  # as where this package is not installed there
                    last = str(error).strip().splitlines()[-1]
                    raise ValueError(f"{job} cannot be run on the cluster: {last}") from None
                except ray.exceptions.RayError:  # it was lost too often
                    text = Outcome(stops=dict.fromkeys(job.clauses, KILLED)).to_json()
                yield job, text
    finally:
        for reference in running:
            with suppress(Exception):
                ray.cancel(reference, force=True)
        ray.shutdown()
