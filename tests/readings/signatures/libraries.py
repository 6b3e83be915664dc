"""The signatures of PyTorch, transformers, JAX, ONNX, MLX and ONNX Runtime.

Sources: torch 2.13, transformers 5.24, jax 0.10.2 and onnx 1.23.2, their documentation; mlx 0.32.4;
com.microsoft.GroupQueryAttention of onnxruntime 1.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from readings.signatures.flash_attention import bound, unsupported
from readings.signatures.formula import (
    all_keys,
    attend,
    causal_keys,
    conventions,
    window_keys,
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional: (B, H, L, d); a mask and the causal flag exclude each other."""
    how = conventions(causal="top_left")
    unsupported(dropout_p=dropout_p or None)
    if attn_mask is not None and is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise RuntimeError("the numbers of heads differ: set enable_gqa=True")
    allowed = causal_keys(query, key, how) if is_causal else all_keys(query, key)
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & (attn_mask == how.keep)
    elif attn_mask is not None:
        bias = attn_mask
    return attend(query, key, value, how, scale=scale, bias=bias, allowed=allowed).context


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention: (B, H, L, d)."""
    unsupported(score_mod=score_mod, block_mask=block_mask, return_aux=return_aux)
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ValueError("the numbers of heads differ: set enable_gqa=True")
    found = attend(query, key, value, conventions(), scale=scale)
    return (found.context, found.lse) if return_lse else found.context


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """transformers, gemma2: (B, H, L, d), but its context is (B, L, H, d)."""
    unsupported(dropout=dropout or None)
    groups: int = module.num_key_value_groups  # type: ignore[assignment]  # of a model
    k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
    how = conventions()
    found = attend(query, k, v, how, scale=scaling, cap=softcap, bias=attention_mask)
    return found.context.transpose(1, 2).contiguous(), found.weights


def sdpa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers, sdpa: causal where the module is, without a mask, of more than one query."""
    if kwargs.get("softcap") is not None:
        raise ValueError("`sdpa` attention does not support `softcap`")
    unsupported(position_bias=position_bias)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    causal = causal and query.shape[2] > 1 and attention_mask is None
    context = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True
    )
    return context.transpose(1, 2).contiguous(), None


def flex_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """transformers, flex: sinks are added after it, from the log-sum-exp."""
    unsupported(position_bias=position_bias, dropout=kwargs.get("dropout") or None)
    how = conventions()
    found = attend(
        query, key, value, how, scale=scaling, cap=softcap, bias=attention_mask, sinks=s_aux
    )
    return found.context.transpose(1, 2).contiguous(), found.lse.to(value.dtype)


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Tensor | None = None,
    key_value_seq_lengths: Tensor | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn: (B, L, H, d), with a log-sum-exp (B, L, H)."""
    how = conventions(causal="top_left", window="top_left")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    allowed = all_keys(q, k)
    if local_window_size is not None:
        pair = local_window_size
        left, right = pair if isinstance(pair, tuple) else (pair, pair)
        allowed = allowed & window_keys(q, k, left, right, how)
    if is_causal:
        allowed = allowed & causal_keys(q, k, how)
    if mask is not None:
        allowed = allowed & (mask == how.keep)
    if key_value_seq_lengths is not None:
        allowed = allowed & (torch.arange(k.shape[2]) < key_value_seq_lengths.view(-1, 1, 1, 1))
    if query_seq_lengths is not None:
        rows = torch.arange(q.shape[2]).unsqueeze(1)
        allowed = allowed & (rows < query_seq_lengths.view(-1, 1, 1, 1))
    k, v = (without_hidden(x, key_value_seq_lengths) for x in (k, v))
    found = attend(q, k, v, how, scale=scale, bias=bias, allowed=allowed)
    context = found.context.transpose(1, 2)
    return (context, found.lse.transpose(1, 2).to(k.dtype)) if return_residual else context


def without_hidden(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return keys or values (B, H, S, d) with zeros after each length."""
    if lengths is None:
        return x
    after = torch.arange(x.shape[2]) >= lengths.view(-1, 1)
    return x.masked_fill(after[:, None, :, None], 0.0)


def onnx_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softmax_precision: int | None = None,
    softcap: float | None = None,
    qk_matmul_output_mode: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ONNX Attention-25 of four axes: (B, H, L, d); it returns the scores as its fourth result."""
    how = conventions(causal="top_left", window="top_left")
    unsupported(past_key=past_key, past_value=past_value)
    allowed = window_keys(Q, K, bound(left_window_size), bound(right_window_size), how)
    if is_causal:
        allowed = allowed & causal_keys(Q, K, how)
    if nonpad_kv_seqlen is not None:
        allowed = _of_lengths(Q, K, nonpad_kv_seqlen, is_causal=is_causal)
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        bias = attn_mask
    K, V = (without_hidden(x, nonpad_kv_seqlen) for x in (K, V))
    found = attend(Q, K, V, how, scale=scale, cap=softcap, bias=bias, allowed=allowed)
    return found.context, K, V, found.weights


def _of_lengths(q: Tensor, k: Tensor, lengths: Tensor, *, is_causal: bool) -> Tensor:
    """Return which keys are seen where places count from the lengths, (B, 1, L, S)."""
    of_items = lengths.view(-1, 1, 1, 1)
    keys, queries = torch.arange(k.shape[2]), torch.arange(q.shape[2]).unsqueeze(1)
    seen = keys < of_items
    if is_causal:
        seen = seen & (keys <= queries + of_items - q.shape[2])
    return seen


def mlx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: str | Tensor | None = None,
    sinks: Tensor | None = None,
    force_fused: bool = False,
    stream: Any = None,
) -> Tensor:
    """mlx.core.fast: (B, H, L, d); the mask may be the word "causal"."""
    how = conventions()
    allowed, bias = all_keys(q, k), None
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"unknown mask {mask!r}")
        allowed = causal_keys(q, k, how)
    elif mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask
    return attend(q, k, v, how, scale=scale, bias=bias, allowed=allowed, sinks=sinks).context


def group_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    total_sequence_length: int | None = None,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float = 0.0,
    local_window_size: int = -1,
    do_rotary: bool = False,
    rotary_interleaved: bool = False,
    smooth_softmax: bool = False,
) -> Tensor:
    """com.microsoft, always causal: heads side by side, (B, L, H * d)."""
    how = conventions()
    unsupported(past_key=past_key, past_value=past_value, seqlens_k=seqlens_k)
    unsupported(cos_cache=cos_cache, sin_cache=sin_cache, smooth=smooth_softmax or None)
    q = query.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    k, v = (x.unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for x in (key, value))
    left = None if local_window_size < 0 else local_window_size - 1
    allowed = causal_keys(q, k, how) & window_keys(q, k, left, None, how)
    found = attend(
        q,
        k,
        v,
        how,
        scale=scale,
        cap=softcap,
        bias=attention_bias,
        allowed=allowed,
        sinks=head_sink,
    )
    return found.context.transpose(1, 2).flatten(2)
