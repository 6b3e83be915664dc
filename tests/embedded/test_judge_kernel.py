"""`judge_kernel`: right kernels conform, impostors fail within seconds, probes catch the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import KernelCase, Report, judge_kernel, judge_output, kernel_cases
from mha.conformance.embedded.calling import Kernel
from mha.spec import Claims, Options, Scores, Sizes, Window
from mha.spec.scores import NO_BOUND, NO_CAP
from support.embedded_kernels import (
    BARE,
    CLAIMS,
    IMPOSTORS,
    RIGHT,
    SINGLE,
    attend,
    in_float32,
    kernel_of,
)

CASE = KernelCase(clause="NUM-1", L=9, S=33, dtype="float32", seed=3)


def failed(report: Report) -> set[str]:
    """The clauses that failed."""
    return {verdict.clause for verdict in report.verdicts if verdict.status == "fail"}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_conform(name: str) -> None:
    kernel, claims = RIGHT[name]
    # docs/embedding.py tries all of them.
    cases = kernel_cases(claims)[:: 4 if name == "online softmax" else 9]
    report = judge_kernel(kernel, claims, cases=cases, seconds=60)
    assert report.conforms, report


@pytest.mark.parametrize("name", IMPOSTORS)
def test_impostors_fail_in_bfloat16(name: str) -> None:
    kernel, _ = IMPOSTORS[name]
    start = time.process_time()
    report = judge_kernel(kernel, CLAIMS, seconds=60, until_failure=True)
    assert failed(report), name
    assert time.process_time() - start < 5


def test_claim_of_what_the_kernel_takes_no_parameter_for_is_not_judged() -> None:
    claims = replace(SINGLE, scores=replace(SINGLE.scores, softcap="before_bias"))
    cases = [replace(CASE, softcap=1.0, clause="CAP-1"), CASE]
    report = judge_kernel(attend, claims, cases=cases, seconds=60)
    assert report.incomplete
    assert not report.conforms
    (capped,) = [verdict for verdict in report.verdicts if verdict.clause == "CAP-1"]
    assert capped.status == "not_claimed"
    assert capped.message == "the kernel has no parameter for softcap"


def test_bits_that_differ_are_reported_and_do_not_decide() -> None:
    calls: list[int] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.append(0)
        result = attend(query, key, value)
        return result * (1 + len(calls) % 2 * 2.0**-23)

    report = judge_kernel(kernel, SINGLE, seconds=60)
    assert report.conforms
    assert failed(report) == {"STA-3"}


def test_reports_are_those_of_the_schema() -> None:
    kernel, _ = IMPOSTORS["every second key"]
    report = judge_kernel(kernel, CLAIMS, seconds=60, cases=kernel_cases(CLAIMS, budget=2))
    assert Report.from_json(report.to_json()).failing == report.failing
    verdict = next(v for v in report.verdicts if v.clause == "NUM-1")
    assert verdict.diagnosis == "only every second key was read, from the first on"
    case = eval(verdict.case or "", {"KernelCase": KernelCase})
    assert isinstance(case, KernelCase)


def test_the_same_seed_gives_the_same_cases_and_verdicts() -> None:
    cases = kernel_cases(CLAIMS, seed=5)
    assert cases == kernel_cases(CLAIMS, seed=5) != kernel_cases(CLAIMS, seed=6)
    assert cases[:7] == kernel_cases(CLAIMS, seed=5, budget=7)
    first, second = (cases[0].build() for _ in range(2))
    assert all(map(torch.equal, first.inputs, second.inputs))
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            third = cases[0].build()
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, first.inputs, third.inputs))


def test_cases_are_of_the_claims_alone() -> None:
    sizes = Sizes(head_dims={64, 128}, length_multiple=16, max_length=256)
    claims = replace(BARE, sizes=sizes, dtypes={"float16", "float32"})
    cases = kernel_cases(claims)
    assert len(cases) > 10
    assert {case.dtype for case in cases} == {"float16", "float32"}
    for case in cases:
        assert case.d in (64, 128)
        assert case.L % 16 == case.S % 16 == 0
        assert max(case.L, case.S) <= 256
        options = (case.causal, case.window, case.sinks, case.lse, case.slopes)
        assert not any(options)
        assert case.mask == "none"
    causal = replace(BARE, causal="top_left", always_causal=True)
    assert all(case.causal for case in kernel_cases(causal))
    shared = replace(BARE, grouped_query=False, multi_query=True)
    assert {case.kv_heads for case in kernel_cases(shared)} == {1}


def test_a_call_that_raises_fails_its_clause() -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[2] == 1:
            raise RuntimeError("one query")
        return attend(query, key, value)

    report = judge_kernel(kernel, SINGLE, seconds=60)
    (verdict, *_) = [v for v in report.verdicts if v.status == "fail"]
    assert verdict.message == "the call raised RuntimeError: one query"
    assert failed(report) == {"HED-1", "SHP-4"}


@pytest.mark.parametrize("returned", [None, (), 1.0, {"x": 1}])
def test_what_is_no_tensor_fails(returned: object) -> None:
    report = judge_kernel(lambda q, k, v: returned, SINGLE, seconds=60)
    assert "SHP-1" in failed(report)


ODD_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "complex": lambda right: right.to(torch.complex64),
    "integers": lambda right: right.long(),
    "sparse": lambda right: right.to_sparse(),
    "on no device": lambda right: right.to("meta"),
    "a number": lambda right: right.sum(),
    "expanded": lambda right: right.sum().expand(right.shape),
    "huge": lambda right: right.sum().expand(10**6, 10**6),
    "with a history": lambda right: right.clone().requires_grad_() * 2,
    "NaN": lambda right: right * float("nan"),
    "a nested list": lambda right: [[right]],
}


@pytest.mark.parametrize("name", ODD_RESULTS)
def test_odd_results_fail_and_break_nothing(name: str) -> None:
    change = ODD_RESULTS[name]
    cases = kernel_cases(SINGLE, budget=2)
    report = judge_kernel(lambda q, k, v: change(attend(q, k, v)), SINGLE, cases=cases, seconds=60)
    assert failed(report), report
    right = attend(*CASE.build().inputs)
    assert not judge_output(CASE.build().inputs, change(right)).ok


def test_a_kernel_in_another_layout_with_other_names() -> None:
    right, claims = RIGHT["eager in float32"]

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_attn_probs: bool = False,
    ) -> Any:
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        context, lse = right(
            *inputs, is_causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap
        )
        context = context.transpose(1, 2).contiguous()
        return (context, lse, None) if return_attn_probs else context

    claims = replace(claims, masks=(), scores=replace(claims.scores, sinks=None))
    cases = list({case.clause: case for case in kernel_cases(claims)}.values())
    report = judge_kernel(flash_attn_func, claims, layout="b l h d", seconds=60, cases=cases)
    assert report.conforms, report
    assert {"CAU-3", "WIN-1", "CAP-1", "LSE-1", "SCL-1"} <= {v.clause for v in report.verdicts}


def test_options_without_a_parameter_are_not_claimed() -> None:
    report = judge_kernel(lambda q, k, v: attend(q, k, v), replace(SINGLE, causal="top_left"))
    statuses = {v.clause: v.status for v in report.verdicts}
    assert statuses["CAU-2"] == "not_claimed"
    with pytest.raises(ValueError, match="the kernel needs block_table"):
        Kernel.read(lambda q, k, v, block_table: q, BARE, "b h l d")
    with pytest.raises(ValueError, match="wrap it in a Python function"):
        judge_kernel(torch.nn.functional.scaled_dot_product_attention, BARE)


def test_another_way_to_call() -> None:
    right = kernel_of(in_float32)

    def call(kernel: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        assert kernel == "a name"
        return right(query, key, value, is_causal=options.is_causal)

    claims = Claims(
        projections=False,
        returns_weights=False,
        masks=(),
        causal="bottom_right",
        dtypes={"bfloat16"},
    )
    cases = kernel_cases(claims, budget=5)
    kernel: Any = "a name"
    report = judge_kernel(kernel, claims, call=call, name="mine", seconds=60, cases=cases)
    assert report.conforms, report
    assert report.verdicts[0].implementation == "mine"


def test_a_run_that_is_too_short_is_incomplete() -> None:
    kernel, claims = RIGHT["eager in float32"]
    report = judge_kernel(kernel, claims, seconds=0.0)
    assert report.incomplete
    assert not report.conforms


def test_each_call_gives_what_stands_for_an_option_that_it_does_not_have() -> None:
    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window_size: int,
        slopes: Tensor,
        causal: bool = True,
        softcap: float = 50.0,
        scale: float | None = None,
    ) -> None:
        """It is not called."""

    window = Window("count", unbounded=NO_BOUND)
    claims = replace(SINGLE, causal="top_left", scores=Scores(window=window))
    taken = Kernel.read(kernel, claims, "b h l d")
    query = torch.zeros(1, 2, 3, 4)

    given = taken.arguments(query, query, Options())
    slopes = given.pop("slopes")
    assert given == {"window_size": NO_BOUND, "causal": False, "softcap": NO_CAP}
    assert slopes.tolist() == [0.0, 0.0]
    said = taken.arguments(query, query, Options(is_causal=True, softcap=2.0, window=(1, 0)))
    assert (said["causal"], said["softcap"], said["window_size"]) == (True, 2.0, 2)
