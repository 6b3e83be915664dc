"""`[tool.mha]` in pyproject.toml: each front end follows it, and what a user gives wins."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mha.conformance import check
from mha.conformance.campaign.folder import Folder, Stamp
from mha.conformance.campaign.plan import Campaign, Plan
from mha.conformance.campaign.run import RunOptions, RunState, run_campaign
from mha.conformance.cli.app import app
from mha.conformance.cli.bench import BenchOptions
from mha.conformance.cli.commands_judging import _jobs
from mha.conformance.engine import workers
from mha.conformance.project import PROFILE_NAMES, read_project
from mha.conformance.results import Report
from mha.conformance.settings import PROFILES, Settings
from mha.conformance.waivers import Waiver, read_waivers
from mha.implementations import resolve
from support.folders import DOCS
from support.forks import run_module

FAULTY = """\
from mha.conformance.faults import registry

implementation = registry.implementations["FiniteFill"]
correct = registry.correct
"""
WHOLE = """\
[tool.mha]
profile = "quick"
dtypes = "float32"
device = "cpu"
select = ["SHP-1", "MSK-8", "MSK-10", "NUM-3"]
ignore = ["MSK-8"]
require = "num"
"""
WAIVER = '[[waiver]]\nimplementation = "FiniteFill"\nclause = "MSK-8"\nreason = "known"\n'


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in a project that has a faulty implementation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


def write(text: str) -> None:
    Path("pyproject.toml").write_text(text)


def mha(*arguments: str) -> tuple[int, str]:
    """Run `mha`; return its exit status and all output."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_pytest(*arguments: str) -> Any:
    return run_module(
        "pytest", "--pyargs", "mha.conformance", "-q", "-p", "no:cacheprovider", *arguments
    )


def test_every_key_is_followed_and_named() -> None:
    write(WHOLE)
    settings = Settings.of()
    assert (settings.profile, settings.dtypes, settings.devices) == (
        "quick",
        ("float32",),
        ("cpu",),
    )
    assert settings.judged_clauses == ("SHP-1", "MSK-10", "NUM-3")
    assert (settings.requires("NUM-3", "SHOULD"), settings.requires("MSK-10", "SHOULD")) == (
        True,
        False,
    )
    assert (
        str(settings)
        == "profile quick, seed 0, 3 clauses (SHP-1, MSK-10, NUM-3) selected by pyproject.toml, "
        "1 clause (MSK-8) ignored by pyproject.toml, 1 clause (NUM-3) of level SHOULD required"
    )
    Path("tests").mkdir()
    assert Settings.of(folder=Path("tests")) == settings


def test_what_the_user_gives_wins() -> None:
    write(WHOLE + "strict = true\n")
    given = Settings.of("default", 0, "MSK-8,MSK-4", "float64", "cpu", require="CFG")
    assert (given.profile, given.dtypes) == ("default", ("float64",))
    assert given.judged_clauses == ("MSK-4", "MSK-8")
    assert given.ignored_clauses == ()
    assert given.requires("CFG-2", "SHOULD")
    assert given.requires("MSK-10", "SHOULD")  # strict
    assert "pyproject.toml" not in str(given)
    with pytest.raises(ValueError, match="no dtype is named"):
        Settings.of(dtypes="")


TARGETS = """\
[tool.mha]
profile = "quick"
dtypes = ["float32", "float64"]
ignore = ["MSK"]
[tool.mha.targets."faulty.py:implementation"]
dtypes = ["float64"]
ignore = []
[tool.mha.targets.loop]
select = ["SHP-1"]
"""


@pytest.mark.parametrize("given", ["", "./", "x="])
def test_table_of_a_target_takes_the_place_of_single_keys(given: str) -> None:
    write(TARGETS)
    target = f"{given}faulty.py:implementation"
    settings = Settings.of()
    own = settings.of_target(resolve(target)[0])
    assert (own.profile, own.dtypes, own.ignored_clauses) == ("quick", ("float64",), ())
    loop = settings.of_target(resolve("loop")[0])
    assert (loop.judged_clauses, loop.dtypes) == (("SHP-1",), ("float32", "float64"))
    other = settings.of_target(resolve("sdpa")[0])
    assert "MSK-1" in other.ignored_clauses
    assert "MSK-1" not in other.judged_clauses
    assert Settings.of(dtypes="float16").of_target(resolve(target)[0]).dtypes == ("float16",)


def test_table_of_what_is_not_judged_may_name_what_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write('[tool.mha.targets.sdpa]\ndevice = "cuda"\nwaivers = "nowhere.toml"\n')
    assert Settings.of().of_target(resolve("loop")[0]).devices == ("cpu",)
    with pytest.raises(ValueError, match=r"the waiver file 'nowhere.toml' cannot be read"):
        Settings.of().of_target(resolve("sdpa")[0])
    with pytest.raises(ValueError, match="torch finds no CUDA device here"):
        Settings.of(waivers=()).of_target(resolve("sdpa")[0])
    assert Settings.of(devices="cpu", waivers=()).of_target(resolve("sdpa")[0]).devices == ("cpu",)


def test_project_that_ignores_all_that_it_selects_is_refused() -> None:
    write('[tool.mha]\nselect = "MSK"\nignore = ["MSK"]\n')
    status, output = mha("check", "loop")
    assert (status, "leaves no clause to judge" in output) == (2, True)
    assert Settings.of(clauses="MSK-1").judged_clauses == ("MSK-1",)


def test_report_on_several_targets_has_all_their_dtypes_and_the_least_thorough_profile() -> None:
    write(TARGETS.replace("ignore = []", 'profile = "default"') + "dtypes = ['float16']\n")
    chosen = [resolve(target)[0] for target in ("faulty.py:implementation", "loop")]
    whole = Settings.of().of_report(chosen)
    assert (whole.profile, whole.dtypes) == ("quick", ("float64", "float16"))
    assert Settings.of().of_report(chosen[:1]).profile == "default"


UNKNOWN_KEY = (
    r"'.*toml', \[tool.mha\]: unknown key 'profil'; did you mean profile\? \(known: profile, "
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profil = 1", UNKNOWN_KEY),
        ('profile = "fast"', r"profile must be 'quick' or 'default' or 'thorough', but is 'fast'"),
        (
            'dtypes = ["float3"]',
            r"dtypes must be one or a list of .*float32, .*, but is \['float3'\]",
        ),
        ("dtypes = []", r"dtypes must be one or a list of"),
        ("device = 1", r"device must be one or a list of cpu, cuda, but is 1"),
        ("waivers = []", r"waivers must be the path of a file"),
        (
            'select = "MSK-99"',
            r"select must be a list of clauses .*, but there is no 'MSK-99'; did you mean MSK-9",
        ),
        ("select = []", r"select selects nothing; leave it out"),
        ("ignore = 3", r"ignore must be a list of clauses or families, .*, but is 3"),
        ("require = [3]", r"require must be a list of clauses or families"),
        ('strict = "yes"', r"strict must be true or false, but is 'yes'"),
        ("targets = 1", r"targets must hold a table for each target, but is 1"),
        ("targets.a = 1", r'\[tool.mha.targets."a"\] must be a table, but is 1'),
        (
            "targets.a.contract = '0.1'",
            r'\[tool.mha.targets."a"\]: unknown key \'contract\' \(known: ',
        ),
    ],
)
def test_table_that_cannot_be_followed_gets_one_line_and_status_2(text: str, message: str) -> None:
    write(f"[tool.mha]\n{text}\n")
    with pytest.raises(ValueError, match=message):
        read_project(Path())
    status, output = mha("check", "loop", "--clause", "SHP-1")
    assert (status, len(output.splitlines())) == (2, 1)
    assert output.startswith("mha: ")


def test_names_of_profiles_are_those_of_the_settings() -> None:
    assert tuple(PROFILES) == ("smoke", *PROFILE_NAMES)


SMALL = """\
[tool.mha]
profile = "quick"
dtypes = ["float32"]
select = ["SHP-1", "MSK-8"]
"""


def statuses(report: Report) -> list[tuple[str, str, str]]:
    return [(verdict.clause, verdict.dtype, verdict.status) for verdict in report.verdicts]


@pytest.mark.usefixtures("undiagnosed")
def test_every_front_end_follows_the_project() -> None:
    write(SMALL)
    failing = [("SHP-1", "float32", "pass"), ("MSK-8", "float32", "fail")]
    assert statuses(check("faulty.py:implementation")) == failing
    status, output = mha("check", "faulty.py:implementation", "--json", "mha.json")
    assert status == 1
    assert (
        "Checking FiniteFill on cpu in float32 (profile quick, seed 0, 2 clauses (SHP-1, MSK-8)"
        " selected by" in output
    )
    done = run_pytest("--mha-impl", "faulty.py:implementation", "--mha-report", "pytest.json")
    assert done.returncode == 1, done.stdout
    for file in ("mha.json", "pytest.json"):
        report = Report.from_json(Path(file).read_text())
        assert (statuses(report), report.profile) == (failing, "quick")
    settings = BenchOptions(targets=("loop",)).settings()
    assert (settings.judged_clauses, settings.dtypes) == (("SHP-1", "MSK-8"), ("float32",))


@pytest.mark.usefixtures("undiagnosed")
def test_ignored_clause_is_not_judged_and_named_in_every_front_end() -> None:
    write(SMALL + 'ignore = ["MSK-8"]\n')
    status, output = mha("check", "faulty.py:implementation")
    assert status == 0, output
    line = "1 clause (MSK-8) ignored by pyproject.toml"
    assert line in output
    done = run_pytest("--mha-impl", "faulty.py:implementation")
    assert done.returncode == 0, done.stdout
    assert line in done.stdout
    assert statuses(check("faulty.py:implementation")) == [("SHP-1", "float32", "pass")]


def test_required_clause_keeps_an_implementation_from_conforming() -> None:
    report = check("loop", "quick", clauses="CFG-2", dtypes="float32")
    required = check("loop", "quick", clauses="CFG-2", dtypes="float32", require="CFG-2")
    (relaxed,), (raised,) = report.verdicts, required.verdicts
    assert (relaxed.level, relaxed.required, raised.required) == ("SHOULD", False, True)
    status, _ = mha(
        "check",
        "loop",
        "--clause",
        "CFG-2",
        "--require",
        "cfg",
        "--dtype",
        "float32",
        "--json",
        "r.json",
    )
    assert status == 0
    assert json.loads(Path("r.json").read_text())["verdicts"][0]["required"]
    options = (
        "--mha-impl",
        "loop",
        "-k",
        "CFG-2",
        "--mha-profile",
        "quick",
        "--mha-report",
        "p.json",
    )
    done = run_pytest(*options, "--mha-require", "CFG-2")
    assert done.returncode == 0, done.stdout
    assert all(
        verdict["required"] for verdict in json.loads(Path("p.json").read_text())["verdicts"]
    )


@pytest.mark.usefixtures("undiagnosed")
def test_waive_writes_where_the_next_run_looks() -> None:
    write(
        SMALL
        + 'waivers = "known/accepted.toml"\n[tool.mha.targets.other]\nwaivers = "other.toml"\n'
    )
    Path("known").mkdir()
    status, output = mha("check", "faulty.py:implementation")
    assert status == 2
    assert output.startswith(
        "mha: the waiver file 'known/accepted.toml' cannot be read: No such file"
    )
    Path("known/accepted.toml").touch()
    assert mha("check", "faulty.py:implementation")[0] == 1
    Path("tests").mkdir()
    assert mha("waive", "MSK-8", "--reason", "known")[1].startswith(
        "added to known/accepted.toml:\n"
    )
    assert [waiver.clause for waiver in read_waivers(Path("known/accepted.toml"))] == ["MSK-8"]
    status, output = mha("check", "faulty.py:implementation")
    assert status == 0
    assert "waivers of known/accepted.toml)" in output
    assert check("faulty.py:implementation").conforms
    assert not check("faulty.py:implementation", waivers=[]).conforms
    assert run_pytest("--mha-impl", "faulty.py:implementation").returncode == 0
    project = read_project(Path())
    assert project.waivers_of("anything", "other") == project.folder / "other.toml"


@pytest.mark.usefixtures("undiagnosed")
def test_waivers_in_the_root_are_read_by_default_also_those_of_what_is_not_judged() -> None:
    write(SMALL)
    Path("mha_waivers.toml").write_text(WAIVER + WAIVER.replace("FiniteFill", "another"))
    status, output = mha("check", "faulty.py:implementation")
    assert status == 0, output
    assert "waivers of mha_waivers.toml)" in output
    status, output = mha("check", "faulty.py:implementation", "--waivers", "mha_waivers.toml")
    assert (status, "waives clauses of another, which is not judged in this run" in output) == (
        2,
        True,
    )
    Path("none.toml").touch()
    assert mha("check", "faulty.py:implementation", "--waivers", "none.toml")[0] == 1


def test_benchmarks_take_waivers() -> None:
    Path("w.toml").write_text(WAIVER)
    settings = BenchOptions(
        targets=("faulty.py:implementation",), waivers=Path("w.toml")
    ).settings()
    assert [waiver.clause for waiver in settings.waivers] == ["MSK-8"]
    status, output = mha("bench", "loop", "--waivers", "w.toml")
    assert (status, "which is not judged in this run" in output) == (2, True)


@pytest.mark.slow
@pytest.mark.mostly_slow(1)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(("days", "is_near"), [(29, True), (31, False)])
def test_waiver_that_expires_soon_is_a_line_of_the_run(days: int, is_near: bool) -> None:
    write(SMALL)
    last = datetime.now(UTC).date() + timedelta(days=days)
    Path("mha_waivers.toml").write_text(f"{WAIVER}expires = {last}\n")
    note = f"the waiver of MSK-8 for FiniteFill expires on {last}: known"
    status, output = mha("check", "faulty.py:implementation")
    assert (status, note in output) == (0, is_near)
    done = run_pytest("--mha-impl", "faulty.py:implementation", "-k", "SHP-1")
    assert (done.returncode, note in done.stdout) == (0, is_near)


def test_table_of_the_docs_can_be_read() -> None:
    docs = (DOCS / "settings.md").read_text(encoding="utf-8")
    write(docs.split("```toml\n[tool.mha]")[1].split("```")[0].join(["[tool.mha]", ""]))
    project = read_project(Path())
    (kernel,) = project.targets.values()
    assert (project.table.ignore, project.table.require, kernel.ignore) == (
        ("CMP-1",),
        ("NUM-3",),
        (),
    )
    assert project.waivers == project.folder / "tests" / "mha_waivers.toml"
    assert kernel.device == ("cuda",)


def test_few_processes_share_the_gpu_of_a_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    assert _jobs(0, None, few=False) == 8
    write('[tool.mha]\ndevice = "cuda"\n')
    assert _jobs(0, None, few=False) == _jobs(0, ["cpu"], few=False) == 4
    assert _jobs(0, None, few=True) == 1


OF_CAMPAIGN = """\
[tool.mha]
profile = "quick"
dtypes = ["float32"]
select = ["SHP-1", "MSK-8", "CFG-2"]
require = ["CFG-2"]
strict = false
[tool.mha.targets.sdpa]
ignore = ["MSK-8"]
dtypes = ["float64"]
"""


def test_jobs_follow_the_project_where_the_plan_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(OF_CAMPAIGN)
    waiver = Waiver(implementation="loop", clause="MSK-8", reason="known")
    Path("mha_waivers.toml").write_text(waiver.to_toml())
    plan = Plan(implementations=("loop", "sdpa"), group="all")
    loop, sdpa = Campaign.of(plan).jobs()
    assert (loop.dtype, loop.profile, loop.clauses) == (
        "float32",
        "quick",
        ("CFG-2", "SHP-1", "MSK-8"),
    )
    assert (loop.settings.waivers, loop.settings.require) == ((waiver,), ("CFG-2",))
    assert (sdpa.dtype, sdpa.clauses, sdpa.waivers) == ("float64", ("CFG-2", "SHP-1"), ())
    ours = replace(plan, dtypes=("float16",), clauses=("MSK-8",), profile="default")
    assert {(job.dtype, job.profile, job.clauses) for job in Campaign.of(ours).jobs()} == {
        ("float16", "default", ("MSK-8",))
    }
    folder = Folder(tmp_path / "results")
    folder.claim(Stamp.of(Campaign.of(plan)))
    Path("mha_waivers.toml").unlink()
    with pytest.raises(
        ValueError,
        match=r"is the folder of another campaign: \[tool.mha\] in pyproject.toml, its waiv",
    ):
        folder.claim(Stamp.of(Campaign.of(plan)))


@pytest.mark.slow
def test_job_is_judged_with_the_waivers_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (
        "from mha.conformance.faults.registry import implementations\n\nfaulty ="
        " implementations['FiniteFill']\n"
    )
    Path("faulty.py").write_text(source)
    Path("pyproject.toml").write_text(OF_CAMPAIGN)
    Path("mha_waivers.toml").write_text(
        Waiver(implementation="FiniteFill", clause="MSK-8", reason="known").to_toml()
    )
    campaign = Campaign.of(Plan(implementations=("faulty.py:faulty",), group="all"))
    (result,) = run_campaign(
        campaign, Folder(tmp_path / "results"), RunOptions(workers=1), RunState()
    )
    found = {
        verdict.clause: (verdict.status, verdict.required) for verdict in result.report.verdicts
    }
    assert found["MSK-8"][0] == "waived"
    assert found["CFG-2"][1]
