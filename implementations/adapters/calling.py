"""How a module or a kernel is called: the names that its function gives to inputs, mask, causal and weights flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args

import torch
from einops import rearrange
from torch import Tensor

from mha.implementations.errors import ImplementationError
from mha.spec import Claims, MaskConvention, Output, causal_mask, join_causal, to_convention

INPUT_WORDS = {
    "query": ("query", "queries", "q", "Q"),
    "key": ("key", "keys", "k", "K"),
    "value": ("value", "values", "v", "V"),
}
ARGUMENT_WORDS = {
    "mask": ("mask", "attn_mask", "attention_mask", "src_mask", "key_padding_mask", "padding_mask", "pad_mask"),
    "is_causal": ("is_causal", "causal"),
    "need_weights": ("need_weights", "return_weights", "output_attentions", "return_attention", "return_attn"),
}


class Call(Protocol):
    """Call a module or kernel with a canonical mask, in the convention that it has."""

    def __call__(
        self,
        target: Any,
        /,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> Output:
        """Return the output, and the weights where they were asked for and the target gives them."""
        ...


def by_name(
    label: str,
    function: Callable[..., Any],
    convention: MaskConvention | None,
    claims: Claims,
    layout: str = "b l d",
    mask_shape: str | None = None,
    mask_numbers: bool = False,
) -> Call:
    """Return the call that passes everything by the function's own names, unknown ones of the inputs by place.

    A function without a causal flag gets the causal mask, aligned as it claims, joined to the mask. One that needs a
    single argument besides is self-attention: it gets the query alone, and refuses other keys and values.
    layout: of the inputs. mask_shape, mask_numbers: see `from_module`.
    Raises ImplementationError where the convention promises a mask and the function has no parameter for it.
    """
    if convention not in (None, *get_args(MaskConvention)):
        raise ImplementationError(f"{label}: mask must be 'keep', 'drop', 'additive' or None, but is {convention!r}")
    if mask_shape is not None and not set(axes_of(mask_shape)) <= {*"bhls", "1"}:
        raise ImplementationError(f"{label}: mask_shape must be of b, h, l, s and 1, as 'b 1 l s', not {mask_shape!r}")
    try:
        taken = inspect.signature(function).parameters
    except ValueError as error:
        raise ImplementationError(f"{label}: {error}; wrap it in a Python function or give call=...") from error
    alone, names = takes_one_input(taken), input_names(taken)
    words = {role: next((w for w in known if w in taken), None) for role, known in ARGUMENT_WORDS.items()}
    batch_axis, length_axis = (layout.split().index(axis) for axis in "bl")
    if convention and not words["mask"]:
        raise ImplementationError(
            f"{label}: mask={convention!r}, but it takes ({', '.join(taken)}), none of which is a known word for a "
            f"mask ({', '.join(ARGUMENT_WORDS['mask'])}); give mask=None, or call=..."
        )

    def call(
        target: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> Output:
        if alone and not (query is key is value):
            raise NotImplementedError(f"{label} takes one input: query, key and value must be one tensor")
        lengths = query.shape[length_axis], key.shape[length_axis]
        # One that is not claimed is not translated: it is for the function to refuse it.
        strange = mask is not None and mask.dtype == torch.bool and "bool" not in claims.masks
        if claims.always_causal:
            if not is_causal:
                raise NotImplementedError(f"{label} is always causal")
            is_causal = False
        elif is_causal and not words["is_causal"] and claims.causal:
            mask, is_causal = join_causal(mask, causal_mask(*lengths, claims.causal, query.device)), False
        named: dict[str, Any] = {}
        if mask is not None:
            if not words["mask"]:
                raise NotImplementedError(f"{label} takes no mask")
            shaped = (
                mask if mask_shape is None else shape_mask(label, mask, mask_shape, query.shape[batch_axis], lengths)
            )
            told = to_convention(shaped, "keep" if strange else convention or "keep", query.dtype)
            named[words["mask"]] = told.to(query.dtype) if mask_numbers and told.dtype == torch.bool else told
        elif words["mask"] and taken[words["mask"]].default is inspect.Parameter.empty:
            named[words["mask"]] = None
        if words["is_causal"]:
            named[words["is_causal"]] = is_causal
        elif is_causal:
            raise NotImplementedError(f"{label} takes no causal flag")
        if words["need_weights"]:
            named[words["need_weights"]] = need_weights
        if names:
            return as_output(target(**dict(zip(names, (query, key, value), strict=True)), **named))
        return as_output(target(*((query,) if alone else (query, key, value)), **named))

    return call


def input_names(taken: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return the function's own words for query, key and value; nothing unless it has a word for each."""
    found = [next((word for word in words if word in taken), "") for words in INPUT_WORDS.values()]
    by_place = any(name and taken[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in found)
    return tuple(found) if all(found) and not by_place else ()


def takes_one_input(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether one argument alone has no default, but for the module itself and what `ARGUMENT_WORDS` has.

    Where query, key and value all are named, it takes three, whatever their defaults.
    """
    if input_names(taken):
        return False
    others = {"self", *(word for words in ARGUMENT_WORDS.values() for word in words)}
    needed = [p for name, p in taken.items() if p.default is p.empty and name not in others]
    inputs = [p for p in needed if p.kind is not p.VAR_KEYWORD]
    return len(inputs) == 1 and inputs[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inputs[0].POSITIONAL_OR_KEYWORD)


def axes_of(pattern: str) -> list[str]:
    """Return the axes that a pattern names, in their order."""
    return pattern.replace("(", " ").replace(")", " ").split()


def shape_mask(label: str, mask: Tensor, pattern: str, batch: int, lengths: tuple[int, int]) -> Tensor:
    """Bring a canonical mask to the shape that a module takes, every axis in full.

    pattern: of b, h, l, s and 1; an axis that it leaves out, or has as 1, is one along which the mask must not differ.
    Raises NotImplementedError where it does, and ValueError for a mask that is not broadcastable.
    """
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = {"b": batch, "h": mask.shape[1], "l": lengths[0], "s": lengths[1]}
    there = []
    for place, (axis, size) in enumerate(sizes.items()):
        if mask.shape[place] not in (1, size):
            raise ValueError(f"{label}: mask must be broadcastable to (B, H, L, S), but has {tuple(mask.shape)}")
        if axis in axes_of(pattern):
            mask = mask.expand(*(size if place == each else -1 for each in range(4)))
            there.append(axis)
            continue
        first = mask.narrow(place, 0, min(1, mask.shape[place]))
        if mask.shape[place] > 1 and not torch.equal(first.expand_as(mask), mask):
            raise NotImplementedError(f"{label} takes masks of the shape {pattern!r}, which cannot differ along {axis}")
        mask = first
        there.append("1")
    return rearrange(mask, f"{' '.join(there)} -> {pattern}").contiguous()


def as_output(returned: Any) -> Output:
    """Read what a module returned: an output, alone or first in a tuple, and weights; the judge sees anything else.

    None after these, as for a cache that was not asked for, is left out.
    """
    if isinstance(returned, tuple) and returned and all(rest is None for rest in returned[2:]):
        return Output(*returned[:2])
    return Output(returned)
