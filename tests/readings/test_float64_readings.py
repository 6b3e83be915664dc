"""What inference makes of classes that compute a part in float32 where the inputs are float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.infer import infer
from mha.spec import Config, Rounding
from support.judging import expect_fail, expect_pass


class SoftmaxInSingle(nn.Module):
    """As in transformers."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        output: Tensor = self.out((self.weigh(self.score(q, k)) @ v).transpose(1, 2).flatten(2))
        return output


class AllInDouble(SoftmaxInSingle):
    """Nothing is in float32."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class ScaleInSingle(AllInDouble):
    """Wrong in float64: the constant."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / torch.sqrt(torch.tensor(q.shape[-1], dtype=torch.float32))


class ValuesInSingle(AllInDouble):
    """Wrong in float64: all that follows the projections."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).float().unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        output: Tensor = self.out(
            (self.weigh(self.score(q, k)) @ v).transpose(1, 2).flatten(2).to(x.dtype)
        )
        return output


class QueryInSingle(AllInDouble):
    """Wrong in float64: what goes into the scores."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.float().to(k.dtype), k)


class ScoresInSingle(SoftmaxInSingle):
    """Wrong in float64: the product, too."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q.float(), k.float()).to(q.dtype)


class WeightsRounded(AllInDouble):
    """Wrong in float64: what comes out of the softmax."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1).float().to(scores.dtype)


class SoftmaxInHalf(SoftmaxInSingle):
    """Wrong: scores are rounded to bfloat16."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.bfloat16).to(scores.dtype)


@pytest.mark.slow
def test_softmax_in_float32_is_declared_for_float64() -> None:
    result = infer(SoftmaxInSingle)
    assert result.implementation.claims.rounding == Rounding(softmax_in_float32=True)
    assert (
        "the softmax is in float32 for float64 inputs too, so NUM-2 is not judged  [tested]"
        in result.report(400)
    )
    assert "from mha.spec import Claims, Rounding\n" in result.declaration
    assert "rounding=Rounding(softmax_in_float32=True)" in result.declaration
    clauses = [
        "HED-1",
        "SMX-1",
        "SMX-2",
        "SMX-6",
        "EQV-9",
        "NUM-1",
        "NUM-6",
        "GRD-1",
        "CFG-4",
    ]
    expect_pass(result, *clauses, also=["NUM-2"], dtypes=["float64"])


@pytest.mark.parametrize(
    "cls",
    [AllInDouble, ScaleInSingle, ValuesInSingle, QueryInSingle, ScoresInSingle, WeightsRounded],
)
def test_nothing_else_is_declared(cls: type[nn.Module]) -> None:
    assert infer(cls).implementation.claims.rounding == Rounding()


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("cls", "clause"),
    [(ScaleInSingle, "NUM-2"), (ValuesInSingle, "NUM-2"), (SoftmaxInHalf, "NUM-1")],
)
@pytest.mark.filterwarnings("ignore:.*is read as what it is nearest to")
def test_other_steps_in_a_narrower_dtype_fail(cls: type[nn.Module], clause: str) -> None:
    expect_fail(cls, clause, dtypes=["float64"])
