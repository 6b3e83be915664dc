"""ONNX's Attention, as its reference evaluator and onnxruntime run it, and GroupQueryAttention.

Attention has no axes of tokens and no log-sum-exp; onnxruntime computes no gradients of it.
"""

from __future__ import annotations

from functools import lru_cache, partial

import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from mha.implementations import from_kernel
from mha.implementations.ecosystem.arrays import numpy_of, tensor_of
from mha.spec import Claims, Rounding, Scores, Sizes, Window

OF_MICROSOFT = "com.microsoft"
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bool: TensorProto.BOOL,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}


@lru_cache(maxsize=512)
def session_of(engine, operator, opset, types, outputs, attributes):
    """Return what runs a model of one node. types: by input, None for one that is left out."""
    domain = OF_MICROSOFT if operator == "GroupQueryAttention" else ""
    names = [name if kind is not None else "" for name, kind in types]
    node = helper.make_node(operator, names, outputs, domain=domain, **dict(attributes))
    known = [(name, kind) for name, kind in types if kind is not None]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in known]
    given = [helper.make_tensor_value_info(name, types[0][1], None) for name in outputs if name]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(OF_MICROSOFT, 1)]
    graph = helper.make_graph([node], "attention", inputs, given)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    if engine == "reference":
        return ReferenceEvaluator(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(engine, operator, opset, inputs, outputs, attributes):
    """Return the outputs of one node, of inputs by name, None for one that is left out."""
    types = tuple((name, None if x is None else TYPES[x.dtype]) for name, x in inputs.items())
    set_ones = tuple((name, value) for name, value in attributes.items() if value is not None)
    session = session_of(engine, operator, opset, types, outputs, set_ones)
    arrays = {name: numpy_of(x) for name, x in inputs.items() if x is not None}
    return tuple(map(tensor_of, session.run(None, arrays)))


def expanded(mask, query, key):
    """Return a mask with all queries and keys.

    One of a single key would be padded with -infinity, as ONNX says. One of a single query is
    refused by onnxruntime in Attention-23, and makes the reference evaluator take a causal mask of
    one query for all.
    """
    if mask is None:
        return None
    mask = torch.atleast_2d(mask)
    return mask.expand(*mask.shape[:-2], query.shape[2], key.shape[2])


def attend23(
    engine,
    query,
    key,
    value,
    mask=None,
    is_causal=False,
    need_weights=False,
    scale=None,
    softcap=0.0,
):
    """Attention-23: the first query is at the first key."""
    mask = expanded(mask, query, key)
    inputs = {"Q": query, "K": key, "V": value, "attn_mask": mask}
    outputs = ("Y", "", "", "weights") if need_weights else ("Y",)
    mode = 3 if need_weights else None  # after the softmax
    attributes = {"is_causal": int(is_causal), "scale": scale, "softcap": softcap}
    attributes["qk_matmul_output_mode"] = mode
    return run(engine, "Attention", 23, inputs, outputs, attributes)


def attend25(
    engine,
    query,
    key,
    value,
    mask=None,
    is_causal=False,
    scale=None,
    softcap=0.0,
    left_window_size=-1,
    right_window_size=-1,
    nonpad_kv_seqlen=None,
):
    """Attention-25 with lengths, by which the last query is at the last key."""
    mask = expanded(mask, query, key)
    if nonpad_kv_seqlen is None:
        nonpad_kv_seqlen = torch.full((len(key),), key.shape[2])
    inputs = {"Q": query, "K": key, "V": value, "attn_mask": mask, "past_key": None}
    inputs |= {"past_value": None, "nonpad_kv_seqlen": nonpad_kv_seqlen}
    windows = {"left_window_size": left_window_size, "right_window_size": right_window_size}
    attributes = {"is_causal": int(is_causal), "scale": scale, "softcap": softcap} | windows
    return run(engine, "Attention", 25, inputs, ("Y",), attributes)[0]


def group_query(
    query, key, value, mask=None, scale=None, softcap=0.0, local_window_size=-1, head_sink=None
):
    """GroupQueryAttention without a cache, (B, L, H d); it is always causal."""
    batch, length = query.shape[:2]
    inputs = {"query": query.flatten(2), "key": key.flatten(2), "value": value.flatten(2)}
    inputs |= {"past_key": None, "past_value": None}
    inputs["seqlens_k"] = torch.full((batch,), length - 1, dtype=torch.int32)
    inputs["total_sequence_length"] = torch.tensor(length, dtype=torch.int32)
    inputs |= {"cos_cache": None, "sin_cache": None, "position_ids": None}
    inputs |= {"attention_bias": mask, "head_sink": head_sink}
    attributes = {"num_heads": query.shape[2], "kv_num_heads": key.shape[2], "scale": scale}
    attributes |= {"local_window_size": local_window_size, "softcap": softcap}
    outputs = ("output", "present_key", "present_value")
    return run("onnxruntime", "GroupQueryAttention", 23, inputs, outputs, attributes)[0].view(
        query.shape
    )


# The scale is applied as its square root, to queries and keys, which no negative number has.
CLAIMS = {
    "grouped_query": True,
    "gradients": False,
    "devices": {"cpu"},
    "dtypes": {"float32", "float16"},
    "rounding": Rounding(log_normaliser=False),
}
MASKS = {"masks": {"bool", "float"}, "value_width": True}
OF_23 = Claims(**CLAIMS, **MASKS, scores=Scores(scale="positive", softcap="before_bias"))
OF_25 = Claims(
    **CLAIMS,
    **MASKS,
    causal="bottom_right",
    returns_weights=False,
    lengths="keys",
    scores=Scores(scale="positive", softcap="before_bias", window=Window("left_right")),
)
reference23 = from_kernel(
    partial(attend23, "reference"), name="onnx-reference-23", mask="keep", claims=OF_23
)
reference25 = from_kernel(
    partial(attend25, "reference"), name="onnx-reference-25", mask="keep", claims=OF_25
)
ort23 = from_kernel(
    partial(attend23, "onnxruntime"), name="onnxruntime-23", mask="keep", claims=OF_23
)
ort25 = from_kernel(
    partial(attend25, "onnxruntime"), name="onnxruntime-25", mask="keep", claims=OF_25
)
gqa = from_kernel(
    group_query,
    name="onnxruntime-gqa",
    layout="b l h d",
    mask="additive",
    mask_shape="b h l s",
    claims=Claims(
        **CLAIMS,
        masks={"bool", "float"},
        cross_attention=False,
        always_causal=True,
        sizes=Sizes(head_dim_multiple=8),
        returns_weights=False,
        scores=Scores(
            scale="positive", softcap="before_bias", window=Window("count"), sinks="input"
        ),
    ),
)
