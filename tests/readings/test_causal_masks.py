"""Causal masks that a class makes itself, and what a query without a key gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.infer import infer
from support.judging import expect_conforms, expect_fail, expect_pass, judged
from support.plain import Plain
from support.readings import evidence, findings, is_tested
from support.right_classes import Heads, Separate, hidden

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class CausalFromTheEnd(Separate):
    """Always causal, aligned bottom-right; a query without a key gets NaN."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = query.shape[1], key.shape[1]
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return self.attend(query, key, value, hidden(visible).to(query.dtype))


class CausalFromTheEndWithZeros(CausalFromTheEnd):
    """The same, but that query gets zeros."""

    def weigh(self, scores: Tensor) -> Tensor:
        empty = scores.isneginf().all(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


class CausalFlagFromTheEnd(CausalFromTheEnd):
    """The same by a flag."""

    def forward(  # type: ignore[override]  # with a flag, and without weights
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False
    ) -> Tensor:
        if is_causal:
            return super().forward(query, key, value)[0]
        return self.attend(query, key, value)[0]


class LeastNumberOfFloat32(Separate):
    """In float64 the fill becomes -infinity in the softmax, which is computed in float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        added = query.new_zeros(())
        if mask is not None:
            added = added.expand(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        return self.attend(query, key, value, added)[0]

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).to(scores)


ALWAYS = {"causal": "bottom_right", "always_causal": True}
# The class, and its claims.
CLASSES: dict[type[nn.Module], dict[str, Any]] = {
    CausalFromTheEnd: {**ALWAYS, "empty_row": "nan"},
    CausalFromTheEndWithZeros: {**ALWAYS, "empty_row": "zeros"},
    CausalFlagFromTheEnd: {"causal": "bottom_right", "empty_row": "nan"},
    LeastNumberOfFloat32: {"empty_row": "uniform", "dtypes": {"float32", "bfloat16", "float16"}},
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class_is_read_as_it_is_and_conforms(cls: type[nn.Module]) -> None:
    result, claims = infer(cls), CLASSES[cls]
    assert is_tested(result)
    assert {name: getattr(result.implementation.claims, name) for name in claims} == claims
    expect_conforms(result, ["SMX-4", "MSK-2", "MSK-8", "GRD-5"])


def test_no_keys_give_zeros_though_a_row_without_an_allowed_key_is_nan() -> None:
    expect_pass(CausalFlagFromTheEnd, "SHP-5")


class AlwaysCausal(Separate):
    """Of one input, as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.attend(x, x, x, hidden(causal).to(x.dtype))[0]


def test_small_errors_show_in_sampled_rows_of_causal_calls() -> None:
    report = judged(infer(AlwaysCausal), ["NUM-5"])
    assert [verdict.status for verdict in report.verdicts] == ["pass"]


class HidesTwice(Plain):
    """Causal with -infinity, and hides padding with the least number: a row may get either."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1)


def test_two_policies_for_empty_rows_are_none() -> None:
    assert evidence(infer(HidesTwice))["empty rows"] == "assumed: it gets something else"


class FlagIsHint(Separate):
    """Its causal flag says that the mask is causal, and does nothing."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if attn_mask is not None:
            return self.attend(x, x, x, hidden(attn_mask).to(x))[0]
        if is_causal:
            raise RuntimeError("the flag needs a mask")
        return self.attend(x, x, x)[0]


def test_causal_flag_that_is_a_hint_is_not_claimed() -> None:
    result = infer(FlagIsHint)
    assert result.implementation.claims.causal is None
    raised = "is_causal=True raises RuntimeError: the flag needs a mask"
    assert findings(result)["causal"] == f"not judged: without a mask, {raised}"


class CausalByDefault(Separate):
    """Causal without a mask, which takes the place of that, as where `is_causal=mask is None`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.attend(x, x, x, hidden(mask).to(x))[0]


class PaddingForCausality(CausalByDefault):
    """Wrong: it forgets that it is causal where there is padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, None if mask is None else mask[:, None, None, :])


def test_mask_may_take_the_place_of_the_causal_one() -> None:
    result = infer(CausalByDefault)
    assert is_tested(result)
    assert "causal_by_default=True" in result.declaration
    assert not result.implementation.claims.always_causal
    expect_pass(result, "CAU-2", also=["MSK-2", "MSK-4", "CAU-4", "PTH-3"])
    assert infer(PaddingForCausality).implementation.claims.always_causal


class TakesLayers(Heads):
    """Takes its projections, an index, and is causal unless it gets a mask, as in torchtune."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        layer_idx: int,
        is_causal: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        assert layer_idx == 0
        self.n_heads, self.is_causal = num_heads, is_causal
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.output_proj = output_proj

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Any:
        if mask is None and self.is_causal:
            mask = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool).tril()
        hides = None if mask is None else ~mask
        contexts = self.attend(self.q_proj(x), self.k_proj(y), self.v_proj(y), hides)
        return self.output_proj(contexts)


def test_causal_default_is_switched_off_where_masks_replace_it() -> None:
    result = infer(TakesLayers)
    claims = result.implementation.claims
    assert claims.cross_attention == "memory"
    assert claims.causal == "top_left"
    assert not claims.always_causal
    assert "from functools import partial" in result.declaration
    assert "    partial(TakesLayers, is_causal=False)," in result.declaration


class LeaksByPositions(Separate):
    """Wrong: always causal by a buffer of positions, but each query sees the next key."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.register_buffer("positions", torch.arange(4096), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.get_buffer("positions")[: x.shape[1]]
        return self.attend(x, x, x, hidden(positions <= positions[:, None] + 1).to(x))[0]


class Sharp(Separate):
    """Wrong: a number makes the softmax too sharp; a parameter might be meant to be learned."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.temperature = 1.3

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]

    def weigh(self, scores: Tensor) -> Tensor:
        return (scores * self.temperature).softmax(-1)


@pytest.mark.parametrize(
    ("cls", "clause"), [(LeaksByPositions, "CAU-1"), (Sharp, "SMX-6")], ids=["leak", "sharp"]
)
def test_wrong_class_is_not_out_of_scope(cls: type[nn.Module], clause: str) -> None:
    expect_fail(infer(cls), clause)
