"""The judge's side of the ranks: processes of their own, which end with the judge."""

from __future__ import annotations

import atexit
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is in its documentation

from mha.conformance.sharding.rank import Join, Raised
from mha.implementations.discovery.errors import UnavailableError, one_line

# In seconds: how long all ranks may take to answer, the first time and later, ...
STARTING, TIMEOUT = 180.0, 60.0
# ... and how long the others may, once one rank has raised or died.
GRACE = 10.0
# A judge that wakes this long after its deadline was stopped, as by a scheduler, and the ranks
# perhaps with it.
STOPPED = 1.0
# A collective that nobody has waited for, as in DTensor, keeps its group, and threads of gloo with
# it.
MOST_GROUPS = 64
CODE = "import sys; from mha.conformance.sharding.rank import main; main(int(sys.argv[1]))"
# In what gloo raises: the place in its sources.
OF_GLOO = "/gloo/"
# How gloo names the other side of a connection: by a port that no other run has.
PEER = re.compile(r"\[[\da-f.:]+\]:\d+")
# The loopback interface, where its name is known; gloo asks for an interface or a host name that
# resolves.
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class RankError(Exception):
    """Ranks disagreed: some raised, died or did not end, and others did not.

    >>> raise RankError("rank 0 returned; rank 1 raised ValueError: odd length")
    Traceback (most recent call last):
    mha.conformance.sharding.group.RankError: rank 0 returned; rank 1 raised ValueError: odd length
    """


class Process:
    """The process of one rank."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if sys.platform in LOOPBACK:
            environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
        # A session of its own, which Ctrl-C does not reach; it ends when its connection does.
        self.process = subprocess.Popen(
            (sys.executable, "-P", "-c", CODE, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=environment,
        )
        theirs.close()

    def end(self) -> int | None:
        """End the process; return its exit status, None if it had not ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(0.2)
        return None

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Group:
    """The ranks of this process, which judge one implementation after another.

    members: the ranks of the mesh, by their numbers in the group; none before the first use, and
        after a failure.
    joined: how many groups there have been.
    entered: how many of them these processes were in.
    user: what the last one was made for; another implementation gets a group without messages that
        were left unread.
    """

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.store: TCPStore | None = None
        self.owner, self.joined, self.entered = os.getpid(), 0, 0
        self.members: tuple[int, ...] = ()
        self.user: object = None
        self.device = ""

    def join(self, members: tuple[int, ...], device: str, user: object) -> None:
        """Make a group, unless there is one for this mesh and this user."""
        if self.owner != os.getpid():
            self.end()
            self.owner, self.store = os.getpid(), None
        if self.user is user and self.members == members and self.device == device:
            return
        if self.entered >= MOST_GROUPS:
            self.end()
        self.user, self.device, self.entered = None, device, self.entered + 1
        timeout, world_size = TIMEOUT, max(members) + 1
        while len(self.processes) < world_size:
            self.processes.append(Process())
            timeout = STARTING
        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.joined += 1
        requests = [
            Join(self.joined, self.store.port, rank, world_size, members, device, 2 * TIMEOUT)
            for rank in range(world_size)
        ]
        try:
            self._ask(range(world_size), requests, timeout)
        except Exception as error:
            self.end()
            message = f"no group of {len(members)} ranks can be made: {one_line(error)}"
            raise UnavailableError(message) from error
        self.user, self.members = user, members

    def ask(self, requests: Sequence[object]) -> list[Any]:
        """Send a request to each member, and return their answers.

        Raises what they raised if all of them did, and RankError if only some did, or one died or
        did not end.
        """
        return self._ask(self.members, requests, TIMEOUT)

    def _ask(self, ranks: Sequence[int], requests: Sequence[object], timeout: float) -> list[Any]:
        for rank, request in zip(ranks, requests, strict=True):
            with suppress(OSError):  # it has died, which reading shows
                self.processes[rank].connection.send_bytes(pickle.dumps(request))
        waiting = {self.processes[rank].connection: rank for rank in ranks}
        try:
            answers = self._collect(waiting, timeout)
        except BaseException:
            # Such as Ctrl-C: answers that come later would be taken for those to other requests.
            self.end()
            raise
        return self._results(ranks, answers)

    def _results(self, ranks: Sequence[int], answers: dict[int, Any]) -> list[Any]:
        """Return the answers of all ranks; raises as `ask` does."""
        results = [answers.get(rank) for rank in ranks]
        raised = [result.error for result in results if isinstance(result, Raised)]
        # What gloo raises where the messages of two ranks do not fit is not a refusal.
        if len(raised) == len(results) and not any(OF_GLOO in str(error) for error in raised):
            self.user = None  # messages may have been left
            raise raised[0]
        if raised or len(answers) < len(results):
            message = self._story(ranks, answers)
            self.end()
            raise RankError(message)
        return [result[0] for result in results if result is not None]

    def _collect(self, waiting: dict[Any, int], timeout: float) -> dict[int, Any]:
        """Return the answers that come in time by rank, each as a tuple of one unless raised."""
        answers: dict[int, Any] = {}
        end = monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - monotonic()))
            if not ready:
                if monotonic() < end + STOPPED:
                    break
                end = monotonic() + timeout
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    answer = None
                if answer is None or isinstance(answer, Raised):
                    end = min(end, monotonic() + GRACE)
                if answer is not None:
                    answers[rank] = answer
        return answers

    def _story(self, ranks: Sequence[int], answers: dict[int, Any]) -> str:
        """Return what became of each rank, or of those that died, which is why others raise."""
        dead, others = list[str](), list[str]()
        for member, rank in enumerate(ranks):
            answer = answers.get(rank)
            if isinstance(answer, Raised):
                first_line, *_ = str(answer.error).strip().splitlines() or [""]
                shown = PEER.sub("another rank", first_line)[:200]
                others.append(f"rank {member} raised {type(answer.error).__name__}: {shown}")
            elif answer is not None:
                others.append(f"rank {member} returned")
            elif (status := self.processes[rank].end()) is not None:
                dead.append(f"rank {member} died with status {status}")
            else:
                others.append(f"rank {member} did not end")
        return "; ".join(dead or others)

    def end(self) -> None:
        """End all processes, unless this is a fork; the next use starts others."""
        for process in self.processes:
            if self.owner == os.getpid():
                process.kill()
        self.processes, self.user, self.members, self.entered = [], None, (), 0


group = Group()
atexit.register(group.end)
