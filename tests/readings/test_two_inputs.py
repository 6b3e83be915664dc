"""Two inputs whose names do not say which one is key and value: trial runs do."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from support.named_parts import Heads, expect_read


class MemoryFirst(Heads):
    """As in a course: the encoder's output comes first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of(y, x, x)


class SourceFirst(Heads):
    """As in code for translation."""

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.of(tgt, src, src, mask)


class MemorySecond(Heads):
    """The name of the second input is not known."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.of(x, z, z)


@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (MemoryFirst, "y as query, and x as key and value, of shape"),
        (SourceFirst, "tgt as query, and src as key and value, of shape"),
        (MemorySecond, "query, and z as key and value, of shape"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "HED-1")


class SwapsTarget(Heads):
    """Wrong: the names say which input is the query."""

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        return self.of(memory, target, target)


def test_inputs_are_not_swapped_against_their_names() -> None:
    with pytest.raises(ImplementationError, match="its output is as long as memory"):
        infer(SwapsTarget)


def test_order_of_what_does_not_take_two_inputs_is_refused() -> None:
    with pytest.raises(
        ImplementationError, match="query_last=True, but it does not take two inputs"
    ):
        from_module(nn.MultiheadAttention, parameters={}, query_last=True)
