"""Attention as tutorials write it: five common forms, with the usual defects of such code."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from mha.conformance.faults.fault import fault
from mha.implementations import from_module
from mha.spec import Claims

DTYPES = {"float64", "float32", "bfloat16", "float16"}


class Vectorized(nn.Module):
    """Masked with -1e9; sizes asserted; reshaped by `view` with a size left open."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Linear(d_model, d_model, bias=bias) for _ in range(4)
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch = query.size(0)
        q, k, v = (
            layer(x).view(batch, -1, self.n_heads, self.d_k).transpose(1, 2)
            for layer, x in ((self.w_q, query), (self.w_k, key), (self.w_v, value))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(-1)
        context = (
            (weights @ v).transpose(1, 2).contiguous().view(batch, -1, self.n_heads * self.d_k)
        )
        return self.w_o(context), weights


class Minimal(nn.Module):
    """Masked with -infinity, which makes an empty row NaN; nothing is validated."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], x.shape[1], self.h, x.shape[2] // self.h).transpose(1, 2)

        q, k, v = split(self.q(query)), split(self.k(key)), split(self.v(value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2)
        output: Tensor = self.o(context.reshape(context.shape[0], context.shape[1], -1))
        return output


class Modular(nn.Module):
    """The scale rounded to float32; masked with -1e9; weights returned after dropout."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        if d_model % n_heads != 0:
            raise ValueError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (
            nn.Linear(d_model, d_model, bias=bias) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = q @ k.transpose(-2, -1) / torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float32))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return weights @ v, weights

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        context, weights = self.attention(
            split(self.w_q(query)), split(self.w_k(key)), split(self.w_v(value)), mask
        )
        return self.w_o(context.transpose(1, 2).flatten(2)), weights


class Einops(nn.Module):
    """No scale and no output projection; masked by adding -1e5."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        self.unused = nn.Linear(
            d_model, d_model, bias=bias
        )  # the weights of an output projection are loaded here

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            rearrange(layer(x), "b l (h d) -> b h l d", h=self.n_heads)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = torch.einsum("bhld, bhsd -> bhls", q, k)
        if mask is not None:
            scores = scores + mask * -1e5
        context = torch.einsum("bhls, bhsd -> bhld", scores.softmax(-1), v)
        return rearrange(context, "b h l d -> b l (h d)")


class FusedQKV(nn.Module):
    """The mask is applied to the axis of the queries, where -1e9 on a whole row cancels in the
    softmax.
    """

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        assert d_model % n_heads == 0, "d_model must be divisible by n_heads"
        self.n_heads = n_heads
        self.qkv, self.out = (
            nn.Linear(d_model, 3 * d_model, bias=bias),
            nn.Linear(d_model, d_model, bias=bias),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, length, d = x.shape
        q, k, v = (
            part.reshape(b, length, self.n_heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) * (d // self.n_heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask.transpose(-1, -2), -1e9)
        if is_causal:
            scores = scores.masked_fill(q.new_ones(length, length).triu(1).bool(), -math.inf)
        context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, length, d)
        output: Tensor = self.out(context)
        return output


NAMED = {f"w_{role}": f"w_{role}" for role in "qkvo"}
vectorized = from_module(
    Vectorized, name="tutorial_vectorized", parameters=NAMED, claims=Claims(dtypes=DTYPES)
)
minimal = from_module(
    Minimal,
    name="tutorial_minimal",
    parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"},
    claims=Claims(returns_weights=False, dtypes=DTYPES),
)
modular = from_module(
    Modular, name="tutorial_modular", parameters=NAMED, claims=Claims(dropout=True, dtypes=DTYPES)
)
einops = from_module(
    Einops,
    name="tutorial_einops",
    parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "unused"},
    mask="drop",
    claims=Claims(returns_weights=False, dtypes=DTYPES),
)
fused_qkv = from_module(
    FusedQKV,
    name="tutorial_fused_qkv",
    parameters={"w_qkv": "qkv", "w_o": "out"},
    mask="drop",
    claims=Claims(cross_attention=False, returns_weights=False, dtypes=DTYPES),
)

fault("MSK-8", implementation=vectorized)(Vectorized)
fault("MSK-9", implementation=minimal)(Minimal)
fault("NUM-2", dtype="float64", implementation=modular)(Modular)
fault("SMX-6", implementation=einops)(Einops)
fault(
    "MSK-1",
    source="https://github.com/lsdefine/attention-is-all-you-need-keras/issues/16",
    implementation=fused_qkv,
)(FusedQKV)
