"""The masks that a module takes: their meaning, their shape, and whether padding is on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Claims, MaskConvention, to_convention
from mha.spec.masks import form_of

PaddingConvention = Literal["keep", "drop"]
MaskedNumber = Literal["-inf", "lowest"]
# B, H, L and S.
Sizes = tuple[int, int, int, int]
# The claim that masks differ along an axis.
CLAIM_OF_AXIS = {"b": "per_item_mask", "h": "per_head_mask", "l": "per_query_mask"}


@dataclass(frozen=True)
class MaskFormat:
    """The masks that a function takes.

    For the author of a `Call`: `translate` gives a mask in this format, and `split` takes key
    padding out of it.

    convention: of boolean masks: "keep" (True = may attend), "drop" (True = may not attend),
        "additive" (0 or -infinity, added to the scores), or None if it takes no mask.
    shape: such as "b s", "b 1 l s" or "(b h) l s", if it does not take what is broadcastable to
        (B, H, L, S); see also `Claims.per_head_mask` and `Claims.per_query_mask`. Without s, "b" or
        "b l", it is the number of the first keys that a query may attend to
        (`Claims.prefix_masks`).
    numbers: whether it takes boolean masks as ones and zeros in the dtype of the query.
    padding: "keep" or "drop" if, beside its mask, it takes one of keys (B, S) under a name of
        padding (`PADDING_NAMES`): keys that no head and no query of an item may attend to go there,
        and the rest of a mask to the mask. Masks of numbers are not split.
    causal_by_default: whether a call without a mask is causal, and a mask takes the place of that.
        A call that is not causal then gets a mask that allows everything.
    causal_word: what a causal call gives in the place of a mask, as "causal" in MLX. Beside a mask,
        the causal one is a part of it.
    required: whether a call without a mask raises. It gets one that allows everything.
    attribute: that of an object which holds the mask, where the function takes such an object.
    beside: other masks of its parameters that are given with the mask, and then allow everything,
        each with its shape: {"q_mask": "b l"} where masks of queries and keys act only together.
    masked_number: what an additive mask has for a key that is masked: "-inf", or "lowest" for the
        lowest number of its dtype, as callers of transformers' code pass it.

    >>> allowed = torch.tensor([[True, True, False]])[:, None, None]
    >>> sizes = (1, 2, 4, 3)
    >>> MaskFormat("drop", "b s").translate("Mine", allowed, sizes, torch.float32, claimed=True)
    tensor([[False, False,  True]])
    """

    convention: MaskConvention | None = "keep"
    shape: str | None = None
    numbers: bool = False
    padding: PaddingConvention | None = None
    causal_by_default: bool = False
    causal_word: str | None = None
    required: bool = False
    masked_number: MaskedNumber = "-inf"
    attribute: str | None = None
    beside: Mapping[str, str] = field(default_factory=dict)

    def validate(self, label: str) -> None:
        """Raise ImplementationError, with the label, for a word that has no meaning here."""
        if self.convention not in (None, *get_args(MaskConvention)):
            raise ImplementationError(
                f"{label}: mask must be 'keep', 'drop', 'additive' or None, but is"
                f" {self.convention!r}"
            )
        if self.shape is not None:
            _validate_shape(label, "mask_shape", self.shape)
        for name, shape in self.beside.items():
            _validate_shape(label, f"the shape of {name} in beside", shape)
        self._validate_counts(label)
        self._validate_number(label)
        self._validate_padding(label)
        if self.required and self.convention is None:
            raise ImplementationError(
                f"{label}: mask_required=True needs the convention of the mask, but mask is None;"
                " pass mask='keep', 'drop' or 'additive'"
            )
        if self.causal_word and self.convention is None:
            raise ImplementationError(
                f"{label}: causal_word={self.causal_word!r} is given in the place of a mask, but"
                " mask is None; pass mask='keep', 'drop' or 'additive'"
            )
        if self.causal_by_default and (self.convention is None or "l" not in self.axes):
            raise ImplementationError(
                f"{label}: causal_by_default declares that a mask takes the place of the causal"
                " one, so masks must be able to differ between queries; if it is causal with each"
                " mask, claim always_causal=True"
            )

    def _validate_number(self, label: str) -> None:
        """Raise ImplementationError for a number of masked keys that no such mask has."""
        if self.masked_number not in get_args(MaskedNumber):
            raise ImplementationError(
                f"{label}: masked_number must be '-inf' or 'lowest', but is {self.masked_number!r}"
            )
        if self.masked_number == "lowest" and self.convention != "additive":
            raise ImplementationError(
                f"{label}: masked_number='lowest' is for masks that are added to the scores; pass"
                " mask='additive'"
            )

    def _validate_counts(self, label: str) -> None:
        """Raise ImplementationError for numbers of keys in a convention that has none."""
        is_plain = self.convention == "keep" and not self.numbers and self.padding is None
        if self.counts_keys and not is_plain:
            raise ImplementationError(
                f"{label}: mask_shape={self.shape!r}, without s, is for the number of the keys that"
                " are kept, so mask must be 'keep', without mask_numbers and padding"
            )

    def _validate_padding(self, label: str) -> None:
        """Raise ImplementationError for padding of no convention, or beside no other mask."""
        if self.padding not in (None, *get_args(PaddingConvention)):
            raise ImplementationError(
                f"{label}: padding must be 'keep', 'drop' or None, but is {self.padding!r}"
            )
        if self.padding and self.convention is None:
            raise ImplementationError(
                f"{label}: padding={self.padding!r} is an argument beside another mask, but mask is"
                f" None; if there is only one, pass mask={self.padding!r} and mask_shape='b s'"
            )

    @property
    def axes(self) -> set[str]:
        """The axes of "bhls" along which its masks differ, without those of separate padding."""
        return {*"bhls"} if self.shape is None else set(axes_of(self.shape))

    @property
    def counts_keys(self) -> bool:
        """Whether its masks are numbers of keys: of the first ones, which a query may attend to."""
        return self.convention is not None and "s" not in self.axes

    def limits(self, claims: Claims) -> dict[str, Any]:
        """Return the claims that these masks cannot express, each with the most that they can."""
        if self.convention is None:
            return {"masks": ()}
        axes, forms = self.axes, self._forms(claims)
        most: dict[str, Any] = {}
        if self.counts_keys:
            most["prefix_masks"] = True
        if self.padding and "b" not in axes and claims.per_item_mask:
            # Items differ in their padding only, which is boolean, and the same for all heads.
            axes = axes - {"h"} | {"b"}
            forms = {"bool"}
            most["joint_masks"] = False
        most["masks"] = forms
        for axis, claim in CLAIM_OF_AXIS.items():
            if axis not in axes:
                most[claim] = False
        return {claim: value for claim, value in most.items() if getattr(claims, claim) != value}

    def _forms(self, claims: Claims) -> set[str]:
        """Return the claimed forms of masks that this format can express."""
        if self.numbers or self.counts_keys:
            return {"bool"}
        if self.convention == "additive":
            return {*claims.masks} - {"int"}  # integers would be added to the scores
        return {*claims.masks}

    def translate(
        self, label: str, mask: Tensor, sizes: Sizes, dtype: torch.dtype, *, claimed: bool
    ) -> Tensor:
        """Return a canonical mask in this format.

        label: the name in messages.
        sizes: B, H, L, S.
        dtype: of the query.
        claimed: whether the form of the mask is claimed; otherwise its values are not translated,
            since refusing it is the task of the function.

        Raises UnsupportedCallError for a mask that this format cannot express.
        """
        if self.numbers and mask.dtype != torch.bool:
            raise UnsupportedCallError(
                f"{label} takes boolean masks as numbers, which a mask of {mask.dtype} is not"
            )
        if mask.is_floating_point() and not claimed and self.padding and "b" not in self.axes:
            raise UnsupportedCallError(
                f"{label} takes numbers in the mask for all items, and not as padding"
            )
        if self.counts_keys:
            mask = _count_keys(label, mask, sizes[3])
        if self.shape is not None:
            mask = shape_mask(label, mask, self.shape, sizes)
        if claimed:
            mask = self._converted(mask, dtype)
        return self._as_numbers(mask, dtype)

    def held(self, mask: Tensor | None) -> Any:
        """Return a mask as it is, or in an object with the declared attribute."""
        if self.attribute is None or mask is None:
            return mask
        return SimpleNamespace(**{self.attribute: mask})

    def allowing_all(
        self, label: str, shape: str, sizes: Sizes, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a mask of a shape, in this convention, that allows everything; see `translate`."""
        mask = shape_mask(label, allow_all(sizes, device), shape, sizes)
        return self._as_numbers(self._converted(mask, dtype), dtype)

    def _converted(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a mask of a claimed form in this convention; one of integers stays one."""
        if form_of(mask) == "int" and self.convention == "drop":
            return 1 - mask
        converted = to_convention(mask, self.convention or "keep", dtype)
        if self.masked_number == "lowest" and converted.is_floating_point():
            return converted.masked_fill(converted == -math.inf, torch.finfo(converted.dtype).min)
        return converted

    def translate_padding(self, keys: Tensor, sizes: Sizes, dtype: torch.dtype) -> Tensor:
        """Return the keys (B, S) of each item, True = may attend, as the padding argument."""
        keys = _expand(_expand(keys, 0, sizes[0]), 1, sizes[3])
        return self._as_numbers(to_convention(keys, self.padding or "keep", dtype), dtype)

    def split(self, label: str, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Split a canonical mask into the keys (B, S) of each item, and the rest of the mask.

        Either is None where the shape of the mask leaves nothing to it: a mask (B, 1, 1, S) is all
        padding, and one that all items share has none. A mask of numbers is not split, nor is any
        without `padding`. label: the name in messages.

        Raises UnsupportedCallError where the rest differs between items, but its format does not.
        """
        if not self.padding or mask is None or mask.dtype != torch.bool or mask.ndim > 4:
            return None, mask
        mask = _of_four_axes(mask)
        if mask.shape[1:3] == (1, 1):
            return mask[:, 0, 0], None
        if mask.shape[0] == 1:
            return None, mask
        keys = mask.any(2).any(1)
        if "b" in self.axes:
            return keys, mask | ~keys[:, None, None]
        shared = mask.any(0, keepdim=True)
        if not torch.equal(mask, keys[:, None, None] & shared):
            raise UnsupportedCallError(
                f"{label} takes a padding mask and a mask for all items, whose AND this is not"
            )
        return keys, shared

    def _as_numbers(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        return mask.to(dtype) if self.numbers and mask.dtype == torch.bool else mask


def _validate_shape(label: str, what: str, shape: str) -> None:
    """Raise ImplementationError for a shape of other axes than those of masks."""
    if not set(axes_of(shape)) <= {*"bhls", "1"}:
        raise ImplementationError(
            f"{label}: {what} must consist of b, h, l, s and 1, such as 'b 1 l s', but is {shape!r}"
        )


def _count_keys(label: str, mask: Tensor, keys: int) -> Tensor:
    """Return how many keys each row of a mask allows, (B, H, L, 1).

    Raises UnsupportedCallError unless these are the first ones.
    """
    if mask.dtype != torch.bool or mask.ndim == 0 or mask.shape[-1] not in (1, keys):
        raise UnsupportedCallError(
            f"{label} takes the number of the keys, which a mask of another form does not say"
        )
    mask = mask.expand(*mask.shape[:-1], keys)
    if bool((mask[..., 1:] & ~mask[..., :-1]).any()):
        raise UnsupportedCallError(
            f"{label} takes the number of the keys, which a mask with a gap does not say"
        )
    return mask.sum(-1, keepdim=True)


def allow_all(sizes: Sizes, device: torch.device) -> Tensor:
    """Return the canonical mask (1, 1, L, S) that allows everything."""
    return torch.ones(1, 1, *sizes[2:], dtype=torch.bool, device=device)


def axes_of(pattern: str) -> list[str]:
    """Return the axes that an einops pattern names, in order."""
    return pattern.replace("(", " ").replace(")", " ").split()


def shape_mask(label: str, mask: Tensor, pattern: str, sizes: Sizes) -> Tensor:
    """Bring a canonical mask to the shape that a module takes, with every axis at full size.

    label: the name in messages.
    mask: broadcastable to (B, H, L, S), whose sizes are `sizes`; an axis of another size keeps it,
        since refusing it is the task of the module.
    pattern: of b, h, l, s and 1; the mask must not differ along an axis that it leaves out or has
        as 1.

    Raises UnsupportedCallError where it does.

    >>> mask = torch.ones(2, 1, 1, 3, dtype=torch.bool)
    >>> shape_mask("Mine", mask, "(b h) l s", (2, 4, 5, 3)).shape
    torch.Size([8, 5, 3])
    """
    if mask.ndim > 4:
        raise UnsupportedCallError(
            f"{label} takes masks of the shape {pattern!r}, not of {mask.ndim} dimensions"
        )
    mask = _of_four_axes(mask)
    kept = axes_of(pattern)
    axes = []
    for number, (axis, size) in enumerate(zip("bhls", sizes, strict=True)):
        if axis in kept:
            mask = _expand(mask, number, size)
            axes.append(axis)
            continue
        first = _first_along(mask, number, size)
        if first is None:
            raise UnsupportedCallError(
                f"{label} takes masks of the shape {pattern!r}, which cannot differ along {axis}"
            )
        mask = first
        axes.append("1")
    return rearrange(mask, f"{' '.join(axes)} -> {pattern}").contiguous()


def _of_four_axes(mask: Tensor) -> Tensor:
    """Return a mask of at most four axes with all four, those that it lacks first."""
    return mask[(None,) * (4 - mask.ndim)]


def _first_along(mask: Tensor, axis: int, size: int) -> Tensor | None:
    """Return the first part of a mask along an axis; None if others differ, or the size does."""
    if mask.shape[axis] not in (1, size):
        return None
    if mask.shape[axis] == 0:
        # As of no query: a mask for all of them may say anything.
        shape = list(mask.shape)
        shape[axis] = 1
        return mask.new_ones(shape)
    first = mask.narrow(axis, 0, 1)
    return first if torch.equal(first.expand_as(mask), mask) else None


def _expand(mask: Tensor, axis: int, size: int) -> Tensor:
    """Return a mask with an axis of size 1 expanded to a size; any other size stays."""
    if mask.shape[axis] != 1:
        return mask
    sizes = [-1] * mask.ndim
    sizes[axis] = size
    return mask.expand(sizes)
