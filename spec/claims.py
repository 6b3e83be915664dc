"""What an implementation declares it can do. It is tested on that, and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, get_args

from mha.spec.dtypes import TRAITS
from mha.spec.rotary import QkNorm, Rotary
from mha.spec.rounding import Rounding
from mha.spec.scores import Alignment as Alignment
from mha.spec.scores import Lse, Packed, Scores
from mha.spec.sizes import Sizes as Sizes
from mha.spec.sizes import smallest_from as smallest_from

EmptyRow = Literal["zeros", "nan", "uniform", "error"]
MASK_FORMS = ("bool", "float", "int")
DTYPES = tuple(TRAITS)
# Those in which torch computes: what an implementation in torch operations claims.
COMPUTE_DTYPES = tuple(name for name, traits in TRAITS.items() if traits.compute is None)
DEVICES = ("cpu", "cuda")
COMPOSITIONS = ("compile", "export", "func", "autocast", "checkpoint", "deterministic")
# What a cache may go through between two steps of decoding.
CACHE_EDITS = ("reorder", "crop", "copy")
# What `Claims.dropout` may be where the output is dropped.
DROPS_OUTPUT = ("output", "both", "each")
EXTRAS = ("bias_kv", "zero_key", "length_first", "unbatched")
RANKS = (1, 2, 3, 4)
# All projections have a bias, none has one, or those that are named.
BIASES: tuple[bool | str, ...] = (
    True,
    False,
    *("".join(roles) for count in (1, 2, 3) for roles in combinations("qkvo", count)),
)


@dataclass(frozen=True, slots=True)
class Claims:
    """What an implementation claims. A clause that needs more is reported as not claimed.

    projections: it has projections. A kernel has none, and `from_kernel` sets this: its inputs are
    heads.

    Inputs:
        cross_attention: key and value may differ from query, and S from L. "memory": but key and
            value are one tensor.
        masks: the forms of mask that it takes: "bool" (True = may attend), "float" (added to the
            scores), and "int" (1 and 0, in any dtype of integers, for True and False).
        mask_ranks: the numbers of dimensions that a mask may have. 4, (B, H, L, S), is one of them;
            with fewer dimensions, a mask is broadcast.
        per_item_mask, per_head_mask, per_query_mask: masks may differ between the items of a batch,
            between heads, between queries. An implementation that claims neither of the last two
            takes padding masks only.
        joint_masks: masks may differ between items and between queries at once. Otherwise they are
            the AND of a padding mask and a mask for all items, as where the two are separate
            arguments.
        prefix_masks: a mask allows the first keys of a row and no others, as where it is given as
            their number.
        always_causal: it is causal even when `is_causal` is not given, so only causal calls are
            made.
        causal: the alignment of the causal mask when L != S; None if it takes no `is_causal`
            (clause CAU-3).
        causal_with_mask: `is_causal` may be given beside a mask, and both apply. False: such a
            call raises (clause PTH-4), as in `torch.nn.functional.scaled_dot_product_attention`.
            "mask_alone": the mask applies without the flag, as FlashInfer's `custom_mask`.
        dtypes, devices: the dtypes and devices that it supports.
        sizes: the numbers of heads, head widths and lengths that it takes; see `Sizes`.

    Results:
        empty_row: the result of a query without an allowed key (clause MSK-8).
        returns_weights: it returns per-head weights on request.
        scale: what the scores are multiplied by, if not 1/sqrt(d_k); 1.0 for scores that are not
            scaled.
        rotary: queries and keys are rotated by their positions before the scores; see `Rotary`.
        qk_norm: queries and keys are normed after their projections; see `QkNorm`.
        scores: what a call may say about the scores, such as another scale; see `Scores`.
        lengths: a call may say how many keys each item has ("keys"), and how many queries too
            ("both"), in a dense batch (clause LEN-1).
        packed: it takes sequences that are packed one after another; see `Packed`. The layout
            "t h d" of `from_kernel` says so.
        lse: it returns the log-sum-exp of the scores on request; see `Lse`.
        gradients: its outputs can be differentiated.
        second_gradients: so can its gradients (clause GRD-9).
        weight_gradients: it gives the gradients of its weights, as a `mha.spec.Differentiable`.
        rounding: where it rounds; see `Rounding`.
        retiles: its order of summation depends on the sizes or numbers of the problem. Equal bits
            and exact special cases are then not required; results within twice the bound are.

    Configurations:
        bias: the values of `Config.bias` that it can be built with: True, False, or the projections
            that have a bias, such as "qvo".
        dropout: it applies `Config.dropout` in training: True to the weights, "output" to the
            output, "both" to both, "each" to the weights alone, as `Config.output_dropout` is for
            the output.
        own_head_dim: `Config.d_head` may be given, so `n_heads` need not divide `d_model`.
        grouped_query: `Config.n_kv_heads` may be less than `n_heads` (clause GQA-1).
        multi_query: all heads share one key and value, so `Config.n_kv_heads` is always 1.
        kv_widths: `Config.kdim` and `Config.vdim` may differ from `d_model` (clause XAT-1).
        value_width: so may `Config.d_value` from the width of queries and keys (clause VAL-1).
        extras: "bias_kv", "zero_key" and "length_first", which are fields of `Config`, and
            "unbatched", which means inputs of two dimensions (clause PTH-5).

    Uses:
        decodes: it is a `mha.spec.Decoder` in every configuration that it claims (clause INC-1).
            "chunks": and takes several new positions at once, against a cache too (clause INC-2).
        decodes_ragged: its `decode` takes `active`, so the items of a batch may differ in length.
        cache_edits: what its caches may go through (clause INC-3): "reorder" by its
            `reorder_cache`, "crop" by its `crop_cache`, "copy" by `copy.deepcopy`.
        composes: what it works with: "compile", "export", "func", "autocast", "checkpoint",
            "deterministic" (the CMP clauses).
        split_keys: it is a `mha.spec.SplitKeys`, which merges a row from parts of its keys (clause
            LSE-2).
        memory: "linear" if its memory grows with L + S, not with L * S (clause MEM-1).
        repeats: a second call gives the same bits, in the "forward" pass, or in "both" (clause
            DET-1).
        batch_invariant: the bits of an item do not depend on the rest of the batch (clause DET-2),
            in any call, or in one with these arguments, such as {"num_splits": 1}.
        world_sizes: the numbers of ranks that it runs on, as a `mha.spec.Sharded` (the DST
            clauses); none by default.

    Raises ValueError for an unknown value, or for claims that contradict each other.

    >>> Claims(masks={"bool", "float"}, causal=None, returns_weights=False).empty_row
    'zeros'
    >>> Claims(causal="left")
    Traceback (most recent call last):
    ValueError: Claims.causal must be one of 'top_left', 'bottom_right', None, but is 'left'
    """

    projections: bool = True
    cross_attention: bool | Literal["memory"] = True
    masks: Collection[str] = frozenset({"bool"})
    mask_ranks: Collection[int] = frozenset(RANKS)
    per_item_mask: bool = True
    per_head_mask: bool = True
    per_query_mask: bool = True
    joint_masks: bool = True
    prefix_masks: bool = False
    always_causal: bool = False
    causal: Alignment | None = "top_left"
    causal_with_mask: bool | Literal["mask_alone"] = True
    empty_row: EmptyRow = "zeros"
    returns_weights: bool = True
    scale: float | None = None
    rotary: Rotary | None = None
    qk_norm: QkNorm | None = None
    scores: Scores = field(default_factory=Scores)
    lengths: Literal["keys", "both"] | None = None
    packed: Packed | None = None
    lse: Lse | None = None
    bias: Collection[bool | str] = frozenset({True, False})
    dropout: bool | Literal["output", "both", "each"] = False
    own_head_dim: bool = False
    gradients: bool = True
    second_gradients: bool = False
    weight_gradients: bool = True
    grouped_query: bool = False
    multi_query: bool = False
    kv_widths: bool = False
    value_width: bool = False
    decodes: bool | Literal["chunks"] = False
    decodes_ragged: bool = False
    cache_edits: Collection[str] = frozenset()
    composes: Collection[str] = frozenset()
    extras: Collection[str] = frozenset()
    world_sizes: Collection[int] = frozenset()
    memory: Literal["linear"] | None = None
    repeats: Literal["forward", "both"] | None = None
    batch_invariant: bool | Mapping[str, Any] | tuple[tuple[str, Any], ...] = False
    split_keys: bool = False
    retiles: bool = False
    dtypes: Collection[str] = frozenset({"float64", "float32"})
    devices: Collection[str] = frozenset({"cpu", "cuda"})
    sizes: Sizes = field(default_factory=Sizes)
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def combines_causal(self) -> bool:
        """Whether causal calls may have a mask, and both apply."""
        return self.always_causal or self.causal_with_mask is True

    @property
    def declares_softmax(self) -> bool:
        """Whether the profile is narrower than the default in how the softmax rounds."""
        return not (self.rounding.softmax_stored and self.rounding.log_normaliser)

    def __post_init__(self) -> None:
        """Turn collections into frozensets; raise ValueError for an unknown value."""
        sets: dict[str, tuple[Any, ...]] = {
            "masks": MASK_FORMS,
            "mask_ranks": RANKS,
            "bias": BIASES,
            "dtypes": DTYPES,
            "devices": DEVICES,
            "composes": COMPOSITIONS,
            "cache_edits": CACHE_EDITS,
            "extras": EXTRAS,
        }
        for name, known in sets.items():
            self._freeze(name, known)
        self._freeze_world_sizes()
        if not isinstance(self.batch_invariant, bool):
            # Pairs, which can be hashed.
            pairs = tuple(sorted(dict(self.batch_invariant).items()))
            object.__setattr__(self, "batch_invariant", pairs)
        self._require_types()
        self._require_consistency()
        self._fit_sizes()
        choices = {
            "cross_attention": (True, False, "memory"),
            "causal": (*get_args(Alignment), None),
            "causal_with_mask": (True, False, "mask_alone"),
            "empty_row": get_args(EmptyRow),
            "dropout": (False, True, *DROPS_OUTPUT),
            "decodes": (False, True, "chunks"),
            "memory": (None, "linear"),
            "lengths": (None, "keys", "both"),
            "repeats": (None, "forward", "both"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"Claims.{name} must be one of {words}, but is {value!r}")

    def _freeze(self, name: str, known: tuple[Any, ...]) -> None:
        """Turn a collection of known values into a frozenset, or raise ValueError."""
        claimed = getattr(self, name)
        is_set = isinstance(claimed, Collection) and not isinstance(claimed, str)
        if not is_set or not all(value in known for value in claimed):
            words = ", ".join(map(repr, known))
            raise ValueError(f"Claims.{name} must be a set of {words}, but is {claimed!r}")
        object.__setattr__(self, name, frozenset(claimed))

    def _freeze_world_sizes(self) -> None:
        """Turn the numbers of ranks into a frozenset, or raise ValueError."""
        sizes = self.world_sizes
        if not isinstance(sizes, Collection) or not all(
            type(size) is int and size > 0 for size in sizes
        ):
            raise ValueError(
                f"Claims.world_sizes must be a set of positive integers, but is {sizes!r}"
            )
        object.__setattr__(self, "world_sizes", frozenset(sizes))

    def _require_consistency(self) -> None:
        """Raise ValueError for claims that contradict each other."""
        scores = self.scores
        needs_alignment = bool(scores.window or scores.chunk or scores.alibi)
        contradictions = {
            "always_causal needs an alignment, but Claims.causal is None": (
                self.always_causal and self.causal is None
            ),
            "decodes_ragged needs Claims.decodes, but that is False": (
                self.decodes_ragged and not self.decodes
            ),
            "cache_edits needs Claims.decodes, but that is False": (
                bool(self.cache_edits) and not self.decodes
            ),
            "multi_query is one key head, and grouped_query any number; claim one": (
                self.multi_query and self.grouped_query
            ),
            **self._mask_contradictions(),
            **self._head_contradictions(),
            "scores has a window, chunks or ALiBi, which need an alignment: Claims.causal, or"
            " Scores.alignment": needs_alignment and self.alignment is None,
            "second_gradients needs Claims.gradients, but that is False": (
                self.second_gradients and not self.gradients
            ),
        }
        for message, holds in contradictions.items():
            if holds:
                raise ValueError(f"Claims.{message}")

    def _require_types(self) -> None:
        """Raise ValueError for a scale or a record of another type."""
        if not isinstance(self.rotary, Rotary | None):
            raise ValueError(f"Claims.rotary must be a Rotary, or None, but is {self.rotary!r}")
        if not isinstance(self.qk_norm, QkNorm | None):
            raise ValueError(f"Claims.qk_norm must be a QkNorm, or None, but is {self.qk_norm!r}")
        if not isinstance(self.packed, Packed | None):
            raise ValueError(f"Claims.packed must be a Packed, or None, but is {self.packed!r}")
        if not isinstance(self.lse, Lse | None):
            raise ValueError(f"Claims.lse must be an Lse, or None, but is {self.lse!r}")
        if self.scale is not None and not (
            isinstance(self.scale, float) and math.isfinite(self.scale) and self.scale
        ):
            raise ValueError(
                f"Claims.scale must be a finite float other than 0, or None, but is {self.scale!r}"
            )

    def _head_contradictions(self) -> dict[str, bool]:
        """Return which claims contradict a rotation or norm of queries and keys, by message."""
        name = "rotary" if self.rotary else "qk_norm"
        extra_keys = self.changes_heads and {"bias_kv", "zero_key"} & set(self.extras)
        return {
            f"{name} comes after projections, but projections is False": (
                self.changes_heads and not self.projections
            ),
            f"{name} is not defined for extra keys, which have no position: leave"
            " 'bias_kv' and 'zero_key' out of extras": bool(extra_keys),
        }

    def _fit_sizes(self) -> None:
        """Claim only widths of heads with whole pairs of columns to rotate."""
        if self.rotary is None:
            return
        multiple = math.lcm(self.sizes.head_dim_multiple, self.rotary.multiple)
        if multiple != self.sizes.head_dim_multiple:
            object.__setattr__(self, "sizes", replace(self.sizes, head_dim_multiple=multiple))

    @property
    def changes_heads(self) -> bool:
        """Whether something stands between the projections and the scores."""
        return bool(self.rotary or self.qk_norm)

    @property
    def norm_weights(self) -> str:
        """`Config.norm_weights` of every configuration."""
        if self.qk_norm is None or self.qk_norm.weight is None:
            return ""
        return self.qk_norm.over

    @property
    def narrows(self) -> bool:
        """Whether a step of a float64 call is declared to be in a narrower dtype."""
        return self.rounding.narrows or (self.changes_heads and self.rounding.heads_in_float32)

    def _mask_contradictions(self) -> dict[str, bool]:
        """Return which claims about masks contradict each other, by message."""
        forms = {*self.masks}
        return {
            f"masks with 'int' must have 'bool' too, but is {forms}": (
                "int" in forms and "bool" not in forms
            ),
            f"prefix_masks are boolean, but Claims.masks is {forms}": (
                self.prefix_masks and not forms <= {"bool"}
            ),
            f"mask_ranks must contain 4, but is {set(self.mask_ranks)}": 4 not in self.mask_ranks,
        }

    @property
    def alignment(self) -> Alignment | None:
        """The alignment of the causal mask, of windows, chunks and ALiBi, if there is one."""
        return self.causal or self.scores.alignment

    def scale_for(self, head_dim: int) -> float:
        """Return what the scores are multiplied by: `scale`, or 1/sqrt(d_k).

        >>> Claims().scale_for(16), Claims(scale=1.0).scale_for(16)
        (0.25, 1.0)
        """
        return head_dim**-0.5 if self.scale is None else self.scale
