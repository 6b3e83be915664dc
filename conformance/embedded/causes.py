"""The known defect that a wrong output is the result of: a few of its rows, solved wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call

# At most so many heads, and rows of each, are looked at.
MOST_HEADS, MOST_ROWS_OF_HEAD = 4, 12
# A defect explains what it leaves less of than this share of the error.
EXPLAINS = 0.25
# Keys that a kernel's last tile may lose.
LAST_KEYS = (1, 8, 16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of one head, in float64, and what the call says of them.

    call, item, head, places: whose rows they are.
    q, k, v: (r, d_k), (S, d_k), (S, d_v).
    allowed, bias: (r, S).
    capped: whether the cap applies; it does before the bias, unless the claims say after.
    """

    call: Call
    item: int
    head: int
    places: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    allowed: Tensor
    bias: Tensor
    cap: float | None
    cap_after_bias: bool
    sink: float | None
    sink_in_lse: bool
    log_base: float

    def scores(self) -> Tensor:
        """Return the scores (r, S), -infinity where a row may not attend."""
        s, cap = self.scale * self.q @ self.k.mT, self.cap
        if cap and not self.cap_after_bias:
            s = cap * (s / cap).tanh()
        s = s + self.bias
        if cap and self.cap_after_bias:
            s = cap * (s / cap).tanh()
        return s.masked_fill(~self.allowed, -math.inf)

    def weights(self) -> Tensor:
        """Return the weights (r, S); those of a row without a key are 0."""
        s = self.scores()
        total = self._total(s, self.sink)
        return (s - total.masked_fill(total.isinf(), 0.0)).exp()

    def context(self) -> Tensor:
        """Return the contexts (r, d_v)."""
        return self.weights() @ self.v

    def lse(self) -> Tensor:
        """Return the log-sum-exp of the rows, (r, 1)."""
        sink = self.sink if self.sink_in_lse else None
        return self._total(self.scores(), sink) / self.log_base

    def _total(self, s: Tensor, sink: float | None) -> Tensor:
        total = s.logsumexp(-1, keepdim=True)
        if sink is None:
            return total
        return torch.logaddexp(total, torch.full_like(total, sink))

    @property
    def distances(self) -> Tensor:
        """How far each key is behind the place of the query, (r, S)."""
        return self.call.distances(self.places)

    @property
    def keys(self) -> Tensor:
        """The places of the keys."""
        return torch.arange(len(self.k), device=self.k.device)


# A defect in words, and the rows as they are with it.
Defect = tuple[str, Callable[[Rows], Rows | None]]
Results = Callable[[Rows], Tensor]


def cause_of(call: Call, results: Mapping[str, Tensor], places: Sequence[tuple[int, ...]]) -> str:
    """Return the known defect that explains these wrong rows, in words, or "".

    results: the context (B, H, L, d_v) and perhaps the log-sum-exp (B, H, L).
    places: (item, head, row) of wrong rows; without any, the first rows are looked at.
    """
    some = _some_rows(call, places)
    if not some:
        return ""
    of_context = [(rows, _taken(results["context"], rows)) for rows in some]
    found = _best(of_context, _wrong_contexts(of_context))
    if found or "lse" not in results:
        return found
    of_lse = [(rows, _taken(results["lse"], rows).unsqueeze(-1)) for rows in some]
    return _best(of_lse, _wrong_lse(), Rows.lse)


def _some_rows(call: Call, places: Sequence[tuple[int, ...]]) -> list[Rows]:
    """Return the rows to look at, by head."""
    by_head: dict[tuple[int, int], list[int]] = {}
    if not places and call.query.numel():
        places = [(0, 0, row) for row in range(min(call.query.shape[2], MOST_ROWS_OF_HEAD))]
    for item, head, row in places:
        rows = by_head.setdefault((item, head), [])
        if row not in rows and len(rows) < MOST_ROWS_OF_HEAD:
            rows.append(row)
    heads = list(by_head)[:MOST_HEADS]
    return [rows_of(call, item, head, by_head[item, head]) for item, head in heads]


def rows_of(call: Call, item: int, head: int, places: Sequence[int]) -> Rows:
    """Return the rows of one head at these places."""
    of_keys, in_group = divmod(head, call.group)
    rows = torch.tensor(places, device=call.query.device)
    part = (
        slice(item, item + 1),
        slice(of_keys, of_keys + 1),
        slice(in_group, in_group + 1),
        rows,
    )
    allowed = call.allowed(*part)[0, 0, 0]
    bias = call.bias(*part)
    sinks = call.options.sinks
    declared = call.claims.lse
    return Rows(
        call=call,
        item=item,
        head=head,
        places=rows,
        q=call.query[item, head, rows].double(),
        k=call.key[item, of_keys].double(),
        v=call.value[item, of_keys].double(),
        scale=call.scale,
        allowed=allowed,
        bias=torch.zeros_like(allowed, dtype=torch.float64) if bias is None else bias[0, 0, 0],
        cap=call.options.softcap or None,
        cap_after_bias=call.claims.scores.softcap == "after_bias",
        sink=None if sinks is None else float(sinks[head]),
        sink_in_lse=declared is None or declared.sink,
        log_base=1.0 if declared is None else declared.log_base,
    )


def _taken(result: Tensor, rows: Rows) -> Tensor:
    """Return a result for these rows, in float64."""
    return result[rows.item, rows.head, rows.places].double()


def _best(
    given: Sequence[tuple[Rows, Tensor]],
    wrong: Iterator[tuple[str, Results]],
    right: Results = Rows.context,
) -> str:
    """Return the words for the defect that leaves least of the errors, if that is little."""
    errors = [_distance(got, right(rows)) for rows, got in given]
    whole = sum(errors)
    if not whole or not math.isfinite(whole):
        return ""
    best, words = EXPLAINS**2 * whole, ""
    for text, result in wrong:
        left = 0.0
        for rows, got in given:
            left += _distance(got, result(rows))
        if left < best:
            best, words = left, text
    return words


def _distance(got: Tensor, other: Tensor) -> float:
    """Return the square of the distance of two results; infinities that are the same count 0."""
    difference = (got - other).masked_fill(got == other, 0.0)
    return float(difference.square().nan_to_num(nan=math.inf).sum())


def _wrong_contexts(given: Sequence[tuple[Rows, Tensor]]) -> Iterator[tuple[str, Results]]:
    """Yield defects in words, and their contexts."""
    yield "the output is zeros", lambda rows: torch.zeros_like(rows.context())
    yield "the output is the mean of the values", _mean
    for text, change in _defects(given[0][0].call):
        yield text, _context_with(change)
    factor = _factor(given)
    text = f"the output is {factor:.4g} times what it should be"
    yield text, lambda rows: factor * rows.context()
    scale = _scale_factor(given)
    if scale is not None:
        text = f"the scores are {scale:.4g} times what they should be"
        yield text, lambda rows: replace(rows, scale=scale * rows.scale).context()
    if _are_exchanged(given):
        exchanged = {id(rows): got for rows, got in given}
        text = "the numbers of each row are right, but in another order"
        yield text, lambda rows: exchanged[id(rows)]


def _mean(rows: Rows) -> Tensor:
    return rows.v.mean(0).expand(len(rows.q), -1)


def _context_with(change: Callable[[Rows], Rows | None]) -> Results:
    """Return what gives the contexts with a defect; NaN where the call has nothing of the kind."""

    def result(rows: Rows) -> Tensor:
        changed = change(rows)
        if changed is None:
            return torch.full_like(rows.context(), math.nan)
        return changed.context()

    return result


def _defects(call: Call) -> Iterator[Defect]:
    """Yield the defects that a call may show."""
    yield from _of_keys()
    yield from _of_masks(call)
    yield from _of_scales(call)
    yield from _of_options(call)
    yield from _of_heads(call)


def _of_keys() -> Iterator[Defect]:
    """Yield defects that lose keys."""
    for number, which in enumerate(("first", "second")):
        text = f"only every second key was read, from the {which} on"
        yield text, lambda rows, n=number: _only(rows, rows.keys % 2 == n)
    for count in LAST_KEYS:
        text = f"the last {count} keys were left out" if count > 1 else "the last key was left out"
        yield text, lambda rows, n=count: _only(rows, rows.keys < len(rows.k) - n)
    yield "the first key was left out", lambda rows: _only(rows, rows.keys > 0)
    text = "only the first half of the keys was read"
    yield text, lambda rows: _only(rows, rows.keys < len(rows.k) / 2)


def _only(rows: Rows, keys: Tensor) -> Rows:
    """Return the rows with only some of the keys, unless a row would have none."""
    allowed = rows.allowed & keys
    none = ~allowed.any(-1, keepdim=True)
    return replace(rows, allowed=allowed | (rows.allowed & none))


def _of_masks(call: Call) -> Iterator[Defect]:
    """Yield other causal masks, windows and masks than the call asks for."""
    options, claims = call.options, call.claims

    def asked(changed: Call) -> Callable[[Rows], Rows]:
        def change(rows: Rows) -> Rows:
            other = rows_of(changed, rows.item, rows.head, rows.places.tolist())
            return replace(rows, allowed=other.allowed, bias=other.bias)

        return change

    def with_options(**fields: object) -> Callable[[Rows], Rows]:
        return asked(replace(call, options=options.change(**fields)))

    if options.window is not None:
        yield "the window was not applied", with_options(window=None)
        yield from _other_windows(options.window, with_options)
    if options.is_causal:
        yield "the causal mask was not applied", with_options(is_causal=False)
        for number, text in ((-1, "hides the query's own key"), (1, "shows one key too many")):
            changed = with_options(is_causal=False, window=_joined(options.window, number))
            yield f"the causal mask {text}", changed
    else:
        text = "the causal mask was applied, though none was asked for"
        yield text, with_options(is_causal=True)
    is_placed = options.is_causal or options.window or options.alibi
    if is_placed and call.query.shape[2] != call.key.shape[2]:
        own = claims.alignment or "top_left"
        other = "bottom_right" if own == "top_left" else "top_left"
        aligned = replace(
            claims,
            causal=other,
            scores=replace(claims.scores, alignment=other),
        )
        text = f"causal mask and window are aligned {other} instead of {own}"
        yield text, asked(replace(call, claims=aligned))
    if options.mask is not None:
        yield "the mask was not applied", with_options(mask=None)
        if options.mask.dtype == torch.bool:
            yield "the mask was read the other way round", with_options(mask=~options.mask)


def _joined(window: tuple[int | None, int | None] | None, right: int) -> tuple[int | None, int]:
    """Return a window that ends so many keys after the query's own."""
    left = None if window is None else window[0]
    return left, right


def _other_windows(
    window: tuple[int | None, int | None], with_options: Callable[..., Callable[[Rows], Rows]]
) -> Iterator[Defect]:
    """Yield windows that are one key too large or too small, or turned round."""
    left, right = window
    for number, word in ((1, "many"), (-1, "few")):
        if left is not None:
            text = f"the window has one key too {word} before the query's own"
            yield text, with_options(window=(left + number, right))
        if right is not None:
            text = f"the window has one key too {word} after the query's own"
            yield text, with_options(window=(left, right + number))
    yield "the window has its sides exchanged", with_options(window=(right, left))


def _of_scales(call: Call) -> Iterator[Defect]:
    """Yield other scales, and scores of a part of the head's width."""
    width = call.query.shape[-1]
    usual = call.claims.scale_for(width)
    if call.options.scale is not None:
        text = "the scale of the call has no effect"
        yield text, lambda rows: replace(rows, scale=usual)
    others = {"1": 1.0, "1/d_k": 1 / width, "1/sqrt(H d_k)": (width * call.query.shape[1]) ** -0.5}
    for name, scale in others.items():
        text = f"the scores are scaled by {name}"
        yield text, lambda rows, tau=scale: replace(rows, scale=tau)
    parts = {width // 2, 3 * width // 4, width - 64, width - 16, width - 8, width - 1}
    for part in sorted(part for part in parts if 0 < part < width):
        text = f"the scores leave out the last {width - part} of {width} columns of the head"
        yield text, lambda rows, n=part: replace(rows, q=rows.q[:, :n], k=rows.k[:, :n])
        text = f"the scores leave out the first {width - part} of {width} columns of the head"
        yield text, lambda rows, n=part: replace(rows, q=rows.q[:, -n:], k=rows.k[:, -n:])


def _of_options(call: Call) -> Iterator[Defect]:
    """Yield defects of softcaps, sinks and slopes."""
    options = call.options
    if options.softcap:
        yield "the softcap has no effect", lambda rows: replace(rows, cap=None)
        text = "the softcap is on the other side of what is added to the scores"
        yield text, lambda rows: replace(rows, cap_after_bias=not rows.cap_after_bias)
    sinks = options.sinks
    if sinks is not None:
        yield "the sink has no effect", lambda rows: replace(rows, sink=None)
        text = "the sink of the first head is that of every head"
        yield text, lambda rows: replace(rows, sink=float(sinks[0]))
        text = "the sink is multiplied by the scale"
        yield text, lambda rows: replace(rows, sink=rows.scale * float(sinks[rows.head]))
    if options.alibi is not None:
        yield "the slopes of ALiBi have no effect", lambda rows: _with_slope(rows, 0.0)
        yield "the bias of ALiBi has the opposite sign", lambda rows: _with_slope(rows, -1.0)


def _with_slope(rows: Rows, factor: float) -> Rows:
    """Return the rows with their slope times a factor."""
    call, options = rows.call, rows.call.options
    assert options.alibi is not None
    slopes = tuple(factor * slope for slope in options.alibi)
    changed = replace(call, options=options.change(alibi=slopes))
    return replace(rows, bias=rows_of(changed, rows.item, rows.head, rows.places.tolist()).bias)


def _of_heads(call: Call) -> Iterator[Defect]:
    """Yield results of other heads, items and rows."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    if heads > 1:
        for step in (1, -1):
            word = "next" if step > 0 else "previous"
            text = f"the output is that of the {word} head"
            yield text, lambda rows, n=step: _elsewhere(rows, head=(rows.head + n) % heads)
    if kv_heads > 1:
        text = "query head h reads the key head h mod H_kv"
        yield text, lambda rows: _with_keys(rows, rows.head % kv_heads)
        yield "every head reads the first key head", lambda rows: _with_keys(rows, 0)
    if batch > 1:
        text = "the output is that of the first item"
        yield text, lambda rows: _elsewhere(rows, item=0)
        text = "the output is that of the next item"
        yield text, lambda rows: _elsewhere(rows, item=(rows.item + 1) % batch)


def _elsewhere(rows: Rows, item: int | None = None, head: int | None = None) -> Rows | None:
    """Return the same rows of another item or head; None where it is their own."""
    item = rows.item if item is None else item
    head = rows.head if head is None else head
    if (item, head) == (rows.item, rows.head):
        return None
    return rows_of(rows.call, item, head, rows.places.tolist())


def _with_keys(rows: Rows, of_keys: int) -> Rows | None:
    """Return the rows with keys and values of another head; None where they are their own."""
    if rows.head // rows.call.group == of_keys:
        return None
    call, item = rows.call, rows.item
    return replace(rows, k=call.key[item, of_keys].double(), v=call.value[item, of_keys].double())


def _factor(given: Sequence[tuple[Rows, Tensor]]) -> float:
    """Return the factor between the right contexts and those that were returned."""
    along = size = 0.0
    for rows, got in given:
        right = rows.context()
        along += float((got * right).sum())
        size += float(right.square().sum())
    return along / size if size else 1.0


def _scale_factor(given: Sequence[tuple[Rows, Tensor]]) -> float | None:
    """Return the factor of the scores that explains the errors best, or None where none does.

    Two steps of Newton's method, from 1.
    """
    factor = 1.0
    for _ in range(2):
        along = size = 0.0
        for rows, got in given:
            scaled = replace(rows, scale=factor * rows.scale)
            p = scaled.weights()
            s = (scaled.scale * scaled.q @ scaled.k.mT) * (p > 0)
            moved = (p * (s - (p * s).sum(-1, keepdim=True))) @ scaled.v
            along += float(((got - p @ scaled.v) * moved).sum())
            size += float(moved.square().sum())
        if not size or not math.isfinite(along):
            return None
        factor *= 1 + max(-0.9, along / size)
    return factor


def _are_exchanged(given: Sequence[tuple[Rows, Tensor]]) -> bool:
    """Return whether the rows have the right numbers in another order."""
    left = whole = 0.0
    for rows, got in given:
        right = rows.context()
        left += _distance(got.sort(-1).values, right.sort(-1).values)
        whole += _distance(got, right)
    return left < EXPLAINS**2 * whole


def _wrong_lse() -> Iterator[tuple[str, Results]]:
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
