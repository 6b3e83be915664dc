"""What wrong kernels do, each in words and as a change of some rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call
from mha.conformance.embedded.solving import Rows, rows_of
from mha.spec.claims import Alignment
from mha.spec.scores import Bounds

# Keys that a kernel's last tile may lose.
LAST_KEYS = (1, 8, 16, 32, 64, 128)

# The rows as they are with a defect; None where it changes nothing of their kind.
Change = Callable[[Rows], Rows | None]
Defect = tuple[str, Change]


def defects(call: Call) -> Iterator[Defect]:
    """Yield the defects that a call may show, the simplest first."""
    yield from _of_keys()
    yield from _of_windows(call)
    yield from _of_masks(call)
    yield from _of_scales(call)
    yield from _of_options(call)
    yield from _of_heads(call)


def _of_keys() -> Iterator[Defect]:
    """Yield defects that lose keys."""
    for number, which in enumerate(("first", "second")):
        text = f"only every second key was read, from the {which} on"
        yield text, partial(_every_second, start=number)
    yield "the last key was left out", partial(_first_keys, lost=1)
    for count in LAST_KEYS[1:]:
        yield f"the last {count} keys were left out", partial(_first_keys, lost=count)
    yield "the first key was left out", lambda rows: _only(rows, rows.keys > 0)
    text = "only the first half of the keys was read"
    yield text, lambda rows: _only(rows, rows.keys < len(rows.k) / 2)


def _every_second(rows: Rows, start: int) -> Rows:
    return _only(rows, rows.keys % 2 == start)


def _first_keys(rows: Rows, lost: int) -> Rows:
    return _only(rows, rows.keys < len(rows.k) - lost)


def _only(rows: Rows, keys: Tensor) -> Rows:
    """Return the rows with only some of the keys, unless a row would have none."""
    allowed = rows.allowed & keys
    none = ~allowed.any(-1, keepdim=True)
    return replace(rows, allowed=allowed | (rows.allowed & none))


def _masked_as(rows: Rows, changed: Call) -> Rows:
    """Return the rows with the masks of another call."""
    other = rows_of(changed, rows.item, rows.head, rows.places.tolist())
    return replace(rows, allowed=other.allowed, bias=other.bias)


def _with_options(call: Call, **fields: Any) -> Change:
    """Return the change to the masks of a call with other options."""
    return partial(_masked_as, changed=replace(call, options=call.options.change(**fields)))


def _of_windows(call: Call) -> Iterator[Defect]:
    """Yield windows that are one key too large or too small, or turned round, or none."""
    if call.options.window is None:
        return
    left, right = call.options.window
    yield "the window was not applied", _with_options(call, window=None)
    for number, word in ((1, "many"), (-1, "few")):
        if left is not None:
            text = f"the window has one key too {word} before the query's own"
            yield text, _with_options(call, window=(left + number, right))
        if right is not None:
            text = f"the window has one key too {word} after the query's own"
            yield text, _with_options(call, window=(left, right + number))
    yield "the window has its sides exchanged", _with_options(call, window=(right, left))


def _of_masks(call: Call) -> Iterator[Defect]:
    """Yield other causal masks and masks than the call asks for."""
    options = call.options
    if options.chunk is not None:
        yield "the chunks were not applied", _with_options(call, chunk=None)
    if options.is_causal:
        yield "the causal mask was not applied", _with_options(call, is_causal=False)
        for number, text in ((-1, "hides the query's own key"), (1, "shows one key too many")):
            window = _ending(options.window, number)
            changed = _with_options(call, is_causal=False, window=window)
            yield f"the causal mask {text}", changed
    else:
        text = "the causal mask was applied, though none was asked for"
        yield text, _with_options(call, is_causal=True)
    yield from _of_alignment(call)
    if options.mask is not None:
        yield "the mask was not applied", _with_options(call, mask=None)
        if options.mask.dtype == torch.bool:
            yield "the mask was read the other way round", _with_options(call, mask=~options.mask)


def _ending(window: Bounds | None, right: int) -> Bounds:
    """Return a window that ends so many keys after the query's own."""
    left = None if window is None else window[0]
    return left, right


def _of_alignment(call: Call) -> Iterator[Defect]:
    """Yield the other alignment of causal mask, window and slopes."""
    options, claims = call.options, call.claims
    is_placed = options.is_causal or options.window or options.chunk or options.alibi
    if not is_placed or call.query.shape[2] == call.key.shape[2]:
        return
    other: Alignment = "top_left"
    if claims.alignment != "bottom_right":
        other = "bottom_right"
    scores = replace(claims.scores, alignment=other)
    changed = replace(call, claims=replace(claims, causal=other, scores=scores))
    own = claims.alignment or "top_left"
    text = f"causal mask and window are aligned {other} instead of {own}"
    yield text, partial(_masked_as, changed=changed)


def _of_scales(call: Call) -> Iterator[Defect]:
    """Yield other scales, and scores of a part of the head's width."""
    width = call.query.shape[-1]
    if call.options.scale is not None:
        usual = call.claims.scale_for(width)
        yield "the scale of the call has no effect", partial(_scaled, scale=usual)
    others = {"1": 1.0, "1/d_k": 1 / width, "1/sqrt(H d_k)": (width * call.query.shape[1]) ** -0.5}
    for name, scale in others.items():
        yield f"the scores are scaled by {name}", partial(_scaled, scale=scale)
    lost = {width - width // 2, width - 3 * width // 4, 64, 16, 8, 1}
    for count in sorted(lost):
        if count >= width:
            continue
        for side in ("last", "first"):
            text = f"the scores leave out the {side} {count} of {width} columns of the head"
            yield text, partial(_narrowed, lost=count, side=side)


def _scaled(rows: Rows, scale: float) -> Rows:
    return replace(rows, scale=scale)


def _narrowed(rows: Rows, lost: int, side: str) -> Rows:
    """Return the rows without some columns of queries and keys."""
    kept = slice(lost, None)
    if side == "last":
        kept = slice(None, -lost)
    return replace(rows, q=rows.q[:, kept], k=rows.k[:, kept])


def _of_options(call: Call) -> Iterator[Defect]:
    """Yield defects of softcaps, sinks and slopes."""
    options = call.options
    if options.softcap:
        yield "the softcap has no effect", lambda rows: replace(rows, cap=None)
        text = "the softcap is on the other side of what is added to the scores"
        yield text, lambda rows: replace(rows, cap_after_bias=not rows.cap_after_bias)
    if options.sinks is not None:
        sinks = options.sinks
        yield "the sink has no effect", lambda rows: replace(rows, sink=None)
        text = "the sink of the first head is that of every head"
        yield text, lambda rows: replace(rows, sink=float(sinks[0]))
        text = "the sink is multiplied by the scale"
        yield text, lambda rows: replace(rows, sink=rows.scale * float(sinks[rows.head]))
    if options.alibi is not None:
        text = "the slopes of ALiBi have no effect"
        yield text, _with_options(call, alibi=None)
        negated = (-torch.tensor(options.alibi)).tolist()
        yield "the bias of ALiBi has the opposite sign", _with_options(call, alibi=negated)


def _of_heads(call: Call) -> Iterator[Defect]:
    """Yield results of other heads and items."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    if heads > 1:
        for step, word in ((1, "next"), (-1, "previous")):
            text = f"the output is that of the {word} head"
            yield text, partial(_elsewhere, heads=step)
    if kv_heads > 1:
        text = "query head h reads the key head h mod H_kv"
        yield text, lambda rows: _with_keys(rows, rows.head % kv_heads)
        yield "every head reads the first key head", lambda rows: _with_keys(rows, 0)
    if batch > 1:
        text = "the output is that of the first item"
        yield text, lambda rows: _elsewhere(rows, items=-rows.item)
        yield "the output is that of the next item", partial(_elsewhere, items=1)


def _elsewhere(rows: Rows, items: int = 0, heads: int = 0) -> Rows | None:
    """Return the same rows so many items or heads on; None where it is their own."""
    batch, n_heads = rows.call.query.shape[:2]
    item, head = (rows.item + items) % batch, (rows.head + heads) % n_heads
    if (item, head) == (rows.item, rows.head):
        return None
    return rows_of(rows.call, item, head, rows.places.tolist())


def _with_keys(rows: Rows, of_keys: int) -> Rows | None:
    """Return the rows with keys and values of another head; None where they are their own."""
    if rows.head // rows.call.group == of_keys:
        return None
    call, item = rows.call, rows.item
    return replace(rows, k=call.key[item, of_keys].double(), v=call.value[item, of_keys].double())


def defects_of_lse() -> Iterator[tuple[str, Callable[[Rows], Tensor]]]:
    """Yield defects of a log-sum-exp in words, and what it is then, (r, 1)."""
    two = math.log(2)
    yield "the log-sum-exp is to the base 2, not e", lambda rows: rows.lse() / two
    yield "the log-sum-exp is to the base e, not 2", lambda rows: rows.lse() * two
    yield "the log-sum-exp has the opposite sign", lambda rows: -rows.lse()
    text = "the log-sum-exp lacks the sink"
    yield text, lambda rows: replace(rows, sink=None).lse()
    text = "the log-sum-exp has the sink, which it should not have"
    yield text, lambda rows: replace(rows, sink_in_lse=True).lse()
    text = "the log-sum-exp is of scores without the scale"
    yield text, lambda rows: replace(rows, scale=1.0).lse()
    yield "the log-sum-exp is the largest score", _largest_score
    text = "the log-sum-exp lacks the largest score, which was subtracted"
    yield text, lambda rows: rows.lse() - _largest_score(rows)


def _largest_score(rows: Rows) -> Tensor:
    return rows.scores().amax(-1, keepdim=True) / rows.log_base
