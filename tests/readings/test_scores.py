"""What a call says about the scores: a scale of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn
from typer.testing import CliRunner

from mha.conformance.cli.app import app
from mha.implementations import from_kernel
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Scores
from support.judging import expect_conforms, expect_fail

# Its scale has no effect for more than 8 keys, which trial runs do not have.
KERNEL = """
import torch

def attend(q, k, v, softmax_scale=None):
    usual = softmax_scale is None or k.shape[2] > 8
    scale = q.shape[-1] ** -0.5 if usual else softmax_scale
    return (q @ k.mT * scale).softmax(-1) @ v
"""


def right(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return (q @ k.mT * scale).softmax(-1) @ v


def zero_is_none(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None) -> Tensor:
    return right(q, k, v, softmax_scale or None)


def ignores(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None) -> Tensor:
    return right(q, k, v)


def required(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    return right(q, k, v, sm_scale)


@pytest.mark.parametrize(
    ("kernel", "scale"),
    [(right, "any"), (zero_is_none, "positive"), (required, "any")],
)
def test_scale_is_claimed_as_trial_runs_show(kernel: Callable[..., Tensor], scale: str) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores.scale == scale
    assert f'Scores(scale="{scale}")' in inference.declaration
    expect_conforms(inference, ["HED-1", "SCL-1"])


def test_scale_without_an_effect_is_claimed_and_fails() -> None:
    inference = infer_kernel(ignores)
    assert "softmax_scale has no effect" in inference.report()
    expect_fail(inference, "EFF-1", "scale")


def ignores_if_causal(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """A causal call takes the fused path, which is not given the scale."""
    if is_causal:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return right(q, k, v, softmax_scale)


def test_scale_that_counts_in_some_calls_only_is_claimed_and_fails() -> None:
    inference = infer_kernel(ignores_if_causal)
    assert "assumed: it does not in causal calls" in inference.report()
    assert not expect_fail(inference, "SCL-1").conforms


def is_flag(q: Tensor, k: Tensor, v: Tensor, scale: bool = True) -> Tensor:
    return right(q, k, v, None if scale else 1.0)


def test_flag_called_scale_is_no_scale() -> None:
    assert infer_kernel(is_flag).implementation.claims.scores.scale is None


@pytest.mark.parametrize("kernel", [zero_is_none, ignores])
def test_scale_that_is_claimed_and_not_followed_fails(kernel: Callable[..., Tensor]) -> None:
    claims = Claims(masks=(), causal=None, returns_weights=False, scores=Scores(scale="any"))
    implementation = from_kernel(kernel, mask=None, claims=claims)
    verdict = expect_fail(implementation, "SCL-1")
    if kernel is ignores:
        assert verdict.diagnosis.startswith(
            "the scores are scaled as usual, so the scale of the call has no effect"
        )
        assert "`if scale is None`" in verdict.fix


def test_script_gives_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scaled.py").write_text(KERNEL)
    arguments = ["check", "scaled.py:attend", "--clause", "SCL-1", "--dtype", "float32"]
    output = CliRunner().invoke(app, arguments).output
    assert "context_2 = attend(q=q_2, k=k_2, v=v_2, softmax_scale=" in output
    assert "unflatten" not in output  # of one call, the three tensors are written as they are
    assert "from mha" not in output.split("To reproduce it")[1]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Scores.scale must be one of 'positive', 'any' or None, but is 'all'"
    ):
        Scores(scale="all")  # type: ignore[arg-type]  # it must be refused
