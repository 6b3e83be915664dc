"""Files are written in one step, and a prepared folder does not choose where."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mha.conformance.campaign.folder import CorruptError, Folder, Result, Stamp, _digest
from mha.conformance.campaign.report import FAILURES, Jobs, keep_failures, write_campaign
from mha.conformance.cli import bench, faults, init
from mha.conformance.reports import kept
from mha.conformance.reports.changes import write_changes
from mha.conformance.reports.compare import Comparison
from mha.conformance.reports.files import HISTORY, KEPT, LAST, save_last, write
from mha.conformance.reports.writing import write_own, write_text
from mha.conformance.results import Report, Verdict
from support.command import CORRECT, run
from support.reports_made import two_implementations

REPORT = two_implementations()
KEY = "0" * 32
Contents = dict[str, bytes]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept.json").write_text("kept")
    monkeypatch.chdir(tmp_path / "here")


def contents(folder: Path) -> Contents:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "started", ["../../../outside/kept", "/tmp/kept", "..", "x\0y", "../history"]
)
def test_time_of_an_earlier_report_names_no_file(started: str) -> None:
    before = contents(Path("../outside"))
    for content in (replace(REPORT, started=started).to_json(), REPORT.to_json()):
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(content)
        assert save_last(replace(REPORT, seed=7), Path()) == ""
        assert Report.from_json(LAST.read_text()).seed == 7
    assert contents(Path("../outside")) == before
    written = {
        path.relative_to(Path().resolve()) for path in Path().resolve().rglob("*") if path.is_file()
    }
    assert all(path.parts[0] == ".mha" for path in written)
    assert [Report.from_json(file.read_text()).seed for file in HISTORY.iterdir()] == [0]


@pytest.mark.parametrize("link", [".mha/.gitignore", ".mha/last.json"])
@pytest.mark.parametrize("there", ["kept.json", "new.json"])
def test_link_in_the_folder_of_the_last_run_is_replaced(link: str, there: str) -> None:
    before = contents(Path("../outside"))
    Path(".mha").mkdir()
    Path(link).symlink_to(Path("../outside").resolve() / there)
    assert save_last(REPORT, Path()) == ""
    assert contents(Path("../outside")) == before
    assert not Path(link).is_symlink()
    assert Report.from_json(LAST.read_text()) == REPORT
    assert Path(".mha/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize("link", [".mha", ".mha/history"])
def test_folder_that_is_a_link_is_not_written_to(link: str) -> None:
    outside = Path("../outside").resolve()
    for number in range(2 * KEPT):
        (outside / f"{number}.json").write_text("theirs")
    (outside / "last.json").write_text(REPORT.to_json())
    before = contents(outside)
    Path(link).parent.mkdir(exist_ok=True)
    Path(link).symlink_to(outside)
    for seed in range(2):
        warning = save_last(replace(REPORT, seed=seed), Path())
    assert warning == f"the run is not saved in {link!r}: it is a link; put a folder in its place"
    assert contents(outside) == before
    status, output = run(
        "check", CORRECT, "--clause", "SHP-1", "--dtype", "float32", "--profile", "quick"
    )
    assert (status, f"mha: {warning}\n" in output) == (0, True)
    kept.keep(replace(REPORT, verdicts=REPORT.verdicts[5:]), Path(".mha/verdicts/x.json"))
    assert contents(outside) == before


def test_kept_verdicts_are_not_written_through_a_link() -> None:
    before = contents(Path("../outside"))
    place = Path(".mha/verdicts/x.json")
    place.parent.mkdir(parents=True)
    place.symlink_to(Path("../outside/kept.json").resolve())
    kept.keep(replace(REPORT, verdicts=REPORT.verdicts[5:]), place)
    assert not place.is_symlink()
    assert kept.read_kept(place)
    assert contents(Path("../outside")) == before


@pytest.mark.parametrize(
    "link", ["plan.json", f"results/00/{KEY}.json", FAILURES, "results", "results/00"]
)
def test_campaign_writes_through_no_link(link: str) -> None:
    before = contents(Path("../outside"))
    folder, stamp = Folder(Path("a")), Stamp({}, {}, (KEY,))
    place = folder.path / link
    place.parent.mkdir(parents=True)
    is_folder = link.startswith("results") and not link.endswith(".json")
    place.symlink_to(Path("../outside" if is_folder else "../outside/new.json").resolve())
    if is_folder:
        with pytest.raises(OSError, match="it is a link; put a folder in its place"):
            folder.put(Result(KEY, REPORT))
    elif link == "plan.json":
        with pytest.raises(ValueError, match="neither empty nor the folder of a campaign"):
            folder.claim(stamp)
    else:
        folder.put(Result(KEY, REPORT))
        assert keep_failures(REPORT, folder).startswith("wrote ")
        assert folder.get(KEY) == Result(KEY, REPORT)
        assert not place.is_symlink()
    assert contents(Path("../outside")) == before


@pytest.mark.parametrize(
    "plan",
    [
        {"plan": {}, "versions": {}, "keys": ["../../../outside/kept"]},
        {"plan": {}, "versions": {}, "keys": [1]},
        {"plan": {}, "versions": {"torch": 2}, "keys": []},
        {"plan": [], "versions": {}, "keys": []},
        [],
    ],
)
def test_stamp_that_is_none_is_one_message(plan: object) -> None:
    Path("a").mkdir()
    Path("a/plan.json").write_text(json.dumps(plan))
    status, output = run("campaign", "report", "a")
    assert (status, output) == (
        2,
        "mha: 'a' is not the folder of a campaign: it has no valid plan.json\n",
    )


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"key": "x", "stops": 1, "retried": {}, "report": {}}', "[" * 10**5]
)
def test_result_that_is_none_is_corrupt(content: str) -> None:
    place = Path("a/results/00") / f"{KEY}.json"
    place.parent.mkdir(parents=True)
    place.write_text(f"{_digest(content)}\n{content}\n")
    for read in (Folder(Path("a")).get, Folder(Path("a")).stops):
        with pytest.raises(CorruptError, match="its content is not a result"):
            read(KEY)


def write_script() -> None:
    Path("run.json").write_text(REPORT.to_json())
    run("show", "MSK-8", "--run", "run.json", "--script", "out.txt")


def waive() -> None:
    Path("run.json").write_text(REPORT.to_json())
    run(
        "waive",
        "MSK-8",
        "--reason",
        "x",
        "--impl",
        "faulty",
        "--run",
        "run.json",
        "--file",
        "out.txt",
    )


def write_matrix() -> None:
    faults._write({lambda _: "matrix": Path("out.txt")}, [])


def write_times() -> None:
    bench.FORMATS[".txt"] = lambda _: "times"
    try:
        bench.write(bench.BenchResults([], [], False), Path("out.txt"))
    finally:
        del bench.FORMATS[".txt"]


def put() -> None:
    folder = Folder(Path("out.txt").parent)
    folder.put(Result(KEY, REPORT))


WRITERS: dict[str, tuple[str, Callable[[], object]]] = {
    "a report": ("out.json", lambda: write(REPORT, Path("out.json"))),
    "a page": ("out.html", lambda: write(REPORT, Path("out.html"))),
    "a comparison": ("out.md", lambda: write_changes(Comparison(REPORT, REPORT), Path("out.md"))),
    "the last run": (str(LAST), lambda: save_last(REPORT, Path())),
    "a kept report": (
        ".mha/verdicts/x.json",
        lambda: kept.keep(conforming(), Path(".mha/verdicts/x.json")),
    ),
    "failures": (FAILURES, lambda: keep_failures(REPORT, Folder(Path()))),
    "a campaign": ("out.html", lambda: write_campaign(REPORT, Jobs(), Path("out.html"))),
    "a result": (f"results/00/{KEY}.json", put),
    "a declaration": (
        "out.py",
        lambda: init._write_all({Path("out.py"): "new", Path("b.yml"): "new"}),
    ),
    "a script": ("out.txt", write_script),
    "a waiver": ("out.txt", waive),
    "a matrix": ("out.txt", write_matrix),
    "times": ("out.txt", write_times),
}


def conforming() -> Report:
    """Return a report of which all is judged and conforms."""
    passes: tuple[Verdict, ...] = REPORT.verdicts[5:]
    return replace(REPORT, verdicts=passes)


@pytest.mark.parametrize("earlier", ["# an earlier one\n", None])
@pytest.mark.parametrize("what", WRITERS)
def test_full_disk_leaves_the_earlier_file(
    what: str, earlier: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, writes = WRITERS[what]
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        file.write_text(earlier)
        file.chmod(0o640)
    if name.startswith(".mha"):
        Path(".mha/.gitignore").write_text("*\n")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        try:
            message = str(writes())
        except (ValueError, OSError) as error:
            message = str(error)
    assert "Traceback" not in message
    assert (file.read_text() if file.exists() else None) == earlier
    assert not list(Path().rglob("*.part"))
    writes()
    assert file.read_text() not in ("", earlier)
    assert file.stat().st_mode & 0o777 == (0o640 if earlier is not None else 0o666 & ~umask())


def umask() -> int:
    """Return what is taken from the mode of a new file."""
    now = os.umask(0)
    os.umask(now)
    return now


def test_own_file_replaces_a_link_and_a_named_one_follows_it() -> None:
    Path("own").symlink_to("there")
    Path("named").symlink_to("there")
    write_text(Path("named"), "named")
    write_own(Path("own"), "own")
    assert (Path("there").read_text(), Path("named").is_symlink()) == ("named", True)
    assert (Path("own").read_text(), Path("own").is_symlink()) == ("own", False)


def test_part_of_a_file_has_a_name_that_nobody_can_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    monkeypatch.setattr(
        os, "fsync", lambda _: names.update(path.name for path in Path().glob(".*.part"))
    )
    for _ in range(3):
        write_text(Path("x.md"), "x")
    assert len(names) == 3
