"""Right classes whose layers, sizes or inputs have uncommon names: each is read as it is, and
conforms.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from support.named_parts import Heads, expect_read


class PackedProj(Heads):
    """The fused layer and the output projection are both called proj, as in a tutorial of PyTorch."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        del self.w_q, self.w_k, self.w_v, self.w_o
        self.packed_proj, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.proj(self.attend(*self.packed_proj(x).chunk(3, -1)))
        return output


class ContextProj(Heads):
    """So are the layer of key and value, and that of the query."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        del self.w_q, self.w_k, self.w_v
        self.query_proj, self.context_proj = (
            nn.Linear(d_model, d_model),
            nn.Linear(d_model, 2 * d_model),
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        output: Tensor = self.w_o(
            self.attend(self.query_proj(x), *self.context_proj(context).chunk(2, -1))
        )
        return output


class SecondInput(Heads):
    """Two inputs, of which no name says that the second one is a memory."""

    def forward(self, decoder_x: Tensor, encoder_x: Tensor) -> Tensor:
        return self.of(decoder_x, encoder_x, encoder_x)


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
        hidden = (
            torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).triu(1)
            if self.causal
            else None
        )
        return self.of(x, context, context, hidden)


class InterleavedHeads(Heads):
    """The columns of heads are interleaved on the way in and out, as in code that splits with
    view(b, d_k, h, l).
    """

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        contexts = self.attend(self.w_q(x), self.w_k(x), self.w_v(x)).unflatten(
            -1, (self.n_heads, -1)
        )
        output: Tensor = self.w_o(contexts.mT.flatten(2))
        return output


class InterleavedQueries(Heads):
    """Wrong: only the heads of the query are interleaved."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.w_q(x).unflatten(-1, (-1, self.n_heads)).mT.flatten(2)
        output: Tensor = self.w_o(self.attend(query, self.w_k(x), self.w_v(x)))
        return output


class InterleavedStack(PackedProj):
    """The rows of one layer are (d_k, 3, n_heads)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.packed_proj(x).unflatten(-1, (-1, 3, self.n_heads))
        output: Tensor = self.proj(self.attend(*(each.mT.flatten(2) for each in rows.unbind(-2))))
        return output


class ListCalledProj(Heads):
    """As in feature matching: three layers in a list called proj."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.proj, self.merge = nn.ModuleList([self.w_q, self.w_k, self.w_v]), self.w_o
        del self.w_q, self.w_k, self.w_v, self.w_o

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (layer(x) for layer, x in zip(self.proj, (query, key, value), strict=True))
        output: Tensor = self.merge(self.attend(*heads))
        return output


class HeadsOfAWidth(Heads):
    """d_model is what its two sizes give."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads * head_dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class SizesByDefault(Heads):
    """Names like those that people use; another number is neither."""

    def __init__(
        self, embedding_dimension: int = 64, n_attention_head: int = 4, rotary_dim: int = 0
    ) -> None:
        super().__init__(embedding_dimension, n_attention_head)
        self.rotary_dim = rotary_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class DropsLessThanAll(Heads):
    """It refuses to drop everything."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        # In one line, as it is often written: DRP-3 looks at the line that raises.
        # fmt: off
        if not 0.0 <= dropout < 1.0: raise ValueError(f"dropout must be in [0, 1), but is {dropout}")  # noqa: E701  one line, as above
        # fmt: on
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.of(x, x, x))
        return output


@pytest.mark.mostly_slow(3)
@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row", "judged"),
    [
        (PackedProj, "w_qkv: packed_proj, w_o: proj  [tested]", "HED-1"),
        (InterleavedHeads, "w_q: w_q as (h e) d -> (e h) d,", "HED-1"),
        (InterleavedHeads, "w_o: w_o as d (h e) -> d (e h)  [tested]", "HED-1"),
        (
            InterleavedStack,
            "w_qkv: packed_proj as (r h e) d -> (e r h) d, w_o: proj  [tested]",
            "HED-1",
        ),
        (ListCalledProj, "w_q: proj.0, w_k: proj.1, w_v: proj.2, w_o: merge  [tested]", "HED-1"),
        (ContextProj, "w_o: w_o, w_q: query_proj, w_kv: context_proj  [tested]", "HED-1"),
        (SecondInput, "query, and encoder_x as key and value", "HED-1"),
        (ContextOfAWidth, "kdim and vdim  [tested]", "XAT-1"),
        (
            ContextOfAWidth,
            "no; to judge it causal too, check functools.partial(ContextOfAWidth, causal=True)",
            "XAT-1",
        ),
        (HeadsOfAWidth, "(num_heads=n_heads, head_dim=head_dim)", "HED-1"),
        (
            SizesByDefault,
            (
                "n_attention_head=n_heads)  [assumed, not by name: embedding_dimension,"
                " n_attention_head]"
            ),
            "HED-1",
        ),
        (DropsLessThanAll, "drops the output in training", "DRP-3"),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str, judged: str) -> None:
    expect_read(cls, row, judged)


n_embd = 48


class ReadsItsModule(Heads):
    """As in a course: d_model is a variable of the module."""

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__(n_embd, num_heads)
        self.head_size = head_size

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


def test_sizes_that_a_constructor_reads_from_its_module_are_named() -> None:
    with pytest.raises(ImplementationError, match="reads n_embd from its module") as error:
        infer(ReadsItsModule)
    made = (
        "globals().update(n_embd=d_model); return ReadsItsModule(num_heads=n_heads,"
        " head_size=d_model // n_heads)"
    )
    assert str(error.value).endswith(
        f"name a function that builds it: def attention(d_model, n_heads): {made}"
    )


class ScaledByNothing(DropsLessThanAll):
    """Wrong: it divides by the share that is kept, also where that is 0."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.scale, self.p = 1 / (1 - dropout), dropout

    def forward(self, x: Tensor) -> Tensor:
        output = self.of(x, x, x)
        return (
            output * (torch.rand_like(output) >= self.p) * self.scale if self.training else output
        )


class KeepsALogarithm(Heads):
    """Wrong: that of 0 raises ValueError, as a check of the range does."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = nn.Dropout(dropout)
        self.log = math.log(1 - dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.of(x, x, x))
        return output


@pytest.mark.parametrize(
    ("cls", "error"), [(ScaledByNothing, "ZeroDivisionError"), (KeepsALogarithm, "ValueError")]
)
def test_construction_that_breaks_with_p_of_1_fails(cls: type[nn.Module], error: str) -> None:
    [verdict] = check(cls, "quick", clauses="DRP-3", dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
    assert error in verdict.message


class UnknownWidth(Heads):
    """A required size of an unknown name, beside one with a word of d_model."""

    def __init__(self, breadth: int, n_heads: int, dim_feedforward: int = 2048) -> None:
        super().__init__(breadth, n_heads)
        self.feedforward = dim_feedforward

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class SingleLetters(Heads):
    """Sizes that only their order tells."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__(D, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (UnknownWidth, "[assumed, not by name: breadth]"),
        (SingleLetters, "[assumed, not by name: D, H]"),
    ],
)
def test_word_in_a_name_does_not_decide(cls: type[nn.Module], row: str) -> None:
    assert row in infer(cls).report(400)


class OtherNumbers(Heads):
    """None of its sizes is a width."""

    def __init__(self, embed_rank: int = 8, n_attention_head: int = 2) -> None:
        super().__init__(8, n_attention_head)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, x, x)


class TwoWidths(OtherNumbers):
    """Either may be d_model."""

    def __init__(self, hidden: int = 8, width: int = 8, n_attention_head: int = 2) -> None:
        super().__init__(hidden, n_attention_head)


@pytest.mark.parametrize("cls", [OtherNumbers, TwoWidths])
def test_numbers_of_another_meaning_are_no_width(cls: type[nn.Module]) -> None:
    with pytest.raises(ImplementationError, match="has a known name of d_model"):
        infer(cls)


def test_heads_of_which_only_the_query_is_interleaved_fail() -> None:
    wrong = infer(InterleavedQueries).implementation
    assert check(wrong, "quick", clauses="HED-1", dtypes="float32").failing == "HED-1"
