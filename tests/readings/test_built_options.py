"""Options about scores that a class takes in its constructor, or holds as a parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import from_module
from mha.implementations.inference.infer import infer
from mha.spec import Alibi, Claims, Config, Scores, Weights, Window
from support.judging import expect_conforms, expect_fail

CLAUSES = ["WIN-1", "WIN-2", "CAP-1", "CHK-1", "SCL-1", "SNK-1", "SNK-2", "EFF-1"]
PARAMETERS = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "o_proj"}


class Attention(nn.Module):
    """Takes what models of today set once: a window that counts keys, a cap, a scale, chunks."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        sliding_window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        attention_chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError("d_model must be divisible by n_heads")
        self.n_heads = n_heads
        self.scale = (d_model // n_heads) ** -0.5 if scale is None else scale
        self.softcap, self.window, self.chunk = softcap, sliding_window, attention_chunk_size
        for name in PARAMETERS.values():
            self.register_module(name, nn.Linear(d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        named = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in named)
        context = self.weights(self.scores(q, k)) @ v
        output: Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        places = torch.arange(q.shape[2])
        distances = places - places.unsqueeze(1)
        allowed = distances <= 0
        if self.window is not None:
            allowed = allowed & (distances > -self.window)
        if self.chunk is not None:
            allowed = allowed & (places // self.chunk == places.unsqueeze(1) // self.chunk)
        return scores.masked_fill(~allowed, -torch.inf)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class WithSinks(Attention):
    """Learns a sink of each head, as gpt-oss does."""

    def __init__(self, d_model: int, n_heads: int, sliding_window: int | None = None) -> None:
        super().__init__(d_model, n_heads, sliding_window)
        self.sinks = nn.Parameter(torch.randn(n_heads))

    def weights(self, scores: Tensor) -> Tensor:
        column = self.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


class OneMore(Attention):
    """Has a key too many in its window."""

    def __init__(self, d_model: int, n_heads: int, sliding_window: int | None = None) -> None:
        super().__init__(d_model, n_heads, sliding_window and sliding_window + 1)


class Kept(Attention):
    """Keeps its window for what makes the masks."""

    def __init__(self, d_model: int, n_heads: int, sliding_window: int | None = None) -> None:
        super().__init__(d_model, n_heads)
        self.kept = sliding_window


class WithSlopes(Attention):
    """Adds ALiBi, if it is asked to."""

    def __init__(self, d_model: int, n_heads: int, use_alibi: bool = False) -> None:
        super().__init__(d_model, n_heads)
        self.use_alibi = use_alibi

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        if not self.use_alibi:
            return scores
        places = torch.arange(q.shape[2])
        slopes = 2.0 ** (-8 * torch.arange(1, self.n_heads + 1) / self.n_heads)
        return scores + slopes.view(-1, 1, 1) * (places - places.unsqueeze(1)).to(scores)


OPTIONS = Scores(
    scale="any",
    window=Window("count", unbounded=None),
    chunk=True,
    softcap="before_bias",
)


def test_options_of_a_constructor_are_found_and_conform() -> None:
    inference = infer(Attention)
    claims = inference.implementation.claims
    assert claims.scores == OPTIONS
    assert claims.always_causal
    assert inference.not_covered == ()
    declared: dict[str, Any] = {}
    exec(inference.declaration, {"Attention": Attention}, declared)
    expect_conforms(declared["implementation"], CLAUSES, dtypes=["float32", "bfloat16"])


def test_sinks_that_are_a_parameter_are_found_and_conform() -> None:
    inference = infer(WithSinks)
    assert inference.implementation.claims.scores.sinks == "input"
    declared: dict[str, Any] = {}
    exec(inference.declaration, {"WithSinks": WithSinks}, declared)
    expect_conforms(declared["implementation"], CLAUSES, dtypes=["float32", "bfloat16"])


def test_another_window_than_is_claimed_is_named() -> None:
    claims = Claims(
        masks=(),
        always_causal=True,
        cross_attention=False,
        returns_weights=False,
        scores=Scores(window=Window("count", unbounded=None)),
    )
    adapted = from_module(OneMore, parameters=PARAMETERS, mask=None, claims=claims)
    verdict = expect_fail(adapted, "WIN-1")
    assert "the window has one key too many before the query's own" in verdict.diagnosis


def test_an_option_that_a_constructor_only_keeps_is_not_claimed() -> None:
    inference = infer(Kept)
    assert inference.implementation.claims.scores == Scores()
    assert inference.not_covered == ("sliding_window",)
    rows = {row.topic: row.finding for row in inference.rows}
    of_masks = "only a mask that a call is given may hold it"
    assert rows["window"] == f"sliding_window has no effect: {of_masks}"
    assert "not judged" not in rows


def test_slopes_that_a_constructor_switches_on_are_found() -> None:
    inference = infer(WithSlopes)
    assert inference.implementation.claims.scores.alibi == Alibi("signed", built_in=True)
    verdict = expect_fail(inference, "ALB-2")
    assert "as if H were a power of two" in verdict.diagnosis


@pytest.mark.parametrize("cls", [Attention, WithSinks])
def test_modules_of_all_options_share_their_weights(cls: type[nn.Module]) -> None:
    attention = infer(cls).implementation
    config = Config(d_model=8, n_heads=2)
    weights = Weights.random(config, 0, torch.float32)
    built = attention.build(config, weights, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 8)
    before = len(list(built.parameters()))
    windowed = built(x, x, x, is_causal=True, window=(1, 0)).output
    windowed.sum().backward()
    assert len(list(built.parameters())) == before
    assert all(float(each.abs().sum()) > 0 for each in built.weight_gradients().values())
    assert not torch.equal(windowed, built(x, x, x, is_causal=True).output)


class Keeping(Attention):
    """Keeps its weights on an attribute, of the module that was called."""

    def weights(self, scores: Tensor) -> Tensor:
        self.attn = scores.softmax(-1)
        return self.attn


def test_weights_on_an_attribute_are_those_of_the_module_that_was_called() -> None:
    claims = Claims(masks=(), always_causal=True, cross_attention=False, scores=OPTIONS)
    adapted = from_module(Keeping, parameters=PARAMETERS, mask=None, weights="attn", claims=claims)
    config = Config(d_model=8, n_heads=2)
    weights = Weights.random(config, 0, torch.float32)
    built = adapted.build(config, weights, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 5, 8)
    windowed = built(x, x, x, is_causal=True, need_weights=True, window=(0, 0)).weights
    assert windowed is not None
    assert torch.equal(windowed, torch.eye(5).expand(2, 2, 5, 5))
