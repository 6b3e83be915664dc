"""How lengths of items go wrong: they have no effect, are others, or places count elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, defect
from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Options

Pair = tuple[Tensor, Tensor]


def _other_lengths(name: str, text: str, change: Callable[[Options], Options]) -> Defect:
    """Return a defect of calls with lengths, which are others."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
        if options.key_lengths is not None:
            options = change(options)
        return TextbookAttention.allow(self, options, scores)

    return defect(name, text, allow=allow)


def without_lengths(options: Options) -> Options:
    """Return options without lengths."""
    return options.change(key_lengths=None, query_lengths=None)


def _from_the_padded(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    """Count places from the lengths with padding, and hide that."""
    allowed, bias = TextbookAttention.allow(self, without_lengths(options), scores)
    return allowed & present_pairs(options, scores), bias


def present_pairs(options: Options, scores: Tensor) -> Tensor:
    """Return which pairs of queries and keys are of an item, boolean (B, 1, L, S)."""
    batch, _, queries, keys = scores.shape
    present = torch.zeros(batch, 1, queries, keys, dtype=torch.bool, device=scores.device)
    lengths = options.lengths_of(batch, queries, keys) or [(queries, keys)] * batch
    for item, (own_queries, own_keys) in enumerate(lengths):
        present[item, :, :own_queries, :own_keys] = True
    return present


LENGTHS_IGNORED = _other_lengths("lengths_ignored", "the lengths have no effect", without_lengths)


def lengths() -> Iterator[Defect]:
    """Yield other lengths of items than a call gives."""
    text = "the first key after an item's own is seen"
    yield defect("one_key_more", text, allow=_one_key_more)
    text = "places count from the lengths with padding, and not from each item's own"
    yield defect("from_the_padded", text, allow=_from_the_padded)
    text = "places count from the numbers of all tokens, and not from each item's own"
    yield defect("from_all_tokens", text, allow=_from_all_tokens)
    text = "as many keys are read for each sequence as the longest one has"
    yield defect("longest_for_all", text, take=_with_next_keys, allow=_as_many_as_the_longest)
    text = "the lengths of the first item are those of every item"
    yield _other_lengths("lengths_of_first_item", text, _of_first_item)


def _one_key_more(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    if options.key_lengths is not None:
        longer = tuple(min(own + 1, scores.shape[3]) for own in options.key_lengths)
        options = options.change(key_lengths=longer)
    return TextbookAttention.allow(self, options, scores)


def _from_all_tokens(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    """Align the causal mask by the sums of all lengths."""
    batch, _, queries, keys = scores.shape
    lengths = options.lengths_of(batch, queries, keys) or [(queries, keys)] * batch
    is_aligned = options.is_causal and self.alignment == "bottom_right"
    if self.claims.packed is None or not is_aligned:
        return TextbookAttention.allow(self, options, scores)
    allowed, bias = TextbookAttention.allow(self, options.change(is_causal=False), scores)
    of_queries, of_keys = map(sum, zip(*lengths, strict=True))
    offset = of_keys - of_queries
    places = torch.arange(queries, device=scores.device).unsqueeze(1) + offset
    return allowed & (torch.arange(keys, device=scores.device) <= places), bias


def _of_first_item(options: Options) -> Options:
    changed = options
    for name in ("key_lengths", "query_lengths"):
        given = getattr(options, name)
        if given is not None:
            changed = changed.change(**{name: given[:1] * len(given)})
    return changed


def _with_next_keys(self: TextbookAttention, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """Let the keys of the next sequences follow those of each, as they do in a row of tokens."""
    lengths = self.options.key_lengths
    if lengths is None or self.claims.packed is None:
        return query, key, value
    starts = [0, *accumulate(lengths)]
    changed = []
    for x in (key, value):
        row = torch.cat([x[item, :length] for item, length in enumerate(lengths)])
        row = F.pad(row, (0, 0, 0, x.shape[1]))
        changed.append(torch.stack([row[start : start + x.shape[1]] for start in starts[:-1]]))
    return query, changed[0], changed[1]


def _as_many_as_the_longest(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    """Let each sequence see as many keys as the longest one has, up to the last token."""
    lengths = options.key_lengths
    if lengths is not None and self.claims.packed is not None:
        left = (sum(lengths[item:]) for item in range(len(lengths)))
        longer = tuple(min(max(lengths), rest) for rest in left)
        options = options.change(key_lengths=longer)
    return TextbookAttention.allow(self, options, scores)
