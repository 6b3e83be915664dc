"""Masks: the canonical form, the conventions of implementations, and the causal mask.

A canonical mask is boolean, True = may attend, and broadcastable to (B, H, L, S). A mask of
floating-point numbers is added to the scores instead. One of integers, if it is claimed, has 1 and
0 for True and False.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mha.spec.claims import Alignment
from mha.spec.dtypes import computable
from mha.spec.scores import AlibiForm, Bounds, Slopes

MaskConvention = Literal["keep", "drop", "additive"]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def to_convention(mask: Tensor, convention: MaskConvention, dtype: torch.dtype) -> Tensor:
    """Translate a canonical mask into the convention of an implementation.

    mask: a boolean mask of any shape; a mask of another dtype is returned unchanged, to be accepted
        or rejected by the implementation.
    convention: "keep" (True = may attend), "drop" (True = masked) or "additive" (0 or -infinity, in
        `dtype`).
    Returns a mask of the same shape, boolean, or in `dtype` if the convention is "additive".

    >>> to_convention(torch.tensor([True, False]), "additive", torch.float32)
    tensor([0., -inf])
    """
    if mask.dtype != torch.bool or convention == "keep":
        return mask
    if convention == "drop":
        return ~mask
    zeros = computable(torch.zeros_like(mask, dtype=dtype))
    return zeros.masked_fill(~mask, float("-inf")).to(dtype)


def form_of(mask: Tensor) -> str:
    """Return the form of a mask, of `mha.spec.claims.MASK_FORMS`; "" for a complex one."""
    if mask.dtype in INTEGERS:
        return "int"
    if mask.dtype == torch.bool:
        return "bool"
    return "float" if mask.is_floating_point() else ""


def causal_mask(
    queries: int, keys: int, alignment: Alignment, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the boolean (L, S) causal mask, True where query i may attend to key j.

    queries, keys: L and S.
    alignment: "top_left" means j <= i, as in `torch.nn.functional.scaled_dot_product_attention`.
        "bottom_right" means j <= i + S - L: the last query sees every key, as decoding with a cache
        requires (clause CAU-3).

    >>> causal_mask(2, 3, "bottom_right").int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return _distances(queries, keys, alignment, device) <= 0


def window_mask(
    queries: int,
    keys: int,
    bounds: Bounds,
    alignment: Alignment,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the boolean (L, S) mask of a window, True where query i may attend to key j.

    queries, keys: L and S.
    bounds: how many keys before and after its own place a query sees, None for all of them.
    alignment: of that place, as for `causal_mask`, which is the window (None, 0).

    >>> window_mask(2, 4, (1, 0), "bottom_right").int()
    tensor([[0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    return in_window(_distances(queries, keys, alignment, device), bounds)


def chunk_mask(
    queries: int, keys: int, chunk: int, alignment: Alignment, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the boolean (L, S) mask of chunks, True where query i may attend to key j.

    queries, keys: L and S.
    chunk: how many places a chunk has; the first one begins at key 0.
    alignment: of the place of a query, as for `causal_mask`. One before the first key is in no
        chunk with a key.

    >>> chunk_mask(2, 4, 2, "bottom_right").int()
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    return in_chunk(_distances(queries, keys, alignment, device), chunk)


def distances_of(rows: Tensor, queries: int, keys: int, alignment: Alignment) -> Tensor:
    """Return how far each key is behind the places of some queries, integers (l, S).

    rows: which queries, integers (l,).
    queries, keys: L and S, of all.
    alignment: of the place of a query among the keys, as for `causal_mask`.

    >>> distances_of(torch.tensor([1]), 2, 3, "bottom_right")
    tensor([[-2, -1,  0]])
    """
    offset = keys - queries if alignment == "bottom_right" else 0
    return torch.arange(keys, device=rows.device) - (rows.unsqueeze(1) + offset)


def in_window(distances: Tensor, bounds: Bounds) -> Tensor:
    """Return whether keys at these distances are in a window, boolean; see `window_mask`."""
    left, right = bounds
    allowed = torch.ones_like(distances, dtype=torch.bool)
    if left is not None:
        allowed = allowed & (distances >= -left)
    if right is not None:
        allowed = allowed & (distances <= right)
    return allowed


def in_chunk(distances: Tensor, chunk: int) -> Tensor:
    """Return whether keys are in the chunk of their query, boolean (l, S); see `chunk_mask`.

    distances: of all keys.
    """
    keys = torch.arange(distances.shape[-1], device=distances.device)
    places = keys - distances
    return places.div(chunk, rounding_mode="floor") == keys // chunk


def bias_at(distances: Tensor, form: AlibiForm) -> Tensor:
    """Return the bias of a slope of 1 at these distances in float64; see `mha.spec.Alibi`."""
    wide = distances.double()
    return -wide.abs() if form == "symmetric" else wide


def _distances(
    queries: int, keys: int, alignment: Alignment, device: torch.device | str = "cpu"
) -> Tensor:
    """Return how far each key is behind the query's place among the keys, integers (L, S)."""
    return distances_of(torch.arange(queries, device=device), queries, keys, alignment)


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return the usual slopes of so many heads (Press et al. 2022), for the head 0 first.

    For the largest power of two n that is no more than H, they are 2^(-8j/n) for j from 1 to n, and
    then the odd powers of 2^(-4/n).

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * place / power) for place in range(1, power + 1)]
    slopes += [2.0 ** (-4 * odd / power) for odd in range(1, 2 * (n_heads - power), 2)]
    return tuple(slopes)


def alibi_bias(
    slopes: Slopes, form: AlibiForm, queries: int, keys: int, alignment: Alignment
) -> Tensor:
    """Return the bias (H, L, S) of slopes in float64; see `mha.spec.Alibi`.

    slopes: of each head, or of each item and head, which give a bias (B, H, L, S).
    queries, keys: L and S.
    alignment: of the query's place among the keys, as for `causal_mask`.

    >>> alibi_bias((0.5,), "symmetric", 2, 3, "top_left")
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]], dtype=torch.float64)
    """
    of_slope_one = bias_at(_distances(queries, keys, alignment), form)
    return torch.tensor(slopes, dtype=torch.float64)[..., None, None] * of_slope_one


def join_causal(mask: Tensor | None, causal: Tensor) -> Tensor:
    """Combine a mask with a causal mask, as their logical AND (clause CAU-4).

    mask: of any form, broadcastable to (B, H, L, S), or None. Where the causal mask hides a
        position, a floating-point mask becomes -infinity, and one of integers 0.
    causal: boolean (L, S), as `causal_mask` returns it.

    >>> join_causal(torch.tensor([False, True, True]), causal_mask(1, 3, "top_left"))
    tensor([[False, False, False]])
    """
    if mask is None:
        return causal
    if mask.is_floating_point():
        return mask.masked_fill(~causal, float("-inf"))
    return mask * causal
