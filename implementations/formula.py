"""Attention in plain torch, step by step, for the textbook, the faults and the trial runs.

An option of the call acts in one of these steps. The oracle, its rounding graphs and the tests with
fifty digits share nothing with them, so that one mistake cannot hide another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from mha.spec import (
    Claims,
    Options,
    Output,
    QkNorm,
    Rotary,
    alibi_bias,
    causal_mask,
    chunk_mask,
    window_mask,
)
from mha.spec.claims import Alignment
from mha.spec.scores import AlibiForm

Normalise = Callable[[Tensor], Tensor]


def rotated(
    x: Tensor, rotary: Rotary, positions: Tensor, frequencies: torch.dtype = torch.float64
) -> Tensor:
    """Return heads (B, heads, length, d_k) that are rotated by their positions.

    positions: broadcastable to (B, heads, length).
    frequencies: the dtype that these are rounded to.
    """
    width = rotary.width(x.shape[-1])
    exponents = torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width
    base = rotary.base_for(x.shape[-1])
    rounded = (base**-exponents / rotary.factor).to(frequencies)
    angles = positions.unsqueeze(-1).double() * rounded.double()
    if rotary.direction == "backward":
        angles = -angles
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned, kept = x[..., :width], x[..., width:]
    if rotary.pairs == "half":
        first, second = turned.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        both = [first * cos - second * sin, second * cos + first * sin]
        turned = torch.stack(both, -1).flatten(-2)
    return torch.cat([turned, kept], -1)


def normed(x: Tensor, norm: QkNorm, weight: Tensor | None) -> Tensor:
    """Return heads (B, heads, length, d_k) that are divided by their norm.

    weight: of the columns of one head, or of all heads, or None.
    """
    axes = (-3, -1) if norm.over == "width" else (-1,)
    if norm.kind == "layer":
        x = x - x.mean(axes, keepdim=True)
    squares = x.square()
    if norm.kind in ("l2", "unit_rms"):
        length = squares.sum(axes, keepdim=True).sqrt()
        x = x / length.clamp(min=norm.eps_for(x.dtype) ** 0.5)
        if norm.kind == "unit_rms":
            x = x * math.prod(x.shape[axis] for axis in axes) ** 0.5
    else:
        x = x * (squares.mean(axes, keepdim=True) + norm.eps_for(x.dtype)).rsqrt()
    if weight is None or norm.weight is None:
        return x
    if norm.weight == "offset":
        weight = 1 + weight
    return x * weight.view(-1, 1, x.shape[-1])


def on_the_way(
    x: Tensor,
    claims: Claims,
    weight: Tensor | None,
    positions: Tensor,
    frequencies: torch.dtype = torch.float64,
) -> Tensor:
    """Return projected queries or keys (B, heads, length, d_k), normed and rotated as claimed.

    weight: of the norm; see `normed`.
    positions, frequencies: see `rotated`.
    """
    norm, rotary = claims.qk_norm, claims.rotary
    if norm and norm.before_rotary:
        x = normed(x, norm, weight)
    if rotary:
        x = rotated(x, rotary, positions, frequencies)
    if norm and not norm.before_rotary:
        x = normed(x, norm, weight)
    return x


def scores_of(q: Tensor, k: Tensor, options: Options, usual_scale: float = 1.0) -> Tensor:
    """Return the scores (B, H, L, S) of queries and keys (B, H, length, d_k), without any mask.

    usual_scale: what they are multiplied by where the call does not say so.
    """
    scale = usual_scale if options.scale is None else options.scale
    return q @ k.mT * scale


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(s / c), or the scores themselves where c is None or 0."""
    return cap * (scores / cap).tanh() if cap else scores


def allowed_by(
    options: Options, like: Tensor, alignment: Alignment = "top_left", alibi: AlibiForm = "signed"
) -> tuple[Tensor, Tensor]:
    """Return the keys that each query may attend to, and what is added to its scores.

    Both are (B, H, L, S), the first one boolean.

    like: scores, or a tensor of their shape, dtype and device.
    alignment: of the causal mask, the window, the chunks and ALiBi.
    alibi: the form of the bias of slopes.
    """
    mask = options.mask
    queries, keys = like.shape[2:]
    allowed = torch.ones_like(like, dtype=torch.bool)
    bias = torch.zeros_like(like)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        masked = mask == -math.inf
        allowed = allowed & ~masked
        bias = bias + mask.masked_fill(masked, 0.0)
    lengths = options.lengths_of(like.shape[0], queries, keys)
    if lengths is None:
        near, of_slopes = _near(options, like, alignment, alibi)
        return allowed & near, bias + of_slopes
    present = torch.zeros_like(allowed)
    for item, (own_queries, own_keys) in enumerate(lengths):
        own = item, slice(None), slice(own_queries), slice(own_keys)
        near, of_slopes = _near(_of_item(options, item), like[own], alignment, alibi)
        present[own] = near
        bias[own] += of_slopes
    return allowed & present, bias


def _near(
    options: Options, like: Tensor, alignment: Alignment, alibi: AlibiForm
) -> tuple[Tensor, Tensor]:
    """Return which keys a query may attend to by their places, (L, S), and the bias of slopes."""
    queries, keys = like.shape[-2:]
    near = torch.ones(queries, keys, dtype=torch.bool, device=like.device)
    bias = like.new_zeros(())
    if options.alibi is not None:
        bias = alibi_bias(options.alibi, alibi, queries, keys, alignment).to(like)
    if options.is_causal:
        near = near & causal_mask(queries, keys, alignment, like.device)
    if options.window is not None:
        near = near & window_mask(queries, keys, options.window, alignment, like.device)
    if options.chunk is not None:
        near = near & chunk_mask(queries, keys, options.chunk, alignment, like.device)
    return near, bias


def _of_item(options: Options, item: int) -> Options:
    """Return the options of an item, which may have slopes of its own."""
    if options.alibi is None:
        return options
    slopes = torch.tensor(options.alibi)
    return options if slopes.ndim == 1 else options.change(alibi=options.alibi[item])


def with_mask(options: Options, change: Callable[[Tensor], Tensor | None]) -> Options:
    """Return options with another mask, if they have one."""
    return options if options.mask is None else options.change(mask=change(options.mask))


def softmax(scores: Tensor) -> Tensor:
    """Normalise the scores over the keys."""
    return scores.softmax(-1)


def weights_of(
    scores: Tensor, allowed: Tensor, normalise: Normalise = softmax, sinks: Tensor | None = None
) -> Tensor:
    """Return the softmax over the allowed keys, (B, H, L, S); a row without any gets zeros.

    Such a row keeps its scores in the softmax, so that neither it nor its gradient is NaN.

    normalise: the softmax over the last axis.
    sinks: a score (H,) of each head that takes part in the denominator only.
    """
    if sinks is not None:
        return weights_of(*_with_sinks(scores, allowed, sinks), normalise)[..., :-1]
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -math.inf)
    return normalise(scores).masked_fill(~allowed, 0.0)


def _with_sinks(scores: Tensor, allowed: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and allowed keys with the sink of each head as one more key, the last one."""
    column = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1), torch.cat([allowed, column > -math.inf], -1)


def sinks_of(options: Options, like: Tensor) -> Tensor | None:
    """Return the sinks of a call as a tensor (H,), like another one in device and dtype."""
    return None if options.sinks is None else torch.as_tensor(options.sinks).to(like)


def log_sum_exp(scores: Tensor, allowed: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the natural log-sum-exp of the allowed scores of each row, (B, H, L).

    Without any, it is -infinity. sinks: (H,), each of which is one more term of the rows of a head.
    """
    if sinks is not None:
        scores, allowed = _with_sinks(scores, allowed, sinks)
    return scores.masked_fill(~allowed, -math.inf).logsumexp(-1)


class Holder(nn.Module):
    """What attention has beside its steps: weights, their gradients, and a cache of inputs.

    decoded: while it decodes, the positions of the keys, (B, 1, S), which end with those of the
        queries; None in other calls, whose positions count from 0.
    decoding: what decoding calls say about scores.
    """

    decoded: Tensor | None = None
    decoding = Options()

    def hold(self, named: Any) -> None:
        """Register copies of tensors, given as pairs of a name and a tensor, as parameters."""
        for name, tensor in named:
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def merge(self, contexts: Tensor) -> Tensor:
        """Concatenate the heads (B, H, L, d_v) to (B, L, H * d_v)."""
        return contexts.transpose(1, 2).flatten(2)

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """See `mha.spec.Decoder`.

        The cache has keys, values, and which of them are an item's own, (B, n, 1).
        """
        if active is None:
            active = query.new_ones(len(query)).bool()
        own = active[:, None, None].expand(-1, query.shape[1], -1)
        new = key.where(own, 0), value.where(own, 0), own
        if cache is None:
            cache = new
        else:
            cache = tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        earlier = causal_mask(query.shape[1], key.shape[1], "bottom_right", query.device)
        # An item that was not active keeps its position.
        self.decoded = (present.cumsum(1) - 1).mT
        # The last query is at the last key, whatever the alignment of other calls is.
        near, _ = _near(self.decoding, earlier, "bottom_right", "signed")
        mask = present.mT.unsqueeze(1) & earlier & near
        options = self.decoding.change(mask=mask, window=None, chunk=None)
        try:
            output: Output = self(query, key, value, **options.arguments)
        finally:
            self.decoded = None
        return output.output, cache

    def decoder_with(self, options: Options) -> Any:
        """Return one that decodes with these options; None if it cannot have them there."""
        if options.alibi is not None or options.key_lengths is not None:
            return None
        other = copy(self)
        other.decoding = options.change(mask=None, is_causal=False)
        return other

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions of queries or keys (B, heads, length, d_k)."""
        if self.decoded is None:
            return torch.arange(x.shape[2], device=x.device)
        return self.decoded[..., -x.shape[2] :]

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """See `mha.spec.CacheEditor`."""
        return tuple(part[items] for part in cache)

    def crop_cache(self, cache: Any, length: int) -> Any:
        """See `mha.spec.CacheEditor`."""
        return tuple(part[:, :length] for part in cache)

    def split_keys(self, sizes: Sequence[int]) -> Any:
        """See `mha.spec.SplitKeys`; a softmax over whole rows does not depend on them."""
        return self

    def weight_gradients(self) -> dict[str, Tensor]:
        """See `mha.spec.Differentiable`."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.named_parameters()
        }
