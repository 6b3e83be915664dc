"""Conventions of other packages fit an adapter of a few lines: `call`, partials, other arrays."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mha.implementations import from_kernel, from_module, resolve
from mha.spec import Claims, Implementation, Output, causal_mask, join_causal
from support.effort import EVERYTHING
from support.judging import expect_conforms, expect_pass

SEPARATE = {f"w_{role}": role for role in "qkvo"}
CLAUSES = ("CFG-1", "SHP-1", "SMX-1", "MSK-1", "MSK-2", "CAU-1", "PTH-1", "HED-1", "NUM-1", "GRD-1")


class Base(nn.Module):
    """Four projections with attention between them."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        if n_heads <= 0 or d_model <= 0 or d_model % n_heads:
            raise ValueError(
                f"d_model ({d_model}) must be a positive multiple of n_heads ({n_heads})"
            )
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        heads = (-1, self.n_heads)
        q, k, v = (
            layer(x).unflatten(-1, heads[::-1]).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if allowed is None:
            weights = scores.softmax(-1)
        else:
            lowest = torch.finfo(scores.dtype).min
            weights = scores.masked_fill(~allowed.expand_as(scores), lowest).softmax(-1) * allowed
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


class StoresWeights(Base):
    """Stores the weights in an attribute."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        output, self.attn = self.attend(query, key, value, mask)
        return output


def call_stores_weights(
    module: StoresWeights,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    **flags: bool,
) -> Output:
    if flags["is_causal"]:
        mask = join_causal(mask, causal_mask(query.shape[1], key.shape[1], "top_left"))
    return Output(module(query, key, value, mask), module.attn)


class TwoMasks(Base):
    """Takes padding (B, S), True = masked, and a mask (B * H, L, S), True = may attend."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, padding: Tensor
    ) -> Any:
        allowed = attn_mask.unflatten(0, (-1, self.n_heads)) & ~padding[:, None, None]
        return self.attend(query, key, value, allowed)


def call_two_masks(
    module: TwoMasks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    **flags: bool,
) -> Output:
    batch, queries, keys = len(query), query.shape[1], key.shape[1]
    if flags["is_causal"]:
        mask = join_causal(mask, causal_mask(queries, keys, "top_left"))
    mask = torch.ones(keys, dtype=torch.bool) if mask is None else mask
    mask = mask.expand(batch, module.n_heads, queries, keys)
    padding = ~mask.any(2).any(1)  # keys that no query of the item may see
    return Output(
        *module(query, key, value, (mask | padding[:, None, None]).flatten(0, 1), padding)
    )


class Causal(Base):
    """Causal or not, as its constructor is called."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True, causal: bool = False) -> None:
        super().__init__(d_model, n_heads, bias)
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        lengths = query.shape[1], key.shape[1]
        return self.attend(
            query, key, value, causal_mask(*lengths, "top_left") if self.causal else None
        )


always_causal = partial(Causal, causal=True)


class Positional(Base):
    """Also takes positions, which change nothing where they are zero."""

    def forward(self, x: Tensor, positions: Tensor, scale: float) -> Any:
        assert positions.shape == x.shape[:2]
        return self.attend(x + positions[..., None] * scale, x, x, None)


def call_positional(
    module: Positional, query: Tensor, key: Tensor, value: Tensor, **named: Any
) -> Output:
    return Output(*module(query, torch.zeros(query.shape[:2]).to(query), 1.0))


def in_numpy(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the context (B, H, L, d_k), computed outside torch."""
    scores = np.einsum("bhld,bhsd->bhls", query, key) / np.sqrt(
        np.asarray(query.shape[-1], query.dtype)
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    context: np.ndarray = (weights / weights.sum(-1, keepdims=True)) @ value
    return context


def through_dlpack(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.from_dlpack(in_numpy(*(np.from_dlpack(x.detach()) for x in (query, key, value))))


NO_MASKS = {"masks": (), "causal": None}
ADAPTERS: dict[str, Callable[[], Implementation]] = {
    "weights in an attribute": lambda: from_module(
        StoresWeights, parameters=SEPARATE, call=call_stores_weights
    ),
    "padding as a separate mask": lambda: from_module(
        TwoMasks, parameters=SEPARATE, call=call_two_masks
    ),
    "causal by construction": lambda: from_module(
        always_causal, parameters=SEPARATE, mask=None, claims=Claims(masks=(), always_causal=True)
    ),
    "not causal by construction": lambda: from_module(Causal, parameters=SEPARATE, mask=None),
    "more arguments": lambda: from_module(
        Positional,
        parameters=SEPARATE,
        mask=None,
        call=call_positional,
        claims=Claims(**NO_MASKS, cross_attention=False),
    ),
    "outside torch": lambda: from_kernel(
        through_dlpack, mask=None, claims=Claims(**NO_MASKS, returns_weights=False, gradients=False)
    ),
}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("convention", ADAPTERS)
def test_convention_is_judged(convention: str) -> None:
    expect_pass(ADAPTERS[convention](), "SHP-1", "NUM-1", "HED-1", also=CLAUSES)


@pytest.mark.parametrize("call", [call_stores_weights, call_two_masks, call_positional])
def test_adapter_is_short(call: Callable[..., Output]) -> None:
    assert len(inspect.getsource(call).splitlines()) < 25


@pytest.mark.parametrize(("name", "always"), [("always_causal", True), ("Causal", False)])
def test_partial_class_is_inferred(name: str, always: bool) -> None:
    (resolved,) = resolve(f"{Path(__file__)}:{name}")
    claims = resolved.implementation.claims
    assert resolved.implementation.name == name
    assert claims.always_causal is always
    assert (claims.causal is None) is not always
    assert resolved.inference is not None
    lines = resolved.inference.report()
    assert f"from_module(\n        {name}," in lines
    assert ("not judged" in lines) is not always  # its argument `causal`


class Wrapped(nn.Module):
    """Has `nn.MultiheadAttention` inside, and refuses what that would not answer."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        if n_heads <= 0 or d_model <= 0 or d_model % n_heads:
            raise ValueError(
                f"d_model ({d_model}) must be a positive multiple of n_heads ({n_heads})"
            )
        self.inner = nn.MultiheadAttention(d_model, n_heads, bias=bias, batch_first=True)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
    ) -> Any:
        if attn_mask is not None and (
            attn_mask.dtype != torch.bool or bool(attn_mask.all(-1).any())
        ):
            raise ValueError("attn_mask must be boolean, and leave each query a key")
        return self.inner(query, key, value, attn_mask=attn_mask, average_attn_weights=False)


@pytest.mark.slow
def test_masks_of_heads_beside_items_conform() -> None:
    """A causal mask that is joined, and one that heads share, must be given to each head."""
    wrapped = from_module(
        Wrapped,
        parameters={
            "w_qkv": "inner.in_proj_weight",
            "b_qkv": "inner.in_proj_bias",
            "w_o": "inner.out_proj",
        },
        mask="drop",
        mask_shape="(b h) l s",
        claims=Claims(empty_row="error"),
    )
    about_masks = ["SHP", "SMX", "MSK", "CAU", "PTH", "HED", "EQV-1", "NUM-1", "GRD-1"]
    expect_conforms(wrapped, [] if EVERYTHING else about_masks)
