"""Kinds of mask, each named for the axes along which it differs, or for what is special in it."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.spec import causal_mask
from mha.spec.claims import Alignment

# The axes of (B, H, L, S) along which a mask of a kind differs. It is broadcast over the others,
# but not over the keys: MSK-5 does not ask for that.
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
FLOAT = ("bias", "key_bias", "query_bias", "far_bias", "head_bias", "full_bias")
# Masks with rows that have no allowed key.
EMPTY = ("empty_rows", "empty_item", "empty_or_full", "empty_bias", "empty_key_bias", "empty_heads")
# One for each way of broadcasting, for clauses about something else; COMMON adds no mask, and a
# float one.
FEW = ("padding", "queries", "full")
COMMON = ("none", *FEW, "bias")
# No mask, and all but those of EMPTY.
NO_EMPTY_ROWS = ("none", *BOOLEAN, *FLOAT)
OF_NUMBERS = (*FLOAT, "empty_bias", "empty_key_bias")
# Kinds that may stand in for one another where masks may not differ along every axis.
GROUPS = (("all",), (*BOOLEAN, "blocks"), FLOAT, ("single",), EMPTY[:3] + EMPTY[5:], EMPTY[3:5])

Shape = tuple[int, int, int, int]


def make_mask(  # noqa: PLR0911  one for each way to make a mask
    kind: str,
    scores: Shape,
    causal: Alignment | None,
    generator: torch.Generator,
    axes: str = "BHLS",
) -> Tensor | None:
    """Return a mask of a kind, or None for "none".

    scores: (B, H, L, S).
    causal: the alignment of the causal mask that the call adds, if it does.
    axes: the mask does not differ along any other axis, whatever its kind; without S, a row allows
        as many of the first keys as the kind would allow of all.

    "all": everything is allowed.
    "padding": the first keys of an item, or, unless causal, sometimes the last.
    "blocks": half of the tiles of queries by keys, 16 wide, or 128 in long rows.
    "single": one key for each query, which the causal mask allows too.
    "far_bias": 0 or -1e9, which is still a finite number.
    other kinds with "bias": normal numbers, and -infinity for a quarter of the pairs.
    all others: each pair of a query and a key is allowed with probability 1/2. Kinds of `EMPTY`
        leave at least one row of the mask without a key, and sometimes all. The others leave every
        row one, after the causal mask too.
    """
    if kind == "none":
        return None
    if "S" not in axes:
        mask = make_mask(kind, scores, causal, generator, f"{axes}S")
        return None if mask is None else mask.sort(-1, descending=True).values
    sizes = dict(zip("BHLS", scores, strict=True))
    for axis in sizes:
        if axis not in EXTENTS[kind] or axis not in axes:
            sizes[axis] = 1
    shape = sizes["B"], sizes["H"], sizes["L"], sizes["S"]
    if kind == "padding":
        return _padding(shape, causal, generator)
    if kind == "single":
        return torch.arange(sizes["S"]) == _allowed_key(shape, scores, causal, generator)
    if kind == "blocks":
        allowed = _blocks(shape, generator)
        return allowed | _rescue(allowed, scores, causal, generator)
    allowed = _drawn(kind, shape, scores, causal, generator)
    # MSK-5 does not ask for a mask that is broadcast over the keys.
    allowed = allowed.expand(*shape[:3], scores[3]).contiguous()
    if kind == "far_bias":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(~allowed, -1e9)
    if kind in OF_NUMBERS:
        numbers = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return numbers.masked_fill(~allowed, float("-inf"))
    return allowed


def _padding(shape: Shape, causal: Alignment | None, generator: torch.Generator) -> Tensor:
    batch, keys = shape[0], shape[-1]
    lengths = torch.randint(1, keys + 1, (*shape[:-1], 1), generator=generator)
    if batch > 1:  # a batch is as long as its longest item
        lengths[torch.randint(batch, (1,), generator=generator)] = keys
    allowed = torch.arange(keys) < lengths
    left = torch.randint(2, lengths.shape, generator=generator) == 1
    return torch.where(left, allowed.flip(-1), allowed) if causal is None else allowed


def _allowed_key(
    shape: Shape, scores: Shape, causal: Alignment | None, generator: torch.Generator
) -> Tensor:
    """Return one key for each row of a mask, at random, among those that the causal mask allows."""
    drawn = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    if causal is None:
        return drawn
    visible = causal_mask(scores[2], scores[3], causal).sum(-1, keepdim=True).clamp(min=1)
    return drawn % (visible if shape[2] > 1 else visible.amin())


def _blocks(shape: Shape, generator: torch.Generator) -> Tensor:
    batch, heads, queries, keys = shape
    size = 16 if keys < 256 else 128
    counts = -(-queries // size), -(-keys // size)
    tiles = torch.rand((batch, heads, *counts), generator=generator) < 0.5
    of_keys = tiles.repeat_interleave(size, -1)[..., :keys]
    return of_keys.repeat_interleave(size, -2)[..., :queries, :]


def _drawn(
    kind: str, shape: Shape, scores: Shape, causal: Alignment | None, generator: torch.Generator
) -> Tensor:
    """Return which pairs of a mask are allowed, each drawn on its own.

    Rows are emptied for kinds of `EMPTY`.
    """
    probability = 0.5
    if kind == "all":
        probability = 1.0
    elif kind in OF_NUMBERS:
        probability = 0.75
    allowed = torch.rand(shape, generator=generator) < probability
    # A row that the causal mask leaves without a key is one more empty row.
    allowed |= _rescue(allowed, scores, None if kind in EMPTY else causal, generator)
    if kind in EMPTY:
        every = torch.rand((), generator=generator) < 0.125
        emptied = (torch.rand((*shape[:-1], 1), generator=generator) < 0.3) | every
        emptied.view(-1)[torch.randint(emptied.numel(), (1,), generator=generator)] = True
        allowed &= ~emptied
    return allowed


def _rescue(
    allowed: Tensor, scores: Shape, causal: Alignment | None, generator: torch.Generator
) -> Tensor:
    """Return which pairs to allow as well, so that every row has a key.

    It is the first key if causal, else a random one.
    """
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
