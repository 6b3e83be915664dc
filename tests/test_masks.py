"""The causal mask, and the translation of masks, against what is written out here."""

from __future__ import annotations

import math

import pytest
import torch

from mha.spec import MaskConvention, causal_mask, to_convention
from mha.spec.claims import Alignment

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
def test_causal_mask(sizes: tuple[int, int]) -> None:
    for alignment, rows in zip(ALIGNMENTS, CAUSAL[sizes], strict=True):
        assert causal_mask(*sizes, alignment).tolist() == [[cell == "x" for cell in row] for row in rows.split()]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_to_convention(convention: MaskConvention) -> None:
    translated = to_convention(torch.tensor([[True, False], [False, True]]), convention, torch.bfloat16)
    assert translated.dtype == (torch.bfloat16 if convention == "additive" else torch.bool)
    assert translated.tolist() == CONVENTIONS[convention]
    for other in (torch.tensor([0.0, -1.0]), torch.tensor([0, 1])):
        assert to_convention(other, convention, torch.bfloat16) is other
