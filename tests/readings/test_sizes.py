"""Sizes: which parameters of a constructor are d_model, the heads and their width."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.adapters.construction import MAX_LENGTH
from mha.implementations.adapters.signature import memory_name
from mha.implementations.inference.infer import infer
from support.judging import expect_pass, verdict_of
from support.options import Plain
from support.readings import expect_read, is_tested
from support.right_classes import Heads, OfItself, Separate


class ContextOfAWidth(Heads):
    """As in diffusion models: the memory may have another width."""

    def __init__(
        self, dim: int, heads: int, context_dim: int | None = None, causal: bool = False
    ) -> None:
        super().__init__(dim, heads)
        self.w_k, self.w_v = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.causal = causal

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        later = torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).triu(1)
        return self.of(x, context, context, later if self.causal else None)


class HeadsOfAWidth(OfItself):
    """d_model is what its two sizes give."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads * head_dim, num_heads)


class SizesByDefault(OfItself):
    """Names like those that people use; another number is neither."""

    def __init__(
        self, embedding_dimension: int = 64, n_attention_head: int = 4, rotary_dim: int = 0
    ) -> None:
        super().__init__(embedding_dimension, n_attention_head)
        self.rotary_dim = rotary_dim


class UnknownNames(OfItself):
    """Names that nobody knows, in the usual order."""

    def __init__(self, breadth: int, parts: int) -> None:
        super().__init__(breadth, parts)


class WidthOfAHead(OfItself):
    """As in a book: what it gives out is the width of one head."""

    def __init__(self, d_in: int, d_out: int, num_heads: int) -> None:
        super().__init__(d_in, num_heads)
        if d_out * num_heads != d_in:
            raise ValueError(f"d_in ({d_in}) must be d_out ({d_out}) times num_heads ({num_heads})")


class WidthsOfAll(OfItself):
    """As in a tutorial: the widths of queries, keys and values have names that are not known."""

    def __init__(self, dim_in: int, dim_k: int, dim_v: int, num_heads: int = 8) -> None:
        super().__init__(dim_in, num_heads)
        if {dim_k, dim_v} != {dim_in}:
            raise ValueError("the widths differ")


class KeySizeOfAHead(WidthOfAHead):
    """As in ports from Haiku: a known name, of another meaning."""

    def __init__(self, num_heads: int, key_size: int, model_size: int) -> None:
        super().__init__(model_size, key_size, num_heads)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("cls", "row", "judged"),
    [
        (ContextOfAWidth, "kdim and vdim  [tested]", "XAT-1"),
        (WidthOfAHead, "d_out=d_model // n_heads)  [assumed, not by name: d_out]", "HED-1"),
        (HeadsOfAWidth, "(num_heads=n_heads, head_dim=head_dim)", "HED-1"),
        (UnknownNames, "parts=n_heads)  [assumed, not by name: breadth, parts]", "HED-1"),
        (
            SizesByDefault,
            "n_attention_head=n_heads)  [assumed, not by name: embedding_dimension,"
            " n_attention_head]",
            "HED-1",
        ),
        (
            WidthsOfAll,
            "num_heads=n_heads, dim_k=d_model, dim_v=d_model)  [assumed, not by name: dim_k,"
            " dim_v]",
            "HED-1",
        ),
        (
            KeySizeOfAHead,
            "model_size=d_model, key_size=d_model // n_heads)  [assumed, not by name: key_size]",
            "HED-1",
        ),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str, judged: str) -> None:
    expect_read(cls, row, judged)


def test_flag_beside_a_width_is_named() -> None:
    partial = "functools.partial(ContextOfAWidth, causal=True)"
    row = f"no; to judge it causal too, check {partial}"
    assert row in infer(ContextOfAWidth).report(400)


def test_declaration_builds_the_class_in_the_same_way() -> None:
    declaration = infer(WidthOfAHead).declaration
    built = "WidthOfAHead(d_in=d_in, num_heads=num_heads, d_out=d_in // num_heads)"
    assert f"    lambda d_in, num_heads: {built},\n" in declaration
    names: dict[str, Any] = {"WidthOfAHead": WidthOfAHead}
    exec(declaration, names)
    assert names["implementation"].name == "WidthOfAHead"
    expect_pass(names["implementation"], "HED-1")


def test_width_of_a_head_cannot_be_one_that_does_not_divide_d_model() -> None:
    assert verdict_of(infer(WidthOfAHead), "CFG-1").status == "not_claimed"


n_embd = 48


class ReadsItsModule(OfItself):
    """As in a course: d_model is a variable of the module."""

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__(n_embd, num_heads)
        self.head_size = head_size


def test_sizes_that_a_constructor_reads_from_its_module_are_named() -> None:
    with pytest.raises(ImplementationError, match="reads n_embd from its module") as error:
        infer(ReadsItsModule)
    made = (
        "globals().update(n_embd=d_model); return ReadsItsModule(num_heads=n_heads,"
        " head_size=d_model // n_heads)"
    )
    named = f"name a function that builds it: def attention(d_model, n_heads): {made}"
    assert str(error.value).endswith(named)


class UnknownWidth(OfItself):
    """A required size of an unknown name, beside one with a word of d_model."""

    def __init__(self, breadth: int, n_heads: int, dim_feedforward: int = 2048) -> None:
        super().__init__(breadth, n_heads)
        self.feedforward = dim_feedforward


class SingleLetters(OfItself):
    """Sizes that only their order tells."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__(D, H)


@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (UnknownWidth, "[assumed, not by name: breadth]"),
        (SingleLetters, "[assumed, not by name: D, H]"),
    ],
)
def test_word_in_a_name_does_not_decide(cls: type[nn.Module], row: str) -> None:
    assert row in infer(cls).report(400)


class OtherNumbers(OfItself):
    """None of its sizes is a width."""

    def __init__(self, embed_rank: int = 8, n_attention_head: int = 2) -> None:
        super().__init__(8, n_attention_head)


class TwoWidths(OtherNumbers):
    """Either may be d_model."""

    def __init__(self, hidden: int = 8, wide: int = 8, n_attention_head: int = 2) -> None:
        super().__init__(hidden, n_attention_head)


class OfOneHead(OfItself):
    """A right class with one head, whose second parameter is no number of heads."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__(d_model, 1)
        self.length = length


class OtherSizes(OfItself):
    """Two unknown names that are not those of the sizes."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__(outer * inner, 1)


class AnotherWidth(OfItself):
    """No choice of its widths fits."""

    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__(d_model, num_heads)
        if d_ff != 4 * d_model:
            raise ValueError("d_ff must be four times d_model")


class Radius(OfItself):
    """What it requires is no width, though that would give the formula for short inputs."""

    def __init__(self, d_model: int, num_heads: int, radius: int) -> None:
        super().__init__(d_model, num_heads)
        self.radius = radius


class SequenceLength(Radius):
    """Nor is this."""

    def __init__(self, d_model: int, num_heads: int, sequence_length: int) -> None:
        super().__init__(d_model, num_heads, sequence_length)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OtherNumbers, "has a known name of d_model"),
        (TwoWidths, "has a known name of d_model"),
        (OfOneHead, "constructor .d_model, length. has a known name of n_heads"),
        (OtherSizes, "constructor .outer, inner. has a known name of d_model"),
        (AnotherWidth, "requires d_ff, which has no known name; supply it with functools"),
        (Radius, "which has no known name; supply it with functools"),
        (SequenceLength, "which has no known name; supply it with functools"),
    ],
)
def test_numbers_of_another_meaning_are_asked_for(cls: type[nn.Module], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        infer(cls)


class WithWidth(Separate):
    """The width of its key has a default that is not None."""

    def __init__(self, d_model: int, n_heads: int, kv_dim: int = 10) -> None:
        super().__init__(d_model, n_heads)
        assert kv_dim > 0

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def test_width_of_the_key_may_have_a_number_by_default() -> None:
    assert is_tested(infer(WithWidth))


class OfALongestMemory(Separate):
    """Its table is as long as its constructor says."""

    def __init__(self, d_model: int, n_heads: int, max_len: int = 64) -> None:
        super().__init__(d_model, n_heads)
        self.register_buffer("table", torch.zeros(max_len), persistent=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attend(x, memory, memory, self.get_buffer("table")[: memory.shape[1]].to(x))[0]


def test_memory_is_not_longer_than_the_class_is_built_for() -> None:
    assert infer(OfALongestMemory).implementation.claims.sizes.max_length == MAX_LENGTH


class Divides(Plain):
    """Takes the width of a head, and still requires that the number of heads divides d_model."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int) -> None:
        assert d_model % n_heads == 0
        super().__init__(d_model, n_heads)
        self.q, self.k, self.v = (nn.Linear(d_model, n_heads * head_dim) for _ in range(3))
        self.out = nn.Linear(n_heads * head_dim, d_model)


def test_own_width_of_heads_is_claimed_only_for_every_width_of_the_model() -> None:
    assert not infer(Divides).implementation.claims.own_head_dim


class WidthsOfInputs(Heads):
    """Tells the widths of its inputs apart."""

    def __init__(self, query_dim: int, key_dim: int, num_heads: int) -> None:
        super().__init__(query_dim, num_heads)
        self.w_k, self.w_v = (nn.Linear(key_dim, query_dim) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.of(x, context, context)


class WidthOfKeysByDefault(WidthsOfInputs):
    """The width of the memory is that of the model, if it is not given."""

    def __init__(self, d_model: int, num_heads: int, key_dim: int | None = None) -> None:
        super().__init__(d_model, key_dim or d_model, num_heads)


@pytest.mark.parametrize("cls", [WidthsOfInputs, WidthOfKeysByDefault])
def test_width_of_keys_is_not_that_of_heads(cls: Callable[..., nn.Module]) -> None:
    result = infer(cls)
    assert not result.implementation.claims.own_head_dim
    expect_pass(result, "SHP-1", "HED-1")


def of_inputs_and_keys(inputs: Tensor, keys: Tensor) -> None:
    """Its second input is the memory, though the first has the name of one, too."""


def test_memory_is_not_the_first_input() -> None:
    assert memory_name(inspect.signature(of_inputs_and_keys).parameters) == "keys"
