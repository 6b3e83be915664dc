"""A memory that is left out in self-attention: both kinds of call are judged, where both are
attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from support.named_parts import Heads, expect_read


class OneMask(Heads):
    """As in code of diffusion models."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.of(x, x, x, mask)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.alone(x, mask) if context is None else self.of(x, context, context, mask)


class TwoMasks(Heads):
    """One for each kind of call."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        return (
            self.of(x, x, x, self_mask)
            if memory is None
            else self.of(x, memory, memory, cross_mask)
        )


class CausalAlone(OneMask):
    """As in a decoder."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.of(x, x, x, later if mask is None else mask | later)


class PositionsAlone(OneMask):
    """Positions count in self-attention."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        moved = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return self.of(moved, moved, x, mask)


class NeedsMemory(OneMask):
    """It has a default, but cannot be left out."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise ValueError("the memory is missing")


class OtherMaskAlone(TwoMasks):
    """The two masks differ in what True means, which cannot be judged as one."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        return super().forward(x, memory, None if self_mask is None else ~self_mask, cross_mask)


@pytest.mark.mostly_slow(3)
@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (OneMask, "query, and context as key and value, left out in self-attention, of shape"),
        (TwoMasks, "self_mask or cross_mask: True = may not attend"),
        (CausalAlone, "calls without context  [unless declared]"),
        (PositionsAlone, "calls without context  [unless declared]"),
        (NeedsMemory, "calls without context  [unless declared]"),
        (OtherMaskAlone, "calls without memory, self_mask  [unless declared]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "MSK-1")


class ReturnsInputAlone(OneMask):
    """Without a context, cross-attention is skipped."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x


class MaskOfContextAlone(Heads):
    """The mask is of the context, and self-attention has none."""

    def forward(
        self, x: Tensor, context: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        return self.of(x, x, x) if context is None else self.of(x, context, context, context_mask)


class OtherEmptyRowsAlone(OneMask):
    """Rows without a key get the mean of all values, and NaN beside a context."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        lowest = (
            None if mask is None else torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -1e30)
        )
        return self.of(x, x, x, lowest)


class WeightsOfContextAlone(OneMask):
    """Weights are returned with a context alone."""

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Any:
        q, k = self.split(self.w_q(x)), self.split(self.w_k(x if context is None else context))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
            torch.zeros(()).bool() if mask is None else mask, -1e9
        )
        return super().forward(x, context, mask), None if context is None else weights.softmax(-1)


@pytest.mark.parametrize(
    "cls",
    [ReturnsInputAlone, MaskOfContextAlone, OtherEmptyRowsAlone, WeightsOfContextAlone],
    ids=lambda cls: cls.__name__,
)
def test_calls_without_a_memory_that_differ_are_not_made(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert "calls without context" in result.report(400)
    assert not result.implementation.call.alone


class LeaksAlone(TwoMasks):
    """Long rows read the first key even if it is masked."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        self_mask: Tensor | None = None,
        cross_mask: Tensor | None = None,
    ) -> Tensor:
        if self_mask is not None and x.shape[1] > 8:
            self_mask = self_mask & (torch.arange(x.shape[1]) > 0)
        return super().forward(x, memory, self_mask, cross_mask)


class LongRowsUnscaledAlone(OneMask):
    """The scores of long rows are not scaled."""

    def alone(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.of(x * (1.25 if x.shape[1] > 8 else 1.0), x, x, mask)


@pytest.mark.parametrize(
    ("cls", "clause"),
    [(LongRowsUnscaledAlone, "HED-1"), (LeaksAlone, "MSK-1")],
    ids=lambda value: str(value),
)
def test_what_is_wrong_without_a_memory_alone_fails(cls: type[nn.Module], clause: str) -> None:
    assert clause in check(cls, "quick", clauses=clause, dtypes="float32").failing


def test_declaration_says_that_a_memory_is_left_out() -> None:
    assert "memory_optional=True" in infer(OneMask).declaration
    assert "memory_optional" not in infer(NeedsMemory).declaration


def test_memory_that_is_not_there_cannot_be_optional() -> None:
    with pytest.raises(
        ImplementationError, match="memory_optional=True, but its calls have no memory"
    ):
        from_module(nn.MultiheadAttention, parameters={}, memory_optional=True)
