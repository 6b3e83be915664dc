"""Kernels that work against the judge, each of which only one of its probes catches."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from mha.conformance import judge_kernel, kernel_cases
from mha.conformance.embedded import comparing
from mha.conformance.embedded.calling import Kernel
from mha.conformance.embedded.cases import KernelCase
from mha.conformance.embedded.repeats import probe_calls
from mha.conformance.embedded.state import settings
from mha.conformance.embedded.trial import Trial
from mha.spec import Lse
from support.embedded_kernels import SINGLE, attend


def writes_into_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scale the query in place."""
    query.mul_(query.shape[-1] ** -0.5)
    return (query @ key.mT).softmax(-1) @ value


def writes_and_puts_back(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scale the query in place, by a power of two, and put it back."""
    query.mul_(2.0).mul_(0.5)
    return attend(query, key, value)


def moves_value(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Give the value other memory."""
    result = attend(query, key, value)
    value.set_(value.clone())
    return result


class Lazy(Tensor):
    """A tensor that could compute when it is read."""


def lazy(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return no plain tensor."""
    return attend(query, key, value).as_subclass(Lazy)


def unwritten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Add to memory that it takes for zeros."""
    result = torch.empty(*query.shape[:3], value.shape[-1])
    return result.add_(attend(query, key, value))


def returns_input(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the only value itself."""
    return value if query.numel() == value.numel() == 32 else attend(query, key, value)


def swallows_nan(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Take a weight that is NaN for zero."""
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1).nan_to_num() @ value


def setting(change: Callable[[], object]) -> Callable[..., Tensor]:
    """A kernel that changes a setting of the process."""

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = attend(query, key, value)
        change()
        return result

    return kernel


def raising(call: int) -> Callable[..., Tensor]:
    """A kernel of which one call raises."""
    calls = count()

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if next(calls) == call:
            raise RuntimeError("out of workspaces")
        return attend(query, key, value)

    return kernel


def cached(key_of: Callable[..., Any], calls: int = 0) -> Callable[..., Tensor]:
    """A kernel that keeps results by a key, and gives them after so many calls with it."""
    known: dict[Any, list[Tensor]] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept = known.setdefault(key_of(query, key, value), [])
        if len(kept) <= calls:
            kept.append(attend(query, key, value))
            return kept[-1].clone()
        return kept[0].clone()

    return kernel


def by_pointer(*inputs: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in inputs)


def by_object(*inputs: Tensor) -> tuple[Any, ...]:
    """By the identity of a tensor, which an attribute marks."""
    if not hasattr(inputs[0], "mark"):
        inputs[0].mark = object()  # type: ignore[attr-defined]  # a new one
    return (inputs[0].mark,)  # type: ignore[attr-defined]  # as above


def by_version(*inputs: Tensor) -> tuple[Any, ...]:
    return (*by_object(*inputs), *(x._version for x in inputs))


def by_shape(*inputs: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape for x in inputs)


def by_first_numbers(*inputs: Tensor) -> tuple[Any, ...]:
    """By the places in memory, and the first and last numbers there."""
    ends = [(float(x.flatten()[0]), float(x.flatten()[-1])) for x in inputs]
    return (*by_pointer(*inputs), *ends)


def late(calls: int) -> Callable[..., Tensor]:
    """A kernel that gives its last result again after so many calls."""
    results: list[Tensor] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(results) >= calls and results[-1].shape == query.shape:
            return results[-1].clone()
        results.append(attend(query, key, value))
        return results[-1].clone()

    return kernel


def in_one_buffer() -> Callable[..., Tensor]:
    """A kernel that returns one buffer again and again."""
    buffers: dict[Any, Tensor] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = attend(query, key, value)
        return buffers.setdefault(result.shape, result).copy_(result)

    return kernel


def with_thread() -> Callable[..., Tensor]:
    """A kernel that leaves a thread running."""
    stop = threading.Event()

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        threading.Thread(target=stop.wait, args=(20,), daemon=True).start()
        return attend(query, key, value)

    kernel.stop = stop  # type: ignore[attr-defined]  # for the test
    return kernel


def patching(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replace a function that a judge may compare with, and return zeros."""
    torch.allclose = lambda *_, **__: True  # type: ignore[assignment]  # the hostile act
    return attend(query, key, value)


def patching_code(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replace the code of a function of the judge."""
    comparing.compared.__code__ = patching.__code__
    return attend(query, key, value)


HOSTILE: dict[str, tuple[Callable[..., Any], str]] = {
    "writes into the query": (writes_into_query, "STA-1"),
    "writes, and puts back": (writes_and_puts_back, "STA-1"),
    "moves the value": (moves_value, "STA-1"),
    "lazy": (lazy, "SHP-1"),
    "unwritten memory": (unwritten, "NUM-1"),
    "returns an input": (returns_input, "STA-2"),
    "one buffer": (in_one_buffer(), "STA-2"),
    "cached by pointer": (cached(by_pointer), "STA-3"),
    "cached by object": (cached(by_object), "STA-3"),
    "cached by version": (cached(by_version), "STA-3"),
    "cached by shape": (cached(by_shape), "STA-3"),
    "cached after a dozen calls": (cached(by_object, calls=12), "STA-3"),
    "cached by first numbers": (cached(by_first_numbers), "STA-3"),
    "cached after fifty calls": (late(60), "STA-3"),
    "one call of many raises": (raising(50), "STA-3"),
    "a thread": (with_thread(), "STA-5"),
    "a patched function": (patching, "STA-5"),
    "patched code": (patching_code, "STA-5"),
    "NaN swallowed": (swallows_nan, "MSK-13"),
    "the default dtype": (setting(lambda: torch.set_default_dtype(torch.float64)), "STA-5"),
    "the gradient mode": (setting(lambda: torch.set_grad_enabled(False)), "STA-5"),
    "torch's random numbers": (setting(lambda: torch.rand(())), "STA-5"),
    "Python's random numbers": (setting(random.random), "STA-5"),
    "NumPy's random numbers": (setting(numpy.random.rand), "STA-5"),
    "subnormal numbers": (setting(lambda: torch.set_flush_denormal(True)), "STA-5"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_only_its_probe_catches_a_hostile_kernel(name: str) -> None:
    kernel, clause = HOSTILE[name]
    cases = kernel_cases(SINGLE)
    few = [case for case in cases if case.clause in ("NUM-1", "SHP-4", "SHP-7")][:10]
    if name == "returns an input":
        few = [case for case in cases if case.clause == "SHP-4"]
    if name in ("cached by shape", "cached by pointer", "unwritten memory"):
        few = few[:1]  # later ones would get the same memory
    before, code, values = torch.allclose, comparing.compared.__code__, settings()
    report = judge_kernel(kernel, SINGLE, cases=few, seconds=60)
    if hasattr(kernel, "stop"):
        kernel.stop.set()
    assert not report.conforms
    decisive = {v.clause for v in report.verdicts if not v.conforms}
    assert decisive == {clause}, report
    assert torch.allclose is before
    assert comparing.compared.__code__ is code
    assert settings() == values


def first_of_one_key(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Give the first query of a causal call its value, without a score."""
    weights = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones_like(weights, dtype=torch.bool).triu(1)
        weights = weights.masked_fill(later, -torch.inf)
    result = weights.softmax(-1) @ value
    if is_causal:
        result[:, :, 0] = value[:, :, 0]
    return result


@pytest.mark.parametrize(("keys", "kernel"), [(5, first_of_one_key), (1, swallows_nan)])
def test_nan_in_the_only_key_of_a_query_need_not_show(
    keys: int, kernel: Callable[..., Tensor]
) -> None:
    is_causal = keys > 1
    claims = replace(SINGLE, causal="top_left" if is_causal else None)
    trial = Trial(Kernel.read(kernel, claims, "b h l d"), claims, torch.device("cpu"))
    case = KernelCase(clause="SHP-4", L=5, S=keys, d=4, dtype="float32", causal=is_causal)
    probe_calls(trial, case)
    assert not trial.findings.of("MSK-13", case).message
    assert trial.findings.of("MSK-13", case).examples == 1


def test_a_log_sum_exp_that_a_later_call_changes_is_found() -> None:
    buffers: dict[Any, Tensor] = {}

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        lse = (query @ key.mT * query.shape[-1] ** -0.5).logsumexp(-1)
        return attend(query, key, value), buffers.setdefault(lse.shape, lse).copy_(lse)

    claims = replace(SINGLE, lse=Lse())
    case = kernel_cases(claims)[0]
    trial = Trial(Kernel.read(kernel, claims, "b h l d"), claims, torch.device("cpu"))
    for seed in (1, 2):
        trial.judge(replace(case, seed=seed))
    trial.look_again()
    assert trial.findings.of("STA-2", case).message == "a later call changed an earlier result"


def test_no_kernel_finds_what_is_expected() -> None:
    """Neither among all objects, nor in the frames of the callers."""
    found: list[Tensor] = []

    def looking(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        right = attend(query, key, value)
        if len(query) == 1:  # the probes call often
            return right
        things = list(gc.get_objects())
        frame = sys._getframe()
        while frame is not None:
            things += frame.f_locals.values()
            frame = frame.f_back
        for thing in things:
            like = type(thing) is Tensor and thing.shape == right.shape and thing is not right
            if like and torch.allclose(thing.to(right.dtype), right, atol=1e-3):
                found.append(thing)
        return right

    judge_kernel(looking, SINGLE, cases=kernel_cases(SINGLE, budget=1), seconds=60)
    # Earlier results of the kernel itself are kept, to see whether they change.
    assert not [thing for thing in found if thing.dtype == torch.float64]
