"""How a module or a kernel is called: the names that its function gives to mask, causal flag and weights flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args

from torch import Tensor

from mha.implementations.errors import ImplementationError
from mha.spec import MaskConvention, Output, causal_mask, join_causal, to_convention
from mha.spec.claims import Alignment

ARGUMENT_WORDS = {
    "mask": ("mask", "attn_mask", "attention_mask"),
    "is_causal": ("is_causal", "causal"),
    "need_weights": ("need_weights", "return_weights", "output_attentions"),
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
    alignment: Alignment | None,
    length_axis: int = 1,
) -> Call:
    """Return the call that passes the three inputs by position, and the rest by the function's own names.

    A function without a causal flag gets the causal mask, aligned as it claims, joined to the mask. One that needs a
    single argument besides is self-attention: it gets the query alone, and refuses other keys and values.
    length_axis: the dimension of query and key that counts positions.
    Raises ImplementationError where the convention promises a mask and the function has no parameter for it.
    """
    if convention not in (None, *get_args(MaskConvention)):
        raise ImplementationError(f"{label}: mask must be 'keep', 'drop', 'additive' or None, but is {convention!r}")
    try:
        taken = inspect.signature(function).parameters
    except ValueError as error:
        raise ImplementationError(f"{label}: {error}; wrap it in a Python function or give call=...") from error
    alone = _takes_one_input(taken)
    words = {role: next((w for w in known if w in taken), None) for role, known in ARGUMENT_WORDS.items()}
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
        if is_causal and not words["is_causal"] and alignment:
            lengths = query.shape[length_axis], key.shape[length_axis]
            mask, is_causal = join_causal(mask, causal_mask(*lengths, alignment, query.device)), False
        named: dict[str, Any] = {}
        if mask is not None:
            if not words["mask"]:
                raise NotImplementedError(f"{label} takes no mask")
            named[words["mask"]] = to_convention(mask, convention or "keep", query.dtype)
        elif words["mask"] and taken[words["mask"]].default is inspect.Parameter.empty:
            named[words["mask"]] = None
        if words["is_causal"]:
            named[words["is_causal"]] = is_causal
        elif is_causal:
            raise NotImplementedError(f"{label} takes no causal flag")
        if words["need_weights"]:
            named[words["need_weights"]] = need_weights
        return as_output(target(*((query,) if alone else (query, key, value)), **named))

    return call


def _takes_one_input(taken: Mapping[str, inspect.Parameter]) -> bool:
    """Whether one argument alone has no default, but for the module itself and what `ARGUMENT_WORDS` has."""
    others = {"self", *(word for words in ARGUMENT_WORDS.values() for word in words)}
    needed = [p for name, p in taken.items() if p.default is p.empty and name not in others]
    inputs = [p for p in needed if p.kind is not p.VAR_KEYWORD]
    return len(inputs) == 1 and inputs[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inputs[0].POSITIONAL_OR_KEYWORD)


def as_output(returned: Any) -> Output:
    """Read what a module returned: an output, or an output and weights; anything else is left for the judge to see."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return Output(*returned)
    return Output(returned)
