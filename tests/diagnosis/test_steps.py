"""Where no defect is named, the first wrong step is, as far as layers and weights show it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import from_module
from mha.implementations.loop import implementation as loop

PATHS = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}


class Odd(nn.Module):
    """Attention with a step that no catalogue has; each class below has it elsewhere."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def bend(self, step: str, x: Tensor) -> Tensor:
        return x + torch.sin(3 * x) / 4 if step == type(self).__name__ else x

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        query = self.bend("Projections", query)
        inputs = zip((self.q, self.k, self.v), (query, key, value), strict=True)
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer, x in inputs
        )
        scores = self.bend("Weights", q @ k.mT / q.shape[-1] ** 0.5)
        weights = (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)
        context = self.bend("Context", weights @ v).transpose(1, 2).flatten(2)
        return self.bend("Outputs", self.out(context)), weights


class Projections(Odd):
    pass


class Weights(Odd):
    pass


class Context(Odd):
    pass


class Outputs(Odd):
    pass


STEPS = {
    Projections: "projections wrong",
    Weights: "projections right, weights wrong",
    Context: "projections right, weights right, context wrong",
    Outputs: "projections right, weights right, context right, output wrong",
}


@pytest.mark.mostly_slow(2)  # the steps in float32, and one in float64
@pytest.mark.parametrize("cls", STEPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_first_wrong_step_is_named(cls: type[nn.Module], dtype: str) -> None:
    implementation = from_module(cls, parameters=PATHS)
    (verdict,) = check(implementation, "quick", clauses="NUM-1", dtypes=dtype).verdicts
    assert (verdict.status, verdict.diagnosis) == ("fail", "")
    assert verdict.steps == STEPS[cls]


@pytest.mark.slow
def test_right_class_has_no_wrong_step() -> None:
    assert {
        verdict.steps for verdict in check(loop, "quick", clauses="NUM", dtypes="float32").verdicts
    } == {""}
