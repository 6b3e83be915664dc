"""Inference: classes as tutorials write them are judged without a declaration."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from mha.implementations import ImplementationError, fused_qkv, minimal, modular, resolve
from mha.implementations.inference.infer import Inference, infer
from mha.implementations.inference.roles import role_of
from mha.spec import Claims
from support.folders import CLASSES
from support.judging import RIGHT, expect_fail, judged
from support.readings import findings

ALL_DTYPES = {"dtypes": {"float64", "float32", "float16", "bfloat16"}}
NO_WEIGHTS, SELF_ATTENTION = {"returns_weights": False}, {"cross_attention": False}
INTEGERS = {"masks": {"bool", "int"}}
MEMORY = {"cross_attention": "memory"}
GROUPED = {"grouped_query": True, "dropout": True}
SHARED_BY_HEADS = {"per_head_mask": False}
PADDING_ONLY = {**SHARED_BY_HEADS, "per_query_mask": False, "causal": None}
# What fails, and rightly: another formula.
FAILED = {
    "no_proj_no_scale": {"HED-1", "CAU-2", "GRD-5"},
    "mean_weights": {"HED-1", "GRD-5"},
}
# For each file: the class, the paths of its projections, the other arguments of `from_module`, and
# the claims.
EXPECTED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "separate_linears": (
        "MultiHeadAttention",
        {"w_q": "W_q", "w_k": "W_k", "w_v": "W_v", "w_o": "W_o"},
        {},
        {**INTEGERS, **NO_WEIGHTS, "bias": {True}, "empty_row": "uniform"},
    ),
    "returns_weights": (
        "MultiHeadAttn",
        {"w_q": "fc_q", "w_k": "fc_k", "w_v": "fc_v", "w_o": "fc_o"},
        {"mask": "drop"},
        {"bias": {True}, "own_head_dim": True, "empty_row": "nan", "dropout": True},
    ),
    "vit_fused_qkv": (
        "Attention",
        {"w_qkv": "qkv", "w_o": "proj"},
        {"mask_shape": "b s"},
        {
            **SELF_ATTENTION,
            **PADDING_ONLY,
            **NO_WEIGHTS,
            "bias": {True, "o"},
            "empty_row": "uniform",
            "dropout": "each",
        },
    ),
    "gpt_causal": (
        "CausalSelfAttention",
        {"w_qkv": "c_attn", "w_o": "c_proj"},
        {"mask": None},
        {**SELF_ATTENTION, **NO_WEIGHTS, "masks": (), "always_causal": True, "dropout": "both"},
    ),
    "causal_flag": (
        "SelfAttention",
        {"w_qkv": "in_proj", "w_o": "out_proj"},
        {"mask": None},
        {**SELF_ATTENTION, **NO_WEIGHTS, "masks": (), "bias": {True, False, "o", "qkv"}},
    ),
    "multi_query": (
        "MultiQueryAttention",
        {"w_q": "q_proj", "w_kv": "kv_proj", "w_o": "out_proj"},
        {"mask": None},
        {
            **SELF_ATTENTION,
            **NO_WEIGHTS,
            "masks": (),
            "bias": {True},
            "multi_query": True,
            "dropout": True,
        },
    ),
    "heads_in_modulelist": (
        "MultiHead",
        {"w_q": "heads.*.q", "w_k": "heads.*.k", "w_v": "heads.*.v", "w_o": "output_linear"},
        {"mask_shape": "b l s"},
        {**INTEGERS, **SHARED_BY_HEADS, **NO_WEIGHTS, "bias": {True}, "empty_row": "nan"},
    ),
    "einops_kv_fused": (
        "CrossAttention",
        {"w_q": "to_q", "w_kv": ("to_kv", "(r h e) d -> (h r e) d"), "w_o": "to_out.0"},
        {"mask_shape": "b s"},
        {
            **{
                **MEMORY,
                **PADDING_ONLY,
                **NO_WEIGHTS,
                "bias": {"o"},
                "own_head_dim": True,
                "empty_row": "uniform",
            },
            **{"kv_widths": True, "dropout": "both"},
        },
    ),
    "parameter_matrices": (
        "EinsumAttention",
        {
            **{f"w_{role.lower()}": (f"W_{role}", "(h e) d -> d h e") for role in "QKV"},
            "w_o": ("W_O", "d (h e) -> h e d"),
            "b_o": "b_O",
        },
        {"mask": None},
        {**MEMORY, **NO_WEIGHTS, "masks": (), "causal": None, "bias": {"o"}, "own_head_dim": True},
    ),
    "sequence_first": (
        "MultiHeadAttention",
        {"w_q": "query.linear", "w_k": "key.linear", "w_v": "value.linear", "w_o": "output"},
        {"mask_shape": "l s b", "layout": "l b d"},
        {
            **INTEGERS,
            **SHARED_BY_HEADS,
            **NO_WEIGHTS,
            "bias": {True, "vo"},
            "empty_row": "nan",
            "dropout": True,
        },
    ),
    "channels_first": (
        "ConvAttention",
        {"w_q": "conv_q", "w_kv": ("conv_kv", "(r h e) d -> (h r e) d"), "w_o": "conv_o"},
        {"layout": "b d l"},
        {
            **INTEGERS,
            **MEMORY,
            **NO_WEIGHTS,
            "bias": {True},
            "empty_row": "uniform",
            "dropout": True,
        },
    ),
    "padding_and_additive": (
        "MHA",
        {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"},
        {"mask": "additive", "padding": "drop"},
        {
            **NO_WEIGHTS,
            "masks": {"bool", "float"},
            "empty_row": "nan",
            "dropout": True,
            "kv_widths": True,
        },
    ),
    "no_proj_no_scale": (
        "MultiHeadSelfAttention",
        {"w_q": "W_query", "w_k": "W_key", "w_v": "W_value", "w_o": None},
        {"mask": None},
        {
            **{
                **SELF_ATTENTION,
                **NO_WEIGHTS,
                "masks": (),
                "always_causal": True,
                "bias": {"qkv", False},
            },
            "dropout": True,
        },
    ),
    "bert_style": (
        "BertAttention",
        {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "dense"},
        {"mask": "additive", "masked_number": "lowest"},
        {
            **SELF_ATTENTION,
            "masks": {"bool", "float"},
            "bias": {True},
            "empty_row": "uniform",
            "dropout": "each",
        },
    ),
    "annotated_clones": (
        "MultiHeadedAttention",
        {"w_q": "linears.0", "w_k": "linears.1", "w_v": "linears.2", "w_o": "linears.3"},
        {"mask_shape": "b l s", "weights": "attn"},
        {**INTEGERS, **SHARED_BY_HEADS, "bias": {True}, "empty_row": "uniform", "dropout": True},
    ),
    "mean_weights": (
        "SelfAttention",
        {"w_v": "values", "w_k": "keys", "w_q": "queries", "w_o": "fc_out"},
        {},
        {**INTEGERS, **NO_WEIGHTS, "bias": {"o"}, "empty_row": "uniform"},
    ),
    "sdpa_grouped": (
        "GroupedQueryAttention",
        {"w_q": "wq", "w_k": "wk", "w_v": "wv", "w_o": "wo"},
        {},
        {
            **SELF_ATTENTION,
            **NO_WEIGHTS,
            "masks": {"bool", "float"},
            "mask_ranks": {2, 3, 4},
            "causal_with_mask": False,
            **GROUPED,
        },
    ),
    "d2l_valid_lens": (
        "MultiHeadAttention",
        {"w_q": "W_q", "w_k": "W_k", "w_v": "W_v", "w_o": "W_o"},
        {"mask_shape": "b"},
        {
            **PADDING_ONLY,
            **NO_WEIGHTS,
            "prefix_masks": True,
            "empty_row": "uniform",
            "dropout": True,
        },
    ),
    "memory_and_padding": (
        "CrossAttention",
        {"w_qkv": "in_proj", "w_o": "out_proj"},
        {"mask": "drop", "mask_shape": "b s"},
        {**MEMORY, **PADDING_ONLY, **NO_WEIGHTS, "dropout": True, "empty_row": "nan"},
    ),
    "dict_output": (
        "SelfAttention",
        {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "dense"},
        {"mask": "additive", "masked_number": "lowest"},
        {
            **SELF_ATTENTION,
            "masks": {"bool", "float"},
            "bias": {True},
            "empty_row": "uniform",
            "dropout": "both",
        },
    ),
    "keras_style": (
        "MultiHeadAttention",
        {"w_q": "query_dense", "w_k": "key_dense", "w_v": "value_dense", "w_o": "output_dense"},
        {"mask_shape": "b l s"},
        {**SHARED_BY_HEADS, "own_head_dim": True, "empty_row": "uniform", "dropout": True},
    ),
    "upper_case": (
        "Attention",
        {"w_q": "Wq", "w_k": "Wk", "w_v": "Wv", "w_o": "Wo"},
        {"mask": "additive"},
        {
            **MEMORY,
            **NO_WEIGHTS,
            "masks": {"bool", "float"},
            "bias": {False},
            "empty_row": "uniform",
        },
    ),
    "graph_adjacency": (
        "GraphAttention",
        {"w_q": "Q", "w_k": "K", "w_v": "V", "w_o": "O"},
        {"mask_shape": "b l s"},
        {
            **SELF_ATTENTION,
            **INTEGERS,
            **NO_WEIGHTS,
            **SHARED_BY_HEADS,
            "bias": {True},
            "empty_row": "uniform",
            "dtypes": {"float64", "float32", "bfloat16"},
        },
    ),
    "two_paddings": (
        "CrossAttention",
        {"w_q": "to_q", "w_kv": "to_kv", "w_o": "to_out"},
        {"mask_shape": "b s"},
        {
            **MEMORY,
            **NO_WEIGHTS,
            **PADDING_ONLY,
            "bias": {"o"},
            "empty_row": "uniform",
        },
    ),
}
DIFFERENT = {
    "no_proj_no_scale": "scores are not scaled and there is no output projection",
    "mean_weights": "the scale is 1/sqrt(d_model)",
}


@pytest.fixture(autouse=True)
def unload_classes() -> Iterator[None]:
    """Forget the modules of the classes: two files may define a class of the same name."""
    loaded = set(sys.modules)
    yield
    for name in set(sys.modules) - loaded:
        if str(CLASSES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    """Import a file of the classes."""
    spec = importlib.util.spec_from_file_location(name, CLASSES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def inferred(name: str) -> tuple[Inference, dict[str, Any]]:
    """Infer the class in a file; return that, and the file's names after the declaration."""
    module = load(name)
    result = infer(getattr(module, EXPECTED[name][0]))
    names = dict(vars(module))
    exec(result.declaration, names)
    return result, names


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("name", EXPECTED)
def test_class_is_inferred_and_its_declaration_is_equivalent(name: str) -> None:
    _, projections, options, claims = EXPECTED[name]
    result, names = inferred(name)
    for adapter in (result.implementation, names["implementation"]):
        assert adapter.parameters == projections
        assert adapter.claims == Claims(**{**ALL_DTYPES, **claims})
        assert adapter.call.masks.shape == options.get("mask_shape")
        assert adapter.call.masks.padding == options.get("padding")
        assert adapter.layout == options.get("layout", "b l d")
        assert adapter.weights == options.get("weights")
    mask = options.get("mask", "keep")
    assert (f'mask="{mask}"' in result.declaration) == (mask in ("drop", "additive"))
    assert ("mask=None" in result.declaration) == (mask is None)
    formula = DIFFERENT.get(name, "softmax(q k^T / sqrt(d_k)) v W_o")
    assert findings(result)["formula"].endswith(formula)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_inferred_implementation_passes(name: str) -> None:
    """Values, masks and gradients are as expected, unless the class computes something else."""
    adapter = inferred(name)[0].implementation
    clauses = ("SHP-1", "HED-1", "MSK-1", "MSK-2", "CAU-2", "GRD-5")
    verdicts = judged(adapter, clauses, "quick" if name in FAILED else RIGHT).verdicts
    failed = {
        verdict.clause for verdict in verdicts if verdict.status not in ("pass", "not_claimed")
    }
    assert failed == FAILED.get(name, set()), verdicts


def test_class_with_another_formula_is_judged() -> None:
    adapter = inferred("mean_weights")[0].implementation
    expect_fail(adapter, "SMX-6", "scaled by 1/sqrt(d_k)")


@pytest.mark.parametrize(
    "cls", [minimal.MinimalAttention, modular.ModularAttention, fused_qkv.FusedAttention]
)
def test_built_in_class_is_inferred_as_it_is_declared(cls: type[nn.Module]) -> None:
    declared: Any = sys.modules[cls.__module__].implementation  # type: ignore[attr-defined]  # each has one
    implementation = infer(cls).implementation
    assert implementation.parameters == declared.parameters
    for claim in ("masks", "causal", "cross_attention", "returns_weights", "per_head_mask", "bias"):
        assert getattr(implementation.claims, claim) == getattr(declared.claims, claim), claim


NAMES = {
    "q": "q W_q wq q_proj query to_q fc_q queries W_query query.linear",
    "k": "k_proj keys toK heads.*.key w_k.weight",
    "v": "value v_lin W_V attn.values",
    "o": "out out_proj proj c_proj dense to_out.0 fc_out output_linear W_O",
    "qkv": "qkv c_attn in_proj_weight Wqkv to_qkv query_key_value",
    "kqv": "kqv to_kqv key_query_value",
    "kv": "kv to_kv kv_proj",
    "vk": "vk",
    None: "a norm layers.0 gate",
}


@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for role, names in NAMES.items() for name in names.split()]
)
def test_role_is_read_from_a_name(name: str, role: str | None) -> None:
    assert role_of(name) == role


def test_resolve_takes_a_class() -> None:
    target = f"{CLASSES}/separate_linears.py:MultiHeadAttention"
    (resolved,) = resolve(target)
    assert resolved.implementation.name == "MultiHeadAttention"
    assert resolved.target == target
    assert resolved.inference is not None
    text = resolved.inference.report(60)
    assert "w_q: W_q" in text
    assert "implementation = from_module(" in text
    rows = text.partition("\n\n")[0].split("\n")
    assert 50 < max(map(len, rows)) <= 60
    with pytest.raises(ImplementationError) as raised:
        resolve(f"{CLASSES}/separate_linears.py")
    assert ":NAME (its classes: MultiHeadAttention)" in str(raised.value)
