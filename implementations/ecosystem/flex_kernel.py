"""`flex_attention` without a compiler, with a mask and scores as its documentation has them."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mha.implementations import from_kernel
from mha.spec import Alibi, Claims, Lse, Rounding, Scores, Window
from mha.spec.claims import COMPUTE_DTYPES


def seen_from(mask, left, right):
    """Return the mask_mod of a window and a mask (B, H, L, S)."""

    def mask_mod(b, h, i, j):
        seen = (j >= i - left) & (j <= i + right)
        return seen if mask is None else seen & mask[b, h, i, j]

    return mask_mod


def score_with(softcap, slopes):
    """Return the score_mod of a softcap and of ALiBi."""

    def score_mod(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score + slopes[h] * (j - i)

    return score_mod


@torch.compiler.set_stance("force_eager")  # it would compile a part of itself for each shape
def attend(
    query,
    key,
    value,
    mask=None,
    is_causal=False,
    scale=None,
    softcap=0.0,
    window_size=(-1, -1),
    alibi_slopes=None,
):
    """Return the context (B, H, L, d_v) and the log-sum-exp (B, H, L)."""
    sizes = (*query.shape[:3], key.shape[2])
    if 0 in sizes:  # create_block_mask rejects them
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        return query.new_zeros(*query.shape[:3], value.shape[3]), lse
    left, right = (sum(sizes[2:]) if bound < 0 else bound for bound in window_size)
    seen = seen_from(mask, left, 0 if is_causal else right)
    blocks = create_block_mask(seen, *sizes, device=str(query.device))
    options = {"scale": scale, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    score_mod = score_with(softcap, alibi_slopes)
    context, aux = flex_attention(query, key, value, score_mod, blocks, **options)
    return context, aux.lse


# The mask is a function here, as its documentation has it; as an added mask it is judged in
# `mha.implementations.flex`. Eager, it has no backward pass on the CPU.
implementation = from_kernel(
    attend,
    name="flex_attention",
    mask="keep",
    mask_shape="b h l s",
    claims=Claims(
        returns_weights=False,
        gradients=False,
        grouped_query=True,
        value_width=True,
        scores=Scores(
            scale="any",
            softcap="before_bias",
            window=Window("left_right"),
            alibi=Alibi("signed"),
        ),
        lse=Lse(),
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False),
    ),
)
