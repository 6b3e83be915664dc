"""How a module or a kernel is called: which of its parameters take the inputs, the mask and the flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
from einops import rearrange
from torch import Tensor

from mha.implementations.errors import ImplementationError
from mha.spec import Claims, MaskConvention, Output, causal_mask, join_causal, to_convention

# The names under which functions take each input and each option; a function has at most one of them.
INPUT_NAMES = {
    "query": ("query", "queries", "q", "Q"),
    "key": ("key", "keys", "k", "K"),
    "value": ("value", "values", "v", "V"),
}
OPTION_NAMES = {
    "mask": ("mask", "attn_mask", "attention_mask", "src_mask", "key_padding_mask", "padding_mask", "pad_mask"),
    "is_causal": ("is_causal", "causal"),
    "need_weights": ("need_weights", "return_weights", "output_attentions", "return_attention", "return_attn"),
}


class Call(Protocol):
    """Calls a module or a kernel with a canonical mask, which it translates."""

    def __call__(  # noqa: PLR0913  the arguments of an attention
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
        """Return the output, and the weights if they are requested and the target returns them.

        target: the module or kernel. The other arguments are those of `mha.spec.Attention`.
        """
        ...


@dataclass(frozen=True)
class Signature:
    """The parameters of a function by what they mean.

    inputs: its names for query, key and value; empty if they are passed by position.
    one_input: whether it takes a single input, as self-attention does.
    mask, is_causal, need_weights: its names for these options; None for an option that it does not have.
    mask_required: whether the mask has no default.
    """

    inputs: tuple[str, ...]
    one_input: bool
    mask: str | None
    is_causal: str | None
    need_weights: str | None
    mask_required: bool


@dataclass(frozen=True)
class MaskFormat:
    """The masks that a function takes; see `mask`, `mask_shape` and `mask_numbers` of `from_module`."""

    convention: MaskConvention | None = "keep"
    shape: str | None = None
    numbers: bool = False


def signature_of(parameters: Mapping[str, inspect.Parameter]) -> Signature:
    """Return what the parameters of a function mean, by their names."""
    inputs = input_names(parameters)
    options = {option: option_name(option, parameters) for option in OPTION_NAMES}
    mask = options["mask"]
    mask_required = mask is not None and parameters[mask].default is inspect.Parameter.empty
    return Signature(inputs, not inputs and takes_one_input(parameters), **options, mask_required=mask_required)


def input_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return a function's names for query, key and value; empty unless it names all three."""
    names = [next((name for name in known if name in parameters), "") for known in INPUT_NAMES.values()]
    positional = any(name and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in names)
    return tuple(names) if all(names) and not positional else ()


def option_name(option: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return a function's name for an option of `OPTION_NAMES`; None if it does not have it."""
    return next((name for name in OPTION_NAMES[option] if name in parameters), None)


def required_inputs(parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters without a default that are not `self`, `**kwargs` or an option."""
    others = {"self", *(name for names in OPTION_NAMES.values() for name in names)}
    required = [p for name, p in parameters.items() if p.default is p.empty and name not in others]
    return [p for p in required if p.kind is not p.VAR_KEYWORD]


def takes_one_input(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function that does not name query, key and value has exactly one input."""
    inputs = required_inputs(parameters)
    return len(inputs) == 1 and inputs[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inputs[0].POSITIONAL_OR_KEYWORD)


def call_by_name(label: str, function: Callable[..., Any], claims: Claims, layout: str, masks: MaskFormat) -> Call:
    """Return a `Call` that passes everything by the function's own names, and inputs it does not name by position.

    A function without a causal flag gets the causal mask, aligned as claimed, joined to the mask. One that requires a
    single argument is self-attention: it gets the query, and raises if key and value are other tensors.
    label: the name in messages. layout: the axes of the inputs in order, among them b (batch) and l (length).

    Raises ImplementationError for a signature that cannot be read, an unknown convention or shape of masks, and where
    the convention declares a mask for which the function has no parameter.
    """
    if masks.convention not in (None, *get_args(MaskConvention)):
        raise ImplementationError(
            f"{label}: mask must be 'keep', 'drop', 'additive' or None, but is {masks.convention!r}"
        )
    if masks.shape is not None and not set(axes_of(masks.shape)) <= {*"bhls", "1"}:
        raise ImplementationError(
            f"{label}: mask_shape must consist of b, h, l, s and 1, such as 'b 1 l s', but is {masks.shape!r}"
        )
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ImplementationError(f"{label}: {error}; wrap it in a Python function or pass call=...") from error
    signature = signature_of(parameters)
    if masks.convention and not signature.mask:
        raise ImplementationError(
            f"{label}: mask={masks.convention!r}, but none of its parameters ({', '.join(parameters)}) has a known "
            f"name of a mask ({', '.join(OPTION_NAMES['mask'])}); pass mask=None or call=..."
        )
    batch_axis, length_axis = (layout.split().index(axis) for axis in "bl")
    return CallByName(label, signature, claims, masks, batch_axis, length_axis)


@dataclass(frozen=True)
class CallByName:
    """A `Call` by the names of a function's parameters; made by `call_by_name`."""

    label: str
    signature: Signature
    claims: Claims
    masks: MaskFormat
    batch_axis: int
    length_axis: int

    def __call__(  # noqa: PLR0913  the arguments of an attention
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
        """Call the target with its own names and its own format of masks."""
        names = self.signature
        if names.one_input and not (query is key is value):
            raise NotImplementedError(f"{self.label} takes one input: query, key and value must be one tensor")
        mask, is_causal = self._causal(query, key, mask, is_causal)
        options = self._mask(query, key, mask)
        if names.is_causal:
            options[names.is_causal] = is_causal
        elif is_causal:
            raise NotImplementedError(f"{self.label} takes no causal flag")
        if names.need_weights:
            options[names.need_weights] = need_weights
        if names.inputs:
            return as_output(target(**dict(zip(names.inputs, (query, key, value), strict=True)), **options))
        return as_output(target(*((query,) if names.one_input else (query, key, value)), **options))

    def _causal(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
        """Return the mask and the causal flag to pass on: the flag becomes a mask where there is no flag."""
        if self.claims.always_causal:
            if not is_causal:
                raise NotImplementedError(f"{self.label} is always causal")
            return mask, False
        if is_causal and not self.signature.is_causal and self.claims.causal:
            lengths = query.shape[self.length_axis], key.shape[self.length_axis]
            return join_causal(mask, causal_mask(*lengths, self.claims.causal, query.device)), False
        return mask, is_causal

    def _mask(self, query: Tensor, key: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Return the mask by the function's own name, in its own format."""
        name, masks = self.signature.mask, self.masks
        if mask is None:
            return {name: None} if name and self.signature.mask_required else {}
        if not name:
            raise NotImplementedError(f"{self.label} takes no mask")
        # A boolean mask that is not claimed is not translated: refusing it is the function's task.
        unclaimed = mask.dtype == torch.bool and "bool" not in self.claims.masks
        if masks.shape is not None:
            lengths = query.shape[self.length_axis], key.shape[self.length_axis]
            mask = shape_mask(self.label, mask, masks.shape, query.shape[self.batch_axis], lengths)
        mask = to_convention(mask, "keep" if unclaimed else masks.convention or "keep", query.dtype)
        return {name: mask.to(query.dtype) if masks.numbers and mask.dtype == torch.bool else mask}


def axes_of(pattern: str) -> list[str]:
    """Return the axes that an einops pattern names, in order."""
    return pattern.replace("(", " ").replace(")", " ").split()


def shape_mask(label: str, mask: Tensor, pattern: str, batch: int, lengths: tuple[int, int]) -> Tensor:
    """Bring a canonical mask to the shape that a module takes, with every axis at full size.

    label: the name in messages. mask: broadcastable to (B, H, L, S). batch, lengths: B and (L, S).
    pattern: of b, h, l, s and 1; the mask must not differ along an axis that it leaves out or has as 1.

    Raises NotImplementedError where it does, and ValueError for a mask that is not broadcastable.
    """
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = {"b": batch, "h": mask.shape[1], "l": lengths[0], "s": lengths[1]}
    axes = []
    for number, (axis, size) in enumerate(sizes.items()):
        if mask.shape[number] not in (1, size):
            raise ValueError(f"{label}: mask must be broadcastable to (B, H, L, S), but has {tuple(mask.shape)}")
        if axis in axes_of(pattern):
            mask = mask.expand(*(size if number == each else -1 for each in range(4)))
            axes.append(axis)
            continue
        first = mask.narrow(number, 0, min(1, mask.shape[number]))
        if mask.shape[number] > 1 and not torch.equal(first.expand_as(mask), mask):
            raise NotImplementedError(f"{label} takes masks of the shape {pattern!r}, which cannot differ along {axis}")
        mask = first
        axes.append("1")
    return rearrange(mask, f"{' '.join(axes)} -> {pattern}").contiguous()


def as_output(returned: Any) -> Output:
    """Return what a module returned as an `Output`.

    returned: an output, or a tuple of an output, weights, and any number of None, such as a cache that is not in use.
    Anything else becomes the output as it is, so that the clauses about outputs report it.

    >>> as_output((torch.zeros(2, 3, 8), None, None)).output.shape
    torch.Size([2, 3, 8])
    """
    if isinstance(returned, tuple) and returned and all(rest is None for rest in returned[2:]):
        return Output(*returned[:2])
    return Output(returned)
