"""The contract of multi-head attention: clauses, sizes, weights, claims, and the oracle with the
expected results.

Names are imported when they are first used: the clauses are data, and reading them must not wait
for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "CLAUSES",
    "Alibi",
    "Attention",
    "CacheEditor",
    "Claims",
    "Clause",
    "Config",
    "Decoder",
    "Differentiable",
    "Expected",
    "Implementation",
    "Level",
    "Lse",
    "MaskConvention",
    "Options",
    "Output",
    "Packed",
    "Problem",
    "QkNorm",
    "Rotary",
    "Rounding",
    "Scores",
    "Sharded",
    "Sizes",
    "SplitKeys",
    "Weights",
    "Window",
    "alibi_bias",
    "alibi_slopes",
    "causal_mask",
    "chunk_mask",
    "gradients",
    "join_causal",
    "oracle",
    "positions",
    "sum_shared",
    "to_convention",
    "validate_call",
    "window_mask",
]

if TYPE_CHECKING:
    from mha.spec.backward import gradients, sum_shared
    from mha.spec.claims import Claims, Sizes
    from mha.spec.clauses import CLAUSES, Clause, Level
    from mha.spec.config import Config
    from mha.spec.forward import Expected, oracle
    from mha.spec.masks import (
        MaskConvention,
        alibi_bias,
        alibi_slopes,
        causal_mask,
        chunk_mask,
        join_causal,
        to_convention,
        window_mask,
    )
    from mha.spec.problem import Problem
    from mha.spec.protocols import (
        Attention,
        CacheEditor,
        Decoder,
        Differentiable,
        Implementation,
        Output,
        SplitKeys,
    )
    from mha.spec.rotary import QkNorm, Rotary
    from mha.spec.rounding import Rounding
    from mha.spec.scores import Alibi, Lse, Options, Packed, Scores, Window
    from mha.spec.sharding import Sharded, positions
    from mha.spec.validation import validate_call
    from mha.spec.weights import Weights
else:
    # No module has the name of one of these: its import would hide the name.
    _MODULES = {
        "backward": ("gradients", "sum_shared"),
        "claims": ("Claims", "Sizes"),
        "clauses": ("CLAUSES", "Clause", "Level"),
        "config": ("Config",),
        "forward": ("Expected", "oracle"),
        "masks": (
            "MaskConvention",
            "alibi_bias",
            "alibi_slopes",
            "causal_mask",
            "chunk_mask",
            "join_causal",
            "to_convention",
            "window_mask",
        ),
        "problem": ("Problem",),
        "protocols": (
            "Attention",
            "CacheEditor",
            "Decoder",
            "Differentiable",
            "Implementation",
            "Output",
            "SplitKeys",
        ),
        "rotary": ("QkNorm", "Rotary"),
        "rounding": ("Rounding",),
        "scores": ("Alibi", "Lse", "Options", "Packed", "Scores", "Window"),
        "sharding": ("Sharded", "positions"),
        "validation": ("validate_call",),
        "weights": ("Weights",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
