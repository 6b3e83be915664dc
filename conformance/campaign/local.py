"""The engine of one machine: a thread looks after the process of each job."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from mha.conformance.campaign.jobs import run_job
from mha.conformance.campaign.plan import Job, Limits
from mha.conformance.campaign.supervised import Processes
from mha.conformance.engine.workers import all_cores


def run_jobs(jobs: Iterable[Job], limits: Limits, workers: int) -> Generator[tuple[Job, bytes]]:
    """Yield each job when it is done, with what `run_job` returned; closing the iterator kills the
    others.

    workers: how many run at once, 0 for one a core.
    """
    workers = workers or all_cores()
    processes, running, waiting = Processes(), dict[Future[bytes], Job](), iter(jobs)
    with ThreadPoolExecutor(workers) as threads:
        try:
            while True:
                for job in islice(waiting, workers - len(running)):
                    running[threads.submit(run_job, job, limits, processes.add)] = job
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            processes.kill()
