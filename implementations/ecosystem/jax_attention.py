"""`jax.nn.dot_product_attention`, as XLA compiles it for the CPU."""

from __future__ import annotations

from functools import partial

import jax
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.ecosystem.arrays import differentiable, numpy_of, tensor_of
from mha.spec import Claims, Lse, Rounding, Scores, Window

# Compiled once for all that has the same shapes, where JAX would compile each step for itself.
OPTIONS = ("scale", "is_causal", "local_window_size", "return_residual")
compiled = jax.jit(jax.nn.dot_product_attention, static_argnames=OPTIONS)


def function_for(query, key):
    """Return what is called: compiled, it raises in bfloat16 where products are of vectors at most.

    docs/ecosystem/jax_NUM-1.py shows it.
    """
    batch, queries, heads, width = query.shape
    are_vectors = [queries, key.shape[1], width].count(1) > 1
    if query.dtype == torch.bfloat16 and batch * heads == 1 and are_vectors:
        return jax.nn.dot_product_attention
    return compiled


def by_jax(function, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a function of JAX's arrays, a tuple, with its gradients."""
    if not any(x.requires_grad for x in inputs):
        return tuple(map(tensor_of, function(*map(numpy_of, inputs))))

    def with_pullback(*tensors: Tensor):
        results, pullback = jax.vjp(function, *map(numpy_of, tensors))

        def pull(*gradients: Tensor):
            return tuple(map(tensor_of, pullback(tuple(map(numpy_of, gradients)))))

        return tuple(map(tensor_of, results)), pull

    return differentiable(with_pullback, *inputs)


def attend(
    query,
    key,
    value,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
):
    """Return the context and the residual. A mask that is added is a `bias`, and differentiated."""
    inputs = [query, key, value]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    if mask is not None and mask.is_floating_point():
        # With a bias of -infinity, an empty row is NaN or, beside the causal flag, sees what that
        # hides, whose scores become 0.7 times the lowest number.
        hidden = mask == -torch.inf
        inputs.append(mask.masked_fill(hidden, 0.0))
        mask = ~hidden
    if local_window_size is not None:  # no number stands for a side without a bound
        longest = query.shape[1] + key.shape[1]
        local_window_size = tuple(longest if w is None else w for w in local_window_size)
    function = partial(
        function_for(query, key),
        mask=numpy_of(mask),
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=numpy_of(query_seq_lengths),
        key_value_seq_lengths=numpy_of(key_value_seq_lengths),
        local_window_size=local_window_size,
        return_residual=True,
    )
    return by_jax(function, *inputs)


# Not claimed: values of another width, which it refuses; float64, for which JAX needs a switch of
# the whole process; gradients of the residual, which it stops. Of the residual of a row without a
# key, nothing is documented.
implementation = from_kernel(
    attend,
    name="jax",
    layout="b l h d",
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        empty_row="uniform",
        returns_weights=False,
        grouped_query=True,
        lengths="both",
        scores=Scores(scale="any", window=Window("left_right", unbounded=None)),
        lse=Lse(layout="b l h", dtype="input", empty="undefined"),
        dtypes={"float32", "bfloat16", "float16"},
        devices={"cpu"},
        rounding=Rounding(scores_stored=False, softmax_stored=False, log_normaliser=False),
    ),
)
