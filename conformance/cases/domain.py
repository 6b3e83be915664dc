"""Domains: the cases that a property is about, as lists of levels, simplest first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS, OF_NUMBERS
from mha.spec import Claims
from mha.spec.dtypes import TRAITS

BOTH = (False, True)
# The dtypes in which the gradients' bound is small beside the gradients, and those in which it is not.
BOUNDED = tuple(name for name, traits in TRAITS.items() if traits.sharp_gradients)
HALF = tuple(name for name, traits in TRAITS.items() if traits.half)
# Where the lowest number and a score do not add up to -infinity.
WIDE_RANGE = tuple(name for name, traits in TRAITS.items() if not traits.narrow)
WITH_GRADIENT = ("eval", "train")
ALL_MODES = ("eval", "train", "no_grad", "inference", "train_no_grad")
# How the three inputs are one tensor or several; all but "self" are cross-attention.
INPUTS = ("cross", "self", "memory", "query_key")
EVERYDAY = ("normal", "integers", "uniform", "large", "offset", "duplicates", "heavy", "tiny", "huge", "selection")
# One regime for each kind of trouble, and layouts likewise, for clauses that are about something else.
TYPICAL = ("normal", "integers", "large", "tiny")
FEW_LAYOUTS = ("contiguous", "mixed")
# For properties that change inputs, which would lose a layout.
DENSE = ("contiguous",)
ALL_LAYOUTS = (*LAYOUTS, "mixed")
# Where the scores are moderate, and the values too: a change of one number shows.
MODERATE = ("normal", "integers", "duplicates")
# The largest product of all sizes, for each scale: what a case can teach, it teaches below this. Long rows on as many
# queries go beyond it, up to `LONG_SQUARE`.
VOLUMES = {"small": 1 << 14, "wide": 1 << 22, "long": 1 << 24}
# The sizes of everyday models, and a width beside a tile; lengths as far as the profile goes.
WIDE = {"n_heads": (8, 3), "head_dim": (64, 17, 80, 256), "B": (1, 5), "L": (1, 7, 33, 197), "S": (7, 33, 197)}
# The largest of these d_model: weights take its square, and their time.
WIDEST = 512
# The longest L = S: a plain implementation holds as many numbers as its square.
LONG_SQUARE = 1025
# Sizes at and beside the edges of tiles.
EDGES = (17, 16, 33, 65, 129, 257, 513)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Which cases a property takes; a tuple lists what is drawn, simplest first, and `min_...` is a smallest size.

    square: L = S in every case. masks: kinds of mask; the name of a kind that an implementation does not claim is
    left out, and so are causal=True and inputs="cross"; a domain left with nothing is not claimed.
    passes: forms of mask, "bool" or "float", that the property itself makes and passes.
    dtypes: the property is only about these; empty means all. scale: "small", "wide" (the sizes of `WIDE`, whatever
    the smallest and largest are) or "long" (keys as many as in the profile's long rows, or half, or an eighth).
    """

    masks: tuple[str, ...] = ("none",)
    causal: tuple[bool, ...] = (False,)
    inputs: tuple[str, ...] = INPUTS
    square: bool = False
    values: tuple[str, ...] = TYPICAL
    layouts: tuple[str, ...] = FEW_LAYOUTS
    modes: tuple[str, ...] = ALL_MODES
    need_weights: tuple[bool, ...] = (False, True)
    bias: tuple[bool, ...] = (True, False)
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    scale: Literal["small", "wide", "long"] = "small"
    min_B: int = 1
    min_L: int = 1
    min_S: int = 1
    min_heads: int = 1
    min_head_dim: int = 1
    max_B: int = 4
    max_heads: int = 9
    max_length: int = 1 << 16

    def within(self, claims: Claims) -> Domain | str:
        """Return the domain cut down to what is claimed, or, where nothing is left, what claim is missing."""
        if not set(self.passes) <= set(claims.masks):
            return f"needs the claim masks={{{', '.join(map(repr, sorted(self.passes)))}}}"
        differ = {"B": claims.per_item_mask, "H": claims.per_head_mask, "L": claims.per_query_mask}
        single = {axis for axis, claimed in differ.items() if not claimed}
        masks = tuple(
            kind
            for kind in self.masks
            if kind == "none"
            or (("float" if kind in OF_NUMBERS else "bool") in claims.masks and not set(EXTENTS[kind]) & single)
        )
        causal = tuple(flag for flag in self.causal if (claims.causal if flag else not claims.always_causal))
        inputs = tuple(kind for kind in self.inputs if kind == "self" or claims.cross_attention)
        bias = tuple(flag for flag in self.bias if flag in claims.bias)
        need_weights = tuple(flag for flag in self.need_weights if not flag or claims.returns_weights)
        left = {
            "masks": masks,
            "causal": causal,
            "cross_attention": inputs,
            "bias": bias,
            "returns_weights": need_weights,
        }
        for claim, levels in left.items():
            if not levels:
                return f"needs the claim {claim}"
        return replace(self, masks=masks, causal=causal, inputs=inputs, bias=bias, need_weights=need_weights)

    @property
    def volume(self) -> float:
        """The largest product of all sizes."""
        return VOLUMES[self.scale]

    def edges(self, longest: int) -> tuple[int, ...]:
        """Return the lengths beside the edges of tiles; in `levels`, the first of them stands for all."""
        edges = EDGES if self.scale == "small" else ()
        return tuple(size for size in edges if size <= min(longest, self.max_length))

    def bounds_of(self, size: str, longest: int) -> tuple[int, int]:
        """Return the smallest and the largest value of a size."""
        return {
            "n_heads": (self.min_heads, self.max_heads),
            "head_dim": (self.min_head_dim, 16),
            "B": (self.min_B, self.max_B),
            "L": (self.min_L, longest),
            "S": (self.min_S, longest),
        }[size]

    def levels(self, longest: int) -> dict[str, tuple[Any, ...]]:
        """Return the values of each field of `Case` that are worth trying on purpose, lengths up to `longest`."""
        edge = self.edges(longest)[:1]
        lengths = {
            name: _between(smallest, self.max_length, 1, 2, 3, *edge)
            for name, smallest in (("L", self.min_L), ("S", self.min_S))
        }
        if self.scale == "long":
            some = (longest, longest - 1, longest // 2 + 1, longest * 3 // 8, longest // 4 + 1, longest // 8 + 1)
            lengths = {"L": (1, 2, 33), "S": some, "head_dim": (8, 2, 64)}
        sizes: dict[str, tuple[Any, ...]] = {
            "n_heads": _between(self.min_heads, self.max_heads, 1, 2, 3, 9),
            "head_dim": _between(self.min_head_dim, 16, 1, 2, 3, 16),
            "B": _between(self.min_B, self.max_B, 1, 2, 3),
        }
        wide = WIDE | {name: tuple(size for size in WIDE[name] if size <= longest) for name in ("L", "S")}
        return {
            **(wide if self.scale == "wide" else sizes | lengths),
            "bias": self.bias,
            "mask": self.masks,
            "causal": self.causal,
            "inputs": self.inputs,
            "layout": self.layouts,
            "values": self.values,
            "mode": self.modes,
            "need_weights": self.need_weights,
        }

    def case(self, claims: Claims, dtype: str, device: str, row: dict[str, Any]) -> Case:
        """Return the case of a row of levels; self-attention and square domains have one length, L unless too long."""
        if self.square or row["inputs"] in ("self", "query_key", "query_value"):
            fits = row["L"] ** 2 * prod(row[size] for size in ("B", "n_heads", "head_dim")) <= self.volume
            length = max(row["L"] if fits else min(row["L"], row["S"]), self.min_L, self.min_S)
            length = min(row["S"], LONG_SQUARE) if self.scale == "long" else length
            row = row | {"L": length, "S": length}
        if self.scale == "wide":
            row = row | {"n_heads": min(row["n_heads"], WIDEST // row["head_dim"])}
        few = self.scale == "long" and row["inputs"] != "self" and claims.causal == "top_left"
        if few and not claims.always_causal:
            row = row | {"causal": False}  # which would leave the few queries the first few keys
        return Case(**row, dtype=dtype, device=device, alignment=claims.causal or "top_left")


@dataclass(frozen=True)
class CaseSpace:
    """The cases of a property for one implementation: its domain within the claims, in one dtype on one device.

    longest: the longest L and S.
    """

    domain: Domain
    claims: Claims
    dtype: str
    device: str
    longest: int

    def case(self, row: dict[str, Any]) -> Case:
        """Return the case of a row of levels."""
        return self.domain.case(self.claims, self.dtype, self.device, row)


def _between(smallest: int, largest: int, *sizes: int) -> tuple[int, ...]:
    """Return the smallest, without which nothing may be small enough, and these sizes as far as they are allowed."""
    return tuple(sorted({smallest, *(size for size in sizes if smallest <= size <= largest)}))
