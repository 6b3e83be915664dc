"""Domains: which cases a property takes, as a tuple of levels for each field of `Case`, simplest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS, OF_NUMBERS
from mha.spec import Claims
from mha.spec.dtypes import TRAITS

BOTH = (False, True)

# dtypes whose gradient bound is small beside the gradients, ...
BOUNDED = tuple(name for name, traits in TRAITS.items() if traits.sharp_gradients)
# ... and those compared with the plain formula in the same dtype instead.
HALF = tuple(name for name, traits in TRAITS.items() if traits.half)
# dtypes whose lowest number plus a score is still finite.
WIDE_RANGE = tuple(name for name, traits in TRAITS.items() if not traits.narrow)

WITH_GRADIENT = ("eval", "train")
ALL_MODES = ("eval", "train", "no_grad", "inference", "train_no_grad")

# All but "self" are cross-attention.
INPUTS = ("cross", "self", "memory", "query_key")

# All values except "low", which only masks are tested with.
MOST_VALUES = ("normal", "integers", "uniform", "large", "offset", "duplicates", "heavy", "tiny", "huge", "selection")
# One for each kind of numerical trouble, for clauses about something else.
FEW_VALUES = ("normal", "integers", "large", "tiny")
# Scores and values of ordinary size, where a change of a single number shows.
MODERATE = ("normal", "integers", "duplicates")

ALL_LAYOUTS = (*LAYOUTS, "mixed")
# For clauses about something else.
FEW_LAYOUTS = ("contiguous", "mixed")
# For properties that replace inputs, which loses their layout.
DENSE = ("contiguous",)

SIZES = ("n_heads", "head_dim", "B", "L", "S")
# The largest product of all sizes in each scale; larger cases take longer and find no more. Square long cases exceed
# theirs, up to `LONGEST_SQUARE`.
VOLUMES = {"small": 1 << 14, "wide": 1 << 22, "long": 1 << 24}
# The scale "wide": the sizes of common models, a width beside a tile edge, and lengths within those of the profile.
WIDE_SIZES = {"n_heads": (8, 3), "head_dim": (64, 17, 80, 256), "B": (1, 5), "L": (1, 7, 33, 197), "S": (7, 33, 197)}
# The largest d_model of more than two heads in the scale "wide": the time that weights take grows with its square.
LARGEST_D_MODEL = 512
# The largest L = S in the scale "long": a plain implementation holds that many scores squared.
LONGEST_SQUARE = 1025
# Lengths at and beside the edges of tiles.
TILE_EDGES = (17, 16, 33, 65, 129, 257, 513)

# The claims that levels of a field need, where they have another name.
CLAIM_OF = {"inputs": "cross_attention", "need_weights": "returns_weights"}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Which cases a property takes. The tuples are the levels of a field of `Case`, simplest first.

    masks: kinds of mask. Levels that need a claim (a form of mask, a causal flag, cross-attention, returned weights)
        are dropped where it is missing; see `within`.
    square: L = S in every case.
    passes: the forms of mask, "bool" or "float", that the property itself makes.
    dtypes: the only dtypes that the property is about; all if empty.
    scale: "small"; "wide", with the levels in `sizes` whatever min_... and max_... are; or "long", where S is
        the profile's `long_rows`, or a fraction of it.
    min_..., max_...: the range of a size; max_length is that of L and S.
    """

    masks: tuple[str, ...] = ("none",)
    causal: tuple[bool, ...] = (False,)
    inputs: tuple[str, ...] = INPUTS
    square: bool = False
    values: tuple[str, ...] = FEW_VALUES
    layouts: tuple[str, ...] = FEW_LAYOUTS
    modes: tuple[str, ...] = ALL_MODES
    need_weights: tuple[bool, ...] = (False, True)
    bias: tuple[bool, ...] = (True, False)
    passes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    scale: Literal["small", "wide", "long"] = "small"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: WIDE_SIZES, hash=False)
    min_B: int = 1
    min_L: int = 1
    min_S: int = 1
    min_heads: int = 1
    min_head_dim: int = 1
    max_B: int = 4
    max_heads: int = 9
    max_length: int = 1 << 16

    def within(self, claims: Claims) -> Domain | str:
        """Return the domain without the levels that are not claimed; if a field has none left, which claim is missing.

        >>> Domain(masks=("none", "bias")).within(Claims(masks={"bool"})).masks
        ('none',)
        >>> Domain(masks=("bias",)).within(Claims(masks={"bool"}))
        'needs the claim masks'
        """
        if not set(self.passes) <= set(claims.masks):
            return f"needs the claim masks={{{', '.join(map(repr, sorted(self.passes)))}}}"
        kept: dict[str, Any] = {
            "masks": tuple(kind for kind in self.masks if _takes_mask(claims, kind)),
            "causal": tuple(flag for flag in self.causal if _takes_causal_flag(claims, flag)),
            "inputs": self.inputs if claims.cross_attention else tuple({"self"} & set(self.inputs)),
            "bias": tuple(flag for flag in self.bias if flag in claims.bias),
            "need_weights": self.need_weights if claims.returns_weights else tuple({False} & set(self.need_weights)),
        }
        for name, levels in kept.items():
            if not levels:
                return f"needs the claim {CLAIM_OF.get(name, name)}"
        return replace(self, **kept)

    @property
    def volume(self) -> float:
        """The largest product of all sizes."""
        return VOLUMES[self.scale]

    def tile_edges(self, longest: int) -> tuple[int, ...]:
        """Return the lengths beside tile edges, up to `longest`; in `levels`, the first stands for all of them."""
        edges = TILE_EDGES if self.scale == "small" else ()
        return tuple(size for size in edges if size <= min(longest, self.max_length))

    def size_range(self, size: str, longest: int) -> tuple[int, int]:
        """Return the smallest and the largest value of a size, in the scale "small"."""
        return {
            "n_heads": (self.min_heads, self.max_heads),
            "head_dim": (self.min_head_dim, 16),
            "B": (self.min_B, self.max_B),
            "L": (self.min_L, longest),
            "S": (self.min_S, longest),
        }[size]

    def levels(self, longest: int) -> dict[str, tuple[Any, ...]]:
        """Return the levels of each field of `Case`, the sizes first, with lengths up to `longest`."""
        return {
            **self._size_levels(longest),
            "bias": self.bias,
            "mask": self.masks,
            "causal": self.causal,
            "inputs": self.inputs,
            "layout": self.layouts,
            "values": self.values,
            "mode": self.modes,
            "need_weights": self.need_weights,
        }

    def _size_levels(self, longest: int) -> dict[str, tuple[int, ...]]:
        if self.scale == "wide":
            fitting = {name: tuple(size for size in self.sizes[name] if size <= longest) for name in ("L", "S")}
            return {**self.sizes, **fitting}
        sizes = {
            "n_heads": _in_range(self.min_heads, self.max_heads, (1, 2, 3, 9)),
            "head_dim": _in_range(self.min_head_dim, 16, (1, 2, 3, 16)),
            "B": _in_range(self.min_B, self.max_B, (1, 2, 3)),
        }
        if self.scale == "long":
            keys = (longest, longest - 1, longest // 2 + 1, longest * 3 // 8, longest // 4 + 1, longest // 8 + 1)
            return sizes | {"L": (1, 2, 33), "S": keys, "head_dim": (8, 2, 64)}
        lengths = (1, 2, 3, *self.tile_edges(longest)[:1])
        return sizes | {
            "L": _in_range(self.min_L, self.max_length, lengths),
            "S": _in_range(self.min_S, self.max_length, lengths),
        }

    def case(self, claims: Claims, dtype: str, device: str, row: dict[str, Any]) -> Case:
        """Return the case of a row of levels, adjusted where its levels do not go together.

        Self-attention and square domains have one length: L, unless that is too long. Few queries on many keys have no
        causal flag that would leave them only the first keys. In the scale "wide", d_model has a limit.
        """
        if self.square or row["inputs"] in ("self", "query_key", "query_value"):
            length = self._one_length(row)
            row = row | {"L": length, "S": length}
        if self.scale == "wide":
            row = row | {"n_heads": min(row["n_heads"], max(2, LARGEST_D_MODEL // row["head_dim"]))}
        few_queries = self.scale == "long" and row["inputs"] != "self"
        if few_queries and claims.causal == "top_left" and not claims.always_causal:
            row = row | {"causal": False}
        return Case(**row, dtype=dtype, device=device, alignment=claims.causal or "top_left")

    def _one_length(self, row: dict[str, Any]) -> int:
        """Return the length that replaces both L and S of a row."""
        queries, keys = int(row["L"]), int(row["S"])
        if self.scale == "long":
            return min(keys, LONGEST_SQUARE)
        fits = queries**2 * prod(row[size] for size in ("B", "n_heads", "head_dim")) <= self.volume
        return max(queries if fits else min(queries, keys), self.min_L, self.min_S)


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
        """Return the case of a row of levels; see `Domain.case`."""
        return self.domain.case(self.claims, self.dtype, self.device, row)


def _takes_mask(claims: Claims, kind: str) -> bool:
    """Return whether a kind of mask is claimed: its form, and every axis along which it differs."""
    if kind == "none":
        return True
    differs = {"B": claims.per_item_mask, "H": claims.per_head_mask, "L": claims.per_query_mask, "S": True}
    form = "float" if kind in OF_NUMBERS else "bool"
    return form in claims.masks and all(differs[axis] for axis in EXTENTS[kind])


def _takes_causal_flag(claims: Claims, flag: bool) -> bool:
    return bool(claims.causal) if flag else not claims.always_causal


def _in_range(smallest: int, largest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest size, and those of `sizes` within the range, in order."""
    return tuple(sorted({smallest, *(size for size in sizes if smallest <= size <= largest)}))
