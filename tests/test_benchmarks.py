"""Benchmarks: only what is right is timed, what was timed is checked, and a plain run has none of it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_front_end import run

import faults
from mha.conformance import benchmarks
from mha.conformance.pytest_plugin import SELECTION
from mha.implementations import resolve


class Recorder:
    """Stands for the fixture of pytest-benchmark: calls once."""

    group = name = ""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def __call__(self, timed: Any) -> None:
        timed()


def speed_of(implementation: Any, shape: str = "one token", steps: str = "forward", dtype: str = "float32") -> Recorder:
    """Run one benchmark, and return what it recorded."""
    request = SimpleNamespace(config=SimpleNamespace(stash={SELECTION: SimpleNamespace(waivers=())}))
    recorder = Recorder()
    benchmarks.test_speed(recorder, request, implementation, shape, steps, dtype, "cpu")  # type: ignore[arg-type]
    return recorder


def test_benchmarks_are_collected_only_if_asked_for() -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    asked = run("--benchmark-only", "--collect-only", "-q", "--mha-impl", "sdpa", env=alone)
    assert "benchmarks.py::test_speed[float32-cpu-small encoder-forward-sdpa]" in asked.stdout
    assert "contract[" not in asked.stdout
    plain = run("--collect-only", "-q", "--mha-impl", "sdpa")
    assert "contract[sdpa-cpu-float32-MSK-1]" in plain.stdout
    assert "test_speed" not in plain.stdout


@pytest.mark.parametrize("steps", benchmarks.PASSES)
@pytest.mark.parametrize("shape", benchmarks.SHAPES)
def test_what_is_right_is_timed_with_its_peak_memory(shape: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "failed_clauses", lambda *_: "")
    (implementation,) = resolve("sdpa")
    recorder = speed_of(implementation, shape, steps)
    assert recorder.group == f"{shape}, {steps}, float32 on cpu"
    held = recorder.extra_info["peak_memory_bytes"]
    assert recorder.name == f"sdpa ({held / 2**20:.1f} MiB)"
    sizes = benchmarks.SHAPES[shape]
    output = 4 * sizes["B"] * sizes["L"] * sizes["n_heads"] * sizes["head_dim"]
    assert held >= 2 * output


def test_what_does_not_conform_is_not_timed() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"Unscaled is not timed: it does not conform \(.*HED-1"):
        speed_of(faults.implementations["Unscaled"])


@pytest.mark.parametrize(
    ("name", "shape", "steps", "dtype", "told"),
    [
        ("fused_qkv", "one token", "forward", "float32", "does not claim cross_attention"),
        ("flex", "small encoder", "forward and backward", "float32", "does not claim gradients"),
        ("Correct", "small encoder", "forward", "float16", "float16 on cpu is not claimed"),
    ],
)
def test_what_is_not_claimed_is_not_timed(name: str, shape: str, steps: str, dtype: str, told: str) -> None:
    implementation = faults.correct if name == "Correct" else resolve(name)[0]
    with pytest.raises(pytest.skip.Exception, match=told):
        speed_of(implementation, shape, steps, dtype)


def test_what_was_timed_is_compared_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "failed_clauses", lambda *_: "")
    with pytest.raises(pytest.fail.Exception, match="what was timed is wrong: output"):
        speed_of(faults.implementations["Unscaled"])


def test_peak_memory_counts_what_was_freed_again() -> None:
    def doubled_twice() -> None:
        one = torch.ones(1 << 18)
        other = one + 1
        del one
        _ = other + 1

    assert benchmarks.peak_memory(doubled_twice, "cpu") == pytest.approx(2 * 4 * (1 << 18), rel=1e-3)
