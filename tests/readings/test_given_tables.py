"""Tables of a rotation that calls are given: sines and cosines in one, and halves of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from mha.spec import Rotary
from support.right_classes import Heads


class OfJoinedTables(Heads):
    """Turns pairs of columns by sines and cosines in one table, if it gets one; as in timm."""

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        q, k = self.w_q(x), self.w_k(x)
        if rope is not None:
            q, k = self.with_table(q, rope), self.with_table(k, rope)
        output: Tensor = self.w_o(self.attend(q, k, self.w_v(x)))
        return output

    def with_table(self, x: Tensor, rope: Tensor) -> Tensor:
        sin, cos = rope.unsqueeze(1).chunk(2, -1)
        heads = x.unflatten(-1, (self.n_heads, -1))
        across = torch.stack([-heads[..., 1::2], heads[..., ::2]], -1).flatten(-2)
        return (heads * cos + across * sin).flatten(2)


class OfTablesOfHalves(Heads):
    """As in GLM: takes tables for the halves of heads, and turns columns side by side."""

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = position_embeddings
        q, k = (self.turned(layer(x), cos, sin) for layer in (self.w_q, self.w_k))
        output: Tensor = self.w_o(self.attend(q, k, self.w_v(x)))
        return output

    def turned(self, x: Tensor, *tables: Tensor) -> Tensor:
        half = tables[0].shape[-1] // 2
        cos, sin = (t[..., :half].repeat_interleave(2, -1).unsqueeze(2) for t in tables)
        heads = x.unflatten(-1, (self.n_heads, -1))
        own, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        across = torch.stack([-own[..., 1::2], own[..., ::2]], -1).flatten(-2)
        return torch.cat([own * cos + across * sin, rest], -1).flatten(2)


def test_table_of_halves_is_given_where_columns_side_by_side_are_turned() -> None:
    result = infer(OfTablesOfHalves)
    assert 'Rotary(pairs="interleaved", tables="given")' in result.declaration
    assert 'rotation_layout="b l (2 p)"' in result.declaration


class OfWidths(OfTablesOfHalves):
    """Its heads have a width of their own."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.n_heads = n_heads
        for name in ("w_q", "w_k", "w_v"):
            setattr(self, name, nn.Linear(d_model, n_heads * head_dim))
        self.w_o = nn.Linear(n_heads * head_dim, d_model)


class OfWidthsInEights(OfWidths):
    """Turns a quarter of each head, so that widths are multiples of 8; is always causal."""

    def turned(self, x: Tensor, *tables: Tensor) -> Tensor:
        assert x.shape[-1] // self.n_heads % 8 == 0
        assert tables[0].shape[-1] in (1, x.shape[-1] // self.n_heads // 4)
        return super().turned(x, *tables)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> Tensor:
        hidden = torch.full((q.shape[1], q.shape[1]), -torch.inf).triu(1)
        return super().attend(q, k, v, hidden.to(q))


@pytest.mark.parametrize("cls", [OfWidths, OfWidthsInEights])
def test_width_of_rotated_heads_is_their_own(cls: type[nn.Module]) -> None:
    claims = infer(cls).implementation.claims
    assert claims.own_head_dim
    assert claims.rotary is not None


class AfterAClassToken(OfJoinedTables):
    """Does not turn its first position, and has no row for it."""

    def with_table(self, x: Tensor, rope: Tensor) -> Tensor:
        return torch.cat([x[:, :1], super().with_table(x[:, 1:], rope)], 1)


@pytest.mark.parametrize(
    ("cls", "layout"), [(OfJoinedTables, "l (sin cos)"), (AfterAClassToken, "l-1 (sin cos)")]
)
def test_table_of_sines_and_cosines_is_found_and_given(cls: type[nn.Module], layout: str) -> None:
    result = infer(cls)
    rotary = result.implementation.claims.rotary
    assert rotary is not None
    assert (rotary.pairs, rotary.tables) == ("interleaved", "given")
    assert f'rotation_layout="{layout}"' in result.declaration
    assert result.not_covered == ()


class OfComplexHalves(Heads):
    """Turns the first half of each head, as complex numbers; inputs are (L, B, D)."""

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k = self.turned(self.w_q(x), freqs_cis), self.turned(self.w_k(x), freqs_cis)
        output: Tensor = self.w_o(self.attend(q, k, self.w_v(x)))
        return output.transpose(0, 1)

    def turned(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        own, rest = x.unflatten(-1, (self.n_heads, -1)).chunk(2, -1)
        pairs = torch.view_as_complex(own.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2)
        return torch.cat([turned, rest], -1).flatten(2)


class OfNarrowTables(OfTablesOfHalves):
    """Turns a quarter of each head, and takes no other tables."""

    def turned(self, x: Tensor, *tables: Tensor) -> Tensor:
        assert tables[0].shape[1:] == (x.shape[1], x.shape[-1] // self.n_heads // 4)
        return super().turned(x, *tables)


@pytest.mark.parametrize(("cls", "part"), [(OfComplexHalves, 0.5), (OfNarrowTables, 0.25)])
def test_tables_of_a_part_of_each_head_are_given(cls: type[nn.Module], part: float) -> None:
    found = infer(cls)
    assert found.implementation.claims.rotary == Rotary(
        pairs="interleaved", part=part, tables="given"
    )


class OfOtherAngles(OfComplexHalves):
    """Turns by twice the angles."""

    def turned(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        return super().turned(x, freqs_cis * freqs_cis)


def test_tables_of_a_part_that_turn_otherwise_are_refused() -> None:
    with pytest.raises(ImplementationError, match="freqs_cis may be of half of each head"):
        infer(OfOtherAngles)


class TurnsQueriesOnly(Heads):
    """Turns whole heads of queries, and no keys."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.split(self.w_q(x))
        first, second = heads.chunk(2, -1)
        q = (heads * cos + torch.cat([-second, first], -1) * sin).transpose(1, 2).flatten(2)
        output: Tensor = self.w_o(self.attend(q, self.w_k(x), self.w_v(x)))
        return output


def test_rotation_that_is_none_by_the_tables_of_a_call_is_not_judged() -> None:
    assert infer(TurnsQueriesOnly).not_covered == ("a rotation by cos and sin",)
