"""Whether a function can be called by name, and the claims that such calls can express."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mha.implementations.adapters.called import call_parameters, forward_of
from mha.implementations.adapters.mask_forms import MaskFormat
from mha.implementations.adapters.names import OPTION_NAMES, PADDING_NAMES
from mha.implementations.adapters.options import InputFormat
from mha.implementations.adapters.signature import Signature, signature_of, takes_two
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims


def read_parameters(label: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; raises ImplementationError where they cannot be read.

    label: the name in messages.
    """
    try:
        return call_parameters(function)
    except ValueError as error:
        raise ImplementationError(
            f"{label}: {error}; wrap it in a Python function or pass call=..."
        ) from error


def read_signature(
    label: str,
    parameters: Mapping[str, inspect.Parameter],
    masks: MaskFormat,
    *,
    self_attention: bool = False,
    memory_optional: bool = False,
    query_last: bool | None = None,
) -> Signature:
    """Return what the parameters of a function mean, if it can be called by name with these masks.

    label: the name in messages.
    self_attention: as for `signature_of`.
    memory_optional, query_last: as for `InputFormat`.

    Raises ImplementationError for an unknown convention or shape of masks, and where a convention
    or another mask is declared for which the function has no parameter, or inputs that it does not
    take.
    """
    masks.validate(label)
    padding = masks.padding is not None
    signature = signature_of(
        parameters, padding=padding, query_last=query_last, self_attention=self_attention
    )
    known = ", ".join(parameters)
    if masks.convention and not signature.mask:
        kind = "another mask" if masks.padding else "a mask"
        raise _no_parameter(label, "mask", masks.convention, known, kind, OPTION_NAMES["mask"])
    if masks.padding and not signature.padding:
        kind = "a padding mask"
        raise _no_parameter(label, "padding", masks.padding, known, kind, PADDING_NAMES)
    for name in masks.beside:
        if name not in parameters:
            raise ImplementationError(
                f"{label}: beside names {name}, but its parameters are {known}; name one of them"
            )
    if query_last is not None and not takes_two(parameters):
        raise ImplementationError(
            f"{label}: query_last={query_last}, but it does not take two inputs; leave that out"
        )
    if not memory_optional:
        return signature
    if not signature.has_optional_memory:
        raise ImplementationError(
            f"{label}: memory_optional=True, but its calls have no memory that has a default; leave"
            " that out"
        )
    alone = signature_of(parameters, padding=padding, query_last=query_last, self_attention=True)
    return replace(signature, alone=alone)


def signature_of_class(
    label: str, cls: type, masks: MaskFormat, inputs: InputFormat, *, never_crosses: bool
) -> Signature:
    """Return what the parameters of calls of a class mean, as it is declared.

    never_crosses: whether a memory is never passed.
    """
    signature = read_signature(
        label,
        read_parameters(label, forward_of(cls)),
        masks,
        self_attention=never_crosses,
        memory_optional=inputs.memory_optional,
        query_last=inputs.query_last,
    )
    return signature.with_rotations(of_pairs=inputs.rotation_pairs, layout=inputs.rotation_layout)


def _no_parameter(
    label: str, option: str, convention: str, parameters: str, kind: str, known: Iterable[str]
) -> ImplementationError:
    """Return the error for a convention of masks that a function has no parameter for."""
    return ImplementationError(
        f"{label}: {option}={convention!r}, but none of its parameters ({parameters}) has a"
        f" known name of {kind} ({', '.join(known)}); pass {option}=None or call=..."
    )


def limits(signature: Signature, masks: MaskFormat, claims: Claims) -> dict[str, Any]:
    """Return the claims that no call of a function can express, each with the most that one can.

    >>> parameters = call_parameters(lambda x, mask=None: x)
    >>> limits(signature_of(parameters), MaskFormat(shape="b s"), Claims(per_head_mask=False))
    {'cross_attention': False, 'per_query_mask': False, 'causal': None}
    """
    most: dict[str, Any] = {}
    if signature.memory:
        if claims.cross_attention is True:
            most["cross_attention"] = "memory"
    elif signature.one_input and claims.cross_attention:
        most["cross_attention"] = False
    if claims.masks:
        most |= masks.limits(claims)
    can_join = masks.convention is not None and "l" in masks.axes
    if claims.causal and not (claims.always_causal or signature.is_causal or can_join):
        most["causal"] = None
    return most
