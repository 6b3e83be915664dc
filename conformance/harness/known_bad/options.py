"""How what a call says about the scores goes wrong: it has no effect, or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, defect
from mha.conformance.harness.known_bad.lengths import LENGTHS_IGNORED
from mha.conformance.harness.textbook import TextbookAttention
from mha.implementations.formula import capped
from mha.spec import Options, chunk_mask, window_mask
from mha.spec.claims import Alignment
from mha.spec.scores import Bounds

Pair = tuple[Tensor, Tensor]


def _other_window(name: str, text: str, change: Callable[[Bounds], Bounds | None]) -> Defect:
    """Return a defect of calls with a window, which is another one."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
        if options.window is not None:
            options = options.change(window=change(options.window))
        return TextbookAttention.allow(self, options, scores)

    return defect(name, text, allow=allow)


def moved(bounds: Bounds, left: int, right: int) -> Bounds:
    """Return a window with more or fewer keys on the sides that have a bound."""
    before, after = bounds
    if before is not None:
        before += left
    if after is not None:
        after += right
    return before, after


def _window_at_other_end(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    allowed, bias = TextbookAttention.allow(self, options.change(window=None), scores)
    if options.window is None:
        return allowed, bias
    other: Alignment = "bottom_right" if self.alignment == "top_left" else "top_left"
    return allowed & window_mask(scores.shape[2], scores.shape[3], options.window, other), bias


def _uncapped(self: TextbookAttention, scores: Tensor, bias: Tensor) -> Pair:
    return scores, bias


def _capped_after_mask(self: TextbookAttention, scores: Tensor, bias: Tensor) -> Pair:
    """Let masked keys have the lowest capped score."""
    cap = self.options.softcap
    scores, bias = TextbookAttention.cap(self, scores, bias)
    if cap is not None:
        scores = scores.masked_fill(~self.allowed, -cap)
        self.allowed = torch.ones_like(self.allowed)
    return scores, bias


def _capped_elsewhere(self: TextbookAttention, scores: Tensor, bias: Tensor) -> Pair:
    """Cap with the bias where it should be without, and the other way round."""
    cap = self.options.softcap
    if cap is None or self.claims.scores.softcap == "after_bias":
        return capped(scores, cap), bias
    return capped(scores + bias, cap), torch.zeros_like(bias)


def _capped_before_scale(self: TextbookAttention, scores: Tensor, bias: Tensor) -> Pair:
    cap, scale = self.options.softcap, self.scale()
    if cap is None or not scale:
        return TextbookAttention.cap(self, scores, bias)
    return scale * capped(scores / scale, cap), bias


def _detached(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.detach()


def _straight_through(self: TextbookAttention, scores: Tensor, bias: Tensor) -> Pair:
    """Cap without a factor in the gradient."""
    capped_scores, bias = TextbookAttention.cap(self, scores, bias)
    return scores + (capped_scores - scores).detach(), bias


SCALE_IGNORED = defect(
    "scale_ignored",
    "the scores are scaled as usual, so the scale of the call has no effect",
    scale=lambda self: self.claims.scale_for(self.config.head_dim),
)
WINDOW_IGNORED = _other_window("window_ignored", "the window has no effect", lambda bounds: None)
UNBOUNDED_IS_ZERO = _other_window(
    "unbounded_is_zero",
    "a side of the window without a bound is read as 0",
    lambda bounds: (bounds[0] or 0, bounds[1] or 0),
)
SOFTCAP_IGNORED = defect("softcap_ignored", "the softcap has no effect", cap=_uncapped)
STRAIGHT_THROUGH = defect(
    "straight_through", "the gradient lacks the factor of the softcap", cap=_straight_through
)


SINKS_DETACHED = defect(
    "sinks_detached",
    "the sinks have no gradient",
    sinks=lambda self, scores: _detached(TextbookAttention.sinks(self, scores)),
)
SINKS_IGNORED = defect("sinks_ignored", "the sinks have no effect", sinks=lambda self, scores: None)


def with_slopes(options: Options, change: Callable[[Tensor], Tensor]) -> Options:
    """Return options with other slopes, if they have any; change: of a tensor (H,) or (B, H)."""
    if options.alibi is None:
        return options
    changed = change(torch.tensor(options.alibi, dtype=torch.float64))
    return options.change(alibi=changed.tolist())


def _other_slopes(name: str, text: str, change: Callable[[Tensor], Tensor]) -> Defect:
    """Return a defect of calls with slopes, which are others."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
        return TextbookAttention.allow(self, with_slopes(options, change), scores)

    return defect(name, text, allow=allow)


def _other_built_in(name: str, text: str, change: Callable[[Tensor], Tensor]) -> Defect:
    """Return a defect of slopes that are built in, which are others."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
        declared = self.claims.scores.alibi
        if declared and declared.built_in:
            options = with_slopes(options, change)
        return TextbookAttention.allow(self, options, scores)

    return defect(name, text, allow=allow)


def geometric(slopes: Tensor) -> Tensor:
    """Return slopes of as many heads, 2^(-8j/H), as if H were a power of two."""
    places = torch.arange(1, len(slopes) + 1, dtype=slopes.dtype)
    return 2 ** (-8 * places / len(slopes))


def from_one(slopes: Tensor) -> Tensor:
    """Return slopes of as many heads that begin with 1, at j = 0."""
    power = 1 << (len(slopes).bit_length() - 1)
    step, half = 2 ** (8 / power), 2 ** (4 / power)
    return torch.cat([slopes[:power] * step, slopes[power:] * half])


SLOPES_IGNORED = _other_slopes(
    "slopes_ignored", "the slopes of ALiBi have no effect", torch.zeros_like
)
GEOMETRIC = _other_built_in(
    "geometric_slopes", "the slopes of ALiBi are 2^(-8j/H), as if H were a power of two", geometric
)


def _other_chunks(name: str, text: str, change: Callable[[int], int | None]) -> Defect:
    """Return a defect of calls with chunks, which are of another size."""

    def allow(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
        if options.chunk is not None:
            options = options.change(chunk=change(options.chunk))
        return TextbookAttention.allow(self, options, scores)

    return defect(name, text, allow=allow)


def _chunks_at_other_end(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    allowed, bias = TextbookAttention.allow(self, options.change(chunk=None), scores)
    if options.chunk is None:
        return allowed, bias
    other: Alignment = "bottom_right" if self.alignment == "top_left" else "top_left"
    return allowed & chunk_mask(scores.shape[2], scores.shape[3], options.chunk, other), bias


def _chunks_as_window(self: TextbookAttention, options: Options, scores: Tensor) -> Pair:
    allowed, bias = TextbookAttention.allow(self, options.change(chunk=None), scores)
    if options.chunk is None:
        return allowed, bias
    last = options.chunk - 1, None
    return allowed & window_mask(scores.shape[2], scores.shape[3], last, self.alignment), bias


CHUNKS_IGNORED = _other_chunks("chunks_ignored", "the chunks have no effect", lambda chunk: None)


def ignored_options() -> Iterator[Defect]:
    """Yield what a call says and what has no effect."""
    yield SCALE_IGNORED
    yield WINDOW_IGNORED
    yield SOFTCAP_IGNORED
    yield SINKS_IGNORED
    yield SLOPES_IGNORED
    yield CHUNKS_IGNORED
    yield LENGTHS_IGNORED


def windows() -> Iterator[Defect]:
    """Yield other windows than a call asks for."""
    for side, place in (("left", "before"), ("right", "after")):
        for number, word in ((1, "many"), (-1, "few")):
            text = f"the window has one key too {word} {place} the query's own"
            change = partial(moved, left=number, right=0)
            if side == "right":
                change = partial(moved, left=0, right=number)
            yield _other_window(f"window_{side}_{number}", text, change)
    yield _other_window(
        "window_mirrored", "the window has its sides exchanged", lambda bounds: bounds[::-1]
    )
    yield UNBOUNDED_IS_ZERO
    yield defect(
        "window_alignment", "the window is aligned at the other end", allow=_window_at_other_end
    )


def caps() -> Iterator[Defect]:
    """Yield caps in another place."""
    text = "the softcap acts after the mask, so that masked keys have the score -c"
    yield defect("capped_after_mask", text, cap=_capped_after_mask)
    text = (
        "the softcap acts on the other side of the float mask: on its sum with the scores, or"
        " without it"
    )
    yield defect("capped_elsewhere", text, cap=_capped_elsewhere)
    yield defect(
        "capped_before_scale", "the softcap acts before the scale", cap=_capped_before_scale
    )


def sinks() -> Iterator[Defect]:
    """Yield sinks of other heads, and those that are added elsewhere."""
    text = "the sink of the first head is that of every head"
    yield defect("first_sink", text, sinks=_changed_sinks(lambda sinks: sinks[:1].expand_as(sinks)))
    text = "the sinks are added to the denominators as they are, and not their exponentials"
    yield defect(
        "sink_as_number", text, sinks=_changed_sinks(lambda sinks: sinks.clamp(min=0).log())
    )
    text = "the sinks are divided by sqrt(d_k), as scores are"
    yield defect("scaled_sinks", text, sinks=_scaled_sinks)


def _changed_sinks(
    change: Callable[[Tensor], Tensor],
) -> Callable[[TextbookAttention, Tensor], Tensor | None]:
    def changed(self: TextbookAttention, scores: Tensor) -> Tensor | None:
        given = TextbookAttention.sinks(self, scores)
        return None if given is None else change(given)

    return changed


def _scaled_sinks(self: TextbookAttention, scores: Tensor) -> Tensor | None:
    given = TextbookAttention.sinks(self, scores)
    return None if given is None else given * self.scale()


def slopes() -> Iterator[Defect]:
    """Yield other slopes than a call gives."""
    text = "the bias of ALiBi has the opposite sign"
    yield _other_slopes("slopes_negated", text, lambda slopes: -slopes)
    text = "the slope of the first head is that of every head"
    yield _other_slopes("first_slope", text, lambda slopes: slopes[..., :1].expand_as(slopes))
    text = "the slopes of the first item are those of every item"
    yield _other_slopes("slopes_of_first_item", text, of_first_item)
    yield GEOMETRIC
    text = "the slopes of ALiBi begin with 1, at j = 0"
    yield _other_built_in("slopes_from_one", text, from_one)


def of_first_item(slopes: Tensor) -> Tensor:
    """Return slopes (B, H) that are all those of the first item; others as they are."""
    return slopes[:1].expand_as(slopes) if slopes.ndim == 2 else slopes


def chunks() -> Iterator[Defect]:
    """Yield other chunks than a call asks for."""
    text = "the chunks are read as a window of the last keys"
    yield defect("chunks_as_window", text, allow=_chunks_as_window)
    for number, word in ((1, "many"), (-1, "few")):
        text = f"the chunks have one place too {word}"
        yield _other_chunks(f"chunks_{number}", text, partial(_resized, number=number))
    text = "the chunks are aligned at the other end"
    yield defect("chunks_alignment", text, allow=_chunks_at_other_end)


def _resized(chunk: int, number: int) -> int:
    return max(1, chunk + number)
