"""Constructors that require several widths: which of them are those of a head is found by trying."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from support.named_parts import Heads, expect_read


class WidthOfAHead(Heads):
    """As in a book: what it gives out is the width of one head."""

    def __init__(self, d_in: int, d_out: int, num_heads: int) -> None:
        super().__init__(d_in, num_heads)
        if d_out * num_heads != d_in:
            raise ValueError(f"d_in ({d_in}) must be d_out ({d_out}) times num_heads ({num_heads})")

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class WidthsOfAll(Heads):
    """As in a tutorial: the widths of queries, keys and values have names that are not known."""

    def __init__(self, dim_in: int, dim_k: int, dim_v: int, num_heads: int = 8) -> None:
        super().__init__(dim_in, num_heads)
        if {dim_k, dim_v} != {dim_in}:
            raise ValueError("the widths differ")

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class KeySizeOfAHead(WidthOfAHead):
    """As in ports from Haiku: a known name, of another meaning."""

    def __init__(self, num_heads: int, key_size: int, model_size: int) -> None:
        super().__init__(model_size, key_size, num_heads)


@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (
            WidthOfAHead,
            "num_heads=n_heads, d_out=d_model // n_heads)  [assumed, not by name: d_out]",
        ),
        (
            WidthsOfAll,
            (
                "num_heads=n_heads, dim_k=d_model, dim_v=d_model)  [assumed, not by name: dim_k,"
                " dim_v]"
            ),
        ),
        (
            KeySizeOfAHead,
            "model_size=d_model, key_size=d_model // n_heads)  [assumed, not by name: key_size]",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "HED-1")


def test_declaration_builds_the_class_in_the_same_way() -> None:
    declaration = infer(WidthOfAHead).declaration
    built = "WidthOfAHead(d_in=d_in, num_heads=num_heads, d_out=d_in // num_heads)"
    assert f"    lambda d_in, num_heads: {built},\n" in declaration
    names: dict[str, object] = {"WidthOfAHead": WidthOfAHead}
    exec(declaration, names)
    (verdict,) = check(names["implementation"], "quick", clauses="HED-1", dtypes="float32").verdicts
    assert (verdict.implementation, verdict.status) == ("WidthOfAHead", "pass")


def test_width_of_a_head_cannot_be_one_that_does_not_divide_d_model() -> None:
    (verdict,) = check(
        infer(WidthOfAHead).implementation, "quick", clauses="CFG-1", dtypes="float32"
    ).verdicts
    assert verdict.status == "not_claimed"


class AnotherWidth(Heads):
    """No choice of its widths fits."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__(d_model, num_heads)
        if d_ff != 4 * d_model:
            raise ValueError("d_ff must be four times d_model")


def test_other_widths_are_asked_for() -> None:
    with pytest.raises(
        ImplementationError,
        match=r"requires d_ff, which has no known name; supply it with functools",
    ):
        infer(AnotherWidth)


class Radius(Heads):
    """What it requires is no width, though that would give the formula for short inputs."""

    def __init__(self, d_model: int, num_heads: int, radius: int) -> None:
        super().__init__(d_model, num_heads)
        self.radius = radius

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class SequenceLength(Radius):
    """Nor is this."""

    def __init__(self, d_model: int, num_heads: int, sequence_length: int) -> None:
        super().__init__(d_model, num_heads, sequence_length)


@pytest.mark.parametrize("cls", [Radius, SequenceLength], ids=lambda cls: cls.__name__)
def test_other_numbers_are_asked_for(cls: type[nn.Module]) -> None:
    with pytest.raises(
        ImplementationError, match="which has no known name; supply it with functools"
    ):
        infer(cls)
