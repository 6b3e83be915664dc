"""Online softmax in Triton: one kernel forward, two backward; its interpreter runs them too."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha.implementations.adapters.kernel import from_kernel
from mha.implementations.discovery.errors import UnavailableError
from mha.spec import Claims, Rounding
from mha.spec.claims import COMPUTE_DTYPES

try:
    import triton
    import triton.language as tl
except ImportError as error:
    message = f"it needs an optional package: pip install 'mha-conformance[triton]' ({error})"
    raise UnavailableError(message) from error

ON_GPU = torch.cuda.is_available()
# Of a tile of queries or keys, of which a kernel holds up to four in shared memory (227 KiB on an
# H100).
MAX_TILE_BYTES = 1 << 15
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    raise UnavailableError(
        "torch finds no GPU; with TRITON_INTERPRET=1, Triton's interpreter runs it, in minutes"
    )


@triton.jit
def load(base, positions, length, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Return rows of a matrix (length, D), zeros outside of it."""
    width = tl.arange(0, BLOCK_D)
    inside = (positions < length)[:, None] & (width < D)[None, :]
    return tl.load(base + positions[:, None] * D + width[None, :], mask=inside, other=0.0).to(WIDE)


@triton.jit
def store(base, positions, length, rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows of a matrix (length, D)."""
    width = tl.arange(0, BLOCK_D)
    inside = (positions < length)[:, None] & (width < D)[None, :]
    tl.store(base + positions[:, None] * D + width[None, :], rows, mask=inside)


@triton.jit
def score(
    q,
    k,
    scale,
    mask,
    m_row,
    m_key,
    rows,
    keys,
    L,
    S,
    HAS_MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Return the scores of a tile, -infinity for hidden keys; mask: that of one head."""
    allowed = (rows < L)[:, None] & (keys < S)[None, :]
    if IS_CAUSAL:
        allowed = allowed & (rows[:, None] >= keys[None, :])
    if HAS_MASK:
        given = tl.load(
            mask + rows[:, None].to(tl.int64) * m_row + keys[None, :] * m_key, mask=allowed, other=0
        )
        allowed = allowed & (given != 0)
    return tl.where(
        allowed, tl.dot(q, tl.trans(k), input_precision="ieee") * tl.load(scale), float("-inf")
    )


@triton.jit
def statistics(mean, highest, total, item, rows, L):
    """Return for each row the mean gradient, the highest score, and the sum of exponentials."""
    mean = tl.load(mean + item * L + rows, mask=rows < L, other=0.0)
    highest = tl.load(highest + item * L + rows, mask=rows < L, other=0.0)
    total = tl.load(total + item * L + rows, mask=rows < L, other=1.0)
    return (
        mean,
        tl.where(highest == float("-inf"), 0.0, highest),
        tl.where(total == 0.0, 1.0, total),
    )


@triton.jit
def gradients(scores, upstream, v, row_statistics):
    """Return the weights of a tile, and the gradients of its scores before the scale is applied."""
    mean, highest, total = row_statistics
    weights = tl.exp(scores - highest[:, None]) / total[:, None]
    return weights, weights * (
        tl.dot(upstream, tl.trans(v), input_precision="ieee") - mean[:, None]
    )


@triton.jit
def forward_kernel(
    q, k, v, scale, mask, m_item, m_head, m_row, m_key, context, highest, total, heads, L, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries of one head of one item, over all tiles of keys."""
    rows, item = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(0).to(tl.int64)
    mask += (item // heads) * m_item + (item % heads) * m_head
    q_tile = load(q + item * L * D, rows, L, D, BLOCK_D, WIDE)
    high = tl.full([TILE], float("-inf"), WIDE)
    sums = tl.zeros([TILE], WIDE)
    context_tile = tl.zeros([TILE, BLOCK_D], WIDE)
    for start in range(0, S, TILE):
        keys = start + tl.arange(0, TILE)
        k_tile = load(k + item * S * D, keys, S, D, BLOCK_D, WIDE)
        v_tile = load(v + item * S * D, keys, S, D, BLOCK_D, WIDE)
        scores = score(
            q_tile, k_tile, scale, mask, m_row, m_key, rows, keys, L, S, HAS_MASK, IS_CAUSAL
        )
        higher = tl.maximum(high, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, rescale = tl.exp(scores - base[:, None]), tl.exp(high - base)
        sums = sums * rescale + tl.sum(weights, 1)
        context_tile = context_tile * rescale[:, None] + tl.dot(
            weights, v_tile, input_precision="ieee"
        )
        high = higher
    context_tile = context_tile / tl.where(sums == 0.0, 1.0, sums)[:, None]
    store(context + item * L * D, rows, L, context_tile, D, BLOCK_D)
    tl.store(highest + item * L + rows, high, mask=rows < L)
    tl.store(total + item * L + rows, sums, mask=rows < L)


@triton.jit
def query_kernel(
    q, k, v, scale, mask, m_item, m_head, m_row, m_key,
    upstream, mean, highest, total, grad_q, heads, L, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one tile of queries over all tiles of keys."""
    rows, item = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(0).to(tl.int64)
    mask += (item // heads) * m_item + (item % heads) * m_head
    q_tile = load(q + item * L * D, rows, L, D, BLOCK_D, WIDE)
    up_tile = load(upstream + item * L * D, rows, L, D, BLOCK_D, WIDE)
    row_statistics = statistics(mean, highest, total, item, rows, L)
    grad_tile = tl.zeros([TILE, BLOCK_D], WIDE)
    for start in range(0, S, TILE):
        keys = start + tl.arange(0, TILE)
        k_tile = load(k + item * S * D, keys, S, D, BLOCK_D, WIDE)
        v_tile = load(v + item * S * D, keys, S, D, BLOCK_D, WIDE)
        scores = score(
            q_tile, k_tile, scale, mask, m_row, m_key, rows, keys, L, S, HAS_MASK, IS_CAUSAL
        )
        _, grad_scores = gradients(scores, up_tile, v_tile, row_statistics)
        grad_tile += tl.dot(grad_scores, k_tile, input_precision="ieee")
    store(grad_q + item * L * D, rows, L, grad_tile * tl.load(scale), D, BLOCK_D)


@triton.jit
def key_kernel(
    q, k, v, scale, mask, m_item, m_head, m_row, m_key,
    upstream, mean, highest, total, grad_k, grad_v, heads, L, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of one tile of keys and values over all tiles of queries."""
    keys, item = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(0).to(tl.int64)
    mask += (item // heads) * m_item + (item % heads) * m_head
    k_tile = load(k + item * S * D, keys, S, D, BLOCK_D, WIDE)
    v_tile = load(v + item * S * D, keys, S, D, BLOCK_D, WIDE)
    grad_k_tile, grad_v_tile = tl.zeros([TILE, BLOCK_D], WIDE), tl.zeros([TILE, BLOCK_D], WIDE)
    for start in range(0, L, TILE):
        rows = start + tl.arange(0, TILE)
        q_tile = load(q + item * L * D, rows, L, D, BLOCK_D, WIDE)
        up_tile = load(upstream + item * L * D, rows, L, D, BLOCK_D, WIDE)
        row_statistics = statistics(mean, highest, total, item, rows, L)
        scores = score(
            q_tile, k_tile, scale, mask, m_row, m_key, rows, keys, L, S, HAS_MASK, IS_CAUSAL
        )
        weights, grad_scores = gradients(scores, up_tile, v_tile, row_statistics)
        grad_k_tile += tl.dot(tl.trans(grad_scores), q_tile, input_precision="ieee")
        grad_v_tile += tl.dot(tl.trans(weights), up_tile, input_precision="ieee")
    store(grad_k + item * S * D, keys, S, grad_k_tile * tl.load(scale), D, BLOCK_D)
    store(grad_v + item * S * D, keys, S, grad_v_tile, D, BLOCK_D)


class FusedAttention(torch.autograd.Function):
    """FlashAttention (Dao et al. 2022): the weights are never stored, forward or backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Return the context (B, H, L, d_k) of contiguous q (B, H, L, d_k), k and v (B, H, S, d_k).

        mask: boolean, broadcastable to (B, H, L, S), True = may attend.
        """
        batch, heads, queries, width = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        # As a tensor, because Triton takes numbers as float32.
        scale = torch.full((), 1 / math.sqrt(width), dtype=wide, device=q.device)
        context = torch.empty_like(q)
        highest = torch.empty(batch, heads, queries, dtype=wide, device=q.device)
        total = torch.empty_like(highest)
        allowed = q.new_ones((), dtype=torch.bool) if mask is None else mask
        allowed = allowed.expand(batch, heads, queries, k.shape[2]).view(torch.uint8)
        inputs = q, k, v, scale, allowed
        ctx.sizes = heads, queries, k.shape[2]
        block = max(16, triton.next_power_of_2(width))
        # A product takes 16 rows at least.
        tile = min(32, max(16, MAX_TILE_BYTES // (block * wide.itemsize)))
        ctx.options = {
            "D": width,
            "BLOCK_D": block,
            "TILE": tile,
            "num_stages": 1,
            "WIDE": {torch.float32: tl.float32, torch.float64: tl.float64}[wide],
            "HAS_MASK": mask is not None,
            "IS_CAUSAL": is_causal,
        }
        grid = (batch * heads, triton.cdiv(queries, ctx.options["TILE"]))
        forward_kernel[grid](
            *inputs, *allowed.stride(), context, highest, total, *ctx.sizes, **ctx.options
        )
        ctx.save_for_backward(*inputs, context, highest, total)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        *inputs, context, highest, total = ctx.saved_tensors
        q, k, v, _, allowed = inputs
        upstream = upstream.contiguous()
        mean = (upstream.to(total) * context).sum(-1)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        of_rows = upstream, mean, highest, total
        for kernel, length, results in (
            (query_kernel, q.shape[2], grads[:1]),
            (key_kernel, k.shape[2], grads[1:]),
        ):
            grid = (q.shape[0] * q.shape[1], triton.cdiv(length, ctx.options["TILE"]))
            kernel[grid](*inputs, *allowed.stride(), *of_rows, *results, *ctx.sizes, **ctx.options)
        return *grads, None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Return the context (B, H, L, d_k) of q (B, H, L, d_k), and k and v (B, H, S, d_k)."""
    if 0 in q.shape or 0 in k.shape:
        return q.new_zeros(q.shape)  # a grid of no programs
    context: Tensor = FusedAttention.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), mask, is_causal
    )
    return context


implementation = from_kernel(
    attend,
    name="triton",
    mask="keep",
    claims=Claims(
        returns_weights=False,
        composes={"autocast"},
        # Triton 3.6 does not compile products of float64 for an H100.
        dtypes=set(COMPUTE_DTYPES) - ({"float64"} if ON_GPU else set()),
        devices={"cuda"} if ON_GPU else {"cpu"},
        rounding=Rounding(
            scores_stored=False,
            weights_stored=False,
            softmax_stored=False,
            scaling_roundings=0,
            log_normaliser=False,
        ),
    ),
)
