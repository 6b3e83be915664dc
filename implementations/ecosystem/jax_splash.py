"""JAX's splash attention, the Pallas kernel for TPUs, in Pallas' interpreter."""

from __future__ import annotations

from functools import lru_cache

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from mha.implementations import from_kernel
from mha.implementations.ecosystem.arrays import numpy_of, tensor_of
from mha.spec import Claims, Lse, Rounding, Scores, Sizes, Window


@lru_cache(maxsize=128)
def kernel_of(heads, lengths, window, softcap, save_residuals):
    """Return the kernel of one item, (H, L, d), with its mask and options, for a batch."""
    mask = splash.FullMask(lengths)
    if window != (None, None):  # which LocalMask cannot express without a mask of constants
        mask = splash.LocalMask(lengths, window, offset=0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        save_residuals=save_residuals,
        interpret=True,
    )
    return jax.jit(jax.vmap(kernel, in_axes=(0, 0, 0, None, None)))


def attend(
    query,
    key,
    value,
    is_causal=False,
    scale=None,
    softcap=None,
    window_size=(None, None),
    sinks=None,
    return_lse=False,
):
    """The scores are not scaled: the query is, before."""
    left, right = window_size
    window = (left, 0 if is_causal else right)
    lengths = (query.shape[2], key.shape[2])
    kernel = kernel_of(query.shape[1], lengths, window, softcap or None, return_lse)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    returned = kernel(*map(numpy_of, (query, key, value)), None, numpy_of(sinks))
    if not return_lse:
        return tensor_of(returned), None
    context, (lse,) = returned
    return tensor_of(context), tensor_of(lse)


# Lengths are whole blocks of 128, and L = S: the softmax of a row without keys is, in the words of
# `LocalMask`, undefined. Masks of a case are arrays of NumPy that a kernel is built for, which all
# items share; they are left out, as are gradients, whose kernels take several times as long.
implementation = from_kernel(
    attend,
    name="jax-splash",
    mask=None,
    claims=Claims(
        masks=(),
        cross_attention=False,
        returns_weights=False,
        gradients=False,
        grouped_query=True,
        scores=Scores(
            scale="any",
            softcap="before_bias",
            window=Window("left_right", unbounded=None),
            sinks="float32",
        ),
        lse=Lse(empty="undefined"),
        dtypes={"float32", "bfloat16"},
        devices={"cpu"},
        sizes=Sizes(head_dims={64, 128}, length_multiple=128, max_length=256),
        rounding=Rounding(scaling_roundings=1),
    ),
)
