"""What an implementation says that it can do: the judge holds it to that, and to no more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

from mha.spec.dtypes import TRAITS

Alignment = Literal["top_left", "bottom_right"]
EmptyRow = Literal["zeros", "nan", "uniform", "error"]
MASK_FORMS = ("bool", "float")
DTYPES = tuple(TRAITS)
DEVICES = ("cpu", "cuda")
COMPOSITIONS = ("compile", "export", "func", "autocast")
# 32 ulp; a coarser exponential would show in every result.
LARGEST_EXP_ERROR = 64
EXTRAS = ("bias_kv", "zero_key", "length_first", "unbatched")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where an implementation rounds: the loosest profile is the default. It enters the error bound.

    scores_stored: scores and weights are stored in the inputs' dtype between steps, not in the accumulator's.
    softmax_stored: so are the differences, exponentials and sums of the softmax; each sum is made in the accumulator.
    scaling_roundings: how many of query and key are rounded after being scaled, before their product (0, 1 or 2).
    exp_error: error of the exponential in unit roundoffs of the accumulator (4 for 1 ulp, 40 for vectorised 20 ulp).
    log_normaliser: weights are exp(score - z), with z the row's log-sum-exp in the accumulator, or parts of a row are
        joined by theirs (split keys); the sum of a row is then off by the rounding of z, which grows with the scores.
    softmax_in_float32: float64 scores are cast to float32 for the softmax; NUM-2 is then not claimed.
    """

    scores_stored: bool = True
    softmax_stored: bool = True
    scaling_roundings: int = 2
    exp_error: int = 40
    log_normaliser: bool = True
    softmax_in_float32: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a profile with which the bound would prove nothing."""
        if self.scaling_roundings not in (0, 1, 2) or not 0 <= self.exp_error <= LARGEST_EXP_ERROR:
            raise ValueError(
                f"Rounding.scaling_roundings must be 0, 1 or 2 and exp_error at most {LARGEST_EXP_ERROR}, but {self!r}"
            )


@dataclass(frozen=True, slots=True)
class Claims:
    """What an implementation claims; a clause that needs more is reported as not claimed.

    cross_attention: key and value may differ from query, and S from L.
    masks: forms of mask that are taken, "bool" (True = may attend) and "float" (added to the scores).
    per_item_mask, per_head_mask, per_query_mask: masks may differ between the items of a batch, heads, queries; what
        says no to the latter two takes padding alone.
    always_causal: it is causal without being asked, so that only causal calls are made.
    causal: where the causal diagonal starts when L != S, or None where `is_causal` is not taken (clause CAU-3).
    empty_row: what a query without an allowed key gets (clause MSK-8).
    returns_weights: per-head weights are returned on request.
    bias: which values of `Config.bias` can be built.
    dropout: `Config.dropout` is honoured in training, True for dropout of the weights, "output" for that of the output.
    gradients: outputs can be differentiated.
    weight_gradients: the attention tells the gradients of its weights: it is a `mha.spec.Differentiable`.
    grouped_query: `Config.n_kv_heads` may be less than `n_heads` (clause GQA-1).
    kv_widths: `Config.kdim` and `Config.vdim` may differ from `d_model` (clause XAT-1).
    decodes: the attention is a `mha.spec.Decoder` (clause INC-1), in every configuration that is claimed.
    decodes_ragged: its `decode` takes `active`, so that the items of a batch may differ in length.
    composes: what it can be used in, "compile", "export", "func", "autocast" (the CMP clauses).
    extras: "bias_kv", "zero_key", "length_first" (fields of `Config`), "unbatched" (inputs of two dimensions; PTH-5).
    retiles: its order of summation depends on the problem's sizes or numbers; equal bits and exact corners are then
        not asked for, but results within twice the bound.
    dtypes, devices: where it runs.
    rounding: see `Rounding`.
    """

    cross_attention: bool = True
    masks: Collection[str] = frozenset({"bool"})
    per_item_mask: bool = True
    per_head_mask: bool = True
    per_query_mask: bool = True
    always_causal: bool = False
    causal: Alignment | None = "top_left"
    empty_row: EmptyRow = "zeros"
    returns_weights: bool = True
    bias: Collection[bool] = frozenset({True, False})
    dropout: bool | Literal["output"] = False
    gradients: bool = True
    weight_gradients: bool = True
    grouped_query: bool = False
    kv_widths: bool = False
    decodes: bool = False
    decodes_ragged: bool = False
    composes: Collection[str] = frozenset()
    extras: Collection[str] = frozenset()
    retiles: bool = False
    dtypes: Collection[str] = frozenset({"float64", "float32"})
    devices: Collection[str] = frozenset({"cpu", "cuda"})
    rounding: Rounding = field(default_factory=Rounding)

    def __post_init__(self) -> None:
        """Raise ValueError for a word that the contract does not know."""
        known = {"masks": MASK_FORMS, "bias": (True, False), "dtypes": DTYPES, "devices": DEVICES}
        known |= {"composes": COMPOSITIONS, "extras": EXTRAS}
        for name, values in known.items():
            claimed = getattr(self, name)
            several = isinstance(claimed, Collection) and not isinstance(claimed, str)
            if not several or not all(each in values for each in claimed):
                raise ValueError(f"Claims.{name} must be a set of {', '.join(map(repr, values))}, but is {claimed!r}")
            object.__setattr__(self, name, frozenset(claimed))
        choices = {"causal": (*get_args(Alignment), None), "empty_row": get_args(EmptyRow)}
        choices["dropout"] = (False, True, "output")
        if self.always_causal and self.causal is None:
            raise ValueError("Claims.always_causal says that every call is causal, but Claims.causal is None")
        if self.decodes_ragged and not self.decodes:
            raise ValueError("Claims.decodes_ragged says how it decodes, but Claims.decodes is False")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(map(repr, allowed))
                raise ValueError(f"Claims.{name} must be one of {expected}, but is {getattr(self, name)!r}")
