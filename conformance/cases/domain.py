"""Domains: which cases a property takes, as levels for each field of `Case`, simplest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from mha.conformance.cases.claimed import CLAIMED_INPUTS as CLAIMED_INPUTS
from mha.conformance.cases.claimed import INPUTS as INPUTS
from mha.conformance.cases.claimed import (
    claimed_biases,
    claimed_inputs,
    claimed_lengths,
    claimed_masks,
    claimed_ranks,
    claimed_scales,
    claimed_slopes,
    claimed_variants,
    claimed_windows,
    if_claimed,
)
from mha.conformance.cases.mask_kinds import OF_NUMBERS
from mha.conformance.cases.memory_layouts import LAYOUTS
from mha.conformance.cases.reasons import NeedsClaim, NotApplicable, Reason
from mha.conformance.cases.variants import VARIANTS
from mha.spec import Claims
from mha.spec.dtypes import TRAITS
from mha.spec.scores import Bounds

BOTH = (False, True)

# dtypes whose gradient bound is small beside the gradients, ...
BOUNDED = tuple(name for name, traits in TRAITS.items() if traits.sharp_gradients)
# ... and those compared with the plain formula in the same dtype instead.
HALF = tuple(name for name, traits in TRAITS.items() if traits.half)
# dtypes whose lowest number plus a score is still finite.
WIDE_RANGE = tuple(name for name, traits in TRAITS.items() if not traits.narrow)

WITH_GRADIENT = ("eval", "train")
ALL_MODES = ("eval", "train", "no_grad", "inference", "train_no_grad")

# All values except "low", which only masks are tested with.
MOST_VALUES = (
    "normal",
    "integers",
    "uniform",
    "large",
    "offset",
    "duplicates",
    "heavy",
    "tiny",
    "huge",
    "selection",
)
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
# The largest product of all sizes in each scale; larger cases take longer and find no more. Square
# long cases exceed theirs, up to `LONGEST_SQUARE`.
VOLUMES = {"small": 1 << 14, "wide": 1 << 22, "long": 1 << 24}
# The levels of sizes in the scale "small": the simplest, an odd one, and one that is large for its
# kind. 9 heads fill no power of two; 16 is a width whose root, the scale, is exact in every dtype.
LEVELS = {"n_heads": (1, 2, 3, 9), "head_dim": (1, 2, 3, 16), "B": (1, 2, 3), "length": (1, 2, 3)}
# The widest head in the scale "small".
WIDEST_HEAD = 16
# The scale "wide": the sizes of common models, a width beside a tile edge, and lengths within those
# of the profile.
WIDE_SIZES = {
    "n_heads": (8, 3),
    "head_dim": (64, 17, 128, 256),
    "B": (1, 5),
    "L": (1, 7, 33, 197),
    "S": (7, 33, 197),
}
# The scale "long": few queries, the step of decoding and one beside a tile edge among them, on
# heads of the widths of kernels and of one that is hardly anything.
LONG_SIZES = {"L": (1, 2, 33), "head_dim": (8, 2, 64)}
# Lengths at and beside the edges of tiles.
TILE_EDGES = (17, 16, 33, 65, 129, 257, 513)

# The claims that levels of a field need, where they have another name.
CLAIM_OF = {
    "inputs": "cross_attention",
    "need_weights": "returns_weights",
    "ranks": "world_sizes",
    "scales": "scores.scale",
    "windows": "scores.window",
    "softcaps": "scores.softcap",
    "sinks": "scores.sinks",
    "slopes": "scores.alibi",
    "chunks": "scores.chunk",
}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Which cases a property takes. The tuples are the levels of a field of `Case`, simplest first.

    Levels that need a claim (a form of mask, a causal flag, cross-attention, returned weights) are
    dropped where it is missing. If a field has none left, the nearest level that is claimed takes
    their place, if there is one: see `within`.

    masks: kinds of mask.
    causal: the causal flag.
    inputs: which of query, key and value are one tensor, as in `Case`.
    square: L = S in every case.
    causal_as_mask: where no mask is claimed, the causal mask may take its place.
    plain: the property does not hold for causal calls.
    may_raise: it lets a causal call with a mask raise.
    values, layouts, modes, need_weights: of those fields of `Case`.
    bias: the values of `Config.bias`: False, True for any bias, or the projection that must have
        one.
    passes: the forms of mask, "bool" or "float", that the property itself makes.
    ranks: the numbers of ranks, as far as the profile takes them; 0 for no sharding.
    variants: "plain" and names in `mha.conformance.cases.variants`.
    scales: explicit scales, None for none; those that are not positive need their own claim.
    windows: bounds as in `Options`, None for none.
    softcaps: caps, None for none.
    sinks: kinds of sinks.
    slopes: kinds of slopes.
    chunks: numbers of places of a chunk, None for no chunks.
    lengths: of items, "keys", "both" or "none".
    lse: whether the log-sum-exp is asked for.
    dtypes: the only dtypes that the property is about; all if empty.
    scale: "small"; "wide", with the levels in `sizes` whatever min_... and max_... are; or "long",
        where S is the profile's `long_rows`, or a fraction of it.
    sizes: the levels of the sizes in the scale "wide".
    min_..., max_...: the range of a size; max_length is that of L and S.
    """

    masks: tuple[str, ...] = ("none",)
    causal: tuple[bool, ...] = (False,)
    inputs: tuple[str, ...] = INPUTS
    square: bool = False
    causal_as_mask: bool = False
    plain: bool = False
    may_raise: bool = False
    values: tuple[str, ...] = FEW_VALUES
    layouts: tuple[str, ...] = FEW_LAYOUTS
    modes: tuple[str, ...] = ALL_MODES
    need_weights: tuple[bool, ...] = (False, True)
    bias: tuple[bool | str, ...] = (True, False)
    passes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0,)
    variants: tuple[str, ...] = ("plain",)
    scales: tuple[float | None, ...] = (None,)
    windows: tuple[Bounds | None, ...] = (None,)
    softcaps: tuple[float | None, ...] = (None,)
    sinks: tuple[str, ...] = ("none",)
    slopes: tuple[str, ...] = ("none",)
    chunks: tuple[int | None, ...] = (None,)
    lengths: tuple[str, ...] = ("none",)
    lse: tuple[bool, ...] = (False,)
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

    def within(self, claims: Claims) -> Domain | Reason:
        """Return the nearest domain whose cases are all claimed; if there is none, the reason.

        >>> Domain(masks=("none", "bias")).within(Claims(masks={"bool"})).masks
        ('none',)
        >>> Domain(inputs=("cross",)).within(Claims(cross_attention=False)).inputs
        ('self',)
        >>> print(Domain(masks=("bias",)).within(Claims(masks={"bool"})))
        needs the claim masks={"float"}
        """
        if missing := self._missing(claims):
            return missing
        kept = self._claimed_levels(claims)
        for name, levels in kept.items():
            if not levels:
                return NeedsClaim.of(self._claim_of(name))
        return replace(self, **kept)

    def _claimed_levels(self, claims: Claims) -> dict[str, Any]:
        """Return the claimed levels of each field, nearest ones where none is; empty if none is.

        The order decides which claim is named where several are missing.
        """
        scores = claims.scores
        return {
            "masks": self._masks(claims),
            "causal": self._causal_flags(claims),
            "inputs": claimed_inputs(self.inputs, claims),
            "bias": claimed_biases(self.bias, claims),
            "need_weights": if_claimed(self.need_weights, claims.returns_weights, False),
            "ranks": claimed_ranks(self.ranks, claims),
            "variants": claimed_variants(self.variants, claims),
            "scales": claimed_scales(self.scales, claims),
            "windows": claimed_windows(self.windows, claims),
            "softcaps": if_claimed(self.softcaps, scores.softcap, None),
            "sinks": if_claimed(self.sinks, scores.sinks, "none"),
            "slopes": claimed_slopes(self.slopes, claims),
            "chunks": if_claimed(self.chunks, scores.chunk, None),
            "lengths": claimed_lengths(self.lengths, claims),
            "lse": if_claimed(self.lse, claims.lse, False),
        }

    def _claim_of(self, name: str) -> str:
        """Return the claim that the levels of a field need."""
        if name == "variants":
            return VARIANTS[self.variants[0]].claim
        return CLAIM_OF.get(name, name)

    def up_to(self, ranks: int) -> Domain:
        """Return the domain without the cases on more ranks, unless there are no others."""
        kept = tuple(each for each in self.ranks if each <= ranks)
        return replace(self, ranks=kept or self.ranks[:1])

    def _missing(self, claims: Claims) -> Reason | None:
        """Return what the property needs in every case and is not claimed, or None."""
        if self.plain and claims.always_causal:
            return NotApplicable("has no form for what is always causal")
        if self.min_heads > max(claims.sizes.n_heads or (self.min_heads,)):
            return NotApplicable(
                f"needs at least {self.min_heads} heads, and Claims.sizes has fewer"
            )
        return self._missing_mask(claims)

    def _missing_mask(self, claims: Claims) -> Reason | None:
        """Return which claim about masks the property needs in every case, or None."""
        always_masked = "none" not in self.masks
        always_both = always_masked and False not in self.causal
        if always_both and not self.combines(claims):
            return NeedsClaim("causal_with_mask")
        if always_masked and not claims.masks and not self._causal_mask_only(claims):
            return NeedsClaim("masks")
        needed = set(self.passes)
        if set(self.masks) <= set(OF_NUMBERS):
            needed.add("float")
        if not needed <= set(claims.masks):
            forms = ", ".join(f'"{form}"' for form in sorted(needed))
            return NeedsClaim("masks", f"{{{forms}}}")
        return None

    def combines(self, claims: Claims) -> bool:
        """Return whether a causal call may have a mask."""
        return claims.combines_causal or self.may_raise

    def _causal_mask_only(self, claims: Claims) -> bool:
        """Return whether the causal mask takes the place of masks, which are not claimed."""
        return self.causal_as_mask and not claims.masks and claims.causal is not None

    def _masks(self, claims: Claims) -> tuple[str, ...]:
        if self._causal_mask_only(claims):
            return ("none",)
        return claimed_masks(self.masks, claims)

    def _causal_flags(self, claims: Claims) -> tuple[bool, ...]:
        if claims.always_causal or self._causal_mask_only(claims):
            return (True,)
        return tuple(flag for flag in self.causal if not flag or claims.causal)

    @property
    def volume(self) -> float:
        """The largest product of all sizes."""
        return VOLUMES[self.scale]

    def tile_edges(self, longest: int) -> tuple[int, ...]:
        """Return the lengths beside tile edges, up to `longest`.

        In `levels`, the first stands for all of them.
        """
        if self.scale != "small":
            return ()
        return _up_to(min(longest, self.max_length), TILE_EDGES)

    def size_range(self, size: str, longest: int) -> tuple[int, int]:
        """Return the smallest and the largest value of a size, in the scale "small"."""
        return {
            "n_heads": (self.min_heads, self.max_heads),
            "head_dim": (self.min_head_dim, WIDEST_HEAD),
            "B": (self.min_B, self.max_B),
            "L": (self.min_L, longest),
            "S": (self.min_S, longest),
        }[size]

    def levels(self, longest: int) -> dict[str, tuple[Any, ...]]:
        """Return the levels of each field of `Case`, the sizes first, with lengths up to `longest`.

        Fields that few properties vary are left out where a property has the usual level only: the
        others keep their cases.
        """
        levels: dict[str, tuple[Any, ...]] = {
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
        special: dict[str, tuple[tuple[Any, ...], Any]] = {
            "ranks": (self.ranks, 0),
            "variant": (self.variants, "plain"),
            "scale": (self.scales, None),
            "window": (self.windows, None),
            "softcap": (self.softcaps, None),
            "sinks": (self.sinks, "none"),
            "slopes": (self.slopes, "none"),
            "chunk": (self.chunks, None),
            "lengths": (self.lengths, "none"),
            "return_lse": (self.lse, False),
        }
        for name, (given, usual) in special.items():
            if given != (usual,):
                levels[name] = given
        return levels

    def _size_levels(self, longest: int) -> dict[str, tuple[int, ...]]:
        if self.scale == "wide":
            lengths = {name: _up_to(longest, self.sizes[name]) for name in ("L", "S")}
            return {**self.sizes, **lengths}
        sizes = {
            "n_heads": _in_range(self.min_heads, self.max_heads, LEVELS["n_heads"]),
            "head_dim": _in_range(self.min_head_dim, WIDEST_HEAD, LEVELS["head_dim"]),
            "B": _in_range(self.min_B, self.max_B, LEVELS["B"]),
        }
        if self.scale == "long":
            sizes["L"], sizes["S"] = LONG_SIZES["L"], _long_rows(longest)
            sizes["head_dim"] = LONG_SIZES["head_dim"]
            return sizes
        lengths_ = (*LEVELS["length"], *self.tile_edges(longest)[:1])
        sizes["L"] = _in_range(self.min_L, self.max_length, lengths_)
        sizes["S"] = _in_range(self.min_S, self.max_length, lengths_)
        return sizes


def volume_of(row: Mapping[str, Any], without: str = "") -> int:
    """Return the product of the sizes of a row of levels, perhaps without one of them."""
    return prod(row[size] for size in SIZES if size != without)


def _long_rows(longest: int) -> tuple[int, ...]:
    """Return numbers of keys at and beside powers of two, where kernels split rows, and between.

    longest: a power of two.
    """
    return (
        longest,
        longest - 1,
        longest // 2 + 1,
        longest * 3 // 8,
        longest // 4 + 1,
        longest // 8 + 1,
    )


def _up_to(longest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes up to the longest one."""
    return tuple(size for size in sizes if size <= longest)


def _in_range(smallest: int, largest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest size, and those of `sizes` within the range, in order."""
    within = {size for size in sizes if smallest <= size <= largest}
    return tuple(sorted({smallest, *within}))
