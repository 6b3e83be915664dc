"""The options of `from_module` and `from_kernel`, in groups or one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from mha.implementations.adapters.axes_of_inputs import TO_LAYOUT
from mha.implementations.adapters.loading import KEYS
from mha.implementations.adapters.mask_forms import MaskedNumber, MaskFormat, PaddingConvention
from mha.implementations.adapters.neutral import Neutral
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import MaskConvention

Group = TypeVar("Group")


@dataclass(frozen=True)
class InputFormat:
    """How a module takes query, key and value.

    layout: the axes of inputs and output in order: "b l d" (batch, length, d_model), "l b d",
        "b d l", or "b d l 1", "b l 1 d" or "b 1 l d" for an image of one column, or of one row.
    memory_optional: whether a call without its memory, one input for key and value that has a
        default, is the same self-attention with the same masks. The memory is then left out where
        query, key and value are one tensor.
    query_last: of two inputs, whether the first one is key and value, and the second one the query,
        or the other way round; by default, their names say it.
    rotation_pairs: whether the rotation that a call requires (`freqs_cos` and `freqs_sin`, or
        complex `freqs_cis`) has the shape (L, d_k / 2), as in Llama, or less where a rotation of a
        part of each head is claimed; by default, cosines and sines are of one element, and
        `freqs_cis` is None.
    rotation_layout: the shape of cosines and sines where `Rotary(tables="given")` is claimed, of
        `mha.implementations.adapters.tables` one of `ROTATION_LAYOUTS` or `JOINED_LAYOUTS`; by
        default "b l r", or "l p" if `rotation_pairs` is True. For `freqs_cis`, "l p 2" are cosines
        and sines in one tensor of real numbers.
    """

    layout: str = "b l d"
    memory_optional: bool = False
    query_last: bool | None = None
    rotation_pairs: bool = False
    rotation_layout: str | None = None


class MaskOptions(TypedDict, total=False):
    """The fields of a `MaskFormat`, as options of their own."""

    mask: MaskConvention | None
    mask_shape: str | None
    mask_numbers: bool
    mask_required: bool
    masked_number: MaskedNumber
    mask_attribute: str | None
    beside: Mapping[str, str]
    padding: PaddingConvention | None
    causal_by_default: bool
    causal_word: str | None


class ModuleOptions(MaskOptions, total=False):
    """The fields of a `MaskFormat`, an `InputFormat` and a `LeftOut`, as options of their own."""

    layout: str
    memory_optional: bool
    query_last: bool | None
    rotation_pairs: bool
    neutral: Neutral
    residual: bool
    rotation_layout: str | None
    arguments: Mapping[str, str]
    cache: str | None
    weights_layout: str | None


# The field that each option sets.
FIELDS_OF_MASKS = {
    "mask": "convention",
    "mask_shape": "shape",
    "mask_numbers": "numbers",
    "mask_required": "required",
    "masked_number": "masked_number",
    "mask_attribute": "attribute",
    "beside": "beside",
    "padding": "padding",
    "causal_by_default": "causal_by_default",
    "causal_word": "causal_word",
}
OTHERS = {name: name for name in ("arguments", "cache", "weights_layout")}
FIELDS_OF_INPUTS = {name: name for name in InputFormat.__dataclass_fields__}


def mask_format(label: str, masks: MaskFormat | None, options: Mapping[str, Any]) -> MaskFormat:
    """Return the masks that are declared as a group, or option by option.

    Raises ImplementationError, with the label, for both at once.
    """
    return _grouped(label, "masks", masks, MaskFormat, FIELDS_OF_MASKS, options)


def input_format(label: str, inputs: InputFormat | None, options: Mapping[str, Any]) -> InputFormat:
    """Return the inputs that are declared as a group, or option by option.

    Raises ImplementationError, with the label, for both at once.
    """
    return _grouped(label, "inputs", inputs, InputFormat, FIELDS_OF_INPUTS, options)


def require_known(function: str, options: Mapping[str, Any], *known: Mapping[str, str]) -> None:
    """Raise TypeError, as Python does, for an option that sets no field of a group."""
    names = set().union(*known)
    for name in options:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def require_default_forms(label: str, masks: MaskFormat, inputs: InputFormat) -> None:
    """Raise ImplementationError for a form of masks or inputs that a `Call` would have to make."""
    if masks == MaskFormat(masks.convention) and inputs == InputFormat(inputs.layout):
        return
    raise ImplementationError(
        f"{label}: call=... is given masks as the contract has them, and makes the call itself,"
        " so mask_shape, mask_numbers, padding, causal_by_default, causal_word, mask_required,"
        " masked_number, mask_attribute, beside, memory_optional, query_last, rotation_pairs"
        " and rotation_layout have no effect; leave them out"
    )


def require_weights(label: str, weights: object, *, has_call: bool) -> None:
    """Raise ImplementationError for weights that are neither on an attribute nor at a place."""
    if weights is None or isinstance(weights, str):
        return
    is_place = isinstance(weights, int) and not isinstance(weights, bool) and weights >= 0
    if has_call or not is_place:
        raise ImplementationError(
            f"{label}: weights must be the name of an attribute or, without call=, a place from 0,"
            f" but is {weights!r}"
        )


def require_parameters_and_layout(label: str, parameters: object, layout: str) -> None:
    """Raise ImplementationError for parameters that are no map, and for an unknown layout."""
    if not (callable(parameters) or isinstance(parameters, Mapping)):
        raise ImplementationError(
            f"{label}: parameters must map {KEYS} to names in the module, but is {parameters!r:.80}"
        )
    if layout not in TO_LAYOUT:
        raise ImplementationError(
            f"{label}: layout must be {' or '.join(map(repr, TO_LAYOUT))}, but is {layout!r}"
        )


def _grouped(
    label: str,
    name: str,
    group: Group | None,
    cls: type[Group],
    fields: Mapping[str, str],
    options: Mapping[str, Any],
) -> Group:
    """Return a group as it is given, or one that is made of the options that set its fields."""
    single = [option for option in options if option in fields]
    if group is None:
        return cls(**{fields[option]: options[option] for option in single})
    if single:
        raise ImplementationError(
            f"{label}: {name}=... and {', '.join(single)} are given; say all in {name}, or leave"
            " that out"
        )
    return group
