"""Layers: which projection each one is, by name or by trial runs, and the layout of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from mha.spec import Config
from support.judging import expect_fail, expect_pass
from support.options import Plain
from support.readings import evidence, expect_read, findings, is_tested
from support.right_classes import Fused, Heads, OfItself, Separate


class PackedProj(Heads):
    """The fused layer and the output projection are called proj, as in a tutorial of PyTorch."""

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
        self.query_proj = nn.Linear(d_model, d_model)
        self.context_proj = nn.Linear(d_model, 2 * d_model)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        key, value = self.context_proj(context).chunk(2, -1)
        output: Tensor = self.w_o(self.attend(self.query_proj(x), key, value))
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


class InterleavedHeads(Heads):
    """The columns of heads are interleaved on the way in and out, as by view(b, d_k, h, l)."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.n_heads)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        contexts = self.attend(self.w_q(x), self.w_k(x), self.w_v(x))
        output: Tensor = self.w_o(contexts.unflatten(-1, (self.n_heads, -1)).mT.flatten(2))
        return output


class InterleavedStack(PackedProj):
    """The rows of one layer are (d_k, 3, n_heads)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.packed_proj(x).unflatten(-1, (-1, 3, self.n_heads))
        output: Tensor = self.proj(self.attend(*(each.mT.flatten(2) for each in rows.unbind(-2))))
        return output


class Matrix(nn.Module):
    """A linear layer of one's own."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class StackedByHeads(Fused):
    """As in Megatron and GPT-NeoX: query, key and value of a head are side by side, biases too."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.qkv = Matrix(d_model, 3 * d_model)  # type: ignore[assignment]  # called in the same way

    def split(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (self.n_heads, 3, -1)).permute(3, 0, 2, 1, 4)


class QueryBesideKey(Fused):
    """As in ConViT: one layer of query and key, and one of values."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        del self.qkv
        self.qk, self.v = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Any:
        projected = torch.cat([self.qk(x), self.v(x)], -1)
        return projected.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)


class OfFourAxes(nn.Module):
    """As in einsum code: W_qkv (3, H, D, d_k), b_qkv (3, D), and W_o (H, d_k, D) as vectors."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.w_qkv = nn.Parameter(torch.empty(3, n_heads, d_model, d_model // n_heads))
        self.b_qkv = nn.Parameter(torch.empty(3, d_model))
        self.vectors = nn.Parameter(torch.empty(n_heads, d_model // n_heads, d_model))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bld,rhde->rbhle", x, self.w_qkv)
        q, k, v = heads + self.b_qkv.unflatten(1, self.vectors.shape[:2])[:, None, :, None]
        contexts = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return contexts.transpose(1, 2).flatten(2) @ self.vectors.flatten(0, 1)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (PackedProj, "w_qkv: packed_proj, w_o: proj  [tested]"),
        (
            InterleavedHeads,
            "w_q: w_q as (h e) d -> (e h) d, w_k: w_k as (h e) d -> (e h) d, w_v: w_v as (h e) d ->"
            " (e h) d, w_o: w_o as d (h e) -> d (e h)  [tested]",
        ),
        (StackedByHeads, "w_qkv: qkv.weight as (r h e) d -> (h r e) d, b_qkv: qkv.bias as (r h e)"),
        (InterleavedStack, "w_qkv: packed_proj as (r h e) d -> (e r h) d, w_o: proj  [tested]"),
        (ListCalledProj, "w_q: proj.0, w_k: proj.1, w_v: proj.2, w_o: merge  [tested]"),
        (ContextProj, "w_o: w_o, w_q: query_proj, w_kv: context_proj  [tested]"),
        (OfFourAxes, "w_qkv: w_qkv as (r h e) d -> r h d e, b_qkv: b_qkv as (r h e) -> r (h e)"),
        (QueryBesideKey, "w_o: out, w_qk: qk, w_v: v"),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "HED-1", "STA-4", "STA-6")


class InterleavedQueries(OfItself):
    """Wrong: only the heads of the query are interleaved."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.w_q(x).unflatten(-1, (-1, self.n_heads)).mT.flatten(2)
        output: Tensor = self.w_o(self.attend(query, self.w_k(x), self.w_v(x)))
        return output


def test_heads_of_which_only_the_query_is_interleaved_fail() -> None:
    expect_fail(infer(InterleavedQueries), "HED-1")


class StackedByShape(nn.Module):
    """No name of its layers has the word of a projection, and its config has no usual name."""

    def __init__(self, hparams: Any, device: str) -> None:
        super().__init__()
        self.n_heads = hparams.num_heads
        self.attn = nn.Linear(hparams.d_model, 3 * hparams.d_model, device=device)
        self.proj = nn.Linear(hparams.d_model, hparams.d_model, device=device)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attn(x).unflatten(-1, (self.n_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        context = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        output: Tensor = self.proj(context)
        return output


def test_projections_may_be_known_by_their_shape_alone() -> None:
    result = infer(StackedByShape)
    assert is_tested(result)
    assert result.implementation.parameters == {
        "w_qkv": ("attn", "(r h e) d -> (h r e) d"),
        "w_o": "proj",
    }


class Stacked(Plain):
    """Its projections are one layer, in this order."""

    name, order = "c_attn", "qkv"

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.add_module(self.name, nn.Linear(d_model, 3 * d_model))
        del self.q, self.k, self.v

    def forward(self, x: Tensor) -> Any:
        projected = self.get_submodule(self.name)(x).unflatten(-1, (3, self.n_heads, -1))
        heads = projected.permute(2, 0, 3, 1, 4)
        q, k, v = (heads[self.order.index(role)] for role in "qkv")
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", ["qkv", "kqv", "vkq"])
def test_stacked_projections_may_be_in_any_order(order: str) -> None:
    result = infer(type("Ordered", (Stacked,), {"order": order}))
    assert result.implementation.parameters == {f"w_{order}": "c_attn", "w_o": "out"}
    expect_pass(result, "HED-1")


def test_order_that_the_name_of_a_layer_does_not_say_is_assumed() -> None:
    result = infer(type("Swapped", (Stacked,), {"name": "qkv", "order": "kqv"}))
    assert "w_kqv: qkv" in findings(result)["projections"]
    found = "assumed: the outputs show this order, though the layer is called qkv"
    assert evidence(result)["projections"] == found


class Smoothed(Stacked):
    """A wrong class, the name of whose layer gives the order."""

    name, order = "kqv", "kqv"

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 1.01


def test_order_in_a_name_is_that_of_a_wrong_class_too() -> None:
    assert infer(Smoothed).implementation.parameters == {"w_kqv": "kqv", "w_o": "out"}


class SharedByHeads(Separate):
    """As in a popular tutorial: one projection of the width of a head, for all heads."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        width = d_model // n_heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def test_projection_that_heads_share_is_no_lack_of_key_heads() -> None:
    with pytest.raises(
        ImplementationError, match="so all heads share one small projection; project all of d_model"
    ):
        infer(SharedByHeads)
