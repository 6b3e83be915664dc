"""Domains: which cases a property takes, as a tuple of levels for each field of `Case`, simplest
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import (
    claimed_axes,
    claimed_windows,
    fit_sizes,
    mask_form,
    sorted_biases,
    takes_mask,
    takes_scale,
    takes_variant,
)
from mha.conformance.cases.mask_kinds import EXTENTS, GROUPS, OF_NUMBERS
from mha.conformance.cases.memory_layouts import LAYOUTS
from mha.conformance.cases.reasons import NeedsClaim, NotApplicable, Reason
from mha.conformance.cases.variants import VARIANTS, as_variant
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

# All but "self" are cross-attention.
INPUTS = ("cross", "self", "memory", "query_key")

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
# The scale "wide": the sizes of common models, a width beside a tile edge, and lengths within those
# of the profile.
WIDE_SIZES = {
    "n_heads": (8, 3),
    "head_dim": (64, 17, 128, 256),
    "B": (1, 5),
    "L": (1, 7, 33, 197),
    "S": (7, 33, 197),
}
# The largest d_model of more than two heads in the scale "wide": the time that weights take grows
# with its square.
LARGEST_D_MODEL = 512
# The largest L = S in the scale "long": a plain implementation holds that many scores squared.
LONGEST_SQUARE = 1025
# Lengths at and beside the edges of tiles.
TILE_EDGES = (17, 16, 33, 65, 129, 257, 513)

# The inputs that may stand in for those of a domain, nearest first, by the claim of
# cross-attention.
CLAIMED_INPUTS: dict[bool | str, tuple[str, ...]] = {
    True: INPUTS,
    "memory": ("memory", "self"),
    False: ("self",),
}
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
}


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Which cases a property takes. The tuples are the levels of a field of `Case`, simplest first.

    Levels that need a claim (a form of mask, a causal flag, cross-attention, returned weights) are
    dropped where it is missing. If a field has none left, the nearest level that is claimed takes
    their place, if there is one: see `within`.

    masks: kinds of mask. causal_as_mask: where no mask is claimed, the causal mask may take its
        place.
    causal: the causal flag. plain: the property does not hold for causal calls. may_raise: it lets
        a causal call with a mask raise.
    bias: the values of `Config.bias`: False, True for any bias, or the projection that must have
        one.
    square: L = S in every case.
    passes: the forms of mask, "bool" or "float", that the property itself makes.
    ranks: the numbers of ranks, as far as the profile takes them; 0 for no sharding.
    variants: "plain" and names in `mha.conformance.cases.variants`.
    scales: explicit scales, None for none; those that are not positive need their own claim.
        windows: bounds as in `Options`, None for none. softcaps: caps, None for none. sinks: kinds
        of sinks.
    slopes: kinds of slopes. lse: whether the log-sum-exp is asked for.
    dtypes: the only dtypes that the property is about; all if empty.
    scale: "small"; "wide", with the levels in `sizes` whatever min_... and max_... are; or "long",
        where S is the profile's `long_rows`, or a fraction of it.
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
        kept: dict[str, Any] = {
            "masks": self._masks(claims),
            "causal": self._causal_flags(claims),
            "inputs": self._inputs(claims),
            "bias": self._biases(claims),
            "need_weights": (
                self.need_weights
                if claims.returns_weights
                else tuple({False} & set(self.need_weights))
            ),
            "ranks": self._ranks(claims),
            **self._of_options(claims),
        }
        for name, levels in kept.items():
            if not levels:
                return NeedsClaim.of(self._claim_of(name))
        return replace(self, **kept)

    def _of_options(self, claims: Claims) -> dict[str, Any]:
        """Return the claimed variants, and of what a call may say about the scores."""
        return {
            "variants": tuple(name for name in self.variants if takes_variant(claims, name)),
            "scales": tuple(scale for scale in self.scales if takes_scale(claims, scale)),
            "windows": claimed_windows(claims, self.windows),
            "softcaps": (
                self.softcaps if claims.scores.softcap else tuple({None} & {*self.softcaps})
            ),
            "sinks": self.sinks if claims.scores.sinks else tuple({"none"} & {*self.sinks}),
            "slopes": self.slopes if claims.scores.alibi else tuple({"none"} & {*self.slopes}),
            "lse": self.lse if claims.lse else tuple({False} & {*self.lse}),
        }

    def _claim_of(self, name: str) -> str:
        """Return the claim that the levels of a field need."""
        return VARIANTS[self.variants[0]].claim if name == "variants" else CLAIM_OF.get(name, name)

    def _ranks(self, claims: Claims) -> tuple[int, ...]:
        """Return the numbers of ranks that are claimed, the least one above 1 where none of the
        usual ones is.
        """
        usual = tuple(ranks for ranks in self.ranks if not ranks or ranks in claims.world_sizes)
        return (
            usual
            or tuple(
                sorted(size for size in claims.world_sizes if size > 1 and self.ranks != (1,))
            )[:1]
        )

    def up_to(self, ranks: int) -> Domain:
        """Return the domain without the cases on more ranks than that, unless there are no others."""
        return replace(
            self, ranks=tuple(each for each in self.ranks if each <= ranks) or self.ranks[:1]
        )

    def _missing(self, claims: Claims) -> Reason | None:
        """Return what the property needs in every case and is not claimed; None if nothing is
        missing.
        """
        if self.plain and claims.always_causal:
            return NotApplicable("has no form for what is always causal")
        if self.min_heads > max(claims.sizes.n_heads or (self.min_heads,)):
            return NotApplicable(
                f"needs at least {self.min_heads} heads, and Claims.sizes has fewer"
            )
        return self._missing_mask(claims)

    def _missing_mask(self, claims: Claims) -> Reason | None:
        """Return which claim about masks the property needs in every case."""
        if not (self._combines(claims) or False in self.causal or "none" in self.masks):
            return NeedsClaim("causal_with_mask")
        needed = set(self.passes)
        if not claims.masks and "none" not in self.masks and not self._causal_mask_only(claims):
            return NeedsClaim("masks")
        if set(self.masks) <= set(OF_NUMBERS):
            needed.add("float")
        if not needed <= set(claims.masks):
            forms = ", ".join(f'"{form}"' for form in sorted(needed))
            return NeedsClaim("masks", f"{{{forms}}}")
        return None

    def _combines(self, claims: Claims) -> bool:
        """Return whether a causal call may have a mask."""
        return claims.causal_with_mask or claims.always_causal or self.may_raise

    def _causal_mask_only(self, claims: Claims) -> bool:
        """Return whether the causal mask takes the place of masks, which are not claimed."""
        return self.causal_as_mask and not claims.masks and claims.causal is not None

    def _masks(self, claims: Claims) -> tuple[str, ...]:
        """Return the claimed kinds, and of each group without one the kind that differs along the
        most claimed axes.
        """
        if self._causal_mask_only(claims):
            return ("none",)
        kept = {kind for kind in self.masks if kind == "none" or takes_mask(claims, kind)}
        kept |= {self._nearest(group, claims) for group in GROUPS if kept.isdisjoint(group)}
        return tuple(kind for kind in self.masks if kind in kept)

    def _nearest(self, group: tuple[str, ...], claims: Claims) -> str:
        """Return the kind of a group that differs along the most claimed axes, "" if no mask of it
        is claimed.
        """
        refused = group if not claims.masks else () if "float" in claims.masks else OF_NUMBERS
        own = (kind for kind in self.masks if kind in group and kind not in refused)
        return max(
            own, key=lambda kind: len(set(EXTENTS[kind]) & set(claimed_axes(claims))), default=""
        )

    def _causal_flags(self, claims: Claims) -> tuple[bool, ...]:
        if claims.always_causal or self._causal_mask_only(claims):
            return (True,)
        return tuple(flag for flag in self.causal if not flag or claims.causal)

    def _inputs(self, claims: Claims) -> tuple[str, ...]:
        claimed = CLAIMED_INPUTS[claims.cross_attention]
        return (
            tuple(kind for kind in self.inputs if kind in claimed or claims.cross_attention is True)
            or claimed[:1]
        )

    def _biases(self, claims: Claims) -> tuple[bool | str, ...]:
        """Return the claimed values, those with the most biases first."""
        claimed = sorted_biases(claims)
        levels: list[bool | str] = []
        for level in self.bias:
            role = "" if isinstance(level, bool) else level
            levels += [
                each
                for each in claimed
                if bool(each) is bool(level) and (each is True or role in str(each))
            ]
        return tuple(dict.fromkeys(levels))

    @property
    def volume(self) -> float:
        """The largest product of all sizes."""
        return VOLUMES[self.scale]

    def tile_edges(self, longest: int) -> tuple[int, ...]:
        """Return the lengths beside tile edges, up to `longest`; in `levels`, the first stands for
        all of them.
        """
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
            **{
                name: levels
                for name, (levels, usual) in self._special_levels.items()
                if levels != usual
            },
        }

    @property
    def _special_levels(self) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """The levels of fields that few properties vary, each with the usual one; others keep their
        cases.
        """
        return {
            "ranks": (self.ranks, (0,)),
            "variant": (self.variants, ("plain",)),
            "scale": (self.scales, (None,)),
            "window": (self.windows, (None,)),
            "softcap": (self.softcaps, (None,)),
            "sinks": (self.sinks, ("none",)),
            "slopes": (self.slopes, ("none",)),
            "return_lse": (self.lse, (False,)),
        }

    def _size_levels(self, longest: int) -> dict[str, tuple[int, ...]]:
        if self.scale == "wide":
            fitting = {
                name: tuple(size for size in self.sizes[name] if size <= longest)
                for name in ("L", "S")
            }
            return {**self.sizes, **fitting}
        sizes = {
            "n_heads": _in_range(self.min_heads, self.max_heads, (1, 2, 3, 9)),
            "head_dim": _in_range(self.min_head_dim, 16, (1, 2, 3, 16)),
            "B": _in_range(self.min_B, self.max_B, (1, 2, 3)),
        }
        if self.scale == "long":
            keys = (
                longest,
                longest - 1,
                longest // 2 + 1,
                longest * 3 // 8,
                longest // 4 + 1,
                longest // 8 + 1,
            )
            return sizes | {"L": (1, 2, 33), "S": keys, "head_dim": (8, 2, 64)}
        lengths = (1, 2, 3, *self.tile_edges(longest)[:1])
        return sizes | {
            "L": _in_range(self.min_L, self.max_length, lengths),
            "S": _in_range(self.min_S, self.max_length, lengths),
        }

    def case(self, claims: Claims, dtype: str, device: str, row: dict[str, Any]) -> Case:
        """Return the case of a row of levels, adjusted where its levels do not go together.

        Self-attention and square domains have one length: L, unless that is too long. Few queries
        on many keys have no causal flag that would leave them only the first keys. In the scale
        "wide", d_model has a limit. Sizes that are not claimed become the next ones that are.
        """
        if self.square or row["inputs"] in ("self", "query_key", "query_value"):
            length = self._one_length(row)
            row = row | {"L": length, "S": length}
        if self.scale == "wide":
            row = row | {"n_heads": min(row["n_heads"], max(2, LARGEST_D_MODEL // row["head_dim"]))}
        form = claims.scores.window.form if claims.scores.window and row.get("window") else ""
        if form == "count" and claims.causal:
            # Of functions that count keys, those without a causal flag may see later keys, or not.
            row = row | {"causal": True}
        row = fit_sizes(self._with_claimed_flag(row, claims), claims)
        row = row | mask_form(row["mask"], claims)
        variant = row.pop("variant", "plain")
        case = Case(
            **row,
            dtype=dtype,
            device=device,
            alignment=claims.alignment or "top_left",
            projected=claims.projections,
        )
        return as_variant(case, variant, claims)

    def _with_claimed_flag(self, row: dict[str, Any], claims: Claims) -> dict[str, Any]:
        """Return the row without a causal flag, or without a mask, where the two do not go
        together.
        """
        few_queries = self.scale == "long" and row["inputs"] != "self"
        if few_queries and claims.causal == "top_left" and not claims.always_causal:
            return row | {"causal": False}
        if row["mask"] != "none" and row["causal"] and not self._combines(claims):
            return row | ({"causal": False} if False in self.causal else {"mask": "none"})
        return row

    def _one_length(self, row: dict[str, Any]) -> int:
        """Return the length that replaces both L and S of a row."""
        queries, keys = int(row["L"]), int(row["S"])
        if self.scale == "long":
            return min(keys, LONGEST_SQUARE)
        fits = queries**2 * prod(row[size] for size in ("B", "n_heads", "head_dim")) <= self.volume
        return max(queries if fits else min(queries, keys), self.min_L, self.min_S)


@dataclass(frozen=True)
class CaseSpace:
    """The cases of a property for one implementation: its domain within the claims, in one dtype on
    one device.

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


def _in_range(smallest: int, largest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest size, and those of `sizes` within the range, in order."""
    return tuple(sorted({smallest, *(size for size in sizes if smallest <= size <= largest)}))
