"""What raises for all dtypes but half precision, or float32, is judged in these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Config
from support.judging import expect_conforms, judged

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")

HALF = {"bfloat16", "float16"}


def require_half(x: Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError("only float16 and bfloat16 are supported")


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, drop: float = 0.0
) -> Tensor:
    """Attend in float32, with weights that are rounded once."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
    context: Tensor = F.dropout(weights, drop).to(q.dtype) @ v
    return context


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Heads last but one, (B, L, H, d_k)."""
    require_half(q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, keys = q.shape[2], k.shape[2]
    later = torch.ones(length, keys, dtype=torch.bool).triu(1 + keys - length)
    return attend(q, k, v, later if causal else None).transpose(1, 2)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """True hides."""
    require_half(query)
    return attend(query, key, value, mask)


def off_by_little(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that are 3 % too small."""
    require_half(q)
    return attend(0.97 * q, k, v)


def unweighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of the values."""
    require_half(q)
    return attend(0 * q, k, v)


def in_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """Half precision, and whole tiles; causal from the left."""
    require_half(q)
    if q.shape[2] % 64 or k.shape[2] % 64:
        raise ValueError("lengths must be a multiple of 64")
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return attend(q * (sm_scale * q.shape[-1] ** 0.5), k, v, later if causal else None)


def in_odd_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half precision, and tiles of 48."""
    require_half(q)
    if q.shape[2] % 48:
        raise ValueError("lengths must be a multiple of 48")
    return attend(q, k, v)


def single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float32 alone."""
    if q.dtype != torch.float32:
        raise TypeError("only float32 is supported")
    return attend(q, k, v)


def brain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bfloat16 alone."""
    if q.dtype != torch.bfloat16:
        raise TypeError("only bfloat16 is supported")
    return attend(q, k, v)


class HalfModule(nn.Module):
    """Self-attention with a mask (B, S), True = may attend, and dropout of the weights."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        Config(d_model, n_heads, dropout=dropout).validate()
        self.n_heads, self.dropout = n_heads, dropout
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        require_half(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = (
            None
            if key_padding_mask is None
            else ~key_padding_mask.expand(x.shape[:2])[:, None, None]
        )
        context = attend(q, k, v, hidden, self.dropout * self.training)
        output: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dtypes", "declared"),
    [
        pytest.param(flash, HALF, 'layout="b l h d"', marks=pytest.mark.slow),
        pytest.param(masked, HALF, 'mask="drop"', marks=pytest.mark.slow),
        (single, {"float32"}, "mask=None"),
        (brain, {"bfloat16"}, "mask=None"),
    ],
)
def test_kernel_of_few_dtypes_conforms(kernel: Any, dtypes: set[str], declared: str) -> None:
    result = infer_kernel(kernel)
    assert result.implementation.claims.dtypes == dtypes
    assert declared in result.declaration
    expect_conforms(result, [], dtypes=dtypes)


def test_wrong_kernel_of_half_precision_fails() -> None:
    """Its scores are as near as roundings in trial runs, but not in the cases."""
    report = judged(infer_kernel(off_by_little), ["SMX-6", "NUM-1"], dtypes=HALF)
    assert "fail" in {verdict.status for verdict in report.verdicts}


def test_refusal_names_what_is_raised_in_each_dtype() -> None:
    with pytest.raises(
        ImplementationError, match=r"only float16 and bf.*; in other dtypes, .*a multiple of 48"
    ):
        infer_kernel(in_odd_tiles)


def test_kernel_of_half_precision_in_whole_tiles_is_read() -> None:
    claims = infer_kernel(in_tiles).implementation.claims
    assert (claims.dtypes, claims.sizes.length_multiple, claims.causal) == (HALF, 64, "top_left")


def test_kernel_of_half_precision_of_another_formula_is_refused() -> None:
    with pytest.raises(ImplementationError, match="its output matches no formula of attention"):
        infer_kernel(unweighted)


@pytest.mark.slow
def test_class_of_half_precision_conforms() -> None:
    result = infer(HalfModule)
    claims = result.implementation.claims
    assert (claims.dtypes, claims.dropout, claims.empty_row) == (HALF, True, "zeros")
    assert 'mask_shape="b s"' in result.declaration
    expect_conforms(result, [], dtypes=HALF)
