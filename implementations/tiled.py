"""Online softmax over tiles of keys, forward and backward: memory grows with L + S, not with L * S."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Claims, Lse, Rounding
from mha.spec.claims import COMPUTE_DTYPES

TILE = 64


class TiledAttention(torch.autograd.Function):
    """Milakov & Gimelshein 2018; the backward pass of FlashAttention (Dao et al. 2022), with tiles of keys only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, ...]:
        """Return the context (B, H, L, d_v), and for each row the highest score and the sum of exponentials.

        q: (B, H, L, d_k); k: (B, H, S, d_k); v: (B, H, S, d_v). The exponentials of a tile are those of differences
        from the highest score so far; the sums before it are rescaled.
        """
        highest = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        total, context = torch.zeros_like(highest), highest.new_zeros(*q.shape[:-1], v.shape[-1])
        for keys, scores in tiles(q, k, mask, is_causal):
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = exp_difference(scores, higher)
            rescale = exp_difference(highest, higher)
            total = total * rescale + weights.sum(-1, keepdim=True)
            context = context * rescale + weights @ v[..., keys, :].to(weights)
            highest = higher
        return (context / total.where(total > 0, 1)).to(q.dtype), highest, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass needs: nothing of size L * S, except the caller's own mask."""
        q, k, v, mask, ctx.is_causal = inputs
        ctx.save_for_backward(q, k, v, mask, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v; the weights of each tile are computed again.

        The gradient of a row of scores is weights * (dW - mean): dW is the gradient of the weights, and `mean` is their
        mean under the weights, which is the scalar product of the context with its own gradient.
        """
        q, k, v, mask, context, highest, total = ctx.saved_tensors
        upstream, inverse = upstream.to(total), 1 / total.where(total > 0, 1)
        mean = (upstream * context).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=total.dtype) for x in (q, k, v))
        for keys, scores in tiles(q, k, mask, ctx.is_causal):
            weights = exp_difference(scores, highest) * inverse
            grad_scores = weights * (upstream @ v[..., keys, :].to(weights).mT - mean) / math.sqrt(q.shape[-1])
            grad_q += grad_scores @ k[..., keys, :].to(weights)
            grad_k[..., keys, :] = grad_scores.mT @ q.to(weights)
            grad_v[..., keys, :] = weights.mT @ upstream
        return grad_q.to(q), grad_k.to(k), grad_v.to(v), None, None


def tiles(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield each tile of keys and its scores (B, H, L, tile), -infinity where a query may not attend."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for start in range(0, k.shape[-2], TILE):
        keys = slice(start, start + TILE)
        scores = q.to(wide) @ k[..., keys, :].to(wide).mT / math.sqrt(q.shape[-1])
        if mask is not None:
            part = mask[..., keys] if mask.ndim and mask.shape[-1] > 1 else mask
            scores = scores.masked_fill(~part, -math.inf)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 - start)
            scores = scores.masked_fill(later, -math.inf)
        yield keys, scores


def exp_difference(scores: Tensor, highest: Tensor) -> Tensor:
    """Return exp(scores - highest), and 0 where a score is -infinity, even if `highest` is -infinity."""
    return (scores - highest.where(highest > -math.inf, 0)).exp()


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context (B, H, L, d_v) of q (B, H, L, d_k), k (B, H, S, d_k) and v (B, H, S, d_v).

    mask: boolean, broadcastable to (B, H, L, S), True = may attend. return_lse: whether to return the log-sum-exp of
    each row too, (B, H, L), in float32 at least, without a gradient.
    """
    given = (q, k, v, mask, is_causal)
    context, highest, total = TiledAttention.apply(*given)  # type: ignore[no-untyped-call]  # of torch
    return (context, (highest + total.log()).squeeze(-1)) if return_lse else context


implementation = from_kernel(
    attend,
    name="tiled",
    mask="keep",
    claims=Claims(
        returns_weights=False,
        composes={"compile", "func", "autocast", "checkpoint", "deterministic"},
        memory="linear",
        lse=Lse(),
        value_width=True,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            scores_stored=False, weights_stored=False, softmax_stored=False, scaling_roundings=0, log_normaliser=False
        ),
    ),
)
