"""The engine of one machine: a thread looks after the process of each job."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Lock

from mha.conformance.campaign.jobs import Process, kill_group, run_job
from mha.conformance.campaign.plan import Job, Limits
from mha.conformance.engine.workers import all_cores


class Cancelled(Exception):
    """A job is not run to its end, since the run is over."""


class Processes:
    """Those that run, until they are all killed."""

    def __init__(self) -> None:
        self.lock, self.running, self.closed = Lock(), list[Process](), False

    def add(self, process: Process) -> None:
        """Note a process that has started; raises Cancelled if it came too late."""
        with self.lock:
            self.running = [*(each for each in self.running if each.poll() is None), process]
            if self.closed:
                raise Cancelled

    def kill(self) -> None:
        """Kill all of them, and those that start from now on."""
        with self.lock:
            self.closed = True
            for process in self.running:
                kill_group(process)


def run_jobs(jobs: Iterable[Job], limits: Limits, workers: int) -> Generator[tuple[Job, bytes]]:
    """Yield each job when it is done, with what `run_job` returned; closing the iterator kills the others.

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
