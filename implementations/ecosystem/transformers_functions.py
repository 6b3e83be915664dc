"""transformers' attention functions, called as its models call them, with their options.

Masks that are added have the lowest number of their dtype for a hidden key, as
`masking_utils.eager_mask` makes them: a row without a key is then the mean of all values.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral

from mha.implementations import from_kernel
from mha.spec import Claims, Rounding, Scores, Window
from mha.spec.claims import COMPUTE_DTYPES

BY_NAME = AttentionInterface()


class Layer:
    """What the functions read of a layer, in inference."""

    training = False

    def __init__(self, query, key, sinks=None, is_causal=False):
        self.num_key_value_groups = query.shape[1] // key.shape[1]
        self.head_dim = query.shape[-1]
        self.sinks = sinks
        self.is_causal = is_causal


def gpt_oss(query, key, value, mask=None, scaling=None, s_aux=None):
    """Eager attention of gpt-oss, whose layers always have sinks: without any, of -infinity."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = query.new_full((query.shape[1],), -torch.inf) if s_aux is None else s_aux
    module = Layer(query, key, sinks)
    return modeling_gpt_oss.eager_attention_forward(module, query, key, value, mask, scaling)


def gemma2(query, key, value, mask=None, scaling=None, softcap=None):
    """Eager attention of Gemma 2; that of Gemma 3 has the same lines."""
    attend, module = modeling_gemma2.eager_attention_forward, Layer(query, key)
    return attend(module, query, key, value, mask, scaling=scaling, softcap=softcap)


def sdpa(query, key, value, mask=None, scaling=None):
    """The function "sdpa"; what it is given of other options, such as s_aux, it leaves out."""
    module = Layer(query, key)
    return BY_NAME["sdpa"](module, query, key, value, mask, scaling=scaling)[0]


@torch.compiler.set_stance("force_eager")  # it would compile flex_attention at the first call
def flex(query, key, value, mask=None, scaling=None, softcap=None):
    """The function "flex_attention", without a compiler."""
    options = {"scaling": scaling, "softcap": softcap}
    return BY_NAME["flex_attention"](Layer(query, key), query, key, value, mask, **options)[0]


def mask_arguments(query, key, padding, sliding_window):
    """Return what a causal model passes to functions of masks, the last query at the last key."""
    allowed = causal_mask_function
    if sliding_window is not None:
        allowed = sliding_window_causal_mask_function(sliding_window)
    lengths = {"batch_size": len(query), "q_length": query.shape[2], "kv_length": key.shape[2]}
    offset = {"q_offset": key.shape[2] - query.shape[2], "local_size": sliding_window}
    return lengths | offset | {"mask_function": allowed, "attention_mask": padding}


def mistral_eager(query, key, value, mask=None, sliding_window=None):
    """Eager attention of Mistral, behind the masks that its model makes."""
    mask = eager_mask(**mask_arguments(query, key, mask, sliding_window), dtype=query.dtype)
    attend, scaling = modeling_mistral.eager_attention_forward, query.shape[-1] ** -0.5
    return attend(Layer(query, key), query, key, value, mask, scaling)


def mistral_sdpa(query, key, value, mask=None, sliding_window=None):
    """The function "sdpa" in Mistral, whose layers are causal, behind the masks of its model."""
    mask = sdpa_mask(**mask_arguments(query, key, mask, sliding_window))
    module = Layer(query, key, is_causal=True)
    return BY_NAME["sdpa"](module, query, key, value, mask)[0]


LAYOUT = "b h l d -> b l h d"
ADDED = {"mask": "additive", "masked_number": "lowest", "layout": LAYOUT}
CLAIMS = {"grouped_query": True, "value_width": True, "dtypes": COMPUTE_DTYPES}
COMPOSES = {"compile", "func", "autocast"}
# Weights are part of what the eager functions return.
EAGER = CLAIMS | {"masks": {"bool", "float"}, "empty_row": "uniform", "composes": COMPOSES}
IN_FLOAT32 = Rounding(softmax_in_float32=True)  # a cast in eager_attention_forward
gpt_oss_eager = from_kernel(
    gpt_oss,
    name="transformers-gpt-oss",
    claims=Claims(**EAGER, scores=Scores(scale="any", sinks="input")),
    **ADDED,
)
gemma2_eager = from_kernel(
    gemma2,
    name="transformers-gemma2",
    claims=Claims(**EAGER, scores=Scores(scale="any", softcap="before_bias"), rounding=IN_FLOAT32),
    **ADDED,
)
# A scale of 0 is not claimed: the kernel of torch gives NaN for it beside a mask (docs/pytorch.md).
sdpa_function = from_kernel(
    sdpa,
    name="transformers-sdpa",
    mask="keep",
    mask_shape="b h l s",
    layout=LAYOUT,
    claims=Claims(
        **CLAIMS,
        masks={"bool", "float"},
        returns_weights=False,
        composes=COMPOSES,
        scores=Scores(scale="positive"),
    ),
)
# Eager flex_attention has no backward pass on the CPU. Masks that differ between heads are not
# claimed: all heads get that of the first one (docs/ecosystem/transformers_flex_MSK-2.py).
flex_function = from_kernel(
    flex,
    name="transformers-flex",
    mask_shape="b h l s",
    claims=Claims(
        **CLAIMS,
        masks={"bool", "float"},
        per_head_mask=False,
        empty_row="uniform",
        returns_weights=False,
        gradients=False,
        scores=Scores(scale="any", softcap="before_bias"),
    ),
    **ADDED,
)
WINDOWED = CLAIMS | {
    "always_causal": True,
    "causal": "bottom_right",
    "per_head_mask": False,
    "per_query_mask": False,
    "scores": Scores(window=Window("count", unbounded=None)),
}
mistral = from_kernel(
    mistral_eager,
    name="transformers-mistral-eager",
    mask="keep",
    mask_shape="b s",
    layout=LAYOUT,
    claims=Claims(**WINDOWED, empty_row="uniform", rounding=IN_FLOAT32),
)
mistral_by_sdpa = from_kernel(
    mistral_sdpa,
    name="transformers-mistral-sdpa",
    mask="keep",
    mask_shape="b s",
    layout=LAYOUT,
    claims=Claims(**WINDOWED, returns_weights=False),
)
