"""Wrong classes are understood as what they are nearest to; what is not plain attention is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.conformance import check
from mha.implementations import ImplementationError
from mha.implementations.inference.infer import InferredClass, infer


def evidence(result: InferredClass) -> dict[str, str]:
    """Return how each row of the report was found."""
    return {row.topic: row.evidence for row in result.rows}


def verdict(result: InferredClass, clause: str) -> tuple[str, bool]:
    (found,) = check(result.implementation, "quick", clauses=[clause], dtypes=["float32"]).verdicts
    return found.status, found.conforms


class Plain(nn.Module):
    """Self-attention with a stacked projection; each class below changes one step."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.place(q), self.place(k)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        context = self.weigh(scores, mask) @ v
        output: Tensor = self.proj(context.transpose(1, 2).flatten(2))
        return output

    def place(self, q: Tensor) -> Tensor:
        return q

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, mask)


class Sigmoid(Plain):
    """Sigmoids stand for the softmax."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return torch.sigmoid(scores if mask is None else scores.masked_fill(~mask, float("-inf")))


class FaintMask(Plain):
    """The masked scores are 1e-9, not -1e9."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores.masked_fill(~mask, 1e-9)).softmax(-1)


class FirstMask(Plain):
    """The mask of the first item counts for all."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None or mask.ndim < 4 else mask[:1])


class Unmasked(Plain):
    """The mask is not used."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None)


class Leaks(Plain):
    """It is always causal, but each query sees the next key."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        return self.attend(x)


class Opposite(Plain):
    """True = may not attend, which is a convention."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, mask if mask is None else ~mask)


# The words of the row about the mask, and a clause that fails.
MASKS: dict[type[nn.Module], tuple[str, str, str]] = {
    FaintMask: ("mask: True = may attend, ", "assumed: ", "MSK-1"),
    Unmasked: ("mask: True = may attend, ", "assumed: masks have no effect", "MSK-1"),
}


@pytest.mark.parametrize("cls", MASKS, ids=lambda cls: cls.__name__)
def test_mask_that_no_format_explains_is_assumed_and_fails(cls: type[nn.Module]) -> None:
    result = infer(cls)
    finding, how, clause = MASKS[cls]
    assert {row.topic: row.finding for row in result.rows}["mask"].startswith(finding)
    assert evidence(result)["mask"].startswith(how)
    assert verdict(result, clause) == ("fail", False)


def test_opposite_convention_is_not_a_fault() -> None:
    result = infer(Opposite)
    assert evidence(result)["mask"] == "tested"
    assert 'mask="drop"' in result.declaration
    assert verdict(result, "MSK-1") == ("pass", True)


def test_order_of_stacked_projections_is_found_without_a_formula() -> None:
    result = infer(Sigmoid)
    assert result.implementation.parameters == {"w_qkv": "qkv", "w_o": "proj"}
    assert evidence(result)["projections"].startswith("assumed: ")
    assert verdict(result, "HED-1") == ("fail", False)


def test_causal_mask_that_leaks_is_read_as_causal() -> None:
    result = infer(Leaks)
    assert result.implementation.claims.always_causal
    assert evidence(result)["causal"] == "assumed: it explains the output only with one query and one key"
    assert verdict(result, "CAU-1") == ("fail", False)


class Swish(Plain):
    """Its parameter of positions has no effect, and its scores are too sharp."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.pos, self.norm = nn.Parameter(torch.zeros(d_model)), nn.LayerNorm(d_model)

    def place(self, q: Tensor) -> Tensor:
        return q * 1.3


def test_what_is_not_used_is_not_out_of_scope() -> None:
    assert verdict(infer(Swish), "SMX-6") == ("fail", False)


class Normalised(Plain):
    """It normalises its input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(self.norm(x), mask)


class Residual(Normalised):
    """It adds its input."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + super().forward(x, mask)


class Rotary(Plain):
    """It rotates by position."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", torch.tensor([0.5]))

    def place(self, q: Tensor) -> Tensor:
        angle = torch.arange(q.shape[-2])[:, None] * self.inv_freq.to(q.dtype)
        one, other, rest = q[..., :1], q[..., 1:2], q[..., 2:]
        turned = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
        return torch.cat([*turned, rest], -1)


class AbsolutePositions(Normalised):
    """It adds positions to its input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.norm, self.position = nn.Identity(), nn.Embedding(64, d_model)  # type: ignore[assignment]  # the point

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.position.weight[: x.shape[1]], mask)


class FeedForward(Plain):
    """It has a feed-forward part."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.ff = nn.Sequential(nn.Linear(d_model, 3 * d_model), nn.GELU(), nn.Linear(3 * d_model, d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.ff(self.attend(x, mask))


class TurnedInPlace(Plain):
    """It rotates by position, without a name that says so."""

    def place(self, q: Tensor) -> Tensor:
        angle = torch.arange(q.shape[-2])[:, None].to(q)
        one, other, rest = q[..., :1], q[..., 1:2], q[..., 2:]
        turned = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
        return torch.cat([*turned, rest], -1)


class Uneven(Plain):
    """Its softmax runs over the queries, beside functions that do not matter."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        torch.tanh(scores.norm())
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return (scores * torch.rsqrt(torch.ones_like(scores))).softmax(-2)


def test_function_that_does_not_matter_is_not_out_of_scope() -> None:
    assert verdict(infer(Uneven), "SMX-6")[0] == "fail"


class OfUnitLength(Plain):
    """It normalises queries."""

    def place(self, q: Tensor) -> Tensor:
        return nn.functional.normalize(q, dim=-1)


def distances(scores: Tensor) -> Tensor:
    """Return how far each key is behind each query, (L, S)."""
    queries, keys = (torch.arange(size) for size in scores.shape[-2:])
    return queries[:, None] - keys


class Capped(Plain):
    """It caps its scores."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(5 * torch.tanh(scores / 5), mask)


class Biased(Plain):
    """It adds ALiBi."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, self.n_heads + 1) / self.n_heads)
        return super().weigh(scores - slopes.to(scores)[:, None, None] * distances(scores).abs(), mask)


class Windowed(Plain):
    """It attends to a window."""

    def __init__(self, d_model: int, n_heads: int, width: int = 2) -> None:
        super().__init__(d_model, n_heads)
        self.width = width

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.masked_fill(distances(scores).abs() > self.width, float("-inf")), mask)


class WidelyWindowed(Windowed):
    """It attends to a window that is longer than the trial runs."""

    def __init__(self, d_model: int, n_heads: int, sliding_window: int = 128) -> None:
        super().__init__(d_model, n_heads, sliding_window)


def test_window_that_an_argument_gives_is_widened() -> None:
    result = infer(WidelyWindowed)
    assert evidence(result)["formula"] == "tested"
    assert "partial(WidelyWindowed, sliding_window=2048)" in result.declaration
    assert verdict(result, "NUM-5") == ("pass", True)


class Sinking(Plain):
    """It has a score without a key for each head."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.sinks = nn.Parameter(torch.zeros(n_heads))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


OUT_OF_SCOPE: dict[type[nn.Module], str] = {
    TurnedInPlace: "it depends on positions (`torch.cos`, `torch.sin`)",
    OfUnitLength: "it normalises what it computes (`normalize`)",
    Capped: "it caps its scores (`tanh`)",
    Biased: "it adds a bias that grows with the distance of query and key (ALiBi)",
    Windowed: "it attends to at most 2 positions on a side",
    Sinking: "it adds scores without a key (`sinks`)",
    Normalised: "Normalised is out of scope: it normalises its input (`norm`); to judge its attention, derive a class "
    "whose constructor sets self.norm = torch.nn.Identity()",
    Residual: "it adds its input to its output (a residual connection); to judge its attention, derive a class whose "
    "forward returns super().forward(x, mask) - x; it normalises its input (`norm`)",
    Rotary: "it depends on positions (`inv_freq`)",
    AbsolutePositions: "it depends on positions (`position.weight`)",
    FeedForward: "it computes with more than four projections (`ff.0`, `ff.2`)",
}


@pytest.mark.parametrize("cls", OUT_OF_SCOPE, ids=lambda cls: cls.__name__)
def test_what_is_not_plain_attention_is_named(cls: type[nn.Module]) -> None:
    with pytest.raises(ImplementationError) as raised:
        infer(cls)
    assert OUT_OF_SCOPE[cls] in str(raised.value)
    assert "\n" not in str(raised.value)


class WithoutNorm(Normalised):
    """What the message about the norm advises."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.norm = torch.nn.Identity()  # type: ignore[assignment]  # the point


def test_advice_about_a_norm_can_be_followed() -> None:
    assert set(evidence(infer(WithoutNorm)).values()) == {"by name", "tested", "tested without a mask"}


class ListedOutput(Plain):
    """Its output projection is a list of a layer and its dropout."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.to_out = nn.ModuleList([self.proj, nn.Dropout(0.0)])
        del self.proj

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out[1](self.to_out[0](context.transpose(1, 2).flatten(2)))


def test_layer_in_a_list_with_dropout_is_the_output_projection() -> None:
    result = infer(ListedOutput)
    assert result.implementation.parameters == {"w_qkv": "qkv", "w_o": "to_out.0"}
    assert evidence(result)["projections"] == "tested"


class Constant(Plain):
    """Nothing shows the order of its axes."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # another signature
        return torch.zeros_like(x)


class RefusesMasks(Plain):
    """Each mask raises."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, None if mask is None else mask.missing)  # type: ignore[attr-defined]  # the point


class PaddingIgnored(Plain):
    """It uses one of its two masks."""

    def forward(  # type: ignore[override]  # another signature
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return self.attend(x, attn_mask)


class PaddingOfFirst(PaddingIgnored):
    """The padding of the first item counts for all."""

    def forward(  # type: ignore[override]  # another signature
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        keys = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
        keys = keys if key_padding_mask is None else ~key_padding_mask[:1, None, None]
        return self.attend(x, keys if attn_mask is None else keys & attn_mask)


UNCLEAR: dict[type[nn.Module], str] = {
    FirstMask: "masks that all items share count as mask_shape='l s', but those of each item for some items only",
    PaddingIgnored: "its padding mask key_padding_mask has no effect; declare padding=None",
    Constant: "no reading gives what it computes, and several are equally near: from_module(Constant, parameters="
    "{'w_qkv': 'qkv', 'w_o': 'proj'}) or from_module(Constant, parameters={'w_qkv': 'qkv', 'w_o': 'proj'}, "
    "layout='l b d'). Declare it below",
    RefusesMasks: "no convention explains what a mask of any common shape does as 'mask' (a boolean one of "
    "(B, H, L, S) raises AttributeError: 'Tensor' object has no attribute 'missing'); pass mask='keep'",
}


@pytest.mark.parametrize("cls", UNCLEAR, ids=lambda cls: cls.__name__)
def test_what_is_as_near_as_something_else_is_asked_for(cls: type[nn.Module]) -> None:
    with pytest.raises(ImplementationError) as raised:
        infer(cls)
    assert UNCLEAR[cls] in str(raised.value)


def test_padding_of_the_first_item_is_judged() -> None:
    result = infer(PaddingOfFirst)
    assert 'padding="drop"' in result.declaration
    assert evidence(result)["mask"].startswith("assumed: ")
    assert verdict(result, "MSK-1") == ("fail", False)
