"""The pytest front end: its options, and one item for each clause, implementation, dtype and
device.

Every pytest run of an environment imports this package, so torch is imported only when something is
judged.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.project import read_project
from mha.conformance.pytest_plugin.stash import (
    FINISH,
    JOURNAL,
    REASONS,
    REPORT,
    SELECTION,
    SESSION,
    UNWRITTEN,
    VERDICT,
    is_benchmark_run,
)
from mha.conformance.shown import visible_line

CONFORMANCE = Path(__file__).resolve().parents[1]
UNGUARDED = (
    "unguarded: code that ends its process ends this run without a word (docs/results.md); use -n"
    " 1, or mha check"
)
# Workers of pytest-xdist that crash are replaced: each fails one clause, and the others are due.
RESTARTS = 10_000
# A clause in a `-k` expression. `-k` selects substrings of names, and names of items end with the
# clause and "]".
CLAUSE_IN_KEYWORD = re.compile(r"\b([A-Za-z]{3}-\d+)\b(?!\])")


SEVERAL: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
NAMES = SEVERAL | {"metavar": "NAME"}
# As argparse takes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "impl": NAMES
    | {
        "help": "what to check: registered names, module:object, file.py:Class, NAME=one of these,"
        " or all (default: what other packages register; if nothing, the built-in implementations)"
    },
    "device": NAMES | {"help": "devices: cpu, cuda (default: cpu)"},
    "dtype": NAMES
    | {
        "help": "dtypes; those that an implementation does not claim are skipped (default: float32"
        " float64; float32 for benchmarks)"
    },
    "profile": {
        "default": None,
        "metavar": "NAME",
        "help": "how thorough: quick, default or thorough (default: default; quick for benchmarks)",
    },
    "seed": {"default": "0", "metavar": "N", "help": "seed of the cases (default: 0)"},
    "strict": {"action": "store_true", "help": "require the clauses of level SHOULD too"},
    "require": SEVERAL | {"metavar": "ID", "help": "require these clauses or families too"},
    "waivers": {
        "default": None,
        "metavar": "FILE",
        "help": "known failures to accept; see mha waive",
    },
    "report": SEVERAL | {"metavar": "FILE", "help": "write reports: .html, .json or .md"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all of which start with --mha-."""
    group = parser.getgroup(
        "mha", "conformance of multi-head attention (write paths before these options)"
    )
    for name, settings in OPTIONS.items():
        group.addoption(f"--mha-{name}", **settings)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run in a fork, as code that is judged may end its process; the fork goes on with the next
    hook.
    """
    from mha.conformance.pytest_plugin.guarded import may_guard, run_in_fork

    judges = _has_options(config) or any(map(_is_of_ours, config.args))
    # None where pytest-xdist is installed, and the option is not given.
    if judges and getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(RESTARTS)
    if not may_guard(config, judges=judges):
        return None
    try:
        return run_in_fork(config)
    except ValueError:  # of pyproject.toml, which `pytest_configure` reports
        return None


def pytest_configure(config: pytest.Config) -> None:
    """Reject an invalid option, or table in pyproject.toml, before anything is collected."""
    if _has_options(config):
        from mha.conformance.pytest_plugin.selection import selection

        selection(config)
    else:
        try:
            read_project(config.invocation_params.dir)
        except ValueError as error:
            raise pytest.exit.Exception(f"mha: {visible_line(str(error))}", returncode=2) from None


def _has_options(config: pytest.Config) -> bool:
    """Return whether one of our options is not its default, with which nothing may be judged."""
    given = (value for name, value in vars(config.option).items() if name.startswith("mha_"))
    return any(value not in ([], None, False, "0") for value in given)


def _is_of_ours(argument: str) -> bool:
    """Return whether an argument of pytest names our folder, or something in it."""
    path = Path(argument.partition("::")[0]).absolute()
    return argument.startswith("mha.conformance") or any(map(_is_ours, (path, *path.parents)))


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect our folders without importing them as packages, under a second name."""
    if _is_ours(path) or _is_ours(path.parent):
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a module of properties as the items of its clauses, or else the benchmarks."""
    if _are_benchmarks(file_path) and not parent.session.isinitpath(file_path):
        return pytest_pycollect_makemodule(file_path, parent)
    properties = file_path.parent.name == "properties" and _is_ours(file_path.parent.parent)
    if is_benchmark_run(parent.config) or file_path.suffix != ".py" or not properties:
        return None
    from mha.conformance.pytest_plugin.items import ContractFile

    return ContractFile.from_parent(parent, path=file_path)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Collect the module of benchmarks under its own name, also if the command line names it."""
    if not _are_benchmarks(module_path):
        return None
    from mha.conformance.pytest_plugin.items import BenchmarkFile

    return BenchmarkFile.from_parent(parent, path=module_path)


def _are_benchmarks(path: Path) -> bool:
    return path.parts[-2:] == ("pytest_plugin", "benchmarks.py") and _is_ours(path.parents[1])


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is our `conformance`: the installed one, or that of a checkout."""
    if folder.name != "conformance":
        return False
    project = folder.parent / "pyproject.toml"
    return folder.resolve() == CONFORMANCE or (
        project.is_file() and 'name = "mha-conformance"' in project.read_text(encoding="utf-8")
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let `-k MSK-1` not select MSK-10 too, by changing it: no hook changes how `-k` matches."""
    has_clauses = any("check_clause" in getattr(item, "fixturenames", ()) for item in items)
    ours = has_clauses or SELECTION in config.stash
    if ours and config.option.keyword:
        config.option.keyword = CLAUSE_IN_KEYWORD.sub(r"\1]", config.option.keyword)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Return the header of a run that judges something, and about how long it takes."""
    if SELECTION not in config.stash:
        return []
    chosen = config.stash[SELECTION]
    ours = sum(item.name.startswith("contract[") for item in items)
    lines = chosen.header()
    if ours:
        lines.append(chosen.takes(ours))
    if ours and FINISH not in config.stash and not config.getoption("numprocesses", None):
        lines.append(UNGUARDED)
    return lines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the verdict to the report of its item, which pytest-xdist carries to its parent."""
    report = yield
    if call.when == "call" and VERDICT in item.stash:
        report.mha_verdict = asdict(item.stash[VERDICT])  # type: ignore[attr-defined]  # an attribute of ours
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None]:
    """Print the verdicts, and why benchmarks were skipped, below everything else."""
    yield
    if REPORT in config.stash:
        from mha.conformance.pytest_plugin.summary import summary

        terminalreporter.section("the contract of multi-head attention")
        for line in summary(config):
            terminalreporter.write_line(line)
    for line in config.stash.get(UNWRITTEN, ()):
        terminalreporter.write_line(line)
    if is_benchmark_run(config):
        reasons = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
        for reason in dict.fromkeys(reasons):
            terminalreporter.write_line(str(reason).removeprefix("Skipped: "))
    for reason in config.stash.get(REASONS, ()):
        terminalreporter.write_line(f"mha: exit status 2: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Keep the verdicts on disk while the run goes on; workers of pytest-xdist are watched."""
    if SELECTION not in session.config.stash:
        return
    if hasattr(session.config, "workerinput"):  # of pytest-xdist
        from mha.conformance.pytest_plugin.guarded import watch_worker

        watch_worker(session.config)
    else:
        from mha.conformance.pytest_plugin.summary import keep_journal

        keep_journal(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say that the run has ended, and how."""
    if SESSION in config.stash and (FINISH in config.stash or JOURNAL in config.stash):
        from mha.conformance.pytest_plugin.guarded import finish

        finish(config, int(config.stash[SESSION].exitstatus))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note the session, which has the exit status."""
    session.config.stash[SESSION] = session


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, also of an interrupted run, and set the exit status."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    chosen = session.config.stash.get(SELECTION, None)
    ended = session.exitstatus <= pytest.ExitCode.INTERNAL_ERROR
    empty = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    judged = chosen is not None and (ended or (empty and bool(chosen.broken)))
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    if judged and reporter is not None and not is_worker:
        from mha.conformance.pytest_plugin.summary import finish

        finish(session, reporter)
