"""Right classes that were once failed, refused or misread: they are read as they are, and conform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.adapters.construction import MAX_LENGTH
from mha.implementations.inference.infer import Inference, infer


class Base(nn.Module):
    """Four layers, and attention under an additive mask."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, added: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor]:
        layers = ((self.q, query), (self.k, key), (self.v, value))
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer, x in layers
        )
        weights = self.weigh(q @ k.mT / q.shape[-1] ** 0.5 + added)
        output: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output, weights

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


def hidden(visible: Tensor) -> Tensor:
    """Return 0 where a key is visible, and -infinity elsewhere."""
    return torch.zeros(visible.shape).masked_fill(~visible, -math.inf)


class CausalFromTheEnd(Base):
    """Always causal, aligned bottom-right; a query without a key gets NaN."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        visible = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(
            key.shape[1] - query.shape[1]
        )
        return self.attend(query, key, value, hidden(visible).to(query.dtype))


class CausalFromTheEndWithZeros(CausalFromTheEnd):
    """The same, but that query gets zeros."""

    def weigh(self, scores: Tensor) -> Tensor:
        empty = scores.isneginf().all(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


class CausalFlagFromTheEnd(Base):
    """The same by a flag."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        visible = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
        visible = visible.tril(key.shape[1] - query.shape[1]) if is_causal else visible
        return self.attend(query, key, value, hidden(visible).to(query.dtype))[0]


class LeastNumberOfFloat32(Base):
    """In float64 the fill becomes -infinity in the softmax, which is computed in float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        added = query.new_zeros(() if mask is None else mask.shape)
        added = added if mask is None else added.masked_fill(~mask, torch.finfo(query.dtype).min)
        return self.attend(query, key, value, added)[0]

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).to(scores)


# The class, and its claims.
CLASSES: dict[type[nn.Module], dict[str, Any]] = {
    CausalFromTheEnd: {"causal": "bottom_right", "always_causal": True, "empty_row": "nan"},
    CausalFromTheEndWithZeros: {
        "causal": "bottom_right",
        "always_causal": True,
        "empty_row": "zeros",
    },
    CausalFlagFromTheEnd: {"causal": "bottom_right", "empty_row": "nan"},
    LeastNumberOfFloat32: {"empty_row": "uniform", "dtypes": {"float32", "bfloat16", "float16"}},
}
CLAUSES = ("SMX-4", "MSK-2", "MSK-8", "GRD-5")


@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class_is_read_as_it_is_and_conforms(cls: type[nn.Module]) -> None:
    result, claims = infer(cls), CLASSES[cls]
    assert not [row for row in result.rows if "assumed" in row.evidence]
    assert {name: getattr(result.implementation.claims, name) for name in claims} == claims
    report = check(result.implementation, "quick", clauses=CLAUSES, dtypes=["float32"])
    failed = {
        verdict.clause: verdict.message for verdict in report.verdicts if not verdict.conforms
    }
    assert not failed


def test_no_keys_give_zeros_though_a_row_without_an_allowed_key_is_nan() -> None:
    (verdict,) = check(
        CausalFlagFromTheEnd, "quick", clauses=["SHP-5"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "pass", verdict.message


class OfTorch(nn.MultiheadAttention):
    """Without gradients, it takes a fast path, whose masks may have other shapes, and whose empty
    rows are NaN.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # as its users write it
        return super().forward(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]


def test_masks_are_those_that_calls_with_gradients_take() -> None:
    result = infer(OfTorch)
    assert 'mask_shape="b s"' in result.declaration
    report = check(result.implementation, "quick", clauses=["SMX-4", "GRD-5"], dtypes=["float32"])
    assert report.conforms


class FlagIsHint(Base):
    """Its causal flag says that the mask is causal, and does nothing."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if is_causal and attn_mask is None:
            raise RuntimeError("the flag needs a mask")
        return self.attend(x, x, x, 0.0 if attn_mask is None else hidden(attn_mask).to(x))[0]


def test_causal_flag_that_is_a_hint_is_not_claimed() -> None:
    result = infer(FlagIsHint)
    assert result.implementation.claims.causal is None
    causal = next(row.finding for row in result.rows if row.topic == "causal")
    assert (
        causal
        == "not judged: without a mask, is_causal=True raises RuntimeError: the flag needs a mask"
    )


class Averages(Base):
    """Returns the weights of each head only where that is asked for."""

    def forward(
        self, x: Tensor, need_weights: bool = True, average_attn_weights: bool = True
    ) -> Any:
        output, weights = self.attend(x, x, x)
        return output, (
            (weights.mean(1) if average_attn_weights else weights) if need_weights else None
        )


def test_weights_of_each_head_are_asked_for() -> None:
    implementation = infer(Averages).implementation
    assert implementation.claims.returns_weights
    assert check(implementation, "quick", clauses=["SHP-2"], dtypes=["float32"]).conforms


class OneMaskForEach(Base):
    """Its mask is that of its own keys, and another one is that of the memory's."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        keys, kept = (x, mask) if context is None else (context, context_mask)
        kept = x.new_ones(keys.shape[:2], dtype=torch.bool) if kept is None else kept
        assert kept.shape == keys.shape[:2]
        return self.attend(x, keys, keys, hidden(kept)[:, None, None].to(x))[0]


def test_mask_of_the_memory_alone_is_reported() -> None:
    result = infer(OneMaskForEach)
    mask = next(row.finding for row in result.rows if row.topic == "mask")
    assert mask == "context_mask: True = may attend, of shape 'b s'"
    assert check(
        result.implementation, "quick", clauses=["MSK-2", "MSK-12"], dtypes=["float32"]
    ).conforms


class CausalByDefault(Base):
    """Causal without a mask, which takes the place of that, as where `is_causal=mask is None`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        visible = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if mask is None else mask
        )
        return self.attend(x, x, x, hidden(visible).to(x))[0]


class PaddingForCausality(CausalByDefault):
    """Wrong: it forgets that it is causal where there is padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, None if mask is None else mask[:, None, None, :])


@pytest.mark.usefixtures("fewest_cases")
def test_mask_may_take_the_place_of_the_causal_one() -> None:
    result = infer(CausalByDefault)
    assert is_tested(result)
    assert "causal_by_default=True" in result.declaration
    assert not result.implementation.claims.always_causal
    clauses = ["MSK-2", "MSK-4", "CAU-2", "CAU-4", "PTH-3"]
    assert not check(result.implementation, "quick", clauses=clauses, dtypes=["float32"]).failing
    assert infer(PaddingForCausality).implementation.claims.always_causal


class OfOneLength(Base):
    """Cuts its mask to the queries alone, and returns the scores."""

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.scores = x.new_zeros(())
        added = 0.0 if mask is None else mask[: x.shape[1], : x.shape[1]]
        keys = x if xa is None else xa
        return self.attend(x, keys, keys, added)[0], self.scores

    def weigh(self, scores: Tensor) -> Tensor:
        self.scores = scores.detach()
        return scores.softmax(-1)


def test_masks_of_one_length_leave_self_attention_and_scores_are_not_weights() -> None:
    result = infer(OfOneLength)
    found = {row.topic: row.finding for row in result.rows}
    assert is_tested(result)
    assert found["inputs"] == "one, as self-attention, of shape (b, l, d)"
    assert (
        found["mask"]
        == "mask: added to the scores, of shape 'l s', where the lowest number of the dtype hides"
        " a key"
    )
    assert found["weights"] == "not returned per head, but the scores before the softmax"


class AlwaysCausalWithScores(OfOneLength):
    """Takes no mask, and returns the scores with those of later keys filled."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # fewer inputs
        later = x.new_full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return super().forward(x, mask=later)


def test_scores_of_a_causal_class_are_not_weights_either() -> None:
    found = {row.topic: row.finding for row in infer(AlwaysCausalWithScores).rows}
    assert found["weights"] == "not returned per head, but the scores before the softmax"


class OfALongestMemory(Base):
    """Its table is as long as its constructor says."""

    def __init__(self, d_model: int, n_heads: int, max_len: int = 64) -> None:
        super().__init__(d_model, n_heads)
        self.register_buffer("table", torch.zeros(max_len), persistent=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attend(x, memory, memory, self.get_buffer("table")[: memory.shape[1]].to(x))[0]


def test_memory_is_not_longer_than_the_class_is_built_for() -> None:
    assert infer(OfALongestMemory).implementation.claims.sizes.max_length == MAX_LENGTH


class WithoutBroadcastKeys(CausalFromTheEndWithZeros):
    """Takes a mask that is broadcast over items, heads and queries, but not over keys."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.shape[-1] != x.shape[1]:
            raise ValueError("the mask does not fit")
        return self.attend(x, x, x, 0.0 if mask is None else hidden(mask).to(x))[0]


@pytest.mark.parametrize("clause", ["MSK-5", "MSK-8", "MSK-9", "PTH-2"])
def test_a_mask_need_not_be_broadcast_over_the_keys(clause: str, fewest_cases: None) -> None:
    (verdict,) = check(WithoutBroadcastKeys, "quick", clauses=[clause], dtypes=["float32"]).verdicts
    assert verdict.status == "pass", verdict.message


class StackedByShape(nn.Module):
    """No word in the names of its layers is one of a projection, and its config has no usual name."""

    def __init__(self, hparams: Any, device: str) -> None:
        super().__init__()
        self.n_heads = hparams.num_heads
        self.attn = nn.Linear(hparams.d_model, 3 * hparams.d_model, device=device)
        self.proj = nn.Linear(hparams.d_model, hparams.d_model, device=device)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attn(x).unflatten(-1, (self.n_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        output: Tensor = self.proj(
            nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )
        return output


def test_projections_may_be_known_by_their_shape_alone() -> None:
    result = infer(StackedByShape)
    assert is_tested(result)
    assert result.implementation.parameters == {
        "w_qkv": ("attn", "(r h e) d -> (h r e) d"),
        "w_o": "proj",
    }


class WithImportance(Base):
    """Returns the mean weight of each key, (B, S), beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = self.attend(x, x, x)
        return output, weights.mean((1, 2))


@dataclass(slots=True)
class Result:
    """What `WithSlots` returns."""

    weights: Tensor
    output: Tensor


class WithSlots(Base):
    """Returns a dataclass with slots, the weights first."""

    def forward(self, x: Tensor) -> Result:
        output, weights = self.attend(x, x, x)
        return Result(weights, output)


class OfThree(Base):
    """Its inputs have names of their own, one of them like that of a memory."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.attend(x, y, z)[0]


class WithWidth(Base):
    """The width of its key has a default that is not None."""

    def __init__(self, d_model: int, n_heads: int, kv_dim: int = 10) -> None:
        super().__init__(d_model, n_heads)
        assert kv_dim > 0

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


class OfTwoMasks(Base):
    """Requires two masks, which may be None."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        added: Tensor | float = (
            0.0 if attn_mask is None else torch.zeros(attn_mask.shape).masked_fill(attn_mask, -1e9)
        )
        if key_padding_mask is not None:
            added = (
                added
                + torch.zeros(key_padding_mask.shape).masked_fill(key_padding_mask, -1e9)[
                    :, None, None
                ]
            )
        return self.attend(x, x, x, added)[0]


def is_tested(result: Inference) -> bool:
    """Return whether nothing is assumed."""
    return not any("assumed" in row.evidence for row in result.rows)


@pytest.mark.parametrize(
    "cls", [WithImportance, WithSlots, OfThree, WithWidth, OfTwoMasks], ids=lambda c: c.__name__
)
def test_class_is_understood(cls: type[nn.Module]) -> None:
    assert is_tested(infer(cls))


def test_padding_beside_a_mask_that_is_required_is_found() -> None:
    assert 'padding="drop"' in infer(OfTwoMasks).declaration


class LeaksByPositions(Base):
    """Wrong: always causal by a buffer of positions, but each query sees the next key."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.register_buffer("positions", torch.arange(4096), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.get_buffer("positions")[: x.shape[1]]
        return self.attend(x, x, x, hidden(positions <= positions[:, None] + 1).to(x))[0]


class Sharp(Base):
    """Wrong: a parameter makes the softmax too sharp."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]

    def weigh(self, scores: Tensor) -> Tensor:
        return (scores * self.temperature).softmax(-1)


@pytest.mark.parametrize(
    ("cls", "clause"), [(LeaksByPositions, "CAU-1"), (Sharp, "SMX-6")], ids=["leak", "sharp"]
)
def test_wrong_class_is_not_out_of_scope(cls: type[nn.Module], clause: str) -> None:
    (verdict,) = check(
        infer(cls).implementation, "quick", clauses=[clause], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"


class LaterKeysAllowed(Base):
    """Its padding is right, and its mask is off by a row."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        added = x.new_zeros(len(x), 1, *2 * x.shape[1:2])
        if attn_mask is not None:
            assert attn_mask.shape == added.shape[2:]
            added = added + hidden(attn_mask.roll(1, 0)).to(x)
        added = (
            added
            if key_padding_mask is None
            else added + hidden(~key_padding_mask)[:, None, None].to(x)
        )
        return self.attend(x, x, x, added)[0]


def test_mask_is_not_left_unused_because_the_padding_is_right() -> None:
    mask = next(row for row in infer(LaterKeysAllowed).rows if row.topic == "mask")
    assert "attn_mask" in mask.finding
    assert mask.evidence.startswith("assumed")
