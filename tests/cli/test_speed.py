"""Timings: ratios with an interval, the machine's limit, and a check of every timed result."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from mha.conformance.benchmarks import compare as comparison
from mha.conformance.benchmarks import runner
from mha.conformance.benchmarks.compare import Timing, compare, interval
from mha.conformance.benchmarks.page import timing_section
from mha.conformance.benchmarks.plot import to_svg
from mha.conformance.benchmarks.workloads import Workload, workload_of, workloads_of
from mha.conformance.cases.case import Case
from mha.conformance.cli.bench import line
from mha.conformance.faults import registry as faults
from mha.implementations import resolve
from mha.spec import Output
from support.timed import SIZES, VECTORIZED, Changed

SMALL = Workload("small", Case(**SIZES), False)
TRAINING = Workload("small", Case(**SIZES), True)
TOKEN = Workload("token", Case(B=2, n_heads=2, head_dim=8, L=1, S=9, inputs="memory"), False)
INCORRECT = "its result is incorrect: the root mean square error of "


@pytest.mark.parametrize(("number", "place"), [(6, 0), (30, 9)])
def test_interval_is_of_order_statistics(number: int, place: int) -> None:
    values = [float(value) for value in range(number)]
    assert interval(random.Random(0).sample(values, number)) == (values[place], values[-1 - place])


@pytest.mark.parametrize("number", [6, 11, 30])
def test_interval_covers_the_median_as_often_as_it_promises(number: int) -> None:
    drawn = random.Random(0)
    covered = 0
    for _ in range(1000):
        low, high = interval([drawn.expovariate(1.0) for _ in range(number)])
        covered += low <= 0.693147 <= high
    assert covered / 1000 > 0.94


@pytest.mark.parametrize("workload", [SMALL, TOKEN, TRAINING], ids=["call", "token", "training"])
def test_implementations_are_timed_in_the_same_rounds(workload: Workload) -> None:
    implementations = [resolve(name)[0].implementation for name in ("sdpa", "kv_cache")]
    one, other = compare(implementations, workload, 8)
    assert (one.implementation, other.implementation) == ("sdpa", "kv_cache")
    assert len(one.seconds) == len(other.seconds) == 8
    assert set(one.ratios) == {1.0}
    assert other.ratios == tuple(b / a for a, b in zip(one.seconds, other.seconds, strict=True))
    assert other.ratio[1] <= other.ratio[0] <= other.ratio[2]
    assert min(one.memory, other.memory) >= 4 * 2 * workload.case.L * 16
    assert 0 < one.share < 1
    assert not one.is_impossible


class CachesByAddress(faults.Correct):
    """Returns the output of the first call with an input again, whatever the input holds now."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        cache = self.__dict__.setdefault("cache", {})
        if query.data_ptr() not in cache:
            cache[query.data_ptr()] = super().forward(query, key, value, mask, is_causal)
        output: Output = cache[query.data_ptr()]
        return output


def test_outputs_cached_by_address_are_not_timed() -> None:
    correct, cached = compare([faults.correct, faults.implementation_of(CachesByAddress)], SMALL, 6)
    assert not correct.skip_reason
    assert cached.skip_reason.startswith(INCORRECT + "output")
    assert cached.incorrect
    assert cached.seconds == ()


def test_implementation_that_becomes_incorrect_between_rounds_is_dropped() -> None:
    class Tires(faults.Correct):
        calls = 0

        def merge(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().merge(x) * (1.0 if type(self).calls < 6 else 1.5)

    tired, correct = compare([faults.implementation_of(Tires), faults.correct], SMALL, 6)
    assert tired.skip_reason.startswith(INCORRECT + "output")
    assert set(correct.ratios) == {1.0}


def test_timing_faster_than_the_machine_is_an_error_of_measurement() -> None:
    timing = Timing(
        implementation="x", workload=SMALL, seconds=(1e-9,) * 6, ratios=(1.0,) * 6, rate=1e9
    )
    assert timing.is_impossible
    assert line(timing).endswith("FASTER THAN THE MACHINE: an error of measurement")
    words = line(timing, in_table=False)
    assert words.startswith("x: ms 0.00, ratio 1.00, 95% interval [1.00, 1.00], share ")
    assert "x !</th>" in timing_section([timing]).html
    assert not Timing(
        implementation="x", workload=SMALL, skip_reason="it does not claim masks"
    ).is_impossible


def test_operations_are_those_of_the_matrix_products() -> None:
    case = Case(B=3, n_heads=2, head_dim=4, L=5, S=5, inputs="self")
    projections, attention = 4 * 2 * 3 * 5 * 8 * 8, 2 * 2 * 3 * 2 * 5 * 5 * 4
    assert Workload("x", case, False).operations == projections + attention
    assert Workload("x", case, True).operations == 3 * (projections + attention)


def test_rounds_end_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LONGEST", 0.0)
    (timing,) = compare([faults.correct], SMALL, 30)
    assert len(timing.seconds) == comparison.FEWEST


def cache_tokens(attention: Any) -> None:
    """Return what was decoded before for a token at the same address."""
    decode, cache = attention.decode, dict[int, Any]()

    def cached(query: Tensor, *rest: Any) -> Any:
        if query.data_ptr() not in cache:
            cache[query.data_ptr()] = decode(query, *rest)
        return cache[query.data_ptr()]

    attention.decode = cached


def tilt_inputs(attention: Any) -> None:
    """Compute the same output, but other gradients of the inputs."""
    attention.register_forward_pre_hook(
        lambda module, given: tuple(1.01 * x - 0.01 * x.detach() for x in given)
    )


def tilt_weights(attention: Any) -> None:
    """Return other gradients of the weights."""
    gradients = attention.weight_gradients
    attention.weight_gradients = lambda: {
        name: 1.01 * gradient for name, gradient in gradients().items()
    }


def test_tokens_cached_by_address_are_not_timed() -> None:
    (timing,) = compare(
        [Changed("caches", resolve("kv_cache")[0].implementation, cache_tokens)], TOKEN, 6
    )
    assert timing.skip_reason.startswith(INCORRECT + "output")


@pytest.mark.parametrize(("change", "gradients"), [(tilt_inputs, "query"), (tilt_weights, "w_")])
def test_gradients_are_compared_with_the_plain_formula(
    change: Callable[[Any], object], gradients: str
) -> None:
    (timing,) = compare([Changed("tilted", VECTORIZED, change)], TRAINING, 6)
    assert timing.skip_reason.startswith(INCORRECT + gradients)


@pytest.mark.parametrize("chunk", [1, 1 << 24], ids=["in parts", "at once"])
def test_plain_results_are_those_of_autograd(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHUNK", chunk)
    problem = Case(**{**SIZES, "dtype": "float64", "causal": True}).problem()
    results = runner.plain_results(problem, True)
    attention: Any = resolve("loop")[0].implementation.build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    leaf = problem.query.detach().clone().requires_grad_()
    output = attention(leaf, leaf, leaf, mask=problem.mask, is_causal=True).output
    output.sum().backward()
    expected = {"output": output.detach(), "query.grad": leaf.grad}
    expected |= {
        f"{name}.grad": grad
        for name, grad in attention.weight_gradients().items()
        if name.startswith("w_")
    }
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(results[name], tensor)


def test_workload_that_does_not_fit_into_memory_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = workload_of("huge", "float32", "cpu", training=False)
    monkeypatch.setattr(runner, "memory_limit", lambda device: 2.0**30)
    assert runner.memory_shortage(resolve("sdpa")[0].implementation, huge) == ""
    shortage = runner.memory_shortage(VECTORIZED, huge)
    assert re.fullmatch(r"it would need about [67] GiB of memory, and there are 1 GiB", shortage)
    assert runner.memory_shortage(VECTORIZED, SMALL) == ""


def test_workloads_are_larger_on_cuda_and_decode_in_inference_only() -> None:
    (token,) = workloads_of(["token"], "float32", "cpu")
    assert token.decodes
    assert not token.training
    large, small = (workloads_of(["huge"], "float32", device) for device in ("cuda", "cpu"))
    assert [workload.training for workload in large] == [False, True]
    assert large[0].case.L > small[0].case.L


SKIPPED = Timing(implementation="<x>", workload=SMALL, skip_reason="<no>")
HOSTILE = Timing(
    implementation="<y>\x00\x1b[31m" + 5000 * "z",
    workload=SMALL,
    seconds=(1.0,) * 6,
    ratios=(1.0,) * 6,
    memory=1,
    rate=1e12,
)


@pytest.mark.parametrize("timings", [[SKIPPED, HOSTILE], [SKIPPED]])
def test_picture_has_what_was_timed_under_any_name(timings: list[Timing]) -> None:
    texts = [
        text.text or "" for text in ElementTree.fromstring(to_svg(timings)).findall(".//{*}text")
    ]
    assert any(text.startswith("<y>") for text in texts) == (HOSTILE in timings)
    assert not any(text.startswith("<x>") or len(text) > 200 for text in texts)


def test_section_escapes_names_and_reasons() -> None:
    section = timing_section([SKIPPED, HOSTILE], picture="<svg></svg>")
    assert (
        '<th scope="row">&lt;x&gt;</th><td colspan="6">not timed: &lt;no&gt;</td>' in section.html
    )
    assert '<th scope="row">&lt;y&gt;\\x00\\x1b[31m' in section.html
    assert "<figure><svg></svg></figure>" in section.html
