"""Masks of integers, masks that are changed in place, and padding that hides its own queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.infer import infer
from support.judging import expect_conforms, expect_fail, expect_pass, verdict_of
from support.readings import findings
from support.right_classes import Hides

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class PairsOfPositions(Hides):
    """A pair of positions is hidden if either is padding; such a query attends to all alike."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.hide(
            x, None if mask is None else ~(mask[:, None, :, None] & mask[:, None, None, :])
        )


class PairsWithNaN(PairsOfPositions):
    """Wrong: what a query of padding attends to is NaN, and so are gradients."""

    fill = -math.inf


class PaddingSeesPadding(Hides):
    """Wrong: a query of padding attends to padding, and to nothing else."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.hide(
            x, None if mask is None else mask[:, None, :, None] != mask[:, None, None, :]
        )


class ZeroedPadding(Hides):
    """The outputs of padding are zeroed; True = padding."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if padding_mask is None:
            return self.hide(x, None)
        return self.hide(x, padding_mask[:, None, None]).masked_fill(padding_mask[..., None], 0.0)


class ZeroedBesideAMask(Hides):
    """The same, beside a mask of pairs."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        hidden = torch.zeros((), dtype=torch.bool) if attn_mask is None else attn_mask
        if key_padding_mask is None:
            return self.hide(x, hidden)
        output = self.hide(x, hidden | key_padding_mask[:, None, None])
        return output.masked_fill(key_padding_mask[..., None], 0.0)


class QueriesOnly(Hides):
    """Wrong: only the queries of padding are hidden, so that all others attend to padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.hide(x, None if mask is None else ~mask[:, None, :, None])


class EqualToZero(Hides):
    """What is 0 or False is hidden."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or not mask.is_floating_point()
        return self.hide(x, None if mask is None else mask == 0)


class DifferentFromZero(Hides):
    """What is 1 or True is hidden, in a mask (B, S)."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        assert padding_mask is None or not padding_mask.is_floating_point()
        return self.hide(x, None if padding_mask is None else padding_mask.bool()[:, None, None])


class ShortIntegersReversed(EqualToZero):
    """Wrong for integers: those of 32 bits are read the other way round."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype == torch.int32:
            mask = mask == 0
        return super().forward(x, mask)


@pytest.mark.parametrize("cls", [PairsOfPositions, ZeroedPadding])
def test_padding_that_hides_its_queries_is_not_judged(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert "hides the queries of padding too" in findings(result)["mask"]
    assert not result.implementation.claims.masks
    expect_conforms(result, ["HED-1", "NUM-1", "SMX"])


def test_mask_beside_such_padding_is_judged() -> None:
    result = infer(ZeroedBesideAMask)
    assert (
        findings(result)["mask"]
        == "attn_mask: True = may not attend, broadcastable to (b, h, l, s)"
    )
    expect_conforms(result, ["MSK-1", "MSK-6"])


@pytest.mark.parametrize(
    ("cls", "clause"),
    [(QueriesOnly, "MSK-1"), (PairsWithNaN, "MSK-9"), (PaddingSeesPadding, "MSK-2")],
)
def test_other_outputs_of_padding_still_fail(cls: type[nn.Module], clause: str) -> None:
    result = infer(cls)
    assert result.implementation.claims.masks
    expect_fail(result, clause)


@pytest.mark.parametrize(
    ("cls", "meaning"),
    [(EqualToZero, "True or 1 = may attend"), (DifferentFromZero, "True or 1 = may not attend")],
)
def test_integers_that_count_as_booleans_are_claimed(cls: type[nn.Module], meaning: str) -> None:
    result = infer(cls)
    assert meaning in findings(result)["mask"]
    assert result.implementation.claims.masks == {"bool", "int"}
    expect_pass(result, "PTH-3", "MSK-12")


def test_integers_of_some_dtypes_are_not_enough() -> None:
    result = infer(ShortIntegersReversed)
    assert result.implementation.claims.masks == {"bool"}
    verdict = expect_fail(result, "MSK-12")
    assert 'claim "int" if 1 and 0 count as True and False' in verdict.message


class CausalInPlace(Hides):
    """Wrong: the mask of the caller, True = hidden, is joined with the causal one in place."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if mask is not None:
            mask |= later
        return self.hide(x, later if mask is None else mask)


class PaddingInPlace(Hides):
    """Wrong: the padding mask of the caller gets other axes."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.hide(
            x, None if key_padding_mask is None else key_padding_mask.unsqueeze_(1).unsqueeze_(1)
        )


@pytest.mark.parametrize("cls", [CausalInPlace, PaddingInPlace], ids=lambda cls: cls.__name__)
def test_mask_that_is_changed_in_its_own_convention_counts_as_changed(cls: type[nn.Module]) -> None:
    verdict = verdict_of(cls, "STA-1")
    assert verdict.message == "the call changed its mask in place"
