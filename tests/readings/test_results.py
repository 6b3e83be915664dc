"""What a call returns: the output, weights, scores and a cache, in tuples and objects."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.infer import infer
from support.judging import expect_fail, expect_pass
from support.plain import Plain
from support.readings import evidence, expect_read, findings, is_tested, refusal_of
from support.right_classes import Fused, Separate


class ScoresBeforeWeights(Fused):
    """As in Uni-Mol: the output, the scores, and the weights."""

    def forward(self, x: Tensor, return_attn: bool = False) -> Any:
        output, scores, weights = self.attend(x)
        return (output, scores, weights) if return_attn else output


class ScoresWeightsOutput(Fused):
    """The output is the last result, and the weights are before it."""

    def forward(self, x: Tensor) -> Any:
        output, scores, weights = self.attend(x)
        return scores, weights, output


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("cls", "row"), [(ScoresBeforeWeights, "weights=2"), (ScoresWeightsOutput, "weights=1")]
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "HED-1")


class Averages(Separate):
    """Returns the weights of each head only where that is asked for."""

    def forward(
        self, x: Tensor, need_weights: bool = True, average_attn_weights: bool = True
    ) -> Any:
        output, weights = self.attend(x, x, x)
        if not need_weights:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights


def test_weights_of_each_head_are_asked_for() -> None:
    implementation = infer(Averages).implementation
    assert implementation.claims.returns_weights
    expect_pass(implementation, "SHP-2")


class OfOneLength(Separate):
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


SCORES = "not returned per head, but the scores before the softmax"


def test_masks_of_one_length_leave_self_attention_and_scores_are_not_weights() -> None:
    result = infer(OfOneLength)
    found = findings(result)
    assert is_tested(result)
    assert found["inputs"] == "one, as self-attention, of shape (b, l, d)"
    lowest = "where the lowest number of the dtype hides a key"
    assert found["mask"] == f"mask: added to the scores, of shape 'l s', {lowest}"
    assert found["weights"] == SCORES


class HeadsLast(Separate):
    """Its weights are (B, L, S, H)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = self.attend(x, x, x)
        return output, weights.movedim(1, -1)


class HeadsBesideItems(Separate):
    """Its weights are (H * B, L, S), as in an old port of the Transformer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = self.attend(x, x, x)
        return output, weights.transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize(
    ("cls", "layout", "shape"),
    [(HeadsLast, "b l s h", "b, l, s, h"), (HeadsBesideItems, "(h b) l s", "h*b, l, s")],
)
def test_weights_are_found_in_other_layouts(cls: type[nn.Module], layout: str, shape: str) -> None:
    result = infer(cls)
    assert findings(result)["weights"] == f"returned per head, of shape ({shape})"
    assert f'weights_layout="{layout}"' in result.declaration


class AlwaysCausalWithScores(OfOneLength):
    """Takes no mask, and returns the scores with those of later keys filled."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # fewer inputs
        later = x.new_full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return super().forward(x, mask=later)


class AveragesAlways(Plain):
    """Returns the mean of the weights of its heads."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # and weights
        return self.attend(x, mask), torch.ones(*x.shape[:2], x.shape[1]) / x.shape[1]


class ReturnsCache(Plain):
    """Returns a cache of twice its input, as GPT-2 does of key and value."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.attend(x, mask), torch.stack((x, x))


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (AlwaysCausalWithScores, SCORES),
        (AveragesAlways, "not returned per head, but of shape (b, l, s)"),
        (ReturnsCache, "not returned"),
    ],
)
def test_what_is_no_weights_of_heads_is_not_called_so(cls: type[nn.Module], finding: str) -> None:
    assert findings(infer(cls))["weights"] == finding


class WithImportance(Separate):
    """Returns the mean weight of each key, (B, S), beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = self.attend(x, x, x)
        return output, weights.mean((1, 2))


@dataclass(slots=True)
class Result:
    """What `WithSlots` returns."""

    weights: Tensor
    output: Tensor


class WithSlots(Separate):
    """Returns a dataclass with slots, the weights first."""

    def forward(self, x: Tensor) -> Result:
        output, weights = self.attend(x, x, x)
        return Result(weights, output)


@pytest.mark.parametrize("cls", [WithImportance, WithSlots], ids=lambda cls: cls.__name__)
def test_output_is_found_beside_other_results(cls: type[nn.Module]) -> None:
    assert is_tested(infer(cls))


class ReturnsNamespace(Plain):
    """Returns a namespace."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return SimpleNamespace(out=self.attend(x, mask))


def test_output_is_read_in_a_namespace() -> None:
    assert evidence(infer(ReturnsNamespace))["formula"] == "tested"


class ReturnsIntegers(Plain):
    """Quantises its output."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self.attend(x, mask) * 127).to(torch.int8)


def test_output_of_integers_is_read_and_fails() -> None:
    expect_fail(infer(ReturnsIntegers), "SHP-3")


class ReturnsObject(Plain):
    """Takes sizes of other names, and returns what holds no output."""

    def __init__(self, wide: int, many: int) -> None:
        super().__init__(wide, many)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return object()


def test_refusal_says_what_follows_if_the_sizes_are_those_assumed() -> None:
    message = refusal_of(ReturnsObject)
    constructor = "none of the parameters of its constructor (wide, many)"
    assert f"{constructor} has a known name of d_model" in message
    assumed = "If wide is d_model and many is n_heads, ReturnsObject needs a declaration"
    assert f". {assumed}: its output was not found" in message
