"""What is timed: ratios with an interval, the machine's limit, and that nothing is fast by being wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from mha.conformance.benchmarks import compare as comparing
from mha.conformance.benchmarks import running
from mha.conformance.benchmarks.compare import Timing, compare, interval
from mha.conformance.benchmarks.plot import to_svg
from mha.conformance.benchmarks.workloads import Work, work_of
from mha.conformance.cases.case import Case
from mha.conformance.cli.bench import line
from mha.conformance.faults import registry as faults
from mha.implementations import resolve
from mha.spec import Claims, Config, Implementation, Output, Weights

SIZES: dict[str, Any] = {"B": 2, "n_heads": 2, "head_dim": 8, "L": 16, "S": 16, "mask": "padding", "inputs": "self"}
SMALL = Work("small", Case(**SIZES), False)
VECTORIZED = resolve("vectorized")[0].implementation
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
    implementations = [resolve(name)[0].implementation for name in ("sdpa", "kv_cache")]
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
    assert line(timing).endswith("MORE THAN THE MACHINE CAN DO: an error of measurement")


def test_operations_are_those_of_the_matrix_products() -> None:
    case = Case(B=3, n_heads=2, head_dim=4, L=5, S=5, inputs="self")
    projections, attention = 4 * 2 * 3 * 5 * 8 * 8, 2 * 2 * 3 * 2 * 5 * 5 * 4
    assert Work("x", case, False).operations == projections + attention
    assert Work("x", case, True).operations == 3 * (projections + attention)


def test_rounds_end_where_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LONGEST", 0.0)
    (timing,) = compare([faults.correct], SMALL, 30)
    assert len(timing.seconds) == comparing.FEWEST


@dataclass
class Changed:
    """An implementation of ours, changed after it was built."""

    name: str
    of: Implementation
    change: Callable[[Any], object]

    @property
    def claims(self) -> Claims:
        """Those of what is changed."""
        return self.of.claims

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Any:
        """Build it and change it."""
        attention: Any = self.of.build(config, weights, dtype=dtype, device=device)
        self.change(attention)
        return attention


def keep_tokens(attention: Any) -> None:
    """Give again what was decoded for a token that lay at the same place."""
    plain, known = attention.decode, dict[int, Any]()

    def decode(query: Tensor, *rest: Any) -> Any:
        if query.data_ptr() not in known:
            known[query.data_ptr()] = plain(query, *rest)
        return known[query.data_ptr()]

    attention.decode = decode


def tilt_inputs(attention: Any) -> None:
    """Compute with the same numbers, but other gradients."""
    attention.register_forward_pre_hook(lambda module, given: tuple(1.01 * x - 0.01 * x.detach() for x in given))


def tilt_weights(attention: Any) -> None:
    """Tell other gradients of the weights."""
    told = attention.weight_gradients
    attention.weight_gradients = lambda: {name: 1.01 * gradient for name, gradient in told().items()}


def test_tokens_kept_by_address_are_not_timed() -> None:
    (timing,) = compare([Changed("keeps", resolve("kv_cache")[0].implementation, keep_tokens)], TOKEN, 6)
    assert "the root mean square error of output" in timing.wrong


@pytest.mark.parametrize("chunk", [1, 1 << 24], ids=["in parts", "at once"])
def test_plain_formula_is_that_of_autograd(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CHUNK", chunk)
    problem = Case(**{**SIZES, "dtype": "float64", "causal": True}).problem()
    found = running.plainly(problem, True)
    attention: Any = resolve("loop")[0].implementation.build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    leaf = problem.query.detach().clone().requires_grad_()
    output = attention(leaf, leaf, leaf, mask=problem.mask, is_causal=True).output
    output.sum().backward()
    told = {"output": output.detach(), "query.grad": leaf.grad}
    told |= {f"{name}.grad": grad for name, grad in attention.weight_gradients().items() if name.startswith("w_")}
    assert found.keys() == told.keys()
    for name, tensor in told.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(("change", "named"), [(tilt_inputs, "query"), (tilt_weights, "w_")])
def test_gradients_are_held_to_the_plain_formula_too(change: Callable[[Any], object], named: str) -> None:
    (timing,) = compare([Changed("tilted", VECTORIZED, change)], Work("small", Case(**SIZES), True), 6)
    assert f"the root mean square error of {named}" in timing.wrong


def test_what_would_not_fit_into_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = work_of("huge", "float32", "cpu", training=False)
    monkeypatch.setattr(running, "memory_limit", lambda device: 2.0**30)
    assert running.unaffordable(resolve("sdpa")[0].implementation, huge) == ""
    assert re.fullmatch(r"it would take about [67] GiB, and there are 1", running.unaffordable(VECTORIZED, huge))
    assert running.unaffordable(VECTORIZED, SMALL) == ""
    assert work_of("huge", "float32", "cuda", training=False).case.L > huge.case.L


def test_picture_holds_what_was_timed_under_any_name() -> None:
    wrong = Timing(implementation="<x>", work=SMALL, wrong="no")
    right = Timing(
        implementation="<y>\x00\x1b[31m" + 5000 * "z",
        work=SMALL,
        seconds=(1.0,) * 6,
        ratios=(1.0,) * 6,
        memory=1,
        rate=1e12,
    )
    for timings, there in (([wrong, right], True), ([wrong], False)):
        told = [text.text or "" for text in ElementTree.fromstring(to_svg(timings)).findall(".//{*}text")]
        assert any(text.startswith("<y>") for text in told) == there
        assert not any(text.startswith("<x>") or len(text) > 200 for text in told)
