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
    "head_keys": "HS",
    "heads": "HLS",
    "full": "BHLS",
    "blocks": "BLS",
    "single": "BLS",
    "bias": "BLS",
    "key_bias": "BS",
    "query_bias": "LS",
    "far_bias": "BLS",
    "head_bias": "HLS",
    "full_bias": "BHLS",
    "empty_rows": "BLS",
    "empty_item": "BS",
    "empty_or_full": "BL",
    "empty_bias": "BLS",
    "empty_key_bias": "BS",
    "empty_heads": "BHLS",
}
BOOLEAN = ("keys", "padding", "queries", "items", "head_keys", "heads", "full")
# One kind for each way of broadcasting, for clauses that are about something else.
FEW = ("padding", "queries", "full")
# No mask, these, and one of numbers.
COMMON = ("none", *FEW, "bias")
FLOAT = ("bias", "key_bias", "query_bias", "far_bias", "head_bias", "full_bias")
EMPTY = ("empty_rows", "empty_item", "empty_or_full", "empty_bias", "empty_key_bias", "empty_heads")
OF_NUMBERS = (*FLOAT, "empty_bias", "empty_key_bias")


def make_mask(
    kind: str, scores: tuple[int, int, int, int], causal: Alignment | None, generator: torch.Generator
) -> Tensor | None:
    """Return a mask of a kind for scores (B, H, L, S), or None for "none".

    "all" allows everything; "padding" allows the first keys of an item, or, unless causal, the last; "blocks" allows
    half of the tiles of queries by keys, 16 wide, or 128 in long rows; "single" allows one key to each query, and goes
    with no causal flag; a "bias" is real numbers, a quarter of them -infinity, but "far_bias" is 0 or -1e9, a number
    still; the rest allow each pair with probability 1/2. Kinds of `EMPTY` leave some rows of the mask without a key, or
    all; the others give every row one, also when they are joined to the causal mask.
    """
    if kind == "none":
        return None
    shape = tuple(size if axis in EXTENTS[kind] else 1 for axis, size in zip("BHLS", scores, strict=True))
    keys = shape[-1]
    if kind == "padding":
        lengths = torch.randint(1, keys + 1, (*shape[:-1], 1), generator=generator)
        allowed = torch.arange(keys) < lengths
        left = torch.randint(2, lengths.shape, generator=generator) == 1
        return torch.where(left, allowed.flip(-1), allowed) if causal is None else allowed
    if kind == "single":
        return torch.arange(keys) == torch.randint(keys, (*shape[:-1], 1), generator=generator)
    if kind == "blocks":
        size = 16 if keys < 256 else 128
        cut = *shape[:2], -(-shape[2] // size), -(-keys // size)
        chosen = torch.rand(cut, generator=generator) < 0.5
        allowed = chosen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(size, -2)[..., : shape[2], :]
        return allowed | _rescue(allowed, scores, causal, generator)
    share = 2.0 if kind == "all" else 0.75 if kind in OF_NUMBERS else 0.5
    allowed = torch.rand(shape, generator=generator) < share
    allowed |= _rescue(allowed, scores, None if kind in EMPTY else causal, generator)
    if kind in EMPTY:
        every = torch.rand((), generator=generator) < 0.125
        emptied = (torch.rand((*shape[:-1], 1), generator=generator) < 0.3) | every
        emptied.view(-1)[torch.randint(emptied.numel(), (1,), generator=generator)] = True
        allowed &= ~emptied
    if kind == "far_bias":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(~allowed, -1e9)
    if kind in OF_NUMBERS:
        numbers = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return numbers.masked_fill(~allowed, float("-inf"))
    return allowed


def _rescue(
    allowed: Tensor, scores: tuple[int, int, int, int], causal: Alignment | None, generator: torch.Generator
) -> Tensor:
    """Return which keys to allow besides, so that every row has one: the first key if causal, else any."""
    keys = allowed.shape[-1]
    if causal is None or keys == 1:
        spare = torch.randint(keys, (*allowed.shape[:-1], 1), generator=generator)
        empty = ~allowed.any(-1, keepdim=True)
    else:
        spare = torch.zeros((*allowed.shape[:-1], 1), dtype=torch.long)
        empty = ~(allowed & causal_mask(scores[2], scores[3], causal)).any(-1, keepdim=True)
        if allowed.shape[2] == 1:
            empty = empty.any(2, keepdim=True)
    return empty & (torch.arange(keys) == spare)
