"""Kinds of mask, each named for what it may differ by."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.spec import causal_mask
from mha.spec.claims import Alignment

# Which of (B, H, L, S) a kind's mask really has; it is broadcast over the others.
EXTENTS = {
    "all": "BS",
    "keys": "S",
    "padding": "BS",
    "queries": "LS",
    "items": "BLS",
    "heads": "HLS",
    "full": "BHLS",
    "single": "BLS",
    "bias": "BLS",
    "head_bias": "BHLS",
    "far_bias": "BLS",
    "empty_rows": "BLS",
    "empty_item": "BS",
}
BOOLEAN = ("keys", "padding", "queries", "items", "heads", "full")
FLOAT = ("bias", "head_bias", "far_bias")
EMPTY = ("empty_rows", "empty_item")
PER_HEAD = ("heads", "full", "head_bias")


def make_mask(
    kind: str, scores: tuple[int, int, int, int], causal: Alignment | None, generator: torch.Generator
) -> Tensor | None:
    """Return a mask of a kind for scores (B, H, L, S), or None for "none".

    "all" allows everything; "padding" allows a first stretch of the keys of each item; "single" allows one key to each
    query, and goes with no causal flag; "bias" and "head_bias" are real numbers, a quarter of them -infinity;
    "far_bias" is 0 or -1e9, a number still; "empty_rows" and "empty_item" leave queries or a whole item without a key;
    the rest allow each pair with probability 1/2. Where only kinds of `EMPTY` may leave a row without a key, the others
    give it one, also when the mask is joined to the causal one.
    """
    if kind == "none":
        return None
    shape = tuple(size if axis in EXTENTS[kind] else 1 for axis, size in zip("BHLS", scores, strict=True))
    keys = scores[-1]
    if kind == "padding":
        lengths = torch.randint(1, keys + 1, (*shape[:-1], 1), generator=generator)
        return torch.arange(keys) < lengths
    if kind == "single":
        return torch.arange(keys) == torch.randint(keys, (*shape[:-1], 1), generator=generator)
    allowed = torch.rand(shape, generator=generator) < {"all": 2.0, "bias": 0.75, "head_bias": 0.75}.get(kind, 0.5)
    allowed |= _rescue(allowed, scores, causal, generator)
    if kind in EMPTY:
        rows = allowed[:, 0, :, 0].clone().fill_(False).flatten()
        rows[torch.randint(len(rows), (1,), generator=generator)] = True
        allowed &= ~rows.view(shape[0], 1, shape[2], 1)
    if kind == "far_bias":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(~allowed, -1e9)
    if kind in FLOAT:
        numbers = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return numbers.masked_fill(~allowed, float("-inf"))
    return allowed


def _rescue(
    allowed: Tensor, scores: tuple[int, int, int, int], causal: Alignment | None, generator: torch.Generator
) -> Tensor:
    """Return which keys to allow besides, so that every row has one: the first key if causal, else any."""
    keys = scores[-1]
    if causal is None:
        spare = torch.randint(keys, (*allowed.shape[:-1], 1), generator=generator)
        empty = ~allowed.any(-1, keepdim=True)
    else:
        spare = torch.zeros((*allowed.shape[:-1], 1), dtype=torch.long)
        empty = ~(allowed & causal_mask(scores[2], keys, causal)).any(-1, keepdim=True)
        if allowed.shape[2] == 1:
            empty = empty.any(2, keepdim=True)
    return empty & (torch.arange(keys) == spare)
