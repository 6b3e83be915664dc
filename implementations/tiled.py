"""Online softmax over tiles of keys, forward and backward: memory grows with L + S."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Claims, Lse, Rounding, Scores, Window
from mha.spec.claims import COMPUTE_DTYPES

TILE = 64


@dataclass(frozen=True)
class Scoring:
    """What a call says about the scores.

    cap: c, of scores that become c tanh(s / c); 0 for none.
    left, right: how many keys before and after its own place a query sees; -1 for all.
    """

    scale: float
    is_causal: bool
    cap: float
    left: int
    right: int

    def of_tile(
        self, q: Tensor, k: Tensor, mask: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor]:
        """Return the scores (B, H, L, tile) of the keys from a place on, and their derivative.

        The scores are -infinity where a query may not attend; the derivative is by the products
        q k^T, which is the scale if there is no cap.

        mask: that of the tile.
        start: the place of the first key of the tile.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * self.scale
        slope = torch.full_like(scores, self.scale)
        if self.cap:
            # The derivative of c tanh(s / c) is 1 - tanh(s / c)^2.
            tangent = (scores / self.cap).tanh()
            scores = self.cap * tangent
            slope = slope * (1 - tangent.square())
        hidden = self.hidden(scores, start)
        if mask is not None:
            hidden = hidden | ~mask
        return scores.masked_fill(hidden, -math.inf), slope

    def hidden(self, scores: Tensor, start: int) -> Tensor:
        """Return the keys of a tile that the window or causality hides, boolean (L, tile)."""
        queries, keys = scores.shape[-2:]
        places = torch.arange(start, start + keys, device=scores.device)
        distances = places - torch.arange(queries, device=scores.device).unsqueeze(1)
        hidden = torch.zeros_like(distances, dtype=torch.bool)
        if self.is_causal:
            hidden = hidden | (distances > 0)
        if self.left >= 0:
            hidden = hidden | (distances < -self.left)
        if self.right >= 0:
            hidden = hidden | (distances > self.right)
        return hidden


class TiledAttention(torch.autograd.Function):
    """Milakov & Gimelshein 2018, and the backward pass of FlashAttention (Dao et al. 2022)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scoring: Scoring
    ) -> tuple[Tensor, ...]:
        """Return the context (B, H, L, d_v), and the highest score and the denominator of each row.

        The exponentials of a tile are those of differences from the highest score so far; the sums
        before it are rescaled.

        q: (B, H, L, d_k); k: (B, H, S, d_k); v: (B, H, S, d_v); sinks: (H,).
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        highest = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=wide)
        total = torch.zeros_like(highest)
        context = highest.new_zeros(*q.shape[:-1], v.shape[-1])
        if sinks is not None:
            # A sink is the first score of a row: its exponential, of the difference 0, is 1.
            highest = highest.maximum(sinks.to(highest).view(-1, 1, 1))
            total = (highest > -math.inf).to(total)
        for keys in tiles(k):
            scores, _ = scoring.of_tile(q, k[..., keys, :], part_of(mask, keys), keys.start)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = exp_difference(scores, higher)
            rescale = exp_difference(highest, higher)
            total = total * rescale + weights.sum(-1, keepdim=True)
            context = context * rescale + weights @ v[..., keys, :].to(weights)
            highest = higher
        return (context / total.where(total > 0, 1)).to(q.dtype), highest, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass needs: of size L * S, only the caller's own mask."""
        q, k, v, mask, sinks, ctx.scoring = inputs
        ctx.save_for_backward(q, k, v, mask, sinks, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks, with the weights computed once more.

        The gradient of a row of scores is weights * (dW - mean): dW is the gradient of the weights,
        and `mean` is their mean under the weights, which is the scalar product of the context with
        its own gradient. A sink has no value.
        """
        q, k, v, mask, sinks, context, highest, total = ctx.saved_tensors
        upstream = upstream.to(total)
        inverse = 1 / total.where(total > 0, 1)
        mean = (upstream * context).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=total.dtype) for x in (q, k, v))
        for keys in tiles(k):
            scores, slope = ctx.scoring.of_tile(q, k[..., keys, :], part_of(mask, keys), keys.start)
            weights = exp_difference(scores, highest) * inverse
            grad_products = weights * (upstream @ v[..., keys, :].to(weights).mT - mean) * slope
            grad_q += grad_products @ k[..., keys, :].to(weights)
            grad_k[..., keys, :] = grad_products.mT @ q.to(weights)
            grad_v[..., keys, :] = weights.mT @ upstream
        grad_sinks = None
        if sinks is not None:
            of_sinks = exp_difference(sinks.to(highest).view(-1, 1, 1), highest) * inverse
            grad_sinks = -(of_sinks * mean).sum((0, 2, 3)).to(sinks)
        return grad_q.to(q), grad_k.to(k), grad_v.to(v), None, grad_sinks, None


def tiles(k: Tensor) -> Iterator[slice]:
    """Yield the places of each tile of keys."""
    for start in range(0, k.shape[-2], TILE):
        yield slice(start, start + TILE)


def part_of(mask: Tensor | None, keys: slice) -> Tensor | None:
    """Return the part of a mask for a tile of keys; one that is for all keys, as it is."""
    if mask is None or mask.ndim == 0 or mask.shape[-1] == 1:
        return mask
    return mask[..., keys]


def exp_difference(scores: Tensor, highest: Tensor) -> Tensor:
    """Return exp(scores - highest), and 0 where a score is -infinity, even if both are."""
    return (scores - highest.where(highest > -math.inf, 0)).exp()


def attend(  # noqa: PLR0913  what a kernel of today takes
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context (B, H, L, d_v).

    q: (B, H, L, d_k).
    k: (B, H, S, d_k).
    v: (B, H, S, d_v).
    mask: boolean, broadcastable to (B, H, L, S), True = may attend.
    scale: what the scores are multiplied by; None for 1/sqrt(d_k).
    softcap: c, of scores that become c tanh(s / c); 0 for none.
    window_size: how many keys before and after its own place a query sees; -1 for all.
    sinks: (H,), whose exponentials are added to the denominators.
    return_lse: whether to return the log-sum-exp of each row too, (B, H, L), in float32 at least,
        without a gradient.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scoring = Scoring(scale, is_causal, softcap, *window_size)
    context, highest, total = TiledAttention.apply(q, k, v, mask, sinks, scoring)  # type: ignore[no-untyped-call]  # of torch
    if not return_lse:
        return context  # type: ignore[no-any-return]  # of torch
    return context, (highest + total.log()).squeeze(-1)


implementation = from_kernel(
    attend,
    name="tiled",
    mask="keep",
    claims=Claims(
        returns_weights=False,
        composes={"compile", "func", "autocast", "checkpoint", "deterministic"},
        memory="linear",
        scores=Scores(
            scale="any", window=Window("left_right"), softcap="before_bias", sinks="float32"
        ),
        lse=Lse(),
        value_width=True,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            scores_stored=False,
            weights_stored=False,
            softmax_stored=False,
            scaling_roundings=0,
            log_normaliser=False,
        ),
    ),
)
