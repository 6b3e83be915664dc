"""What an implementation declares it can do. It is tested on that, and on nothing else."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mha.spec.dtypes import TRAITS

Alignment = Literal["top_left", "bottom_right"]
EmptyRow = Literal["zeros", "nan", "uniform", "error"]
MASK_FORMS = ("bool", "float")
DTYPES = tuple(TRAITS)
# Those in which torch computes: what an implementation in torch operations claims.
COMPUTE_DTYPES = tuple(name for name, traits in TRAITS.items() if traits.compute is None)
DEVICES = ("cpu", "cuda")
COMPOSITIONS = ("compile", "export", "func", "autocast")
# 32 ulp; a coarser exponential would show in every result.
LARGEST_EXP_ERROR = 64
EXTRAS = ("bias_kv", "zero_key", "length_first", "unbatched")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where an implementation rounds. It enters the error bound; the default is the loosest profile.

    scores_stored: scores and weights are stored in the dtype of the inputs between steps, not in the accumulator's.
    softmax_stored: so are the differences, exponentials and sums of the softmax; each sum itself is accumulated in the
        accumulator's dtype.
    scaling_roundings: how many of query and key are rounded after being scaled, before their product: 0, 1 or 2.
    exp_error: error of the exponential, in unit roundoffs of the accumulator (4 for 1 ulp, 40 for vectorised 20 ulp).
    log_normaliser: weights are computed as exp(score - z), with z the row's log-sum-exp in the accumulator, or parts of
        a row are merged by their log-sum-exps (split keys). The sum of a row is then off by the rounding of z, which
        grows with the scores.
    softmax_in_float32: float64 scores are cast to float32 for the softmax; clause NUM-2 is then not claimed.

    Raises ValueError for a `scaling_roundings` or an `exp_error` outside its range: the bound would prove nothing.

    >>> Rounding(softmax_stored=False, log_normaliser=False).exp_error  # a plain `torch.softmax`
    40
    """

    scores_stored: bool = True
    softmax_stored: bool = True
    scaling_roundings: int = 2
    exp_error: int = 40
    log_normaliser: bool = True
    softmax_in_float32: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError unless the profile is one for which the bound proves something."""
        if self.scaling_roundings not in (0, 1, 2):
            raise ValueError(f"Rounding.scaling_roundings must be 0, 1 or 2, but is {self.scaling_roundings!r}")
        if not 0 <= self.exp_error <= LARGEST_EXP_ERROR:
            raise ValueError(f"Rounding.exp_error must be from 0 to {LARGEST_EXP_ERROR}, but is {self.exp_error!r}")


@dataclass(frozen=True, slots=True)
class Claims:
    """What an implementation claims. A clause that needs more is reported as not claimed.

    Inputs:
        cross_attention: key and value may differ from query, and S from L.
        masks: the forms of mask that it takes: "bool" (True = may attend) and "float" (added to the scores).
        per_item_mask, per_head_mask, per_query_mask: masks may differ between the items of a batch, between heads,
            between queries. An implementation that claims neither of the last two takes padding masks only.
        always_causal: it is causal even when `is_causal` is not given, so only causal calls are made.
        causal: the alignment of the causal mask when L != S; None if it takes no `is_causal` (clause CAU-3).
        dtypes, devices: the dtypes and devices that it supports.

    Results:
        empty_row: the result of a query without an allowed key (clause MSK-8).
        returns_weights: it returns per-head weights on request.
        gradients: its outputs can be differentiated.
        weight_gradients: it gives the gradients of its weights, as a `mha.spec.Differentiable`.
        rounding: where it rounds; see `Rounding`.
        retiles: its order of summation depends on the sizes or numbers of the problem. Equal bits and exact special
            cases are then not required; results within twice the bound are.

    Configurations:
        bias: the values of `Config.bias` that it can be built with.
        dropout: it applies `Config.dropout` in training: True to the weights, "output" to the output.
        grouped_query: `Config.n_kv_heads` may be less than `n_heads` (clause GQA-1).
        kv_widths: `Config.kdim` and `Config.vdim` may differ from `d_model` (clause XAT-1).
        extras: "bias_kv", "zero_key" and "length_first", which are fields of `Config`, and "unbatched", which means
            inputs of two dimensions (clause PTH-5).

    Uses:
        decodes: it is a `mha.spec.Decoder` in every configuration that it claims (clause INC-1).
        decodes_ragged: its `decode` takes `active`, so the items of a batch may differ in length.
        composes: what it works with: "compile", "export", "func", "autocast" (the CMP clauses).

    Raises ValueError for an unknown value, or for claims that contradict each other.

    >>> Claims(masks={"bool", "float"}, causal=None, returns_weights=False).empty_row
    'zeros'
    >>> Claims(causal="left")
    Traceback (most recent call last):
    ValueError: Claims.causal must be one of 'top_left', 'bottom_right', None, but is 'left'
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
        """Turn collections into frozensets; raise ValueError for an unknown value or a contradiction."""
        sets: dict[str, tuple[Any, ...]] = {
            "masks": MASK_FORMS,
            "bias": (True, False),
            "dtypes": DTYPES,
            "devices": DEVICES,
            "composes": COMPOSITIONS,
            "extras": EXTRAS,
        }
        for name, known in sets.items():
            claimed = getattr(self, name)
            is_set = isinstance(claimed, Collection) and not isinstance(claimed, str)
            if not is_set or not all(value in known for value in claimed):
                raise ValueError(f"Claims.{name} must be a set of {', '.join(map(repr, known))}, but is {claimed!r}")
            object.__setattr__(self, name, frozenset(claimed))
        if self.always_causal and self.causal is None:
            raise ValueError("Claims.always_causal needs an alignment, but Claims.causal is None")
        if self.decodes_ragged and not self.decodes:
            raise ValueError("Claims.decodes_ragged needs Claims.decodes, but that is False")
        choices = {
            "causal": (*get_args(Alignment), None),
            "empty_row": get_args(EmptyRow),
            "dropout": (False, True, "output"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Claims.{name} must be one of {', '.join(map(repr, allowed))}, but is {value!r}")
