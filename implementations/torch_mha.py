"""`torch.nn.MultiheadAttention`, called as its users call it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, to_convention


def call(
    module: nn.MultiheadAttention,
    /,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> Output:
    """Give each mask to the argument that is meant for it.

    A mask (B, 1, 1, S) is padding, (B, S) there; one that is the same for all items and heads is (L, S); any other is
    (B * H, L, S). `is_causal` is a hint there, that `attn_mask` is the causal mask: both are given, where it is true.
    """
    padding, hint = None, False
    axis = 1 if module.batch_first and query.ndim == 3 else 0
    batch = query.shape[1 - axis] if query.ndim == 3 else 1
    queries, keys = query.shape[axis], key.shape[axis]
    if mask is not None and mask.ndim == 4 and mask.shape == (batch, 1, 1, keys):
        padding, mask = to_convention(mask[:, 0, 0], "drop", query.dtype), None
    if is_causal:
        causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.masked_fill(~causal, float("-inf"))
        elif padding is not None and padding.dtype != torch.bool:
            mask = to_convention(causal, "additive", padding.dtype)  # two masks of one dtype, as it asks for
        else:
            hint, mask = mask is None, causal if mask is None else mask & causal
    if mask is not None:
        mask = to_convention(mask, "drop", query.dtype)
        scores = (batch, module.num_heads, queries, keys)
        shared = mask.ndim <= 2 or mask.shape[:-2] == (1, 1)
        mask = mask.reshape(mask.shape[-2:]).expand(scores[-2:]) if shared else mask.expand(scores).flatten(0, 1)
    output, weights = module(
        query,
        key,
        value,
        key_padding_mask=padding,
        need_weights=need_weights,
        attn_mask=mask,
        average_attn_weights=False,
        is_causal=hint,
    )
    return Output(output, weights)


def parameters(config: Config) -> dict[str, str]:
    """Return where its weights are: the three projections are one matrix if their inputs are equally wide."""
    stacked = config.key_width == config.value_width == config.d_model
    separate = {f"w_{role}": f"{role}_proj_weight" for role in "qkv"}
    projections = {"w_qkv": "in_proj_weight"} if stacked else separate
    extra = {"extra_k": "bias_k", "extra_v": "bias_v"} if config.bias_kv else {}
    return projections | {"b_qkv": "in_proj_bias", "w_o": "out_proj"} | extra


implementation = from_module(
    partial(nn.MultiheadAttention, batch_first=True),
    name="torch_mha",
    parameters=parameters,
    call=call,
    claims=Claims(
        masks={"bool", "float"},
        dropout=True,
        kv_widths=True,
        extras={"bias_kv", "zero_key", "length_first", "unbatched"},
        composes={"compile", "export", "func", "autocast"},
        dtypes={"float64", "float32", "bfloat16", "float16"},
        rounding=Rounding(softmax_stored=False, log_normaliser=False),
    ),
)
