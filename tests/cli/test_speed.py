"""Timings: ratios with an interval, the machine's limit, and a check of every timed result."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
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
from mha.implementations import from_kernel, resolve
from mha.spec import Claims, Output, Scores, Window
from support.timed import HEADS, SIZES, VECTORIZED, Changed

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


def windowed(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, window_size: Any = (-1, -1)
) -> Tensor:
    """A correct kernel with a window, for L = S, causal calls and grouped heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    places = torch.arange(query.shape[2])
    before = places.unsqueeze(1) - places
    forbidden = before < 0
    if window_size[0] >= 0:
        forbidden = forbidden | (before > window_size[0])
    scores = query @ key.mT / query.shape[-1] ** 0.5
    context: Tensor = scores.masked_fill(forbidden, float("-inf")).softmax(-1) @ value
    return context


def window_of_one_more(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, window_size: Any = (-1, -1)
) -> Tensor:
    """The same, with a window that has a key too many."""
    left, right = window_size
    if left >= 0:
        left += 1
    return windowed(query, key, value, is_causal, (left, right))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("option", [{}, {"window": (3, 0)}, {"n_kv_heads": 2}], ids=str)
def test_kernels_are_timed_with_their_options(option: dict[str, Any], training: bool) -> None:
    plain = Claims(masks=(), returns_weights=False)
    claims = replace(plain, grouped_query=True, scores=Scores(window=Window("left_right")))
    both = windowed, window_of_one_more
    kernels = [from_kernel(each, mask=None, claims=claims) for each in both]
    workload = Workload("heads", Case(**HEADS | option), training)
    right, wrong = compare(kernels, workload, 6)
    assert len(right.seconds) == 6
    assert right.workload.operations < Workload("heads", Case(**HEADS), True).operations * 1.01
    assert wrong.incorrect == ("window" in option)
    assert workload.unclaimed(kernels[0]) == ""
    limited = from_kernel(windowed, mask=None, claims=plain)
    assert bool(workload.unclaimed(limited)) == bool(option)


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
