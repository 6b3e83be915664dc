"""The signatures of FlashInfer's functions of one request: (L, H, d), or (H, d) in decoding.

Source: flashinfer/prefill.py and flashinfer/decode.py of flashinfer-ai/flashinfer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.spec import alibi_slopes
from readings.signatures.flash_attention import bound, unsupported
from readings.signatures.formula import (
    Attended,
    Conventions,
    alibi_bias,
    all_keys,
    attend,
    causal_keys,
    conventions,
    window_keys,
)


def of_flashinfer() -> Conventions:
    """Return the conventions of both functions."""
    return conventions(log_base=2.0, alibi="signed", cap="after_bias")


def request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Conventions,
    *,
    kv_layout: str,
    pos_encoding_mode: str,
    scale: float | None,
    window_left: int,
    cap: float | None,
    custom_mask: Tensor | None = None,
    causal: bool = False,
) -> Attended:
    """Return attention of one request, the context (1, L, H, d) and the log-sum-exp (1, L, H)."""
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(f"expected tensors of three axes, got {q.ndim} and {k.ndim}")
    q = q.transpose(0, 1).unsqueeze(0)
    if kv_layout == "NHD":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    k, v = k.unsqueeze(0), v.unsqueeze(0)
    allowed = all_keys(q, k) & window_keys(q, k, bound(window_left), None, how)
    if custom_mask is not None:
        if custom_mask.shape != allowed.shape:
            raise ValueError(f"expected a mask of {allowed.shape}, got {custom_mask.shape}")
        allowed = allowed & custom_mask
    elif causal:
        allowed = allowed & causal_keys(q, k, how)
    bias = None
    if pos_encoding_mode == "ALIBI":
        slopes = torch.tensor(alibi_slopes(q.shape[1]), dtype=torch.float32)
        bias = alibi_bias(q, k, slopes, how)
    elif pos_encoding_mode != "NONE":
        raise NotImplementedError(pos_encoding_mode)
    found = attend(q, k, v, how, scale=scale, cap=cap, bias=bias, allowed=allowed)
    return Attended(found.context.transpose(1, 2), found.lse.transpose(1, 2), found.weights)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """A mask takes the place of the causal flag."""
    unsupported(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, o_dtype=o_dtype)
    unsupported(packed_custom_mask=packed_custom_mask)
    found = request(
        q,
        k,
        v,
        of_flashinfer(),
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        scale=sm_scale,
        window_left=window_left,
        cap=logits_soft_cap,
        custom_mask=custom_mask,
        causal=causal,
    )
    return (found.context[0], found.lse[0]) if return_lse else found.context[0]


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One query of each head, (H, d); the log-sum-exp is (H,)."""
    found = request(
        q.unsqueeze(0),
        k,
        v,
        of_flashinfer(),
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        scale=sm_scale,
        window_left=window_left,
        cap=logits_soft_cap,
    )
    return (found.context[0, 0], found.lse[0, 0]) if return_lse else found.context[0, 0]
