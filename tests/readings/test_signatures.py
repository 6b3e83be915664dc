"""Published signatures of kernels: each is read as it is, and with one convention changed.

docs/kernel-signatures.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from mha.implementations import from_kernel, resolve
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Lse, Scores, Weights, Window
from readings.signatures import flash_attention as flash
from readings.signatures import flashinfer, libraries
from readings.signatures.formula import changed
from support.folders import ROOT

Function = Callable[..., Any]
BOTTOM_RIGHT = {"causal": "aligned bottom_right"}
TOP_LEFT = {"causal": "aligned top_left"}
SCALE = {"scale": "multiplies the scores; any number"}
CAP = {"softcap": "before any mask"}
INCLUSIVE = {"window": "both inclusive; -1 for no bound"}
OWN_SLOPES = {"alibi": "of each item and head add -m |t - p|"}
LSE = {"lse": "the natural one, of shape (b, h, l); it can be differentiated"}
FLASH = SCALE | CAP | INCLUSIVE
KEYS = {"sizes": "fewer key heads"}
SINKS = {"sinks": "in its denominators, in float32"}
ADDED = {"mask": "added to the scores"}
TWO_LAYOUTS = {"inputs": "of shape (b, h, l, d), the context (b, l, h, d)"}

# Every parameter of these is as published; what is read without a declaration.
PUBLISHED: dict[Function, dict[str, str]] = {
    flash.flash_attn_func: BOTTOM_RIGHT | FLASH | OWN_SLOPES | LSE | KEYS,
    flash.flash_attn_qkvpacked_func: FLASH | OWN_SLOPES | LSE,
    flash.flash_attn_kvpacked_func: BOTTOM_RIGHT | FLASH | OWN_SLOPES | LSE | KEYS,
    flash.flash_attn_varlen_func: BOTTOM_RIGHT
    | FLASH
    | KEYS
    | {
        "alibi": "of each head add -m |t - p|",
        "packed": "tokens after the last sequence get rows of zeros",
        "lse": "the natural one, of shape (h, t)",
        "not covered here": "block_table",
    },
    flash.flash_attn_with_kvcache: BOTTOM_RIGHT
    | FLASH
    | OWN_SLOPES
    | LSE
    | KEYS
    | {
        "inputs": "q, k_cache, v_cache, of shape (b, l, h, d)",
        "items": "cache_seqlens: of the keys of each item",
        "bits": 'claimed: batch_invariant={"num_splits": 1}',
    },
    flash.flash_attn_3_func: BOTTOM_RIGHT
    | FLASH
    | LSE
    | KEYS
    | {
        "chunk": "attention_chunk: a query sees the keys of its own chunk",
        "not covered here": "qv, q_descale, k_descale, v_descale, pack_gqa, sm_margin",
    },
    flash.flash_attn_4_func: BOTTOM_RIGHT
    | SCALE
    | CAP
    | SINKS
    | LSE
    | KEYS
    | {"window": "both inclusive; None for no bound", "not covered here": "mask_mod"},
    flashinfer.single_prefill_with_kv_cache: BOTTOM_RIGHT
    | SCALE
    | {
        "inputs": "of shape (l, h, d)",
        "mask": "custom_mask: True = may attend, of shape 'l s'",
        "softcap": "after a float mask is added",
        "window": "keys before its own; -1 for no bound",
        "alibi": "the usual slopes m of heads add m (t - p)",
        "lse": "to base 2, of shape (b, l, h)",
    },
    flashinfer.single_decode_with_kv_cache: BOTTOM_RIGHT
    | SCALE
    | KEYS
    | {
        "inputs": "of shape (h, d) and (l, h, d), one query in a call",
        "softcap": "after a float mask is added",
        "window": "keys before its own; -1 for no bound",
        "lse": "to base 2, of shape (b, l, h)",
    },
    libraries.scaled_dot_product_attention: SCALE
    | KEYS
    | {"causal": "top_left, not beside a mask", "mask": "attn_mask: True = may attend"},
    libraries.flex_attention: SCALE
    | KEYS
    | LSE
    | {"causal": "no", "not covered here": "score_mod, block_mask, kernel_options, return_aux"},
    libraries.eager_attention_forward: SCALE | CAP | ADDED | TWO_LAYOUTS | KEYS,
    libraries.sdpa_attention_forward: SCALE
    | TWO_LAYOUTS
    | KEYS
    | {"causal": "is_causal, aligned top_left; beside a mask, the flag has no effect"},
    libraries.flex_attention_forward: SCALE | CAP | ADDED | TWO_LAYOUTS | SINKS | LSE | KEYS,
    libraries.dot_product_attention: TOP_LEFT
    | SCALE
    | KEYS
    | {
        "window": "both inclusive; None for no bound",
        "items": "of the keys and the queries of each item",
        "lse": "the natural one, of shape (b, l, h)",
        "not judged": "bias",
    },
    libraries.onnx_attention: TOP_LEFT
    | SCALE
    | CAP
    | KEYS
    | {
        "window": "left_window_size, right_window_size: keys before and after its own",
        "items": "nonpad_kv_seqlen: of the keys of each item",
    },
    libraries.mlx_attention: SCALE
    | SINKS
    | KEYS
    | {"causal": 'mask="causal", aligned bottom_right', "given": "scale=1/sqrt(d_k)"},
    libraries.group_query_attention: SCALE
    | CAP
    | SINKS
    | KEYS
    | {
        "causal": "always, aligned bottom_right",
        "window": "local_window_size: keys, its own among them; -1 for no bound",
        "given": "num_heads=n_heads, kv_num_heads=n_kv_heads",
    },
}


class Change(NamedTuple):
    """A function with a changed convention, and what its row about a topic says then."""

    function: Function
    conventions: dict[str, Any]
    topic: str
    said: str


NO_EFFECT = "has no effect"
OTHER_SIGN = "assumed by its name: its bias has the other sign"
UNREAD = "assumed by its name: no reading gives what it does"
APART = "assumed by its name: its places are counted {}, and those of causal calls {}"
# A convention may be another one that is published, which is then read; what is none is a fault,
# which is said, and fails.
CHANGES = [
    Change(flash.flash_attn_func, {"left_edge": 1}, "window", "elsewhere, window_size is keys"),
    Change(flash.flash_attn_func, {"right_edge": 1}, "window", "leaves out the last key"),
    Change(
        flash.flash_attn_func,
        {"causal": "top_left"},
        "window",
        APART.format("bottom_right", "top_left"),
    ),
    Change(flash.flash_attn_func, {"log_base": 2.0}, "lse", "to base 2"),
    Change(flash.flash_attn_func, {"cap": "after_bias"}, "softcap", "after a float mask"),
    Change(flash.flash_attn_func, {"alibi": "grows"}, "alibi", OTHER_SIGN),
    Change(flash.flash_attn_func, {"groups": "in turn"}, "heads", "the key head h % H_kv"),
    Change(flash.flash_attn_4_func, {"sink": "scaled"}, "sinks", UNREAD),
    Change(flash.flash_attn_4_func, {"sink_in_lse": False}, "lse", "sinks are not in its sum"),
    Change(libraries.dot_product_attention, {"keep": False}, "mask", "True or 1 = may not"),
    Change(libraries.onnx_attention, {"cap": "after_bias"}, "softcap", "after a float mask"),
]
MORE_CHANGES = [
    Change(flash.flash_attn_func, {"causal": "top_left", "window": "top_left"}, "causal", "top_"),
    Change(
        flash.flash_attn_func,
        {"window": "top_left"},
        "alibi",
        APART.format("top_left", "bottom_right"),
    ),
    Change(flash.flash_attn_func, {"right_edge": -1}, "window", "takes in the key after a window"),
    Change(flash.flash_attn_func, {"log_base": 10.0}, "lse", UNREAD),
    Change(flash.flash_attn_func, {"alibi": "signed"}, "alibi", "add m (t - p)"),
    Change(flash.flash_attn_func, {"alibi": "reversed"}, "alibi", OTHER_SIGN),
    Change(flash.flash_attn_func, {"scale": 2}, "formula", "the scale is 1/d_k"),
    Change(flash.flash_attn_func, {"ignored": "softmax_scale"}, "scale", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "window_size"}, "window", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "softcap"}, "softcap", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "alibi_slopes"}, "alibi", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "return_attn_probs"}, "lse", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "causal"}, "causal", NO_EFFECT),
    Change(flash.flash_attn_func, {"ignored": "causal"}, "scale", "any number"),
    Change(flash.flash_attn_varlen_func, {"causal": "top_left"}, "causal", "top_left"),
    Change(flash.flash_attn_varlen_func, {"log_base": 2.0}, "lse", "to base 2"),
    Change(flash.flash_attn_3_func, {"ignored": "attention_chunk"}, "chunk", NO_EFFECT),
    Change(
        flash.flash_attn_3_func,
        {"window": "top_left"},
        "chunk",
        APART.format("top_left", "bottom_right"),
    ),
    Change(flash.flash_attn_4_func, {"ignored": "learnable_sink"}, "sinks", NO_EFFECT),
    Change(
        flashinfer.single_prefill_with_kv_cache,
        {"left_edge": 1},
        "window",
        "(elsewhere, window_left is keys before its own)",
    ),
    Change(flashinfer.single_prefill_with_kv_cache, {"log_base": 0.0}, "lse", "the natural one"),
    Change(flashinfer.single_prefill_with_kv_cache, {"causal": "top_left"}, "causal", "top_left"),
    Change(flashinfer.single_prefill_with_kv_cache, {"alibi": "reversed"}, "alibi", OTHER_SIGN),
    Change(flashinfer.single_prefill_with_kv_cache, {"alibi": "symmetric"}, "alibi", "-m |t - p|"),
    Change(flashinfer.single_decode_with_kv_cache, {"log_base": 0.0}, "lse", "the natural one"),
    Change(
        flashinfer.single_decode_with_kv_cache,
        {"left_edge": 1},
        "window",
        "(elsewhere, window_left is keys before its own)",
    ),
    Change(
        libraries.scaled_dot_product_attention,
        {"causal": "bottom_right"},
        "causal",
        "is_causal, aligned bottom_right, not beside a mask",
    ),
    Change(libraries.scaled_dot_product_attention, {"keep": False}, "mask", "may not attend"),
    Change(libraries.scaled_dot_product_attention, {"ignored": "scale"}, "scale", NO_EFFECT),
    Change(libraries.flex_attention, {"log_base": 2.0}, "lse", "to base 2"),
    Change(libraries.eager_attention_forward, {"cap": "after_bias"}, "softcap", "after a float"),
    Change(libraries.sdpa_attention_forward, {"causal": "bottom_right"}, "causal", "bottom_right"),
    Change(libraries.flex_attention_forward, {"ignored": "s_aux"}, "sinks", NO_EFFECT),
    Change(
        libraries.dot_product_attention,
        {"window": "bottom_right"},
        "window",
        APART.format("bottom_right", "top_left"),
    ),
    Change(libraries.onnx_attention, {"causal": "bottom_right"}, "causal", "bottom_right"),
    Change(libraries.onnx_attention, {"left_edge": 1}, "window", "(elsewhere, left_window_size"),
    Change(libraries.mlx_attention, {"sink": "scaled"}, "sinks", UNREAD),
    Change(libraries.mlx_attention, {"ignored": "sinks"}, "sinks", NO_EFFECT),
    Change(libraries.group_query_attention, {"left_edge": 1}, "window", "leaves out the first"),
    Change(libraries.group_query_attention, {"causal": "top_left"}, "causal", "always"),
]
# Reading these takes more than half a second of one core, since many layouts are tried first.
LONG = (
    flashinfer.single_prefill_with_kv_cache,
    flashinfer.single_decode_with_kv_cache,
    libraries.eager_attention_forward,
    libraries.sdpa_attention_forward,
    libraries.flex_attention_forward,
    libraries.group_query_attention,
)


def marked(function: Function, *values: Any, slow: bool, name: str) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] * slow, id=name)


def rows_of(function: Function) -> dict[str, str]:
    """Return the rows of a reading, each with its evidence."""
    return {row.topic: f"{row.finding} [{row.evidence}]" for row in infer_kernel(function).rows}


@pytest.mark.parametrize(
    "function",
    [marked(each, each, slow=each in LONG, name=each.__name__) for each in PUBLISHED],
)
def test_published_signature_is_read_without_a_declaration(function: Function) -> None:
    rows = rows_of(function)
    assert not [row for row in rows.values() if "assumed" in row or NO_EFFECT in row]
    for topic, said in PUBLISHED[function].items():
        assert said in rows[topic]


def named(change: Change) -> str:
    conventions = "-".join(f"{name}={value}" for name, value in change.conventions.items())
    return f"{change.function.__name__}-{conventions}-{change.topic}"


@pytest.mark.parametrize(
    "change",
    [
        *[marked(each.function, each, slow=False, name=named(each)) for each in CHANGES],
        *[marked(each.function, each, slow=True, name=named(each)) for each in MORE_CHANGES],
    ],
)
def test_changed_convention_is_read_or_said(change: Change) -> None:
    rows = rows_of(changed(change.function, **change.conventions))
    assert change.said in rows[change.topic]


def attended(function: Function, layout: str, **options: Any) -> Any:
    """Return what a function of FlashInfer gives for five queries and three keys."""
    claims = Claims(
        masks=(),
        causal="bottom_right",
        returns_weights=False,
        scores=Scores(window=Window("left")),
        lse=Lse(base="2", layout="b l h"),
    )
    config, generator = Config(d_model=6, n_heads=2), torch.Generator().manual_seed(0)
    query, memory = (torch.randn(2, n, 6, generator=generator).double() for n in (5, 3))
    kernel = from_kernel(function, mask=None, layout=layout, claims=claims)
    weights = Weights.random(config, 0, torch.float64)
    attention = kernel.build(config, weights, dtype=torch.float64, device="cpu")
    return attention(query, memory, memory, return_lse=True, **options)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "window": (1, 0)}]
)
def test_decoding_is_called_for_each_query(options: dict[str, Any]) -> None:
    whole = attended(flashinfer.single_prefill_with_kv_cache, "l h d", **options)
    each = attended(flashinfer.single_decode_with_kv_cache, "h d", **options)
    torch.testing.assert_close(each.output, whole.output)
    torch.testing.assert_close(each.lse, whole.lse, check_dtype=False)


def test_window_of_a_single_query_is_of_causal_calls() -> None:
    with pytest.raises(NotImplementedError, match="slopes are of causal calls"):
        attended(flashinfer.single_decode_with_kv_cache, "h d", window=(1, None))


def test_a_file_with_a_signature_is_understood() -> None:
    path = ROOT / "tests" / "readings" / "signatures" / "libraries.py"
    (resolved,) = resolve(f"{path}:mlx_attention")
    assert resolved.inference is not None
    assert resolved.implementation.claims.scores.sinks == "float32"
