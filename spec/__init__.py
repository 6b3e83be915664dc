"""The contract of multi-head attention: clauses, sizes, weights, claims, and the oracle that knows the right answer."""

from mha.spec.claims import Claims, Rounding
from mha.spec.clauses import CLAUSES, Clause, Level
from mha.spec.config import Config
from mha.spec.gradients import gradients, sum_shared
from mha.spec.masks import MaskConvention, causal_mask, join_causal, to_convention
from mha.spec.oracle import Expected, oracle
from mha.spec.problem import Problem
from mha.spec.protocols import Attention, Decoder, Differentiable, Implementation, Output
from mha.spec.validation import validate_call
from mha.spec.weights import Weights

__all__ = [
    "CLAUSES",
    "Attention",
    "Claims",
    "Clause",
    "Config",
    "Decoder",
    "Differentiable",
    "Expected",
    "Implementation",
    "Level",
    "MaskConvention",
    "Output",
    "Problem",
    "Rounding",
    "Weights",
    "causal_mask",
    "gradients",
    "join_causal",
    "oracle",
    "sum_shared",
    "to_convention",
    "validate_call",
]
