"""`torch.nn.MultiheadAttention`, called as its users call it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, causal_mask, join_causal, to_convention
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


def call(  # noqa: PLR0913  the arguments of an attention
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
    """Call the module with the mask as the argument that is meant for it; see `mha.spec.Attention`.

    A mask (B, 1, 1, S) is `key_padding_mask` (B, S), and any other one is `attn_mask`. For the
    module, `is_causal` is a hint that `attn_mask` is the causal mask: where that is so, both are
    passed.
    """
    axis = 1 if module.batch_first and query.ndim == 3 else 0
    batch = query.shape[1 - axis] if query.ndim == 3 else 1
    lengths, padding = (query.shape[axis], key.shape[axis]), None
    if mask is not None and mask.shape == (batch, 1, 1, lengths[1]):
        padding, mask = to_convention(mask[:, 0, 0], "drop", query.dtype), None
    hint = is_causal and mask is None and (padding is None or padding.dtype == torch.bool)
    if is_causal:
        mask = with_causal(mask, padding, causal_mask(*lengths, "top_left", query.device))
    if mask is not None:
        mask = in_two_or_three_axes(
            to_convention(mask, "drop", query.dtype), (batch, module.num_heads, *lengths)
        )
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


def with_causal(mask: Tensor | None, padding: Tensor | None, causal: Tensor) -> Tensor:
    """Return the causal mask (L, S), joined to the mask if there is one, in a dtype that fits the
    padding mask.
    """
    if mask is None and padding is not None and padding.dtype != torch.bool:
        return to_convention(
            causal, "additive", padding.dtype
        )  # the module warns about two masks of different dtypes
    return join_causal(mask, causal)


def in_two_or_three_axes(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a mask as the module takes it: (L, S) if all items and heads share it, else (B * H, L,
    S).

    mask: broadcastable to `shape`, which is (B, H, L, S).
    """
    shared = mask.ndim <= 2 or mask.shape[:-2] == (1, 1)
    return (
        mask.reshape(mask.shape[-2:]).expand(shape[-2:])
        if shared
        else mask.expand(shape).flatten(0, 1)
    )


def parameters(config: Config) -> dict[str, str]:
    """Return where the weights go: the three projections are one matrix if their inputs are equally
    wide.
    """
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
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(
            log_normaliser=False
        ),  # the masked softmax of the fast path stores exponentials
    ),
)
