"""`mha bench`: ratios with an interval, the machine's limit, and that nothing is fast by being wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mha.conformance import benching
from mha.conformance.cases.case import Case
from mha.conformance.cli import app
from mha.conformance.faults import gallery as faults
from mha.conformance.reports.report import Report, Verdict
from mha.conformance.speed import compare as comparing
from mha.conformance.speed import running, work
from mha.conformance.speed.compare import Timing, compare, interval
from mha.conformance.speed.plot import to_svg
from mha.conformance.speed.work import Work, work_of
from mha.implementations import resolve
from mha.spec import Implementation, Output

SIZES: dict[str, Any] = {"B": 2, "n_heads": 2, "head_dim": 8, "L": 16, "S": 16, "mask": "padding", "inputs": "self"}
SMALL = Work("small", Case(**SIZES), False)
TOKEN = Work("token", Case(B=2, n_heads=2, head_dim=8, L=1, S=9, inputs="memory"), False)


class KeepsByAddress(faults.Correct):
    """Gives the output of the first call with an input again, whatever the input has become."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False
    ) -> Output:
        known = self.__dict__.setdefault("known", {})
        if query.data_ptr() not in known:
            known[query.data_ptr()] = super().forward(query, key, value, mask, is_causal)
        found: Output = known[query.data_ptr()]
        return found


def test_interval_has_the_median_as_often_as_it_says() -> None:
    drawn = random.Random(0)
    for number, least in ((6, 0.94), (11, 0.94), (30, 0.94)):
        held = 0
        for _ in range(1000):
            low, high = interval([drawn.expovariate(1.0) for _ in range(number)])
            held += low <= 0.693147 <= high
        assert least < held / 1000 <= 1
    assert interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == (1.0, 6.0)
    assert interval([float(value) for value in range(30)]) == (9.0, 20.0)


@pytest.mark.parametrize("timed", [SMALL, TOKEN, Work("small", Case(**SIZES), True)], ids=["call", "token", "training"])
def test_all_are_timed_in_the_same_rounds(timed: Work) -> None:
    implementations = [resolve(name)[0] for name in ("sdpa", "kv_cache")]
    one, other = compare(implementations, timed, 8)
    assert (one.implementation, other.implementation) == ("sdpa", "kv_cache")
    assert len(one.seconds) == len(other.seconds) == 8
    assert set(one.ratios) == {1.0}
    assert other.ratios == tuple(b / a for a, b in zip(one.seconds, other.seconds, strict=True))
    assert other.ratio[1] <= other.ratio[0] <= other.ratio[2]
    assert min(one.memory, other.memory) >= 4 * 2 * timed.case.L * 16
    assert 0 < one.share < 1
    assert not one.impossible


def test_what_is_kept_by_address_is_not_timed() -> None:
    right, wrong = compare([faults.correct, faults.implementation_of(KeepsByAddress)], SMALL, 6)
    assert not right.wrong
    assert "what would be timed is wrong" in wrong.wrong
    assert wrong.seconds == ()


def test_what_turns_wrong_while_it_is_timed_is_told() -> None:
    class Tires(faults.Correct):
        calls = 0

        def merge(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().merge(x) * (1.0 if type(self).calls < 6 else 1.5)

    (timing,) = compare([faults.implementation_of(Tires)], SMALL, 6)
    assert "what would be timed is wrong" in timing.wrong


def test_what_is_faster_than_the_machine_is_an_error_of_measurement() -> None:
    timing = Timing(implementation="x", work=SMALL, seconds=(1e-9,) * 6, ratios=(1.0,) * 6, rate=1e9)
    assert timing.impossible
    assert benching.line(timing).endswith("MORE THAN THE MACHINE CAN DO: an error of measurement")


def test_operations_are_those_of_the_matrix_products() -> None:
    case = Case(B=3, n_heads=2, head_dim=4, L=5, S=5, inputs="self")
    projections, attention = 4 * 2 * 3 * 5 * 8 * 8, 2 * 2 * 3 * 2 * 5 * 5 * 4
    assert Work("x", case, False).operations == projections + attention
    assert Work("x", case, True).operations == 3 * (projections + attention)


def test_rounds_end_where_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LONGEST", 0.0)
    (timing,) = compare([faults.correct], SMALL, 30)
    assert len(timing.seconds) == comparing.FEWEST


def test_some_rows_tell_of_outputs_and_of_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class FirstRow(faults.Complete):
        def merge(self, x: Tensor) -> Tensor:
            merged = super().merge(x)
            return torch.cat([1.1 * merged[:, :1], merged[:, 1:]], 1)

    class LastKey(faults.Complete):
        def split(self, x: Tensor) -> Tensor:
            heads = super().split(x)
            if heads.requires_grad:
                heads.register_hook(lambda grad: torch.cat([grad[:, :, :-1], 1.1 * grad[:, :, -1:]], 2))
            return heads

    training = Work("small", Case(**SIZES), True)
    assert training.rows.tolist() == list(range(16))
    (timing,) = compare([faults.implementation_of(FirstRow)], training, 6)
    assert "the root mean square error of output" in timing.wrong
    monkeypatch.setattr(work, "SAMPLED", 4)
    assert 15 not in training.rows.tolist()
    (timing,) = compare([faults.implementation_of(LastKey)], training, 6)
    assert "the root mean square error of query.grad" in timing.wrong


def test_what_would_not_fit_into_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = work_of("longest", "float32", "cpu", training=False)
    sizes = {"sdpa": 0.1, "vectorized": 6.0}
    for name, least in sizes.items():
        monkeypatch.setattr(running, "_memory", lambda device: 2.0**30)
        why = running.unaffordable(resolve(name)[0], longest)
        assert ("GiB, and this machine has 1" in why) == (least > 1)
    assert running.unaffordable(resolve("vectorized")[0], SMALL) == ""
    assert work_of("longest", "float32", "cuda", training=False).case.L > longest.case.L


def report_on(implementation: Implementation, *_: Any) -> Report:
    """Stands for the judge: `loop` fails."""
    status: Any = "fail" if implementation.name == "loop" else "pass"
    told: Any = {"implementation": implementation.name, "clause": "MSK-1", "level": "MUST", "required": True}
    verdict = Verdict(**told, dtype="float32", device="cpu", status=status)
    return Report(verdicts=(verdict,), profile="quick", seed=0, versions={}, targets={implementation.name: "x"})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for module in (benching, work):
        monkeypatch.setattr(module, "SHAPES", {"encoder": SIZES})
    monkeypatch.setattr(benching, "USUAL", ("encoder",))
    monkeypatch.setattr(benching, "SWEEP", (8, 16))
    monkeypatch.setattr(benching, "report_on", report_on)
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("small")
def test_table_and_files_tell_the_same() -> None:
    arguments = ["bench", "sdpa", "flex", "loop", "--rounds", "6", "--threads", "1", "--to", "t.json", "--to", "t.html"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert "loop is not timed: it does not conform (MSK-1)" in done.output
    assert "encoder, inference, float32 on cpu, 1 thread\n" in done.output
    assert "flex                     not timed: it does not claim gradients" in done.output
    rows = json.loads(Path("t.json").read_text())
    assert [(row["implementation"], row["work"]["training"]) for row in rows] == [
        ("sdpa", False),
        ("flex", False),
        ("sdpa", True),
    ]
    assert f"{1e3 * median(rows[0]['seconds']):9.2f}    1.00" in done.output
    page = Path("t.html").read_text()
    assert "1 of 2 implementations conform" not in page
    assert "2 of 3 implementations conform" in page
    assert f"<td>{1e3 * median(rows[0]['seconds']):.2f}</td><td>1.00</td>" in page
    assert "<figure>" not in page


@pytest.mark.usefixtures("small")
def test_growing_lengths_are_drawn() -> None:
    arguments = ["bench", "sdpa", "minimal", "--sweep", "--rounds", "6", "--to", "s.svg", "--to", "s.html"]
    swept = CliRunner().invoke(app, arguments)
    assert swept.exit_code == 0, swept.output
    assert Path("s.svg").read_text().strip() in Path("s.html").read_text()
    drawn = ElementTree.parse("s.svg").getroot()
    assert {"sdpa", "minimal", "time in ms, against length", "8", "16", "100%"} <= {
        text.text for text in drawn.findall(".//{*}text")
    }


BAD_INPUT = {
    "an unknown shape": (("--shape", "decoder"), "no shape 'decoder'; known are encoder"),
    "an unknown dtype": (("--dtype", "float8"), "no dtype 'float8'"),
    "another form": (("--to", "t.pdf"), "--to must name a .html or .json or .svg file in a folder that is there"),
    "no folder": (("--to", "no/t.svg"), "--to must name a .html or .json or .svg file in a folder that is there"),
    "a picture of no sweep": (("--to", "t.svg"), "add --sweep, or write .html"),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_and_status_2(what: str) -> None:
    arguments, message = BAD_INPUT[what]
    done = CliRunner().invoke(app, ["bench", "sdpa", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.splitlines()) == 1


def test_picture_of_nothing_is_left_out() -> None:
    wrong = Timing(implementation="<x>", work=SMALL, wrong="no")
    right = Timing(implementation="<y>", work=SMALL, seconds=(1.0,) * 6, ratios=(1.0,) * 6, memory=1, rate=1e12)
    assert "&lt;y&gt;" in to_svg([wrong, right])
    assert "&lt;x&gt;" not in to_svg([wrong, right])
