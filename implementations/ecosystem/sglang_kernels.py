"""SGLang's Triton kernels for prefill and decoding, and its merge, in Triton's interpreter."""

from __future__ import annotations

import torch

from mha.implementations import from_kernel, from_merge
from mha.implementations.ecosystem.sglang_files import load
from mha.spec import Claims, Lse, Rounding, Scores, Window

DECODE, EXTEND, PREFILL = map(load, ("decode_attention", "extend_attention", "prefill_attention"))


def offsets_of(lengths):
    return torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()


def extended(query, key, value, is_causal, lengths, cached, cache, **options):
    """Return what `extend_attention_fwd` gives for new tokens (T, H, d) of sequences of lengths.

    cached: how many tokens of each sequence are in the cache, (slots, H, d) for keys and values.
    cache: keys, values, and the slots of all that are cached, one sequence after another.
    """
    context = query.new_empty(*query.shape[:2], value.shape[2])
    EXTEND.extend_attention_fwd(
        q_extend=query,
        k_extend=key,
        v_extend=value,
        o_extend=context,
        k_buffer=cache[0],
        v_buffer=cache[1],
        qo_indptr=offsets_of(lengths),
        kv_indptr=offsets_of(cached),
        kv_indices=cache[2],
        custom_mask=None,
        is_causal=is_causal,
        mask_indptr=None,
        max_len_extend=int(max(lengths, default=0)),
        k_scale=1.0,
        v_scale=1.0,
        **options,
    )
    return context


def extend(
    query,
    key,
    value,
    cu_seqlens,
    sm_scale=None,
    logit_cap=0.0,
    sliding_window_size=-1,
    sinks=None,
    return_lse=False,
):
    """`extend_attention_fwd` without a cache; a window is symmetric without the causal flag."""
    lengths = cu_seqlens.diff()
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    none = (key, value, torch.zeros(1, dtype=torch.int64))
    options = {"sm_scale": sm_scale, "logit_cap": logit_cap, "sinks": sinks, "lse_extend": lse}
    options["sliding_window_size"] = sliding_window_size
    return extended(query, key, value, True, lengths, 0 * lengths, none, **options), lse


def extend_cache(query, key, value, cu_seqlens, sm_scale=None, logit_cap=0.0, sinks=None):
    """`extend_attention_fwd` in two calls: the second half of each sequence finds the first one in
    the cache.
    """
    lengths = cu_seqlens.diff()
    sizes = torch.stack([lengths // 2, lengths - lengths // 2], 1).flatten().tolist()
    halves = torch.arange(len(query)).split(sizes)
    first, second = torch.cat(halves[::2]), torch.cat(halves[1::2])
    half, cache = lengths // 2, (key, value, first)
    context = query.new_empty(*query.shape[:2], value.shape[2])
    options = {"sm_scale": sm_scale, "logit_cap": logit_cap, "sinks": sinks}
    for rows, own, cached in ((first, half, 0 * half), (second, lengths - half, half)):
        tokens = [x[rows] for x in (query, key, value)]
        context[rows] = extended(*tokens, True, own, cached, cache, **options)
    return context


def prefill(query, key, value, cu_seqlens, max_seqlen, causal=True, sm_scale=None):
    """`context_attention_fwd` of packed tokens (T, H, d)."""
    context = torch.empty_like(query)
    places = (cu_seqlens[:-1], cu_seqlens.diff(), max_seqlen)
    PREFILL.context_attention_fwd(query, key, value, context, *places, causal, sm_scale)
    return context


def decode(query, key, value, is_causal=False, sm_scale=None, logit_cap=0.0, sinks=None):
    """`decode_attention_fwd`: each query (B, L, H, d) is a request on the keys of its item."""
    (batch, length, heads, width), keys, splits = query.shape, key.shape[1], 2
    requests = batch * length
    counts = torch.full((length,), keys)
    if is_causal:
        counts = (torch.arange(length) + keys - length + 1).clamp(min=0)
    starts = torch.arange(batch).repeat_interleave(length) * keys
    slots = [torch.arange(n) + s for n, s in zip(counts.repeat(batch), starts, strict=True)]
    context = query.new_empty(requests, heads, value.shape[3])
    partial = torch.empty(requests, heads, splits, value.shape[3] + 1)
    scale = width**-0.5 if sm_scale is None else sm_scale
    DECODE.decode_attention_fwd(
        *(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), context),
        *(offsets_of(counts.repeat(batch)), torch.cat([torch.zeros(0, dtype=torch.int64), *slots])),
        *(partial[..., :-1].contiguous(), partial[..., -1].contiguous()),
        *(torch.full((requests,), splits, dtype=torch.int32), splits, scale, 1.0, 1.0),
        logit_cap=logit_cap,
        sinks=sinks,
    )
    return context.unflatten(0, (batch, length))


# The kernels have no backward pass. In bfloat16, the interpreter multiplies the bits of the numbers
# (triton-lang/triton#11584).
CLAIMS = {
    "masks": (),
    "causal": "bottom_right",
    "returns_weights": False,
    "gradients": False,
    "grouped_query": True,
    "dtypes": {"float32", "float16"},
}
PACKED = {"layout": "t h d", "mask": None}
# As many keys as queries, of which a sequence is made.
OF_TOKENS = CLAIMS | {"cross_attention": False}
OPTIONS = {"scale": "any", "softcap": "before_bias", "sinks": "float32"}
extend_attention = from_kernel(
    extend,
    name="sglang-extend",
    claims=Claims(
        **OF_TOKENS,
        always_causal=True,
        value_width=True,
        scores=Scores(**OPTIONS, window=Window("left")),
        lse=Lse(layout="t h"),
    ),
    **PACKED,
)
extend_on_cache = from_kernel(
    extend_cache,
    name="sglang-extend-cache",
    claims=Claims(**OF_TOKENS, always_causal=True, value_width=True, scores=Scores(**OPTIONS)),
    **PACKED,
)
context_attention = from_kernel(
    prefill,
    name="sglang-prefill",
    claims=Claims(**OF_TOKENS, scores=Scores(scale="any")),
    **PACKED,
)
decode_attention = from_kernel(
    decode,
    name="sglang-decode",
    layout="b l h d",
    mask=None,
    claims=Claims(**CLAIMS, value_width=True, scores=Scores(**OPTIONS)),
)
merge_state = from_merge(
    load("merge_state").merge_state_triton,
    name="sglang-merge-state",
    layout="(b l) h d",
    lse=Lse(layout="t h"),
    claims=Claims(
        masks={"bool", "float"},
        empty_row="nan",  # of two parts without a key, which LSE-2 is about
        gradients=False,
        dtypes={"float32", "bfloat16", "float16"},
        rounding=Rounding(softmax_stored=False, merges=4, reductions=4),
    ),
)
