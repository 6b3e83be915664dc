"""Kernels and classes of few sizes: whole tiles, equal lengths, common widths of heads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference import kernels
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Sizes
from support.judging import expect_fail, expect_pass


def of_one_shape(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if not q.shape == k.shape == v.shape:
        raise ValueError("one shape")
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def in_tiles(q: Tensor, k: Tensor, v: Tensor, block_size: int = 32) -> Tensor:
    """With a running maximum over tiles of keys."""
    if q.shape[2] % block_size or k.shape[2] % block_size:
        raise ValueError("whole tiles")
    highest = q.new_full((*q.shape[:3], 1), -math.inf)
    total, context = torch.zeros_like(highest), torch.zeros_like(q)
    for keys, values in zip(k.split(block_size, 2), v.split(block_size, 2), strict=True):
        scores = q @ keys.mT / math.sqrt(q.shape[-1])
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        kept, weights = (highest - higher).exp(), (scores - higher).exp()
        total, context = (
            total * kept + weights.sum(-1, keepdim=True),
            context * kept + weights @ values,
        )
        highest = higher
    return context / total


def of_common_widths(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
    """As in the tutorial of Triton."""
    if q.shape[-1] not in {16, 32, 64, 128}:
        raise ValueError("the width")
    if q.shape[1] % 16 or k.shape[1] % 16:
        raise ValueError("lengths must be multiples of 16")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale).transpose(1, 2)


def of_merged_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, length, width = q.shape
    if length % 64:
        raise ValueError("whole tiles")
    nothing = q.new_zeros(batch, length, k.shape[1])
    return torch.baddbmm(nothing, q, k.mT, alpha=width**-0.5).softmax(-1) @ v


def of_narrow_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[-1] > 128:
        raise ValueError("too wide")
    return F.scaled_dot_product_attention(q, k, v)


def with_a_square_flag(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if q.shape[2] % 16 or k.shape[2] % 16:
        raise ValueError("whole tiles")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("a causal mask is square")
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


LONG_TILES = "lengths  multiples of 64: others raise ValueError: whole tiles  [tested]"
# The kernel, the sizes that are claimed, and a line of its table.
KERNELS: list[tuple[Any, Sizes, str]] = [
    (
        of_one_shape,
        Sizes(),
        "lengths  as many keys as queries: others raise ValueError: one shape  [tested]",
    ),
    (
        in_tiles,
        Sizes(length_multiple=32),
        "lengths     multiples of 32: others raise ValueError: whole tiles  [tested]",
    ),
    (
        of_common_widths,
        Sizes(head_dims={16, 32, 64, 128}, length_multiple=16),
        "head_dim  16, 32, 64 or 128: with 5, ValueError: the width  [tested]",
    ),
    (
        of_narrow_heads,
        Sizes(max_head_dim=128),
        "head_dim  at most 128: with 256, ValueError: too wide  [tested]",
    ),
    (
        with_a_square_flag,
        Sizes(length_multiple=16),
        "causal   causal, aligned top_left  [tested]",
    ),
    (of_merged_heads, Sizes(length_multiple=64), LONG_TILES),
]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(("kernel", "sizes", "row"), KERNELS)
def test_kernel_is_judged_in_the_sizes_for_which_it_does_not_raise(
    kernel: Any, sizes: Sizes, row: str
) -> None:
    result = infer_kernel(kernel)
    claims = result.implementation.claims
    assert claims.sizes == sizes
    assert claims.cross_attention == (kernel is not of_one_shape)
    assert row in result.report()
    expect_pass(result, "SHP-1", "HED-1", "GRD-1", also=["HED", "EQV-3", "CAU-1", "NUM-1"])


def of_whole_tiles_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leaves out the queries after the last whole tile."""
    context = torch.zeros_like(q)
    for start in range(0, q.shape[2] // 32 * 32, 32):
        context[:, :, start : start + 32] = F.scaled_dot_product_attention(
            q[:, :, start : start + 32], k, v
        )
    return context


def of_the_first_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leaves out the keys after as many as there are queries; of merged heads it would be right."""
    return F.scaled_dot_product_attention(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]])


@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize("kernel", [of_whole_tiles_of_queries, of_the_first_keys])
def test_kernel_that_is_wrong_for_other_sizes_is_judged_in_them(kernel: Any) -> None:
    result = infer_kernel(kernel)
    assert result.implementation.claims.sizes == Sizes()
    assert result.implementation.claims.cross_attention is True
    assert (
        "assumed: it explains the output only for some of the sizes that it takes"
        in result.report(width=200)
    )
    expect_fail(result, "HED-1")


def of_long_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Raises for few queries, and leaves out those after the last whole tile."""
    if q.shape[2] < 16:
        raise ValueError("at least one tile")
    return of_whole_tiles_of_queries(q, k, v)


def of_more_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Raises for fewer keys than queries, and leaves out the last ones of more."""
    if k.shape[2] < q.shape[2]:
        raise ValueError("fewer keys")
    return of_the_first_keys(q, k, v)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            of_long_rows,
            "with some lengths it raises ValueError: at least one tile, but not with 50",
        ),
        (of_more_keys, "with unequal lengths it raises ValueError: fewer keys, but not with all"),
    ],
)
def test_no_claim_hides_sizes_for_which_it_does_not_raise(kernel: Any, message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        infer_kernel(kernel)


def test_slow_kernel_is_not_tried_with_long_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 64 queries on 64 keys takes half a second; longer ones would take minutes."""
    elapsed, longest = [0.0], [0]

    def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _batch, _heads, _length, _width = q.shape
        longest[0] = max(longest[0], q.shape[2])
        elapsed[0] += 0.5 * (q.shape[2] / 64) ** 2
        return (q @ k.mT / 3).softmax(-1) @ v

    monkeypatch.setattr(kernels, "process_time", lambda: elapsed[0])
    with pytest.raises(ImplementationError, match="its output matches no formula of attention"):
        infer_kernel(slow)
    assert longest[0] == 64


def test_kernel_that_is_wrong_and_raises_is_refused() -> None:
    def of_another_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape != k.shape:
            raise ValueError("one shape")
        return (q @ k.mT / 3).softmax(-1) @ v

    with pytest.raises(
        ImplementationError,
        match=r"of shape \(b, h, l, d\), each call raises ValueError: one shape \(test_w",
    ):
        infer_kernel(of_another_scale)


class OfTiles(nn.Module):
    """Its lengths are multiples of its tiles."""

    def __init__(self, d_model: int, n_heads: int, block_size: int = 64) -> None:
        super().__init__()
        self.n_heads, self.block_size = n_heads, block_size
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        if x.shape[1] % self.block_size:
            raise ValueError(f"the length must be a multiple of {self.block_size}")
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        context: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # of nn.Module


class OfCausalTiles(OfTiles):
    """Always causal, with a table of 512 positions."""

    def __init__(self, d_model: int, n_heads: int, block_size: int = 16) -> None:
        super().__init__(d_model, n_heads, block_size)
        self.register_buffer("later", torch.ones(512, 512, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without a flag
        if x.shape[1] > len(self.later):  # type: ignore[arg-type]  # a buffer
            raise IndexError("too long")
        return super().forward(x, causal=True)


@pytest.mark.slow
def test_class_of_causal_tiles_is_judged_up_to_its_table() -> None:
    claims = infer(OfCausalTiles).implementation.claims
    assert claims.always_causal
    assert claims.sizes == Sizes(length_multiple=16, max_length=512)


class OfOneShape(nn.Module):
    """Of three inputs, which have one shape, and heads of common widths."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        if d_model // n_heads not in {16, 32, 64, 128}:
            raise ValueError("no kernel for this width")
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not query.shape == key.shape == value.shape:
            raise ValueError("one shape")
        inputs = ((self.q, query), (self.k, key), (self.v, value))
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer, x in inputs
        )
        context: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(context)  # type: ignore[no-any-return]  # of nn.Module


def test_class_of_one_shape_and_common_widths_is_judged_on_them() -> None:
    result = infer(OfOneShape)
    claims = result.implementation.claims
    assert (claims.cross_attention, claims.sizes) == (False, Sizes(head_dims={16, 32, 64, 128}))
    assert (
        "lengths      as many keys as queries: others raise ValueError: one shape  [tested]"
        in result.report()
    )
    expect_pass(result, "SHP-1", "HED", "GRD-1", "NUM-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constructor", "tile"), [(OfTiles, 64), (partial(OfTiles, block_size=16), 16)]
)
def test_class_of_whole_tiles_is_judged_on_them(constructor: Any, tile: int) -> None:
    result = infer(constructor)
    assert result.implementation.claims.sizes == Sizes(length_multiple=tile)
    report = result.report(200)
    assert (
        f"multiples of {tile}: others raise ValueError: the length must be a multiple of {tile} "
        " [tested]" in report
    )
    assert f"block_size={tile}" in report
    clauses = ["SHP-1", "HED-1", "CAU-1", "GRD-1"]
    expect_pass(result, *clauses)
