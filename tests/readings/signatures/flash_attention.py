"""The signatures of flash-attention 2, 3 and 4: (B, L, H, d), or packed tokens (T, H, d).

Sources: flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py of Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from readings.signatures.formula import (
    Attended,
    Conventions,
    alibi_bias,
    all_keys,
    attend,
    causal_keys,
    conventions,
    distances,
    window_keys,
)

Pair = tuple[int, int]


def unsupported(**options: Any) -> None:
    """Raise NotImplementedError for an option that is given."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported")


def bound(number: int | None) -> int | None:
    """Return a bound of a window; negative numbers stand for none."""
    return None if number is None or number < 0 else number


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Conventions,
    *,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
    lengths: Tensor | None = None,
) -> Attended:
    """Return attention of (B, L, H, d), the context in the same axes."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    allowed = all_keys(q, k) & window_keys(q, k, *window, how)
    if causal:
        allowed = allowed & causal_keys(q, k, how)
    if chunk:
        places = distances(q, k, how.window)
        keys = torch.arange(k.shape[2])
        allowed = allowed & (keys // chunk == (keys - places).div(chunk, rounding_mode="floor"))
    bias = None if slopes is None else alibi_bias(q, k, slopes, how)
    if lengths is not None:
        return _of_items(q, k, v, how, lengths, (scale, causal, window, softcap, slopes))
    found = attend(q, k, v, how, scale=scale, cap=softcap, bias=bias, allowed=allowed, sinks=sinks)
    return Attended(found.context.transpose(1, 2), found.lse, found.weights)


def _of_items(
    q: Tensor, k: Tensor, v: Tensor, how: Conventions, lengths: Tensor, options: tuple[Any, ...]
) -> Attended:
    """Return what each item gives with its own number of keys."""
    scale, causal, window, softcap, slopes = options
    parts = []
    for item, length in enumerate(lengths.tolist()):
        own = [x[item : item + 1] for x in (q, k[:, :, :length], v[:, :, :length])]
        of_item = slopes[item : item + 1] if slopes is not None and slopes.ndim > 1 else slopes
        axes = [x.transpose(1, 2) for x in own]
        settings = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
        parts.append(flash(*axes, how, **settings, slopes=of_item))
    context = torch.cat([part.context for part in parts])
    lse = torch.cat([part.lse for part in parts])
    return Attended(context, lse, parts[0].weights)


def of_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, run: Callable[..., Attended]
) -> tuple[Tensor, Tensor]:
    """Return the context (T, H, d) and the log-sum-exp (H, T) of packed sequences."""
    context = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.zeros(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for item in range(len(cu_q) - 1):
        rows = slice(int(cu_q[item]), int(cu_q[item + 1]))
        keys = slice(int(cu_k[item]), int(cu_k[item + 1]))
        part = run(q[rows].unsqueeze(0), k[keys].unsqueeze(0), v[keys].unsqueeze(0))
        context[rows] = part.context[0]
        lse[:, rows] = part.lse[0]
    return context, lse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attention 2."""
    unsupported(dropout_p=dropout_p or None)
    found = flash(
        q,
        k,
        v,
        conventions(),
        scale=softmax_scale,
        causal=causal,
        window=(bound(window_size[0]), bound(window_size[1])),
        softcap=softcap,
        slopes=alibi_slopes,
    )
    return (found.context, found.lse, None) if return_attn_probs else found.context


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attention 2 of stacked heads, (B, L, 3, H, d)."""
    return flash_attn_func(
        *qkv.unbind(2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attention 2 of stacked keys and values, (B, S, 2, H, d)."""
    return flash_attn_func(
        q,
        *kv.unbind(2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash-attention 2 of packed sequences."""
    unsupported(dropout_p=dropout_p or None, block_table=block_table)

    def run(*inputs: Tensor) -> Attended:
        return flash(
            *inputs,
            conventions(),
            scale=softmax_scale,
            causal=causal,
            window=(bound(window_size[0]), bound(window_size[1])),
            softcap=softcap,
            slopes=alibi_slopes,
        )

    context, lse = of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, run)
    return (context, lse, None) if return_attn_probs else context


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash-attention 2 with a cache of keys and values."""
    unsupported(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    unsupported(
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table
    )
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(q),), cache_seqlens)
    found = flash(
        q,
        k_cache,
        v_cache,
        conventions(),
        scale=softmax_scale,
        causal=causal,
        window=(bound(window_size[0]), bound(window_size[1])),
        softcap=softcap,
        slopes=alibi_slopes,
        lengths=cache_seqlens,
    )
    return (found.context, found.lse) if return_softmax_lse else found.context


def flash_attn_3_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attention 3."""
    unsupported(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    found = flash(
        q,
        k,
        v,
        conventions(),
        scale=softmax_scale,
        causal=causal,
        window=(bound(window_size[0]), bound(window_size[1])),
        softcap=softcap,
        chunk=attention_chunk,
    )
    return (found.context, found.lse) if return_attn_probs else found.context


def flash_attn_4_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Any] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """flash-attention 4: a negative bound of a window is an offset, and None is no bound."""
    unsupported(qv=qv, gather_kv_indices=gather_kv_indices, aux_tensors=aux_tensors)
    unsupported(score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    unsupported(block_sparse_tensors=block_sparse_tensors)
    unsupported(block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    found = flash(
        q,
        k,
        v,
        conventions(),
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=learnable_sink,
    )
    return found.context, found.lse if return_lse else None
