"""Classes that take no number of heads, and have one."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError, from_module
from mha.implementations.adapters.widths import reads_no_number_of_heads, with_one_head
from mha.implementations.discovery.errors import UnsupportedCallError
from mha.implementations.inference.infer import infer
from mha.implementations.inference.projections import alike_with_one_head
from mha.implementations.inference.understanding import has_one_head
from mha.spec import Claims, Config, Sizes, Weights


class OneHead(nn.Module):
    """The weights (B, L, S) beside the output."""

    def __init__(self, d_model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = self.dropout(scores.softmax(-1))
        return self.out(weights @ v), weights


class Head(nn.Module):
    """A part of an attention that has W_o elsewhere."""

    def __init__(self, n_embd: int, head_size: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(n_embd, head_size, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self._weights(q @ k.mT * q.shape[-1] ** -0.5) @ v

    def _weights(self, scores: Tensor) -> Tensor:
        hidden = torch.ones_like(scores).triu(1).bool()
        return scores.masked_fill(hidden, -math.inf).softmax(-1)


class OfAConfig(Head):
    """Its config has no number of heads either."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config.n_embd, config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.proj(super().forward(x))
        return output


class HeadsInABase(nn.Module):
    """A fault where there are several heads: they are not put side by side again."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.proj(context.reshape_as(x))
        return output


class HeadsOfABase(HeadsInABase):
    """It reads no number of heads itself."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.proj = nn.Linear(config.n_embd, config.n_embd)


class HeadsInAPart(nn.Module):
    """One of its parts reads their number."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.width = config.n_embd
        self.part = HeadsOfABase(config)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.part(x)
        return output


class OverQueries(Head):
    """A fault: the weights of a key sum to 1."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, d_model)

    def _weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(1)


class FourHeads(OneHead):
    """Their number is in its code only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without weights
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(context.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        (
            OneHead,
            (
                "OneHead(d_model=d_model, dropout=dropout)",
                "True = may attend, of shape 'b l s'",
                "weights      returned per head, of shape (b, l, s)",
                "lambda n_heads, d_model, dropout=0.0: OneHead(d_model=d_model, dropout=dropout)",
                "sizes=Sizes(n_heads={1})",
            ),
        ),
        (
            Head,
            (
                "Head(n_embd=d_model, head_size=head_dim)",
                "w_v: value, w_o: none, and added to its output  [tested]",
                "causal       always",
                "sizes        the width of a head",
            ),
        ),
        (OfAConfig, ("w_o: proj  [tested]", "lambda n_heads, config: OfAConfig(config=config)")),
        (OverQueries, ("[assumed: it explains the output only where all scores are equal]",)),
    ],
)
def test_class_without_a_number_of_heads_has_one(cls: type[nn.Module], rows: tuple[str]) -> None:
    report = infer(cls).report(400)
    for row in rows:
        assert row in report


class HeadsByWidth(OneHead):
    """A head for each 64 columns."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without weights
        heads = max(1, x.shape[-1] // 64)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(context.transpose(1, 2).flatten(2))


def test_class_whose_width_decides_how_many_heads_it_has_asks_for_their_number() -> None:
    with pytest.raises(ImplementationError, match="has a known name of n_heads"):
        infer(HeadsByWidth)


@pytest.mark.parametrize("cls", [HeadsOfABase, HeadsInAPart])
def test_class_whose_base_or_part_reads_their_number_has_several(cls: type[nn.Module]) -> None:
    assert reads_no_number_of_heads(cls)
    assert infer(cls).implementation.claims.sizes.n_heads is None


@pytest.mark.slow
def test_class_with_several_heads_asks_for_their_number() -> None:
    with pytest.raises(ImplementationError, match="has a known name of n_heads"):
        infer(FourHeads)


@pytest.mark.parametrize(("cls", "expected"), [(OverQueries, True), (FourHeads, False)])
def test_what_reshapes_may_have_several_heads(cls: type[nn.Module], *, expected: bool) -> None:
    assert has_one_head(cls(8)) == expected


def test_declaration_of_one_head_returns_its_weights() -> None:
    (build,) = with_one_head("OneHead", OneHead)
    attention = from_module(
        build,
        parameters={"w_qkv": "qkv", "w_o": "out"},
        mask_shape="b l s",
        weights_layout="b l s",
        name="OneHead",
        claims=Claims(cross_attention=False, per_head_mask=False, sizes=Sizes(n_heads={1})),
    )
    config = Config(d_model=6, n_heads=1)
    built = attention.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
    x = torch.zeros(5, 3, 6, dtype=torch.float64)
    assert built(x, x, x, need_weights=True).weights.shape == (5, 1, 3, 3)
    config = Config(d_model=6, n_heads=2)
    with pytest.raises(UnsupportedCallError, match=r"takes no number of heads \(2\): it has one"):
        attention.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")


def test_layouts_that_differ_in_the_axis_of_heads_are_one_with_one_head() -> None:
    maps = [
        {"w_qkv": "qkv", "w_o": "out"},
        {"w_qkv": ("qkv", "(r h e) d -> (h r e) d"), "w_o": "out"},
        {"w_qkv": ("qkv", "(r h e) d -> (h e r) d"), "w_o": "out"},
    ]
    assert alike_with_one_head(maps) == [maps[0], maps[2]]  # type: ignore[arg-type]  # invariance
