"""Classes with a table of positions: it is as long as the calls need, and no longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.adapters.construction import MAX_LENGTH, SHORT
from mha.implementations.inference.infer import infer
from support.judging import expect_pass, verdict_of
from support.plain import Plain
from support.readings import evidence


class OfATable(Plain):
    """Always causal by a table: as long as its constructor says, or of 2048 positions."""

    lengths: ClassVar[list[int]] = []

    def __init__(self, d_model: int, n_heads: int, block_size: int) -> None:
        super().__init__(d_model, n_heads)
        self.lengths.append(block_size)
        visible = torch.ones(block_size, block_size, dtype=torch.bool).tril()
        self.register_buffer("visible", visible, persistent=False)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        visible = self.get_buffer("visible")[: scores.shape[-2], : scores.shape[-1]]
        return super().weigh(scores, visible if mask is None else visible & mask)


class OfATableOf2048(OfATable):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads, 2048)


@pytest.mark.parametrize(
    ("cls", "longest"), [(OfATable, None), (OfATableOf2048, 2048)], ids=["given", "of 2048"]
)
def test_no_call_is_longer_than_the_table_of_a_class(
    cls: type[nn.Module], longest: int | None
) -> None:
    result = infer(cls)
    assert result.implementation.claims.sizes.max_length == longest
    expect_pass(result, "NUM-5")


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize(
    ("clause", "options", "longest"),
    [
        ("SHP-1", {}, SHORT),
        ("EQV-7", {}, SHORT),
        ("STA-3", {}, SHORT),
        ("NUM-5", {}, MAX_LENGTH),
        # Properties that choose their own lengths.
        ("NUM-8", {"dtypes": ["bfloat16"]}, MAX_LENGTH),
        ("GRD-8", {"dtypes": ["bfloat16"]}, 3 * 640),
        # The profile's own, with its keys doubled.
        ("EQV-7", {"profile": "default"}, 3 * 2 * 260),
    ],
)
def test_a_table_is_as_long_as_the_cases_need(
    clause: str, options: dict[str, Any], longest: int
) -> None:
    implementation = infer(OfATable).implementation
    OfATable.lengths.clear()
    (found,) = check(
        implementation,
        **{"profile": "quick", "clauses": [clause], "dtypes": ["float32"], **options},
    ).verdicts
    assert found.status == "pass", found.message
    assert max(OfATable.lengths[2:]) == longest  # the first are of no case


class WithoutScale(OfATable):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(2 * scores, mask)


def test_explaining_a_failure_needs_no_longer_table() -> None:
    implementation = infer(WithoutScale).implementation
    implementation = replace(implementation, claims=replace(implementation.claims, scale=None))
    OfATable.lengths.clear()
    found = verdict_of(implementation, "HED-1")
    assert (found.status, bool(found.steps), bool(found.arguments)) == ("fail", True, True)
    assert max(OfATable.lengths[2:]) == SHORT


class WindowWithinTable(OfATable):
    """Its window is no wider than its table."""

    def __init__(
        self, d_model: int, n_heads: int, block_size: int, sliding_window: int = 64
    ) -> None:
        super().__init__(d_model, n_heads, block_size)
        assert sliding_window <= block_size
        self.visible = self.visible.triu(1 - sliding_window)


def test_a_window_that_is_widened_has_a_table_as_long() -> None:
    result = infer(WindowWithinTable)
    assert evidence(result)["formula"] == "tested"
    assert f"partial(WindowWithinTable, sliding_window={MAX_LENGTH})" in result.declaration
    expect_pass(result, "SHP-1", "NUM-5")
