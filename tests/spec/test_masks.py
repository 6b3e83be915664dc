"""The causal mask, and masks in other conventions, against written-out examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mha.spec import MaskConvention, causal_mask, join_causal, to_convention
from mha.spec.claims import Alignment

# For each (L, S): the rows of the mask, x = may attend, aligned top left and bottom right.
CAUSAL = {
    (3, 3): ("x.. xx. xxx", "x.. xx. xxx"),
    (2, 5): ("x.... xx...", "xxxx. xxxxx"),
    (5, 2): ("x. xx xx xx xx", ".. .. .. x. xx"),
    (1, 3): ("x..", "xxx"),
    (3, 1): ("x x x", ". . x"),
}
CONVENTIONS: dict[MaskConvention, list[list[float]]] = {
    "keep": [[True, False], [False, True]],
    "drop": [[False, True], [True, False]],
    "additive": [[0.0, -math.inf], [-math.inf, 0.0]],
}
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")


@pytest.mark.parametrize("sizes", CAUSAL, ids=str)
def test_causal_mask_has_the_declared_alignment(sizes: tuple[int, int]) -> None:
    for alignment, rows in zip(ALIGNMENTS, CAUSAL[sizes], strict=True):
        cells = np.array([list(row) for row in rows.split()])
        assert causal_mask(*sizes, alignment).tolist() == (cells == "x").tolist()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_boolean_mask_is_translated(convention: MaskConvention) -> None:
    translated = to_convention(
        torch.tensor([[True, False], [False, True]]), convention, torch.bfloat16
    )
    assert translated.dtype == (torch.bfloat16 if convention == "additive" else torch.bool)
    assert translated.tolist() == CONVENTIONS[convention]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    "mask", [torch.tensor([0.0, -1.0]), torch.tensor([0, 1])], ids=["float", "integer"]
)
def test_other_masks_are_returned_unchanged(convention: MaskConvention, mask: torch.Tensor) -> None:
    assert to_convention(mask, convention, torch.bfloat16) is mask


def test_causal_mask_combines_with_every_form_of_mask() -> None:
    causal = causal_mask(2, 2, "top_left")
    assert join_causal(None, causal) is causal
    assert join_causal(torch.tensor([False, True]), causal).tolist() == [
        [False, False],
        [False, True],
    ]
    assert join_causal(torch.tensor([0.5, 2.0]), causal).tolist() == [[0.5, -math.inf], [0.5, 2.0]]
