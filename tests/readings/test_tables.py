"""Classes with a table of positions: it is as long as the calls need, and no longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations.adapters.construction import MAX_LENGTH, SHORT
from mha.implementations.inference import sizes
from mha.implementations.inference.infer import infer
from support.judging import expect_pass, verdict_of
from support.plain import Plain
from support.readings import evidence, findings


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


@pytest.mark.mostly_slow(3)
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


class ShortTable(Plain):
    """Is causal by a table that is shorter than some cases, and that no argument makes longer."""

    longest = 40

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        visible = torch.ones(self.longest, self.longest, dtype=torch.bool).tril()
        self.register_buffer("visible", visible)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        visible = self.get_buffer("visible")[:length, :length].expand(length, length)
        return super().weigh(scores, visible if mask is None else visible & mask)


class LongTable(ShortTable):
    """Its table ends at 600."""

    longest = 600


def test_longest_input_is_claimed() -> None:
    result = infer(ShortTable)
    assert result.implementation.claims.sizes.max_length == 40
    assert findings(result)["lengths"].startswith("at most 40: others raise RuntimeError: ")
    names: dict[str, Any] = {"ShortTable": ShortTable}
    exec(result.declaration, names)
    assert names["implementation"].claims == result.implementation.claims
    for clause in ("SHP-1", "NUM-5"):
        assert verdict_of(result, clause, "default").status == "pass"


@pytest.mark.parametrize(("seconds_of_512", "longest"), [(0.9, 600), (1.1, None)])
def test_calls_that_would_take_too_long_are_not_tried(
    seconds_of_512: float, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of twice the length takes four times as long; 4 s are too many."""
    elapsed, tried = [0.0], list[int]()
    original = LongTable.weigh

    def timed(self: LongTable, scores: Tensor, mask: Tensor | None) -> Tensor:
        tried.append(scores.shape[-1])
        elapsed[0] += seconds_of_512 * (scores.shape[-1] / 512) ** 2
        return original(self, scores, mask)

    monkeypatch.setattr(LongTable, "weigh", timed)
    monkeypatch.setattr(sizes, "process_time", lambda: elapsed[0])
    assert infer(LongTable).implementation.claims.sizes.max_length == longest
    assert max(tried) == (1024 if longest else 512)
