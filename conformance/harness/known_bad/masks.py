"""How masks go wrong: what is masked, the causal flag, and rows without a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, Step, defect
from mha.conformance.harness.textbook import TextbookAttention
from mha.implementations.formula import with_mask
from mha.spec import Options, causal_mask

Allowed = tuple[Tensor, Tensor]
# What a causal mask lets a query see, boolean (L, S), of L and S.
Visible = Callable[[TextbookAttention, int, int], Tensor]
# What defects that are hard to tell from each other have in common.
UNCALLED = "later keys are masked without a causal flag"
_UNCALLED = {
    0: UNCALLED,
    1: f"{UNCALLED}, from the next but one on",
    -1: f"{UNCALLED}, and so is the key at the query's own position",
}


def _with_mask(change: Callable[[Tensor], Tensor | None]) -> Step:
    """Return `allow` with another mask, from one of (B, H, L, S)."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        changed = with_mask(options, lambda mask: change(mask.expand(scores.shape)))
        return TextbookAttention.allow(self, changed, scores)

    return allow


def _with_causal(visible: Visible) -> Step:
    """Return `allow` with another causal mask (L, S)."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, options.change(is_causal=False), scores)
        if options.is_causal:
            allowed = allowed & visible(self, scores.shape[2], scores.shape[3])
        return allowed, bias

    return allow


def _always(key: int) -> Step:
    """Return `allow` where no mask can exclude a key."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, options, scores)
        if options.mask is not None:
            allowed = allowed | (torch.arange(scores.shape[3]) == key % scores.shape[3])
        return allowed, bias

    return allow


def _joined_by_or(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
    allowed, bias = TextbookAttention.allow(self, options.change(is_causal=False), scores)
    causal, _ = TextbookAttention.allow(self, options.change(mask=None), scores)
    if options.mask is not None and options.is_causal:
        return allowed | causal, bias
    return allowed & causal, bias


def _added(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
    return TextbookAttention.allow(self, with_mask(options, lambda mask: mask.to(scores)), scores)


def _float(change: Callable[[TextbookAttention, Tensor], Tensor]) -> Step:
    """Return `allow` with another float mask."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        changed = with_mask(
            options, lambda mask: mask if mask.dtype == torch.bool else change(self, mask)
        )
        return TextbookAttention.allow(self, changed, scores)

    return allow


def masks() -> Iterator[Defect]:
    """Yield masks that are ignored, read in another way, or taken from elsewhere."""
    yield defect("unmasked", "the mask is ignored", allow=_with_mask(lambda mask: None))
    yield defect(
        "upside_down",
        "the mask is read the other way round: what it allows is masked",
        allow=_with_mask(_not),
    )
    for axis, name in enumerate(("item", "head", "query")):
        text = f"the mask of the first {name} counts for all"
        yield defect(f"first_{name}", text, allow=_with_mask(partial(_first_along, axis)))
    yield defect(
        "transposed",
        "the mask is applied to the queries instead of the keys",
        allow=_with_mask(_transposed),
    )
    yield defect("crossed", "the mask has items and heads exchanged", allow=_with_mask(_exchanged))
    yield defect("last_key", "the last key cannot be masked", allow=_always(-1))
    yield defect("first_key", "the first key cannot be masked", allow=_always(0))
    yield defect(
        "or", "mask and causal flag are joined by `or` instead of `and`", allow=_joined_by_or
    )
    text = "the boolean mask is added to the scores, as 1 where it is true"
    yield defect("added", text, allow=_added)
    text = "the float mask is read as a boolean one"
    yield defect("as_boolean", text, allow=_float(lambda self, mask: mask.bool()))
    text = "only the infinite entries of the float mask count"
    yield defect(
        "finite", text, allow=_float(lambda self, mask: mask.masked_fill(mask != -math.inf, 0.0))
    )
    text = "the float mask is added before the scores are scaled"
    yield defect("mask_scaled", text, allow=_float(lambda self, mask: mask * self.scale()))
    text = "the float mask is subtracted"
    yield defect(
        "subtracted",
        text,
        allow=_float(lambda self, mask: torch.where(mask == -math.inf, mask, -mask)),
    )


def layouts() -> Iterator[Defect]:
    """Yield masks that are repeated in another order, counted, or inverted together; some look like
    a simpler one.
    """
    text = "the mask is laid out (heads, items), but read as (items, heads)"
    yield defect("heads_first", text, allow=_with_mask(_read_as_items_first))
    text = "the mask is laid out (items, heads), but read as (heads, items)"
    yield defect("items_first", text, allow=_with_mask(_read_as_heads_first))
    text = "a mask for all heads is indexed by the head, as if there were one for each"
    yield defect("by_head", text, allow=_indexed_by_head)
    text = (
        "the mask is read as a length: its True entries are counted, and as many of the first keys"
        " seen"
    )
    yield defect("as_count", text, allow=_with_mask(_up_to_count))
    text = "the mask is read as a length: all keys after the first masked one are masked"
    yield defect("as_length", text, allow=_with_mask(_up_to_masked))
    text = (
        "the masks are read the other way round: what mask and causal flag allow together is masked"
    )
    yield defect("both_upside_down", text, allow=_inverted(_shifted(0)))
    yield defect("both_upside_down_other", text, allow=_inverted(_other_alignment))


def _first_along(axis: int, mask: Tensor) -> Tensor:
    return mask.narrow(axis, 0, 1).expand(mask.shape)


def _transposed(mask: Tensor) -> Tensor:
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("only a square mask can be transposed")
    return mask.mT


def _exchanged(mask: Tensor) -> Tensor:
    if mask.shape[0] != mask.shape[1]:
        raise ValueError("as many items as heads are needed")
    return mask.transpose(0, 1)


def _read_as_items_first(mask: Tensor) -> Tensor:
    return mask.transpose(0, 1).reshape(mask.shape)


def _read_as_heads_first(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[1], mask.shape[0], *mask.shape[2:]).transpose(0, 1)


def _indexed_by_head(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
    """Read a mask (B or 1, 1, L or 1, S) at item + head; beyond its end, everything is allowed."""
    mask = options.mask
    if mask is not None and mask.ndim == 4 and mask.shape[1] == 1:
        items, heads = scores.shape[:2]
        beyond = torch.full((heads, *mask.shape[2:]), mask.dtype == torch.bool).to(mask)
        flat = torch.cat([mask[:, 0], beyond])
        first = torch.zeros(items, dtype=torch.long)
        if len(mask) == items:
            first = torch.arange(items)
        options = options.change(mask=flat[first[:, None] + torch.arange(heads)])
    return TextbookAttention.allow(self, options, scores)


def _up_to_count(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True)


def _up_to_masked(mask: Tensor) -> Tensor:
    return mask.cumprod(-1).bool() if mask.dtype == torch.bool else mask


def _inverted(causal: Visible) -> Step:
    """Return `allow` of what the masks, with this causal one, do not allow."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = _with_causal(causal)(self, options, scores)
        has_mask = options.mask is not None and options.mask.dtype == torch.bool
        if options.is_causal or has_mask:
            allowed = ~allowed
        return allowed, bias

    return allow


def _not(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask


def causal() -> Iterator[Defect]:
    """Yield causal masks that are ignored or lie elsewhere."""
    yield defect(
        "not_causal",
        "the causal flag is ignored",
        allow=_with_causal(lambda self, L, S: torch.ones(L, S).bool()),
    )
    text = "the causal flag is ignored where there is one query, as in decoding"
    yield defect("not_causal_alone", text, allow=_with_causal(_of_several_queries))
    shifts = {
        1: "a query sees one key too many",
        -1: "a query does not see the key at its own position",
    }
    for offset, text in shifts.items():
        yield defect(
            f"causal_{offset}",
            f"the causal mask is off by one: {text}",
            allow=_with_causal(_shifted(offset)),
        )
    text = "the causal mask is aligned at the other end"
    yield defect("alignment", text, allow=_with_causal(_other_alignment))
    for aligned, other_end in (("", False), ("_other", True)):
        before, upto = (_shifted(offset, other_end=other_end) for offset in (-1, 0))
        text = "the causal mask is turned round: a query sees the keys after it"
        yield defect(f"anticausal{aligned}", text, allow=_with_causal(_reversed(before)))
        text = "the causal mask is inverted: a query sees only the keys after it"
        yield defect(f"causal_inverted{aligned}", text, allow=_with_causal(_reversed(upto)))
    for offset in (0, 1, -1):
        yield defect(
            f"uncalled_{offset}", _UNCALLED[offset], UNCALLED, allow=_uncalled(_shifted(offset))
        )
    yield defect("uncalled_other", UNCALLED, UNCALLED, allow=_uncalled(_other_alignment))


def _uncalled(visible: Visible) -> Step:
    """Return `allow` with a causal mask (L, S) where none is asked for."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, options, scores)
        if not options.is_causal:
            allowed = allowed & visible(self, scores.shape[2], scores.shape[3])
        return allowed, bias

    return allow


def _shifted(offset: int, *, other_end: bool = False) -> Visible:
    def visible(self: TextbookAttention, queries: int, keys: int) -> Tensor:
        from_the_end = (self.claims.causal == "bottom_right") != other_end
        base = keys - queries if from_the_end else 0
        return torch.ones(queries, keys).tril(base + offset).bool()

    return visible


def _of_several_queries(self: TextbookAttention, queries: int, keys: int) -> Tensor:
    if queries == 1:
        return torch.ones(queries, keys).bool()
    return _shifted(0)(self, queries, keys)


def _reversed(visible: Visible) -> Visible:
    return lambda self, queries, keys: ~visible(self, queries, keys)


def _other_alignment(self: TextbookAttention, queries: int, keys: int) -> Tensor:
    if self.claims.causal == "top_left":
        return causal_mask(queries, keys, "bottom_right")
    return causal_mask(queries, keys, "top_left")


def empty_rows() -> Iterator[Defect]:
    """Yield what a row without a key may give."""
    for policy, text in (
        ("uniform", "attends to all keys equally, as with a finite fill"),
        ("nan", "is NaN, as with a fill of -infinity"),
        ("zeros", "gets zeros"),
    ):
        text = f"a query without an allowed key {text}"
        yield defect(f"empty_{policy}", text, weigh=_empty_as(policy))
    text = "a query without an allowed key attends as if nothing were masked"
    yield defect("empty_unmasked", text, weigh=_empty_as("unmasked"))


def _empty_as(policy: str) -> Step:
    def weigh(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        weights = (scores + bias).masked_fill(~(allowed | empty), -math.inf).softmax(-1)
        if policy == "unmasked":
            return weights
        fills = {"uniform": 1 / scores.shape[-1], "nan": math.nan, "zeros": 0.0}
        return weights.masked_fill(empty, fills[policy])

    return weigh
