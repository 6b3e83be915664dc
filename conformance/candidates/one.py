"""One candidate: a file whose kernel is judged in the process that calls this."""

from __future__ import annotations

import os
import resource
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha.conformance.embedded.kernel import judge_kernel
from mha.conformance.results import Report
from mha.spec.claims import Claims

# So much of a reward is the share of clauses that a wrong kernel keeps: any right one has more.
MOST_FOR_A_WRONG_ONE = 0.5
# What a verdict on one candidate is, beside its file.
Line = dict[str, Any]


@dataclass(frozen=True)
class Terms:
    """How every candidate is judged.

    claims: what each must do.
    name: that of the kernel in each file.
    layout, seed, seconds, device: as for `judge_kernel`.
    timeout: seconds after which a candidate is stopped, with its import.
    memory: in MiB, how much more than at its start its process may have; 0 for no limit.
    until_failure: whether a wrong kernel is tried no further after its first failure.
    """

    claims: Claims
    name: str = "kernel"
    layout: str = "b h l d"
    seed: int = 0
    seconds: float = 10.0
    device: str = "cpu"
    timeout: float = 60.0
    memory: int = 4096
    until_failure: bool = False


def claims_from(text: str) -> Claims:
    """Return claims, given as FILE:OBJECT; raise ValueError where there are none.

    The file runs in this process: it is of whoever judges, not of a candidate.
    """
    file, _, name = text.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"claims must be FILE:OBJECT, but there is no file {file!r}")
    claims = runpy.run_path(file).get(name)
    if not isinstance(claims, Claims):
        raise ValueError(f"{name} in {file} is no mha.spec.Claims, but {claims!r:.80}")
    return claims


def judge_file(path: Path, terms: Terms) -> Line:
    """Run a file, judge its kernel, and return what there is to say about it.

    The outcome is "right", "wrong", "incomplete" (not every clause was reached in time), or "no
    kernel".
    """
    _limit_memory(terms.memory)
    _be_silent()
    try:
        kernel = runpy.run_path(str(path))[terms.name]
    except MemoryError:
        raise
    except BaseException as error:  # whatever a file raises, SystemExit too
        return {"outcome": "no kernel", "why": _in_words(error), "reward": 0.0}
    try:
        report = judge_kernel(
            kernel,
            terms.claims,
            seed=terms.seed,
            seconds=terms.seconds,
            device=terms.device,
            layout=terms.layout,
            name=path.stem,
            until_failure=terms.until_failure,
        )
    except ValueError as error:
        return {"outcome": "no kernel", "why": str(error), "reward": 0.0}
    return _line_of(report)


def _line_of(report: Report) -> Line:
    """Return what a report says, in short."""
    failed = [verdict for verdict in report.verdicts if not verdict.conforms]
    tried = [verdict for verdict in report.verdicts if verdict.status in ("pass", "fail")]
    share = 1 - len(failed) / max(1, len(tried))
    if failed:
        outcome, reward = "wrong", MOST_FOR_A_WRONG_ONE * share
    elif report.incomplete:
        outcome, reward = "incomplete", MOST_FOR_A_WRONG_ONE
    else:
        outcome, reward = "right", 1.0
    why = ""
    if failed:
        why = failed[0].diagnosis or failed[0].message
    return {
        "outcome": outcome,
        "failed": sorted({verdict.clause for verdict in failed}),
        "why": why[:500],
        "reward": round(reward, 4),
    }


def _limit_memory(more: int) -> None:
    """Let the process have so many MiB more than now; 0 for any number."""
    if not more or sys.platform != "linux":
        return
    status = dict(_fields(Path("/proc/self/status").read_text(encoding="utf-8")))
    now = int(status["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + (more << 20), now + (more << 20)))


def _fields(text: str) -> Mapping[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _be_silent() -> None:
    """Send what the candidate prints nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
