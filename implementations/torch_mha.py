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
    has_batch = query.ndim == 3
    axis = 1 if module.batch_first and has_batch else 0
    batch = query.shape[1 - axis] if has_batch else 1
    lengths = query.shape[axis], key.shape[axis]
    padding = None
    if mask is not None and mask.shape == (batch, 1, 1, lengths[1]):
        padding = to_convention(mask[:, 0, 0], "drop", query.dtype)
        mask = None
    hint = is_causal and mask is None and (padding is None or padding.dtype == torch.bool)
    if is_causal:
        mask = with_causal(mask, padding, causal_mask(*lengths, "top_left", query.device))
    if mask is not None:
        dropped = to_convention(mask, "drop", query.dtype)
        mask = in_two_or_three_axes(dropped, (batch, module.num_heads, *lengths))
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
    """Return the causal mask (L, S), joined to the mask if there is one.

    Beside a padding mask it is of the same dtype: the module warns about two different ones.
    """
    if mask is None and padding is not None and padding.dtype != torch.bool:
        return to_convention(causal, "additive", padding.dtype)
    return join_causal(mask, causal)


def in_two_or_three_axes(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a mask as the module takes it, (L, S) if it is for all items and heads.

    It is (B * H, L, S) otherwise.

    mask: broadcastable to `shape`, which is (B, H, L, S).
    """
    if mask.ndim <= 2 or mask.shape[:-2] == (1, 1):
        return mask.reshape(mask.shape[-2:]).expand(shape[-2:])
    return mask.expand(shape).flatten(0, 1)


def parameters(config: Config) -> dict[str, str]:
    """Return where the weights go: projections of equally wide inputs are one matrix."""
    places = {"w_qkv": "in_proj_weight"}
    if not config.key_width == config.value_width == config.d_model:
        places = {f"w_{role}": f"{role}_proj_weight" for role in "qkv"}
    places |= {"b_qkv": "in_proj_bias", "w_o": "out_proj"}
    if config.bias_kv:
        places |= {"extra_k": "bias_k", "extra_v": "bias_v"}
    return places


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
        # The masked softmax of the fast path stores exponentials.
        rounding=Rounding(log_normaliser=False),
    ),
)
