"""How the masks of raw classes are read: integers, those that are changed, and padding that hides
its own queries.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.inference.infer import Inference, infer
from mha.spec import Config


class Heads(nn.Module):
    """Self-attention; what is hidden is boolean (B, H, L, S), or broadcast to that."""

    fill = -1e9

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def attend(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if hidden is not None:
            assert torch.broadcast_shapes(hidden.shape, scores.shape) == scores.shape
            scores = scores.masked_fill(hidden, self.fill)
        output: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class PairsOfPositions(Heads):
    """A pair of positions is hidden if either is padding, so that a query of padding attends to all
    keys alike.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(
            x, None if mask is None else ~(mask[:, None, :, None] & mask[:, None, None, :])
        )


class PairsWithNaN(PairsOfPositions):
    """Wrong: what a query of padding attends to is NaN, and so are gradients."""

    fill = -math.inf


class PaddingSeesPadding(Heads):
    """Wrong: a query of padding attends to padding, and to nothing else."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(
            x, None if mask is None else mask[:, None, :, None] != mask[:, None, None, :]
        )


class ZeroedPadding(Heads):
    """The outputs of padding are zeroed; True = padding."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if padding_mask is None:
            return self.attend(x, None)
        return self.attend(x, padding_mask[:, None, None]).masked_fill(padding_mask[..., None], 0.0)


class ZeroedBesideAMask(Heads):
    """The same, beside a mask of pairs."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        hidden = torch.zeros((), dtype=torch.bool) if attn_mask is None else attn_mask
        if key_padding_mask is None:
            return self.attend(x, hidden)
        output = self.attend(x, hidden | key_padding_mask[:, None, None])
        return output.masked_fill(key_padding_mask[..., None], 0.0)


class QueriesOnly(Heads):
    """Wrong: only the queries of padding are hidden, so that all others attend to padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, None if mask is None else ~mask[:, None, :, None])


class EqualToZero(Heads):
    """What is 0 or False is hidden."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or not mask.is_floating_point()
        return self.attend(x, None if mask is None else mask == 0)


class DifferentFromZero(Heads):
    """What is 1 or True is hidden, in a mask (B, S)."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        assert padding_mask is None or not padding_mask.is_floating_point()
        return self.attend(x, None if padding_mask is None else padding_mask.bool()[:, None, None])


class ShortIntegersReversed(EqualToZero):
    """Wrong for integers: those of 32 bits are read the other way round."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype == torch.int32:
            mask = mask == 0
        return super().forward(x, mask)


def reading(result: Inference) -> str:
    return next(row.finding for row in result.rows if row.topic == "mask")


@pytest.mark.parametrize("cls", [PairsOfPositions, ZeroedPadding])
def test_padding_that_hides_its_queries_is_not_judged(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert "hides the queries of padding too" in reading(result)
    assert not result.implementation.claims.masks
    assert check(
        result.implementation, "quick", clauses=["HED-1", "NUM-1", "SMX"], dtypes=["float32"]
    ).conforms


def test_mask_beside_such_padding_is_judged() -> None:
    result = infer(ZeroedBesideAMask)
    assert reading(result) == "attn_mask: True = may not attend, broadcastable to (b, h, l, s)"
    assert check(
        result.implementation, "quick", clauses=["MSK-1", "MSK-6"], dtypes=["float32"]
    ).conforms


@pytest.mark.parametrize(
    ("cls", "clause"),
    [(QueriesOnly, "MSK-1"), (PairsWithNaN, "MSK-9"), (PaddingSeesPadding, "MSK-2")],
)
def test_other_outputs_of_padding_still_fail(cls: type[nn.Module], clause: str) -> None:
    result = infer(cls)
    assert result.implementation.claims.masks
    (verdict,) = check(
        result.implementation, "quick", clauses=[clause], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"


@pytest.mark.parametrize(
    ("cls", "meaning"),
    [(EqualToZero, "True or 1 = may attend"), (DifferentFromZero, "True or 1 = may not attend")],
)
def test_integers_that_count_as_booleans_are_claimed(cls: type[nn.Module], meaning: str) -> None:
    result = infer(cls)
    assert meaning in reading(result)
    assert result.implementation.claims.masks == {"bool", "int"}
    report = check(result.implementation, "quick", clauses=["PTH-3", "MSK-12"], dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} == {"pass"}


def test_integers_of_some_dtypes_are_not_enough() -> None:
    result = infer(ShortIntegersReversed)
    assert result.implementation.claims.masks == {"bool"}
    (verdict,) = check(
        result.implementation, "quick", clauses=["MSK-12"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "fail"
    assert 'claim "int" if 1 and 0 count as True and False' in verdict.message


class CausalInPlace(Heads):
    """Wrong: the mask of the caller, True = hidden, is joined with the causal one in place."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if mask is not None:
            mask |= later
        return self.attend(x, later if mask is None else mask)


class PaddingInPlace(Heads):
    """Wrong: the padding mask of the caller gets other axes."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.attend(
            x, None if key_padding_mask is None else key_padding_mask.unsqueeze_(1).unsqueeze_(1)
        )


@pytest.mark.parametrize("cls", [CausalInPlace, PaddingInPlace], ids=lambda cls: cls.__name__)
def test_mask_that_is_changed_in_its_own_convention_counts_as_changed(cls: type[nn.Module]) -> None:
    (verdict,) = check(cls, "quick", clauses="STA-1", dtypes="float32").verdicts
    assert verdict.message == "the call changed its mask in place"
