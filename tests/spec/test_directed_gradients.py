"""The directed test of gradients: correct ones stay below the threshold, defects do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.conformance import check
from mha.conformance.faults.base import Complete, implementation_of
from mha.conformance.faults.directed import (
    KeyGradientOffInHalf,
    LastKeyLostBackwards,
    RowSumOffInHalf,
)
from mha.spec import Claims, Rounding, gradients, sum_shared
from mha.spec.directed import allowance, allowances
from mha.spec.directed_gradients import Adjoint, allowance_of_gradients, allowances_of_gradients
from mha.spec.gradient_graph import gradient_graph
from support.directed_margins import measured
from support.random_problems import STRICT, one_thread
from support.random_roundings_of_gradients import (
    FORMS,
    Rounded,
    U,
    random_direction,
    random_projections,
    small_problem,
)

_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


def test_allowances_in_float32_have_four_digits() -> None:
    problem, upstream = small_problem()
    graph = gradient_graph(problem, Claims(), upstream)
    along = [random_direction(graph), *({name: exact} for name, exact in graph.exact.items())]
    for direction, part in zip(along, allowances_of_gradients(graph, along), strict=True):
        assert part.threshold == pytest.approx(
            allowance_of_gradients(graph, direction).threshold, rel=1e-4
        )
    outputs = [graph.forward.output, upstream.double()]
    for output, part in zip(outputs, allowances(graph.forward, outputs), strict=True):
        assert part.threshold == pytest.approx(allowance(graph.forward, output).threshold, rel=1e-4)


@pytest.mark.parametrize("inputs", ["cross", "memory", "self"])
def test_exact_gradients_are_the_oracles(inputs: str) -> None:
    problem, upstream = small_problem(bias_kv=True, zero_key=True)
    if inputs != "cross":
        problem = problem.change(value=problem.key)
    if inputs == "self":
        problem = problem.change(query=problem.key)
        upstream = upstream.repeat(1, 2, 1)[:, :5]
    problem = problem.change(mask=torch.randn(problem.shape[2:]).half(), is_causal=inputs == "self")
    expected = sum_shared(problem, gradients(problem, Claims(), upstream))
    for name, exact in gradient_graph(problem, Claims(), upstream).exact.items():
        torch.testing.assert_close(exact, expected[name].mid, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_adjoint_is_that_of_autograd(form: tuple[bool, bool]) -> None:
    problem, upstream = small_problem()
    graph = gradient_graph(problem, Claims(), upstream)
    direction, moved = random_direction(graph), dict[str, Tensor]()

    def store(name: str, x: Tensor) -> Tensor:
        moved[name] = torch.zeros_like(x, requires_grad=True)
        return x + moved[name]

    found = Rounded(problem, upstream, store, form)()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, graph.exact[name], rtol=1e-12, atol=1e-12)
    sum((found[name] * w).sum() for name, w in direction.items()).backward()
    of_output, recomputed = form
    for name, uses in Adjoint.of(graph, direction).gradients().items():
        if name not in moved:
            continue
        parts = [forms[0] for forms in uses]
        if name == "context" and not of_output:
            parts = parts[1:]
        if name == "d_weight" and of_output:
            parts = parts[:1]
        if name == "weight" and recomputed:  # g_c does not come from these weights
            parts = [parts[0] - (Adjoint.of(graph, {"w_o": direction["w_o"]}).m)]
        expected = torch.stack([part.expand_as(parts[0]) for part in parts]).sum(0)
        torch.testing.assert_close(moved[name].grad, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_random_roundings_stay_below_the_threshold_and_hoeffdings_tail(
    form: tuple[bool, bool],
) -> None:
    draws = 4000
    distance, part = random_projections(form, draws)
    assert distance.max() * part.sd <= part.threshold
    assert 0.1 < distance.square().mean().sqrt() < 1
    for length in (1.0, 2.0, 3.0):
        likely = 2 * math.exp(-(length**2) / 2)
        assert (distance > length).double().mean() <= likely + 4 * math.sqrt(likely / draws)


def test_mean_of_large_roundings_is_within_the_second_order() -> None:
    (problem, upstream), draws, size = small_problem(), 20000, 0.03
    graph, generator = gradient_graph(problem, Claims(), upstream), torch.Generator().manual_seed(1)

    def store(name: str, x: Tensor) -> Tensor:
        return x * (1 + size * torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1))

    direction = random_direction(graph, "query", "key", "value")
    found = Rounded(problem, upstream, store)(draws)
    errors = sum(
        ((found[name].unflatten(0, (draws, -1)) - graph.exact[name]) * w).sum((1, 2, 3))
        for name, w in direction.items()
    )
    assert isinstance(errors, Tensor)
    allowed = allowance_of_gradients(graph, direction).second_order * (size / U) ** 2
    assert abs(float(errors.mean())) <= allowed + 4 * float(errors.std()) / draws**0.5
    assert allowed < 30 * float(errors.std())


@pytest.mark.slow
def test_no_correct_implementation_exceeds_the_threshold(
    record_property: Callable[..., None],
) -> None:
    found = measured(range(7))
    largest = max(margin.ratio for margins in found.values() for margin in margins)
    record_property("largest ratio to the threshold", largest)
    assert all(len(margins) > 30 for margins in found.values())
    assert 0 < largest < 0.6


def test_strict_profiles_have_smaller_thresholds() -> None:
    problem, upstream = small_problem()
    loose, strict = (
        gradient_graph(problem, Claims(rounding=profile), upstream)
        for profile in (Rounding(), STRICT)
    )
    for name in loose.exact:
        direction = random_direction(loose, name)
        assert (
            allowance_of_gradients(strict, direction).threshold
            < allowance_of_gradients(loose, direction).threshold
        )


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            KeyGradientOffInHalf,
            r"the gradient of (the key|w_k) were [34]\.\d\d% \(.*\) too large; rounding explains",
        ),
        (
            RowSumOffInHalf,
            (
                r"[45]\.\d\d% \(.*\) of the row sum of P dP were left out; rounding explains"
                r" 0\.\d\d% at"
            ),
        ),
        (
            LastKeyLostBackwards,
            r"(49|5\d)(\.\d)?% \(.*\) of the gradients of the last allowed key were lost",
        ),
    ],
)
def test_message_says_how_much_of_which_defect_there_is(
    fault: type[Complete], message: str
) -> None:
    report = check(implementation_of(fault), "quick", clauses=["GRD-8"], dtypes=["float16"])
    assert re.search(message, report.verdicts[0].message)


@pytest.mark.usefixtures("undiagnosed")
def test_a_gradient_that_is_not_finite_fails() -> None:
    class NanGradient(Complete):
        def split(self, x: Tensor) -> Tensor:
            x = super().split(x)
            if x.requires_grad:
                x.register_hook(
                    lambda gradient: gradient.masked_fill(gradient == gradient.max(), math.nan)
                )
            return x

    report = check(implementation_of(NanGradient), "quick", clauses=["GRD-8"], dtypes=["bfloat16"])
    assert not report.conforms
