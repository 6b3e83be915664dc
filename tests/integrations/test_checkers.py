"""The judge in the place of other benchmarks' checks, each called as the benchmark calls it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance.integrations import flashinfer_bench, gpu_mode, kernelbench
from mha.conformance.integrations.reading import Reading
from mha.spec import Claims, Lse
from support.embedded_kernels import in_float32, kernel_of

CLAIMS = Claims(projections=False, returns_weights=False, causal="bottom_right", lse=Lse())
RIGHT = kernel_of(in_float32)


def drawn(seed: int = 0) -> list[Tensor]:
    """Query, key and value, (1, 2, 9 or 33, 16)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 16, generator=generator) for length in (9, 33, 33)]


def mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value.mean(2, keepdim=True).expand(*query.shape[:3], -1).contiguous()


def test_gpu_mode() -> None:
    def read(data: tuple[Tensor, Tensor, Tensor, dict[str, Any]]) -> Reading:
        query, key, value, config = data
        return Reading((query, key, value), {"is_causal": config["causal"]})

    check = gpu_mode.check_implementation(read, CLAIMS)
    query, key, value = drawn()
    data = (query, key, value, {"causal": True})
    assert check(data, RIGHT(query, key, value, is_causal=True)) == (True, "")
    good, message = check(data, RIGHT(query, key, value))
    assert not good
    assert "the causal mask was not applied" in message


@dataclass
class KernelExecResult:
    """A stand-in for KernelBench's."""

    compiled: bool = False
    correctness: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    """A model of a problem, whose forward is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_kernelbench(precision: torch.dtype) -> None:
    def read(inputs: Sequence[Any]) -> Reading:
        query, key, value = inputs
        return Reading((query, key, value))

    check = kernelbench.run_and_check_correctness(read, CLAIMS, KernelExecResult)

    def get_inputs() -> list[Tensor]:
        return [torch.rand(2, 2, 64, 128) for _ in range(3)]

    def judged(function: Any) -> KernelExecResult:
        original = Model(lambda *x: RIGHT(*x)[0])
        result: KernelExecResult = check(
            original, Model(function), get_inputs, {}, 2, seed=1, precision=precision
        )
        return result

    right = judged(lambda *x: RIGHT(*x)[0])
    assert right == KernelExecResult(True, True, {"correctness_trials": "(2 / 2)"})
    # By the benchmark's own tolerance of 1e-2, both are right in bfloat16.
    wrong = judged(mean)
    assert not wrong.correctness
    assert "the mean of the values" in wrong.metadata["correctness_issue"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the modules of FlashInfer-Bench, as its repository has them."""
    status = SimpleNamespace(RUNTIME_ERROR="RUNTIME_ERROR", INCORRECT_NUMERICAL="INCORRECT")
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".bench": {},
        ".bench.evaluators": {},
        ".bench.evaluators.default": {"DefaultEvaluator": object},
        ".bench.evaluators.utils": {
            "allocate_outputs": lambda _, given, device: [
                torch.empty_like(given[0]),
                torch.empty(given[0].shape[:3]),
            ],
            "normalize_result": lambda _, result, device: list(result),
        },
        ".bench.utils": {"make_eval": lambda **given: SimpleNamespace(**given)},
        ".data": {"Correctness": SimpleNamespace, "EvaluationStatus": status},
    }
    for name, values in contents.items():
        module = ModuleType(f"flashinfer_bench{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("benchmark")
@pytest.mark.parametrize("in_place", [True, False])
def test_flashinfer_bench(in_place: bool) -> None:
    def read(definition: Any, inputs: Sequence[Any]) -> Reading:
        query, key, value = inputs
        return Reading((query, key, value))

    evaluator = flashinfer_bench.attention_evaluator(
        read, CLAIMS, lambda definition: definition.op_type == "gqa"
    )
    assert evaluator.can_evaluate(SimpleNamespace(op_type="gqa"))
    assert not evaluator.can_evaluate(SimpleNamespace(op_type="gemm"))

    def judged(function: Any) -> tuple[Any, Any]:
        class Runnable:
            metadata = SimpleNamespace(destination_passing_style=in_place)

            def __call__(self, *tensors: Tensor) -> Any:
                results = function(*tensors[:3])
                for place, result in zip(tensors[3:], results, strict=False):
                    place.copy_(result)
                return results

        found: tuple[Any, Any] = evaluator.check_correctness(
            None, Runnable(), [drawn(0), drawn(1)], [], None, "log", "cpu"
        )
        return found

    correctness, evaluation = judged(RIGHT)
    assert evaluation is None
    assert 0 < correctness.max_absolute_error < 1
    _, evaluation = judged(lambda *x: (mean(*x), RIGHT(*x)[1]))
    assert evaluation.status == "INCORRECT"
    assert "the mean of the values" in evaluation.extra_msg

    def raising(*inputs: Tensor) -> Any:
        raise RuntimeError("no kernel image")

    _, evaluation = judged(raising)
    assert evaluation.status == "RUNTIME_ERROR"
    assert evaluation.extra_msg == "no kernel image"
