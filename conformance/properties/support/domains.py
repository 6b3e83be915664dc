"""Domains that properties of several families share."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.conformance.cases.domain import BOTH, DENSE, HALF, MODERATE, Domain
from mha.conformance.cases.mask_kinds import COMMON

# The sizes of everyday models.
EVERYDAY_SIZES = Domain(
    scale="wide",
    masks=("none", "padding", "blocks", "full", "bias", "head_bias"),
    causal=BOTH,
    values=MODERATE,
    inputs=("cross", "self", "memory"),
)
# Heads wider than 256, of which the last block of columns may be a single one.
WIDE_HEADS = replace(
    EVERYDAY_SIZES,
    masks=("none", "padding", "full", "bias"),
    sizes={"n_heads": (2, 1), "head_dim": (257, 320), "B": (1, 2), "L": (7, 1, 33), "S": (7, 33)},
)
# Widths that heads of known models have, for each of which a library may have a kernel of its own.
WIDTHS = (24, 32, 40, 48, 72, 80, 96, 112, 160, 192, 224)
ONE_OF_EACH_WIDTH = Domain(
    values=("normal",), layouts=DENSE, need_weights=(False,), min_L=3, min_S=5, max_length=9
)
# Inference as it is run every day, with the width of most large models, and others that are not
# multiples of 8, or not even of 2.
EVERYDAY_INFERENCE = Domain(
    scale="wide",
    causal=BOTH,
    values=MODERATE,
    inputs=("self", "cross", "memory"),
    modes=("no_grad", "inference"),
    need_weights=(False,),
    sizes={
        "n_heads": (4, 3),
        "head_dim": (20, 17, 128, 50),
        "B": (2, 1),
        "L": (33, 32, 130),
        "S": (33, 130),
    },
)
# Half precision, with so many elements that a root mean square over them is not a matter of luck.
MANY_ELEMENTS_IN_HALF = Domain(
    dtypes=HALF, values=("normal",), min_heads=2, min_head_dim=8, min_B=4, max_B=4, min_L=8, min_S=8
)
# The larger errors of gradients are those of a few keys with large weights, so there must be more
# items.
MANY_GRADIENTS_IN_HALF = Domain(
    dtypes=HALF,
    values=("normal",),
    scale="wide",
    min_heads=2,
    sizes={"n_heads": (2, 4), "head_dim": (8, 16), "B": (12,), "L": (16, 33), "S": (8, 33)},
)
LONG_ROWS = Domain(
    masks=("none", "padding", "blocks", "queries", "full", "key_bias", "query_bias", "full_bias"),
    causal=BOTH,
    values=MODERATE,
    layouts=("contiguous", "sliced"),
    inputs=("cross", "self", "memory"),
    scale="long",
    max_heads=3,
    max_B=2,
)
# Long rows in cross-attention, of 40 queries at most.
FEW_QUERIES = replace(LONG_ROWS, inputs=("cross",), causal=(False,))
# Training calls whose outputs show which weights were dropped; the properties choose the lengths
# themselves.
DROPOUT_PATTERNS = Domain(
    masks=COMMON,
    causal=BOTH,
    inputs=("cross", "self", "memory"),
    values=("normal",),
    layouts=DENSE,
    modes=("train", "train_no_grad"),
    max_heads=3,
    max_B=3,
)
# Two seeds drop the same of 64 keys, or outputs, with probability 2^-64 only, even if all rows
# share a pattern.
DROPOUT_SEEDS = Domain(
    values=("normal",), layouts=DENSE, modes=("train",), min_L=8, min_S=64, min_head_dim=8
)
# The dtype of the products under autocast, and calls in that mode.
AUTOCAST_DTYPE = torch.bfloat16
AUTOCAST = Domain(
    masks=("none", "padding", "queries", "bias", "empty_item"),
    causal=BOTH,
    values=MODERATE,
    layouts=DENSE,
    modes=("eval",),
    max_length=17,
    dtypes=("float32",),
)
# Sequences that are decoded position by position.
DECODING = Domain(
    causal=(True,),
    square=True,
    values=MODERATE,
    layouts=DENSE,
    modes=("eval",),
    need_weights=(False,),
    max_length=65,
)
# Calls that say several things about the scores at once, and nothing first.
SEVERAL_OPTIONS = Domain(
    masks=COMMON,
    causal=BOTH,
    values=MODERATE,
    windows=(None, (2, 0), (0, 1)),
    chunks=(None, 2),
    softcaps=(None, 1.0),
    sinks=("none", "mixed"),
    slopes=("none", "mixed"),
    scales=(None, 2.0),
    variants=("plain", "grouped"),
    min_heads=2,
)
# What a property needs one of that takes such calls.
NEEDS_OPTIONS = "|".join(
    f"scores.{option}" for option in ("scale", "window", "softcap", "sinks", "alibi", "chunk")
)
