"""The definition of a kernel: a loop over items and heads, with every option."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.adapters.kernel import from_kernel
from mha.spec import Alibi, Claims, Lse, Rounding, Scores, Window
from mha.spec.claims import COMPUTE_DTYPES


def attend(  # noqa: PLR0913  what a kernel of today takes
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the context (B, H, L, d_v), and on request the log-sum-exp (B, H, L).

    q: (B, H, L, d_k).
    k: (B, H_kv, S, d_k).
    v: (B, H_kv, S, d_v).
    mask: boolean (True = may attend) or added to the scores, broadcastable to (B, H, L, S).
    window_size: how many keys before and after its own place a query sees; -1 for all.
    attention_chunk: how many places a chunk has, beyond which no query sees a key; 0 for no chunks.
    alibi_slopes: m of -m |t - p|, (H,) or (B, H).
    sinks: (H,), whose exponentials are added to the denominators.
    seqused_q, seqused_k: (B,), how many queries and keys each item has.
    """
    batch, heads, length, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mask = torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask
    slopes = q.new_zeros(heads) if alibi_slopes is None else alibi_slopes
    sinks = q.new_full((heads,), -math.inf) if sinks is None else sinks
    contexts = q.new_zeros(batch, heads, length, v.shape[-1])
    sums = q.new_full((batch, heads, length), -math.inf, dtype=wide)
    for b in range(batch):
        queries = length if seqused_q is None else int(seqused_q[b])
        keys = k.shape[2] if seqused_k is None else int(seqused_k[b])
        p, t = places(queries, keys, q.device)
        seen = seen_from(p, t, causal, window_size, attention_chunk)
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            own_k, own_v = k[b, shared, :keys].to(wide), v[b, shared, :keys].to(wide)
            s = scale * (q[b, h, :queries].to(wide) @ own_k.mT)
            s = capped(s, softcap) - slopes.expand(batch, heads)[b, h] * (t - p).abs()
            s = masked(s, mask.expand(batch, heads, length, k.shape[2])[b, h])
            s = s.masked_fill(~seen, -math.inf)
            found = of_scores(s, own_v, sinks[h].to(wide))
            contexts[b, h, :queries], sums[b, h, :queries] = found
    return (contexts, sums) if return_lse else contexts


def places(queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places of the queries among the keys, (L, 1), and those of the keys, (S,)."""
    of_queries = torch.arange(queries, device=device).unsqueeze(1) + keys - queries
    return of_queries, torch.arange(keys, device=device)


def seen_from(
    p: Tensor, t: Tensor, causal: bool, window_size: tuple[int, int], attention_chunk: int
) -> Tensor:
    """Return which keys at the places t a query at p sees, boolean (L, S)."""
    left, right = window_size
    seen = (t <= p) | (not causal)
    if left >= 0:
        seen = seen & (t >= p - left)
    if right >= 0:
        seen = seen & (t <= p + right)
    if attention_chunk:
        # Rounded down, also for queries before the first key.
        seen = seen & (t // attention_chunk == p.div(attention_chunk, rounding_mode="floor"))
    return seen


def capped(s: Tensor, softcap: float) -> Tensor:
    """Return c tanh(s / c), or the scores themselves for a cap c of 0."""
    return softcap * (s / softcap).tanh() if softcap else s


def masked(s: Tensor, mask: Tensor) -> Tensor:
    """Return scores (L, S) with a mask, boolean or added, of which they are the first part."""
    own = mask[: s.shape[0], : s.shape[1]]
    if own.dtype == torch.bool:
        return s.masked_fill(~own, -math.inf)
    hidden = own == -math.inf
    return (s + own.masked_fill(hidden, 0.0)).masked_fill(hidden, -math.inf)


def of_scores(s: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contexts (L, d_v) of scores (L, S), and their log-sum-exps (L,).

    A query without a key gets zeros and -infinity. What is hidden from every query is not read.
    """
    v = v.masked_fill((s == -math.inf).all(0).unsqueeze(1), 0.0)
    # One more key, with the score of the sink and a value of zeros.
    s, v = torch.cat([s, sink.expand(len(s), 1)], 1), F.pad(v, (0, 0, 0, 1))
    empty = (s == -math.inf).all(1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    weights, lse = s.softmax(1).masked_fill(empty, 0.0), s.logsumexp(1)
    return weights @ v, lse.masked_fill(empty[:, 0], -math.inf)


implementation = from_kernel(
    attend,
    name="kernel_loop",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        causal="bottom_right",
        returns_weights=False,
        grouped_query=True,
        value_width=True,
        scores=Scores(
            scale="any",
            window=Window("left_right"),
            chunk=True,
            softcap="before_bias",
            sinks="float32",
            alibi=Alibi("symmetric", per_item=True),
        ),
        lse=Lse(gradient=True),
        lengths="both",
        repeats="both",
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            scores_stored=False, weights_stored=False, softmax_stored=False, scaling_roundings=0
        ),
    ),
)
