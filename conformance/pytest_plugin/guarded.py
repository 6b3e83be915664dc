"""A run of pytest in a fork: where judged code ends the process, the run says what was reached.

Torch is imported only in the fork.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import pytest

from mha.conformance.engine import guard
from mha.conformance.engine.descendants import adopt_orphans, descendants, kill_descendants
from mha.conformance.project import read_project
from mha.conformance.pytest_plugin.stash import FINISH, JOURNAL, SELECTION


def run_in_fork(config: pytest.Config) -> int | None:
    """Go on in a fork, and return None there; here, return the exit status once that has ended."""
    folder = config.invocation_params.dir
    timeout, before = read_project(folder).call_timeout, descendants()
    adopt_orphans()  # which a fork does not inherit
    parted = guard.fork_off(timeout)
    if not isinstance(parted, guard.Outcome):
        config.stash[FINISH] = parted
        return None
    kill_descendants(before)
    if parted.status is not None:
        return parted.status
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.suspend_global_capture(in_=True)
    print(f"\nmha: {_said(parted.why, folder)}", file=sys.stderr, flush=True)
    return 2


def watch_worker(config: pytest.Config) -> None:
    """Let a worker of pytest-xdist end where a call does not return; its parent goes on."""
    timeout = config.stash[SELECTION].given.call_timeout
    if timeout and sys.platform == "linux":
        guard.watch_from_outside(timeout)


def _said(why: str, folder: Path) -> str:
    """Return what to say of a run that ended early: why, what was judged then, and before."""
    from mha.conformance.reports.files import LAST
    from mha.conformance.reports.journal import STARTED, recover
    from mha.conformance.reports.text import visible

    reports = recover(folder)
    last = []
    for verdict in chain.from_iterable(report.verdicts for report in reports):
        if verdict.message == STARTED:
            last.append(f"{verdict.clause} of {verdict.implementation}")
    said = f"the run ended early, in the code to be judged: {why}"
    if last:
        said += f" while it judged {', '.join(last)}"
    if reports:
        said += f"; what was reached is in {folder / LAST} (mha show)"
    return visible(said)


def may_guard(config: pytest.Config, *, judges: bool) -> bool:
    """Return whether a run is one of a program that judges, and can be forked.

    judges: whether it is asked to judge, by its options or by what it collects.
    """
    given = config.invocation_params
    is_program = not given.plugins and tuple(map(str, given.args)) == tuple(sys.argv[1:])
    return judges and is_program and not hasattr(config, "workerinput") and guard.may_fork()


def finish(config: pytest.Config, status: int) -> None:
    """Give the exit status of the run to the process that waits for it."""
    if FINISH in config.stash:
        config.stash[FINISH](status)
    if JOURNAL in config.stash:
        config.stash[JOURNAL].close()
