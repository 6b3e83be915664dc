"""Benchmarks under pytest time conforming implementations only, and check each result."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.benchmarks.workloads import EVERY_SHAPE, workload_of
from mha.conformance.faults import registry as faults
from mha.conformance.harness import memory
from mha.conformance.harness.memory import memory_limit, peak_memory
from mha.conformance.pytest_plugin import benchmarks
from mha.conformance.pytest_plugin.stash import SELECTION
from mha.conformance.settings import Settings
from mha.implementations import resolve
from mha.spec import Claims
from support import variants
from support.forks import run_module
from support.front_end import CHECKOUT, run

ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
# A plugin of pytest, since what is judged may not change the judge.
FEWER = """\
from dataclasses import replace

def pytest_configure():
    from mha.conformance.settings import PROFILES
    PROFILES["quick"] = replace(PROFILES["quick"], boundary=1, examples=1)
"""
MINE = """\
from mha.conformance.faults import registry, softmax
from mha.spec import Claims

# So that judging takes less long.
few = Claims(masks=(), causal=None, gradients=False, returns_weights=False)
plain = registry.implementation_of(registry.Correct, few)
unscaled = registry.implementation_of(softmax.Unscaled, few)
"""


class Recorder:
    """Takes the place of the fixture of pytest-benchmark."""

    group = name = ""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, timed: Callable[[], Any], setup: Callable[[], Any], rounds: int) -> None:
        """Make two of the rounds."""
        assert rounds >= 5
        for _ in range(2):
            setup()
            timed()


def speed_of(
    implementation: Any,
    shape: str = "token",
    mode: str = "inference",
    dtype: str = "float32",
    threads: int = 1,
) -> Recorder:
    """Run one benchmark, and return what it recorded."""
    recorder, chosen = Recorder(), SimpleNamespace(settings=Settings(profile="quick"))
    options = {"benchmark_min_rounds": "5", "benchmark_max_time": "0.1"}
    config = SimpleNamespace(stash={SELECTION: chosen}, getoption=options.get)
    request: Any = SimpleNamespace(config=config)
    workload = workload_of(shape, dtype, "cpu", training=mode == "training", threads=threads)
    benchmarks.test_speed(recorder, request, implementation, workload)
    return recorder


def test_benchmarks_are_collected_only_if_asked_for() -> None:
    collected = run("--benchmark-only", "--collect-only", "-q", "--mha-impl", "sdpa", env=ALONE)
    assert (
        "benchmarks.py::test_speed[float32-cpu-encoder-inference-one_thread-sdpa]"
        in collected.stdout
    )
    assert (
        "benchmarks.py::test_speed[float32-cpu-huge-training-one_thread-sdpa]" in collected.stdout
    )
    assert "contract[" not in collected.stdout
    plain = run("--collect-only", "-q", "--mha-impl", "sdpa")
    assert "contract[sdpa-cpu-float32-MSK-1]" in plain.stdout
    assert "test_speed" not in plain.stdout
    named = run_module(
        "pytest", "conformance/pytest_plugin/benchmarks.py", "--mha-impl", "sdpa", cwd=CHECKOUT
    )
    assert named.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.slow
def test_run_shows_time_memory_and_why_something_is_not_timed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    targets = (f"{tmp_path}/mine.py:unscaled", f"{tmp_path}/mine.py:plain", "fused_qkv")
    chosen = ("-k", "token and one_thread", "--mha-dtype", "float32", "--mha-profile", "quick")
    (tmp_path / "fewer.py").write_text(FEWER)
    alone = ALONE | {"PYTHONPATH": str(tmp_path)}
    done = run("-p", "fewer", "--benchmark-only", *chosen, "--mha-impl", *targets, env=alone)
    assert done.returncode == 1, done.stdout
    assert "Unscaled is not timed: it does not conform (" in done.stdout
    assert "benchmark 'token, inference, float32 on cpu, 1 thread': 1 tests" in done.stdout
    assert "Correct (" in done.stdout
    assert "error" not in done.stdout.splitlines()[-1]
    assert "fused_qkv is not timed: it does not claim cross_attention" in done.stdout


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("name", "shape", "mode"),
    [
        pytest.param("sdpa", "encoder", "inference", marks=pytest.mark.slow),
        ("sdpa", "token", "inference"),
        ("kv_cache", "encoder", "training"),
    ],
)
def test_conforming_implementation_is_timed_with_its_peak_memory(
    name: str, shape: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "failing_clauses", lambda *_: "")
    implementation = resolve(name)[0].implementation
    before = torch.get_num_threads()
    recorder = speed_of(implementation, shape, mode, threads=2)
    assert recorder.group == f"{shape}, {mode}, float32 on cpu, 2 threads"
    assert torch.get_num_threads() == before
    peak = recorder.extra_info["peak_memory_bytes"]
    assert recorder.name == f"{name} ({peak / 2**20:.1f} MiB)"
    sizes = EVERY_SHAPE[shape]
    output = 4 * sizes["B"] * sizes["L"] * sizes["n_heads"] * sizes["head_dim"]
    assert peak >= 2 * output


@pytest.mark.parametrize(
    ("name", "shape", "mode", "dtype", "reason"),
    [
        ("fused_qkv", "token", "inference", "float32", "does not claim cross_attention"),
        ("flex", "encoder", "training", "float32", "does not claim gradients"),
        ("Correct", "encoder", "inference", "float16", "float16 on cpu is not claimed"),
        ("NotScaled", "encoder", "inference", "float32", "it claims a scale"),
    ],
)
def test_unclaimed_workload_is_not_timed(
    name: str, shape: str, mode: str, dtype: str, reason: str
) -> None:
    not_scaled = faults.implementation_of(variants.NotScaled, Claims(scale=1.0))
    own = {"Correct": faults.correct, "NotScaled": not_scaled}
    implementation = own[name] if name in own else resolve(name)[0].implementation
    with pytest.raises(pytest.skip.Exception, match=reason):
        speed_of(implementation, shape, mode, dtype)


class AlmostScaled(faults.Complete):
    """Scores are off by 1% in rows that are longer than any of the quick profile."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.01 if k.shape[2] > 1000 else 1.0)


class TiltedGradient(faults.Complete):
    """Gradients are off by 1% where the batch is large."""

    def split(self, x: Tensor) -> Tensor:
        heads = super().split(x)
        if heads.requires_grad and len(heads) > 5:
            heads.register_hook(lambda gradient: gradient * 1.01)
        return heads


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("cls", "shape", "mode"),
    [(AlmostScaled, "long", "inference"), (TiltedGradient, "encoder", "training")],
)
def test_timed_results_are_compared_with_the_plain_formula(
    cls: Any, shape: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "failing_clauses", lambda *_: "")
    with pytest.raises(pytest.fail.Exception, match="its result is incorrect"):
        speed_of(faults.implementation_of(cls), shape, mode)


def test_peak_memory_is_the_most_held_at_once() -> None:
    def doubled_twice() -> None:
        one = torch.ones(1 << 18)
        other = one + 1
        del one
        _ = other + 1

    assert peak_memory(doubled_twice, "cpu") == pytest.approx(2 * 4 * (1 << 18), rel=1e-3)


def test_memory_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("memory.max", "memory.limit_in_bytes")]
    monkeypatch.setattr(memory, "LIMITS", [str(file) for file in files])
    total = memory_limit("cpu")
    files[0].write_text("max\n")
    assert memory_limit("cpu") == total > 1 << 20
    files[1].write_text("1048576\n")
    assert memory_limit("cpu") == 1 << 20
