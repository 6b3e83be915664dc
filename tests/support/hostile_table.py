"""Print a table: what each front end says of each kind of code that works against the judge.

A cell is "conforms", the first clause that fails, or "error", for the judge's own. The script ends
in an error if a verdict is lost, an exit status is not that of the verdicts, or `loop`, judged
beside them, does not conform. All kinds of a column are judged in one run, but those that end their
process where a front end has one alone. It takes most of an hour; words on the command line are the
front ends to try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mha.conformance.engine.descendants import ending_descendants
from mha.conformance.faults import (
    hostile,
    hostile_changes,
    hostile_exceptions,
    hostile_processes,
    hostile_results,
)
from mha.conformance.faults.base import Direct
from mha.conformance.reports.files import LAST, read
from mha.conformance.results import Report, Verdict

MODULES = (hostile, hostile_results, hostile_changes, hostile_exceptions, hostile_processes)
# Takes all memory, which only a campaign limits by itself.
HUNGRY = "hoards"
# Pretends that the user pressed Ctrl-C, which ends every run.
INTERRUPTS = "presses_ctrl_c"
CLAUSES = ("SHP-1", "NUM-1", "STA-3", "STA-5", "INC-1")
# Whoever ends the process ends the run, where both are one.
ENDS_ITS_PROCESS = {
    *(
        "loops",
        "segfaults",
        "exits_hard",
        "exits_in_c",
        "runs_another_program",
        "kills_itself",
        "stops_itself",
    ),
    *(
        "holds_the_interpreter",
        "waits_for_a_lock",
        "closes_descriptors",
        "writes_to_descriptors",
        "ends_later",
    ),
    INTERRUPTS,
}
PROJECT = "[tool.mha]\ncall_timeout = 5\n"


def kinds() -> dict[str, str]:
    """Return the targets, by name."""
    targets = dict[str, str]()
    for module in MODULES:
        names = [name for name, value in vars(module).items() if isinstance(value, Direct)]
        targets |= {name: f"{module.__name__}:{name}" for name in names}
    return targets


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a Python in a folder; processes that it leaves would keep a pipe open."""
    return subprocess.run(
        [sys.executable, *command], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def reached(folder: Path) -> Report:
    """Return the last report in a folder; an empty one where nothing was reached."""
    if (folder / LAST).exists():
        return read(folder / LAST)
    return Report(verdicts=(), profile="quick", seed=0, versions={}, incomplete=True)


def check_with(jobs: int, targets: Sequence[str], folder: Path) -> tuple[int, Report]:
    """Judge by `mha check`."""
    clauses = [word for clause in CLAUSES for word in ("--clause", clause)]
    options = ["--profile", "quick", "--dtype", "float32", "--jobs", str(jobs), *clauses]
    done = run(["-m", "mha.conformance", "check", *targets, *options], folder)
    return done.returncode, reached(folder)


def pytest_with(jobs: int, targets: Sequence[str], folder: Path) -> tuple[int, Report]:
    """Judge by pytest."""
    options = [
        "--mha-profile",
        "quick",
        "--mha-dtype",
        "float32",
        "-n",
        str(jobs),
        "-k",
        " or ".join(CLAUSES),
    ]
    done = run(
        ["-m", "pytest", "--pyargs", "mha.conformance", "-q", *options, "--mha-impl", *targets],
        folder,
    )
    return done.returncode, reached(folder)


API = """
import sys
from pathlib import Path
from mha.conformance import check
report = check(sys.argv[2], "quick", clauses=sys.argv[1].split(), dtypes="float32")
Path("report.json").write_text(report.to_json())
sys.exit(report.exit_status)
"""


def api(targets: Sequence[str], folder: Path) -> tuple[int, Report]:
    """Judge by `check()`, each in a Python of its own."""
    statuses, verdicts = set[int](), list[Verdict]()
    for target in targets:
        done = run(["-c", API, " ".join(CLAUSES), target], folder)
        statuses.add(done.returncode)
        report = Report.from_json((folder / "report.json").read_text())
        verdicts += report.verdicts
        (folder / "report.json").unlink()
    return max(statuses), replace(report, verdicts=tuple(verdicts))


def campaign(targets: Sequence[str], folder: Path) -> tuple[int, Report]:
    """Judge by a campaign."""
    plan = {
        "implementations": [*targets],
        "clauses": [*CLAUSES],
        "dtypes": ["float32"],
        "group": "all",
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in plan.items()]
    (folder / "plan.toml").write_text(
        "\n".join([*lines, 'profile = "quick"', "timeout = 60", "memory = 4"])
    )
    run(
        [
            "-m",
            "mha.conformance",
            "campaign",
            "run",
            "plan.toml",
            "--out",
            "results",
            "--jobs",
            "2",
        ],
        folder,
    )
    done = run(
        ["-m", "mha.conformance", "campaign", "report", "results", "--to", "report.json"], folder
    )
    return done.returncode, Report.from_json((folder / "report.json").read_text())


Judged = Callable[[Sequence[str], Path], tuple[int, Report]]
# Each front end, and whether code that ends its process ends all of it.
FRONT_ENDS: dict[str, tuple[Judged, bool]] = {
    "`mha check`, 1 process": (partial(check_with, 1), False),
    "2": (partial(check_with, 2), False),
    "4": (partial(check_with, 4), False),
    "pytest": (partial(pytest_with, 0), True),
    "`-n 2`": (partial(pytest_with, 2), False),
    "`check()`": (api, True),
    "campaign": (campaign, False),
}


def said_by(judged: Judged, targets: Mapping[str, str]) -> dict[str, str]:
    """Return what a front end says of each kind; raises AssertionError for a lost verdict."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pyproject.toml").write_text(PROJECT)
        status, report = judged([*targets.values(), "loop"], folder)
    by_name = report.by_implementation
    said = {kind: outcome(by_name.get(kind, ())) for kind in [*targets, "loop"]}
    own = said.pop("loop")
    assert report.incomplete or own == "conforms", own
    assert (status == 0) == (set(said.values()) == {"conforms"}), (status, said)
    return said


def outcome(verdicts: Sequence[Verdict]) -> str:
    """Return "conforms", the first clause that fails, or "error"."""
    failing = [
        verdict.clause
        for verdict in verdicts
        if verdict.status == "fail" and verdict.level == "MUST"
    ]
    if failing:
        return failing[0]
    if not verdicts or any(verdict.status == "harness_error" for verdict in verdicts):
        return "error"
    return "conforms"


def column(front_end: str) -> dict[str, str]:
    """Return what a front end says of each kind."""
    judged, is_ended = FRONT_ENDS[front_end]
    targets = {
        name: target
        for name, target in kinds().items()
        if name != HUNGRY or front_end == "campaign"
    }
    alone = [
        name for name in targets if name == INTERRUPTS or (is_ended and name in ENDS_ITS_PROCESS)
    ]
    said = said_by(judged, {name: target for name, target in targets.items() if name not in alone})
    for name in alone if front_end != "`check()`" else ():
        said |= said_by(judged, {name: targets[name]})
    return said


def main() -> None:
    """Print the table, with the front ends that are named, or all."""
    chosen = sys.argv[1:] or list(FRONT_ENDS)
    columns = [column(front_end) for front_end in chosen]
    print("| | " + " | ".join(chosen) + " |")
    print("|---" * (len(chosen) + 1) + "|")
    for name in kinds():
        cells = [said.get(name, "-") for said in columns]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    with ending_descendants():
        main()
