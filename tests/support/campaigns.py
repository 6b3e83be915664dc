"""Small campaigns, and implementations that end the process of a job."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from mha.conformance.campaign.folder import Folder
from mha.conformance.campaign.plan import Campaign, Job, Plan
from mha.conformance.campaign.report import campaign_report
from mha.conformance.campaign.run import RunOptions, RunState, run_campaign
from mha.conformance.results import VOLATILE, Report, Verdict
from support.acting import ACTING

CLAUSES = ("SHP-1", "SHP-5", "MSK-1")


PLAN = Plan(
    implementations=("loop", "sdpa"), dtypes=("float32",), seeds=3, profile="quick", clauses=CLAUSES
)


KILLING = (
    ACTING
    + """
FLAG = Path(__file__).with_suffix(".flag")

def die_once():
    if not FLAG.exists():
        FLAG.touch()
        os.kill(os.getpid(), signal.SIGSEGV)

def sleep():
    FLAG.write_text(str(os.getpid()))
    time.sleep(1000)

def lose_once():  # see LOSING
    if not FLAG.exists():
        FLAG.write_text(str(os.getpid()))

dying, hungry = Bad("dying", die_once), Bad("hungry", lambda: bytearray(2**36))
losing = Bad("losing", lose_once)
slow = Bad("slow", sleep)
"""
)


def verdict_on(job: Job, clause: str, **changes: Any) -> Verdict:
    """Return a verdict that depends on the job alone; in the last seed, SHP-5 fails."""
    failed = clause == "SHP-5" and job.seed == 2
    what: dict[str, Any] = (
        {"status": "fail", "case": "Case(L=2)", "message": "wrong"}
        if failed
        else {"status": "pass"}
    )
    where = {
        "implementation": job.target,
        "clause": clause,
        "dtype": job.dtype,
        "device": job.device,
    }
    return Verdict(**{**where, "level": "MUST", "examples": 10 + job.seed, **what, **changes})


def run(folder: Folder, *, most: int | None = None, plan: Plan = PLAN, **options: Any) -> RunState:
    """Run a campaign, or only its first jobs."""
    state = RunState()
    running = run_campaign(Campaign.of(plan), folder, RunOptions(**options), state)
    for _ in islice(running, most):
        pass
    running.close()
    return state


def timeless(report: Report) -> Report:
    blank = {name: "" for name in VOLATILE if name != "seconds"}
    return replace(
        report,
        verdicts=tuple(replace(verdict, seconds=0.0) for verdict in report.verdicts),
        **blank,
    )


def report_of(*named: Folder) -> Report:
    return timeless(campaign_report(named)[0])
