"""Reports: every format shows the same results, and text is never markup or commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from mha.conformance import pytest_plugin
from mha.conformance.cli import bench
from mha.conformance.cli.app import app
from mha.conformance.engine.replay import failures, replay_verdicts
from mha.conformance.reports.compare import Comparison
from mha.conformance.reports.files import FORMATS, render, suffixes, validate_file, write
from mha.conformance.reports.github import workflow_commands
from mha.conformance.reports.html import Section, to_html
from mha.conformance.reports.merge import merge
from mha.conformance.reports.terminal import matrix
from mha.conformance.reports.text import describe, summarise, summarise_report
from mha.conformance.results import VOLATILE, Rejections, Report
from support.folders import DOCS
from support.reports_made import FORMAT_1, HOSTILE, hostile, report, two_implementations, verdict

SCHEMA = DOCS / "report.schema.json"


def test_json_is_read_as_it_was_written() -> None:
    original = two_implementations()
    assert Report.from_json(original.to_json()) == original
    surrogate = hostile()  # JSON cannot hold a lone surrogate
    message = surrogate.verdicts[0].message.replace("\udc80", "?")
    assert Report.from_json(surrogate.to_json()).verdicts[0].message == message


def test_published_schema_is_that_of_the_reports() -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == Report.schema(), (
        "regenerate it: mha report --schema > docs/report.schema.json"
    )
    data = json.loads(two_implementations().to_json())
    assert set(data) == set(published["properties"])
    assert set(data["verdicts"][0]) == set(published["$defs"]["Verdict"]["properties"])
    assert set(VOLATILE) <= {*data, *data["verdicts"][0]}
    assert "unclaimed" not in SCHEMA.read_text()


def test_report_of_format_1_is_read_compared_and_replayed() -> None:
    old = Report.from_json(FORMAT_1)
    passed, failed = old.verdicts
    assert passed.rejections == {"zeros": Rejections(5, 6), "noise": Rejections(0, 2)}
    assert (passed.cases_to_failure, failed.cases_to_failure) == (None, 3)
    assert Report.from_json(old.to_json()) == old
    new = replace(old, verdicts=(passed, replace(failed, status="pass")))
    assert Comparison(old, new).fixed == [new.verdicts[1]]
    ((_, replay),) = replay_verdicts(old, failures(old))
    assert replay.outcome == "FIXED"


def test_results_need_no_torch() -> None:
    script = "import sys, mha.conformance.results; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


WRITTEN = two_implementations().to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not JSON"),
        ("{}", "it has no format"),
        ("[" * 100_000, "not JSON"),
        ('{"format": 2}', "verdicts: Field required"),
        ('{"format": 1}', "verdicts: "),
        ('{"format": 1, "verdicts": [{"rejected": 1}, 2]}', "verdicts.0"),
        (WRITTEN.replace('"seed": 0', '"seed": "0"'), "seed: Input should be a valid integer"),
        (WRITTEN.replace('"status": "waived"', '"status": "good"'), "verdicts.4.status"),
        (WRITTEN.replace('"format": 2', '"format": 3'), "the report has format 3"),
        (WRITTEN.replace("MSK-8", "MSK-99"), "clauses that this version does not know: MSK-99"),
    ],
)
def test_text_that_is_not_a_report_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Report.from_json(text)


def test_help_lists_every_format() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group, which it is
    help_of = {
        (name, p.name): getattr(p, "help", "") for name, c in commands.items() for p in c.params
    }
    parser = pytest.Parser(_ispytest=True)
    pytest_plugin.pytest_addoption(parser)
    (group,) = (group for group in parser._groups if group.name == "mha")
    (option,) = (option for option in group.options if "--mha-report" in option.names())
    for text in (help_of["check", "report"], help_of["report", "to"], option.attrs()["help"]):
        assert suffixes() in text
    assert suffixes(bench.FORMATS) in help_of["bench", "to"]


def test_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    validate_file(tmp_path / "run.html", "--to")
    with pytest.raises(
        ValueError, match=r"--to takes a file name that ends in \.html, \.json or \.md"
    ):
        validate_file(tmp_path / "run.pdf", "--to")
    with pytest.raises(ValueError, match="there is no folder"):
        validate_file(tmp_path / "nowhere" / "run.html", "--to")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no file grow beyond 100 bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("earlier", ["an earlier one", None])
@pytest.mark.parametrize("suffix", FORMATS)
def test_report_that_cannot_be_written_leaves_no_half_of_one(
    earlier: str | None, suffix: str, tmp_path: Path
) -> None:
    file = tmp_path / f"report{suffix}"
    if earlier:
        file.write_text(earlier)
    assert "File too large" in write(two_implementations(), file)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == ({file.name: earlier} if earlier else {})


def test_report_is_written_through_a_link_and_keeps_the_mode_of_the_file(tmp_path: Path) -> None:
    place, link = tmp_path / "there.md", tmp_path / "link.md"
    place.write_text("an earlier one")
    place.chmod(0o640)
    link.symlink_to(place)
    assert write(two_implementations(), link) == ""
    assert link.is_symlink()
    assert place.read_text().startswith("## Multi-head")
    assert place.stat().st_mode & 0o777 == 0o640


def test_matrix_has_a_cell_for_each_family() -> None:
    lines = matrix(two_implementations().verdicts)
    assert lines[0].split() == ["answers", "SHP", "MSK", "CAU", "NUM"]
    assert lines[2].split() == ["faulty", "1/3", "✓", "✗1", "-", "w1"]
    assert lines[3].split() == ["correct", "4/4", "✓", "✓", "✓", "✓"]
    assert lines[4] == "✗ fails   w waived   ✓ passes   - not claimed"
    assert lines[5].startswith("answers, conduct, refusals: the required clauses that pass")
    assert lines[6].startswith("Each other cell: the worst status")


def test_matrix_is_the_same_without_colour_and_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = two_implementations().verdicts
    colored = matrix(verdicts, color=True)
    assert "\x1b[" in "".join(colored)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in colored] == matrix(verdicts)
    monkeypatch.setenv("NO_COLOR", "1")
    assert matrix(verdicts, color=True) == matrix(verdicts)
    plain = matrix(verdicts, plain=True)
    assert "".join(plain).isascii()
    assert plain[2].split() == ["faulty", "1/3", ".", "x1", "-", "w1"]


def test_matrix_continues_below_in_a_narrow_terminal() -> None:
    lines = matrix(two_implementations().verdicts, width=16)
    headings = [line.split() for line in lines if line.endswith(("answers", "MSK", "NUM"))]
    assert headings == [["answers"], ["SHP", "MSK"], ["CAU", "NUM"]]
    assert max(map(len, lines)) <= 16


def test_matrix_has_a_row_for_each_of_two_names_that_are_cut() -> None:
    names = ["x" * 80 + end for end in "ab"]
    lines = matrix([verdict(name, "SHP-1") for name in names])
    assert sum(line.startswith("x") for line in lines) == 2


def test_summary_has_an_outcome_failures_and_counts() -> None:
    assert summarise(two_implementations().verdicts, width=200, profile="quick") == [
        "Wrong answers:",
        "fail            MSK-8   float32: output[0, 0, 0] is nan, but should be 0.5",
        "",
        "Waived:",
        "waived          NUM-1   float32: output is off [waived: <known>]",
        "",
        "Other advice:",
        "unmet SHOULD    MSK-10  float32: output[0, 0, 0] is nan, but should be 0.5",
        "",
        (
            "    judged: 4 of 5 clauses on 200 cases; largest error 0.20 of its bound; wrong"
            " answers put to the same cases: 5 of 6 noticed"
        ),
        "    not judged: causal (1)",
        (
            "    profile quick: neither long rows nor rare sizes were tried; --profile default"
            " tries them"
        ),
        (
            "faulty: DOES NOT CONFORM: 1 of 3 answers is wrong (MSK-8). Waived: NUM-1. Also"
            " advised: MSK-10."
        ),
        "",
        (
            "    judged: 5 clauses on 200 cases; largest error 0.40 of its bound; wrong answers put"
            " to the same cases: 25 of 30 noticed"
        ),
        (
            "    profile quick: neither long rows nor rare sizes were tried; --profile default"
            " tries them"
        ),
        "correct: CONFORMS: all 4 answers right.",
    ]


def test_entry_of_one_cause_names_its_clauses_and_the_usual_fix() -> None:
    cause = {"diagnosis": "the mask is ignored", "fix": "pass it on"}
    verdicts = [verdict("x", clause, "fail", **cause) for clause in ("HED-1", "MSK-1", "MSK-2")]
    verdicts.append(replace(verdicts[1], dtype="float64"))
    assert summarise(verdicts, width=200)[:4] == [
        "Wrong answers:",
        "fail            MSK-1, MSK-2, HED-1 float32, float64: the mask is ignored",
        f"{' ' * 24}MSK-1: output[0, 0, 0] is nan, but should be 0.5",
        f"{' ' * 24}usual fix: pass it on",
    ]
    assert "\nusual fix  pass it on\n" in describe(verdicts[0])


def test_report_prints_in_lines_and_opens_in_a_notebook() -> None:
    first, failure, *_ = repr(two_implementations()).splitlines()
    assert (
        first
        == "faulty: does not conform (1 pass, 1 fail, 1 unmet SHOULD, 1 not claimed, 1 waived)"
    )
    assert (
        failure
        == "    fail MSK-8 faulty, float32 on cpu: output_2[0, 0, 0] is nan, but should be 0.5"
    )
    html = two_implementations()._repr_html_()
    assert html.startswith("<p>faulty: does not conform")
    assert html.count("fail MSK-8 faulty") == 1
    assert "<details><summary>fail MSK-8 faulty, float32 on cpu: " in html
    assert "[waived: &lt;known&gt;]" in html
    assert "<known>" not in html


def test_a_report_that_was_stopped_does_not_say_that_what_passes_fails() -> None:
    stopped = replace(two_implementations(), verdicts=(verdict("x", "MSK-1"),), incomplete=True)
    assert repr(stopped) == "x: not judged in full (1 pass)"


def test_summary_fits_a_narrow_terminal() -> None:
    lines = [
        line
        for text in summarise(two_implementations().verdicts, width=60)
        for line in text.splitlines()
    ]
    assert max(map(len, lines)) <= 60
    assert max(map(len, describe(two_implementations().verdicts[3], width=60).splitlines())) <= 60


def test_description_has_the_message_case_and_script() -> None:
    text = describe(two_implementations().verdicts[1])
    assert text.startswith(
        "MSK-8 (MUST): Empty rows follow one declared policy\n\nmessage    output_2[0, 0, 0] is nan"
    )
    for row in (
        "\njudged     faulty, float32 on cpu; 40 cases tried\n",
        "\ncase       Case(mask='empty_rows')\n",
        "\nsizes      B=1, L=1, S=1, d_model=1, n_heads=1\n",
        "\nmessage    output_2[0, 0, 0] is nan, but should be 0.5\n",
        "\n    assert 1 < 0, 'less & more'",
    ):
        assert row in text


def test_traceback_keeps_its_lines() -> None:
    message = "Traceback:\n  File x\nKeyError: 1"
    text = describe(verdict("x", "MSK-8", "harness_error", message=message))
    assert "\nmessage    Traceback:\n             File x\n           KeyError: 1\n" in text


def test_markdown_has_the_matrix_and_each_failure() -> None:
    text = render(two_implementations(), ".md")
    assert "| | outcome | judged | answers | conduct | refusals | SHP | MSK | CAU | NUM |" in text
    assert "- `faulty`: DOES NOT CONFORM: 1 of 3 answers is wrong (MSK-8)." in text
    row = "DOES NOT CONFORM | 4 of 5 | 1 of 3 (SHOULD 0 of 1) | - | - | ✓ | ✗1 | - | w1 |"
    assert f"| `faulty` | {row}" in text
    assert (
        "| `correct` | CONFORMS | 5 of 5 | 4 of 4 (SHOULD 1 of 1) | - | - | ✓ | ✓ | ✓ | ✓ |" in text
    )
    assert text.count("<details>") == 1
    assert (
        "<summary>fail MSK-8, faulty, float32 on cpu: Empty rows follow one declared"
        " policy</summary>" in text
    )
    assert "Case: `Case(mask='empty_rows')`" in text


def test_annotations_are_errors_and_notices() -> None:
    lines = list(workflow_commands(two_implementations()))
    assert [line.split(" title=")[0] for line in lines] == ["::error", *["::notice"] * 3]
    assert lines[-1].startswith(
        "::notice title=faulty%3A DOES NOT CONFORM::DOES NOT CONFORM: 1 of 3 answers is wrong"
    )
    *_, last = workflow_commands(replace(two_implementations(), not_covered={"faulty": ("sinks",)}))
    assert last.endswith("Not covered: sinks.")
    title = "MSK-8 faulty float32%3A Empty rows follow one declared policy"
    assert lines[0].startswith(f"::error title={title}::output[0, 0, 0] is nan")


@pytest.mark.parametrize("suffix", FORMATS)
def test_hostile_text_is_escaped_in_files(suffix: str) -> None:
    text = render(hostile(), suffix)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    if suffix == ".json":
        return
    if suffix == ".html":  # except the whole report, which the page offers as JSON
        text = re.sub(r'id="report">[^<]*<', "", text)
    assert len(text) < 600_000
    text.encode()
    outside_code = re.sub("`[^`\n]*`", "", text)
    assert "<img" not in outside_code
    assert "<script>window" not in outside_code


def test_hostile_text_is_escaped_on_the_terminal_and_in_annotations() -> None:
    verdicts = hostile().verdicts
    texts = [
        *matrix(verdicts),
        *summarise(verdicts),
        describe(replace(verdicts[0], script=HOSTILE)),
        *workflow_commands(hostile()),
    ]
    lines = [line for text in texts for line in text.splitlines()]
    for line in lines:
        assert all(c.isprintable() for c in line), line
        assert len(line) < 5000
    assert sum(line.startswith("::") for line in lines) == 2


def test_hostile_name_is_shown_in_one_line() -> None:
    *_, last = summarise(hostile().verdicts)
    assert last.startswith("</script><script>window.pwned=1</script>")
    assert HOSTILE not in last


def test_shards_are_merged_in_the_order_of_the_contract() -> None:
    whole = two_implementations()
    shards = [
        replace(whole, verdicts=whole.verdicts[place::3], started=str(3 - place))
        for place in range(3)
    ]
    merged = merge(shards)
    assert merged.verdicts == whole.verdicts
    assert merged.started == "1"
    assert merge([whole, whole]).verdicts == whole.verdicts


def test_merged_report_says_what_is_not_covered_of_each_implementation() -> None:
    parts = [
        report(verdict(name, "SHP-1"), not_covered={name: (f"option_of_{name}",)})
        for name in ("first", "second")
    ]
    text = "\n".join(summarise_report(merge(parts)))
    assert "not covered: option_of_first" in text
    assert "not covered: option_of_second" in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            report(verdict("faulty", "MSK-8")),
            "they disagree about MSK-8 for faulty, float32 on cpu",
        ),
        (report(seed=1), "seed is 0 in one and 1 in another"),
    ],
)
def test_reports_of_two_runs_are_not_merged(other: Report, message: str) -> None:
    with pytest.raises(ValueError, match=f"not shards of one run: {message}"):
        merge([two_implementations(), other])


@pytest.mark.parametrize(
    ("status", "outcome"),
    [("harness_error", "COULD NOT BE JUDGED"), ("not_claimed", "NOTHING WAS JUDGED")],
)
def test_page_does_not_say_conforms_without_a_verdict(status: str, outcome: str) -> None:
    page = render(report(verdict("x", "SHP-1", status)), ".html")
    assert '<div class="verdict fail">' in page
    assert f"<h1>x: {outcome}</h1>" in page
    assert f"✗ {outcome}" in page


def test_page_has_further_sections() -> None:
    page = to_html(two_implementations(), [Section("Speed & size", "speed", "<b>fast</b>")])
    assert '<h2 id="speed">Speed &amp; size</h2>' in page
    assert "<b>fast</b>" in page


def test_page_has_one_entry_for_a_cause_in_several_implementations() -> None:
    fix = "Use `softmax(-1)`, see MSK-1"
    same = {"diagnosis": "the mask is ignored", "fix": fix}
    failed = [verdict(name, "MSK-1", "fail", **same) for name in ("one", "other")]
    page = render(report(*failed, verdict("third", "MSK-1")), ".html")
    shown = page[page.index('id="failures"') : page.index('id="implementations"')]
    assert shown.count("<article") == 1
    assert shown.count("the mask is ignored") == 1
    assert "Use <code>softmax(-1)</code>, see MSK-1" in shown
    assert ['href="#one/MSK-1"' in shown, 'href="#other/MSK-1"' in shown] == [True, True]
    assert shown.index('class="message"') < shown.index("mha replay")


def test_page_leads_with_the_verdict_then_the_matrix_then_the_causes() -> None:
    page = render(two_implementations(), ".html")
    order = ['class="verdict fail"', 'id="families"', 'id="failures"', 'id="implementations"']
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    assert '<a class="fail" href="#MSK" title="faulty, Masks: fail">✗1</a>' in page


def test_clauses_link_to_their_pages() -> None:
    page = to_html(two_implementations(), clause_pages="../clauses/")
    assert '"pages": "../clauses/"' in page


def test_page_shows_the_known_bad_answers() -> None:
    page = render(two_implementations(), ".html")
    assert "<td>83% of 6</td>" in page
    assert '"rejected": "zeros 5 of 6"' in page


def test_two_long_names_are_two_columns() -> None:
    long = "x" * 80
    page = render(
        report(verdict(f"{long}a", "SHP-1"), verdict(f"{long}b", "SHP-1", "fail")), ".html"
    )
    assert "<h1>1 of 2 implementations conform</h1>" in page
    assert page.count("✗ DOES NOT CONFORM") == 1
    assert page.count(f"{long} ... (81 characters) (2)</span>") == 1


def test_exit_status_is_2_where_not_everything_was_judged() -> None:
    passed = verdict("x", "SHP-1")
    assert report(passed).exit_status == 0
    assert report(passed, verdict("x", "MSK-8", "fail")).exit_status == 1
    for given in ({"incomplete": True}, {"broken": {"mine": "ImportError"}}):
        assert report(passed, **given).exit_status == 2
        assert not report(passed, **given).conforms
    assert report(passed, verdict("x", "CFG-2", "harness_error")).exit_status == 2
    assert report().exit_status == 2
