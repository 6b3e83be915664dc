"""The pytest front end: options, and the collection of one item for each clause, implementation, dtype and device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mha.conformance.pytest_plugin.stash import REPORT, SELECTION, UNWRITTEN, is_benchmark_run

CONFORMANCE = Path(__file__).resolve().parents[1]
CLAUSE_ID = re.compile(r"\b([A-Za-z]{3}-\d+)\b(?!\])")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all named --mha-..."""
    group = parser.getgroup("mha", "conformance of multi-head attention (give paths before these)")
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME", "default": []}
    group.addoption(
        "--mha-impl",
        **several,
        help="implementations to judge: a registered name, module:object, or file.py:object (default: all registered)",
    )
    group.addoption("--mha-device", **several, help="devices to judge on: cpu, cuda (default: cpu)")
    group.addoption(
        "--mha-dtype",
        **several,
        help="dtypes to judge in, as far as they are claimed (default: float32 float64; benchmarks: float32)",
    )
    group.addoption(
        "--mha-profile",
        default=None,
        metavar="NAME",
        help="how far to go: quick, default, thorough (default: default; quick before benchmarks)",
    )
    group.addoption("--mha-seed", default="0", metavar="N", help="seed of the cases; one seed, one result (default: 0)")
    group.addoption("--mha-strict", action="store_true", help="fail for a clause of level SHOULD too")
    group.addoption("--mha-waivers", default=None, metavar="FILE", help="known departures, as TOML")
    group.addoption("--mha-report", **several | {"metavar": "FILE"}, help="write a report: FILE.html, .json or .md")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a wrong option before anything runs."""
    options = (name for name in vars(config.option) if name.startswith("mha_"))
    if any(getattr(config.option, name) not in ([], None, False, "0") for name in options):
        from mha.conformance.pytest_plugin.selection import selection

        selection(config)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect our own folders as plain ones: as packages they would be imported under a second name."""
    return pytest.Dir.from_parent(parent, path=path) if _is_ours(path) or _is_ours(path.parent) else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a module of properties as the contract items of its clauses, or, if asked for, the benchmarks instead."""
    if _are_benchmarks(file_path) and not parent.session.isinitpath(file_path):
        return pytest_pycollect_makemodule(file_path, parent)
    properties = file_path.parent.name == "properties" and _is_ours(file_path.parent.parent)
    if is_benchmark_run(parent.config) or file_path.suffix != ".py" or not properties:
        return None
    from mha.conformance.pytest_plugin.items import ContractFile

    return ContractFile.from_parent(parent, path=file_path)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the module of benchmarks under its own name, also where it is named on the command line."""
    if not _are_benchmarks(module_path):
        return None
    from mha.conformance.pytest_plugin.items import BenchmarkFile

    return BenchmarkFile.from_parent(parent, path=module_path)


def _are_benchmarks(path: Path) -> bool:
    return path.parts[-2:] == ("pytest_plugin", "benchmarks.py") and _is_ours(path.parents[1])


def _is_ours(folder: Path) -> bool:
    """Whether a folder is our `conformance`: the one installed, or that of a checkout beside an installed wheel."""
    if folder.name != "conformance":
        return False
    project = folder.parent / "pyproject.toml"
    return folder.resolve() == CONFORMANCE or (
        project.is_file() and 'name = "mha-conformance"' in project.read_text(encoding="utf-8")
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let `-k MSK-1` mean that clause alone, though MSK-10 begins with the same letters."""
    if SELECTION in config.stash and config.option.keyword:
        config.option.keyword = CLAUSE_ID.sub(r"\1]", config.option.keyword)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what is judged, on what, and how."""
    return config.stash[SELECTION].header() if SELECTION in config.stash else []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict on each implementation."""
    if REPORT in config.stash:
        from mha.conformance.pytest_plugin.summary import summary

        terminalreporter.section("the contract of multi-head attention")
        for line in summary(config.stash[SELECTION], config.stash[REPORT], terminalreporter):
            terminalreporter.write_line(line)
    for line in config.stash.get(UNWRITTEN, ()):
        terminalreporter.write_line(line)
    if is_benchmark_run(config):
        reasons = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
        for reason in dict.fromkeys(reasons):
            terminalreporter.write_line(str(reason).removeprefix("Skipped: "))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, also of a run that was stopped; see `summary.finish` for the exit status."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    judged = SELECTION in session.config.stash and session.exitstatus <= pytest.ExitCode.INTERNAL_ERROR
    if judged and reporter is not None:
        from mha.conformance.pytest_plugin.summary import finish

        finish(session, reporter)
