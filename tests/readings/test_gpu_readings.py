"""Functions and classes that raise on the CPU are read on a GPU, if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference import candidate
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from support.judging import expect_conforms

process = {"on_gpu": False}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is the CPU, while `process` says so."""
    call = candidate.Candidate.call

    def called(self: candidate.Candidate, *given: Any, **options: Any) -> Any:
        process["on_gpu"] = self.device == "cpu" and "devices" in self.claims
        return call(self, *given, **options)

    monkeypatch.setitem(process, "on_gpu", False)
    monkeypatch.setattr(candidate, "GPU", "cpu")
    monkeypatch.setattr(candidate.Candidate, "call", called)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads (B, H, L, d_k)."""
    if not (process["on_gpu"] or q.is_cuda):
        raise RuntimeError("cannot be accessed from the CPU")
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def attend_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError("half precision alone")
    return attend(q, k, v)


@torch.no_grad()
def attend_forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a kernel without a backward."""
    return attend(q, k, v)


def attend_without_value_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v.detach())


def refuse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("out of memory" if process["on_gpu"] else "cannot be accessed from the CPU")


class Block(nn.Module):
    """Self-attention around a kernel."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        output: Tensor = self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return output


@pytest.mark.mostly_slow(1)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("read", "made"),
    [
        (infer_kernel, attend),
        (infer, Block),
        pytest.param(infer_kernel, attend_in_half, marks=pytest.mark.slow),
    ],
)
def test_what_raises_on_the_cpu_alone_is_read_on_the_gpu(read: Any, made: Any) -> None:
    result = read(made)
    assert result.implementation.claims.devices == {"cuda"}
    assert 'devices={"cuda"}' in result.declaration
    assert "a GPU: on the CPU, calls raise" in result.report()


@pytest.mark.usefixtures("gpu")
def test_gradients_are_not_claimed_if_there_are_none_at_all() -> None:
    result = infer_kernel(attend_forward)
    assert not result.implementation.claims.gradients
    assert "its outputs have none" in result.report()
    assert infer_kernel(attend_without_value_gradients).implementation.claims.gradients


@pytest.mark.usefixtures("gpu")
def test_what_raises_there_too_is_refused_with_what_it_raises_there() -> None:
    with pytest.raises(ImplementationError, match="out of memory"):
        infer_kernel(refuse)


@pytest.mark.usefixtures("gpu")
def test_what_is_read_on_the_cpu_is_not_tried_on_the_gpu() -> None:
    result = infer_kernel(lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v)
    assert result.implementation.claims.devices == {"cpu", "cuda"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to have no GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ImplementationError, match="cannot be accessed from the CPU"):
        infer_kernel(attend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernel_conforms_on_a_gpu() -> None:
    expect_conforms(attend, ["HED-1", "NUM-1", "GRD-1"], devices="cuda")
