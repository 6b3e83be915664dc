"""Attention in plain torch, each step once: what the textbook, the faults and the trial runs are
made of.

An option of the call acts in one of these steps. The oracle, its rounding graphs and the tests with
fifty digits share nothing with them, so that one mistake cannot hide another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha.spec import Options, Output, alibi_bias, causal_mask, window_mask
from mha.spec.claims import Alignment
from mha.spec.scores import AlibiForm

Normalise = Callable[[Tensor], Tensor]


def scores_of(q: Tensor, k: Tensor, options: Options, usual_scale: float = 1.0) -> Tensor:
    """Return the scores (B, H, L, S) of queries and keys (B, H, length, d_k), without any mask or
    cap.

    usual_scale: what they are multiplied by where the call does not say so.
    """
    return q @ k.mT * (usual_scale if options.scale is None else options.scale)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Return c tanh(s / c), or the scores themselves where c is None or 0."""
    return cap * (scores / cap).tanh() if cap else scores


def allowed_by(
    options: Options, like: Tensor, alignment: Alignment = "top_left", alibi: AlibiForm = "signed"
) -> tuple[Tensor, Tensor]:
    """Return which keys each query may attend to, boolean, and what is added to its scores, both
    (B, H, L, S).

    like: scores, or a tensor of their shape, dtype and device. alignment: of the causal mask, the
        window and ALiBi.
    alibi: the form of the bias of slopes.
    """
    mask = options.mask
    allowed, bias = torch.ones_like(like, dtype=torch.bool), torch.zeros_like(like)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        masked = mask == -math.inf
        allowed, bias = allowed & ~masked, bias + mask.masked_fill(masked, 0.0)
    if options.alibi is not None:
        bias = bias + alibi_bias(options.alibi, alibi, like.shape[2], like.shape[3], alignment).to(
            like
        )
    if options.is_causal:
        allowed = allowed & causal_mask(like.shape[2], like.shape[3], alignment, like.device)
    if options.window is not None:
        allowed = allowed & window_mask(
            like.shape[2], like.shape[3], options.window, alignment, like.device
        )
    return allowed, bias


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

    Such a row keeps its scores in the softmax, so that neither it nor its gradient is NaN. sinks: a
    score (H,) of each head that takes part in the denominator only.
    """
    if sinks is not None:
        column = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        extended = torch.cat([scores, column], -1)
        return weights_of(extended, torch.cat([allowed, column > -math.inf], -1), normalise)[
            ..., :-1
        ]
    empty = ~allowed.any(-1, keepdim=True)
    return normalise(scores.masked_fill(~(allowed | empty), -math.inf)).masked_fill(~allowed, 0.0)


def sinks_of(options: Options, like: Tensor) -> Tensor | None:
    """Return the sinks of a call as a tensor (H,), on the device of another one and in its dtype."""
    return None if options.sinks is None else torch.as_tensor(options.sinks).to(like)


def log_sum_exp(scores: Tensor, allowed: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the natural log-sum-exp of the allowed scores of each row, (B, H, L); without any, it
    is -infinity.

    sinks: (H,), of which each is one of the terms.
    """
    if sinks is not None:
        column = sinks.to(scores).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores, allowed = (
            torch.cat([scores, column], -1),
            torch.cat([allowed, column > -math.inf], -1),
        )
    return scores.masked_fill(~allowed, -math.inf).logsumexp(-1)


class Holder(nn.Module):
    """What attention in steps has beside the steps: its weights and their gradients, and a cache of
    inputs.
    """

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
        """See `mha.spec.Decoder`; the cache has keys, values, and which of them are an item's own,
        (B, n, 1).
        """
        active = query.new_ones(len(query)).bool() if active is None else active
        own = active[:, None, None].expand(-1, query.shape[1], -1)
        new = key.where(own, 0), value.where(own, 0), own
        cache = (
            new
            if cache is None
            else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        )
        key, value, present = cache
        earlier = causal_mask(query.shape[1], key.shape[1], "bottom_right", query.device)
        output: Output = self(query, key, value, mask=present.mT.unsqueeze(1) & earlier)
        return output.output, cache

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
