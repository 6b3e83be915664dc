"""How a kernel is called: what a case says, by the names that its parameters have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.layouts import Layout
from mha.spec.claims import Claims
from mha.spec.masks import causal_mask, join_causal
from mha.spec.option_names import (
    CHUNK_NAMES,
    RETURN_LSE_NAMES,
    SCALE_NAMES,
    SINK_NAMES,
    SLOPES_NAMES,
    SOFTCAP_NAMES,
    WINDOW_NAMES,
    WINDOW_PAIRS,
    acts_by_default,
)
from mha.spec.scores import Options, stand_in

# Calls a kernel: (kernel, query, key, value, options) -> what it returns. Tensors are in the
# kernel's layout.
Call = Callable[..., Any]
# The names under which kernels take each option; a kernel has at most one of them. Masks are True
# where a query may attend.
NAMES = {
    "mask": ("attn_mask", "attention_mask", "mask", "attn_bias", "bias"),
    "is_causal": ("is_causal", "causal", "use_causal"),
    "chunk": CHUNK_NAMES,
    "scale": SCALE_NAMES,
    "softcap": SOFTCAP_NAMES,
    "sinks": SINK_NAMES,
    "alibi": SLOPES_NAMES,
    "return_lse": RETURN_LSE_NAMES,
    "window": WINDOW_NAMES,
    "grouped": ("enable_gqa",),
}
# Those that are passed as they are, if a case says them.
PASSED = ("mask", "is_causal", "chunk", "scale", "softcap", "sinks", "alibi", "return_lse")


class NotExpressed(Exception):
    """A kernel has no parameter for what a case says."""


@dataclass(frozen=True)
class Kernel:
    """A function as the judge calls it.

    layout: that of query, key and value; context: that of its context.
    names: its own name for each option that it has.
    window: its one or two names for a window.
    in_each_call: those of these names that each call gives, as they have no default, or one that
        changes what is computed.
    call: calls it instead, if it is given.
    """

    function: Callable[..., Any]
    claims: Claims
    layout: Layout
    context: Layout
    names: Mapping[str, str]
    window: tuple[str, ...]
    in_each_call: frozenset[str] = frozenset()
    call: Call | None = None

    @classmethod
    def read(
        cls, function: Callable[..., Any], claims: Claims, layout: str, call: Call | None = None
    ) -> Kernel:
        """Read the parameters of a function; its first three are query, key and value.

        Raises ValueError for parameters without a default that are not known, and a layout that is
        none.
        """
        of_inputs, _, of_context = layout.partition("->")
        axes = Layout.read(of_inputs)
        context = Layout.read(of_context) if of_context else axes
        parameters = {} if call is not None else _parameters(function)
        names, window = _names_of(parameters)
        if call is None:
            _require_known(parameters, {*names.values(), *window})
        in_each_call = [name for name, each in parameters.items() if _is_of_each_call(name, each)]
        return cls(function, claims, axes, context, names, window, frozenset(in_each_call), call)

    def arguments(self, query: Tensor, key: Tensor, options: Options) -> dict[str, Any]:
        """Return what is passed beside the tensors, by the kernel's own names.

        query, key: with the axes of the contract.

        Raises NotExpressed for what it has no parameter for.
        """
        options = self._with_causal_mask(query, key, options)
        given = self._without_options(query)
        for option in PASSED:
            value = getattr(options, option)
            if value is None or value is False:
                continue
            name = self.names.get(option)
            if name is None and option == "return_lse":
                continue  # it returns one without being asked
            if name is None:
                raise NotExpressed(f"the kernel has no parameter for {option}")
            given[name] = self._as_taken(option, value, query)
        if options.window is not None:
            given |= self._window(options.window)
        if "grouped" in self.names and query.shape[1] != key.shape[1]:
            given[self.names["grouped"]] = True
        return given

    def _without_options(self, query: Tensor) -> dict[str, Any]:
        """Return what stands for no option, for those that each call gives."""
        neutral: dict[str, Any] = {"is_causal": False, "scale": query.shape[-1] ** -0.5}
        for option in ("softcap", "sinks", "alibi"):
            neutral[option] = stand_in(option, query, query.shape[1])
        given = dict[str, Any]()
        for option, value in neutral.items():
            name = self.names.get(option)
            if name in self.in_each_call:
                given[name] = value
        if self.claims.scores.window and self.in_each_call.intersection(self.window):
            given |= self._window((None, None))
        return given

    def _with_causal_mask(self, query: Tensor, key: Tensor, options: Options) -> Options:
        """Return options with the causal mask in the mask, if the kernel takes no causal flag."""
        takes_flag = "is_causal" in self.names or self.claims.always_causal
        if not options.is_causal or takes_flag or "mask" not in self.names:
            if self.claims.always_causal and "is_causal" not in self.names:
                return options.change(is_causal=False)
            return options
        alignment = self.claims.causal or "top_left"
        causal = causal_mask(query.shape[2], key.shape[2], alignment, query.device)
        mask = join_causal(options.mask, causal[None, None])
        return options.change(mask=mask, is_causal=False)

    def _as_taken(self, option: str, value: Any, query: Tensor) -> Any:
        """Return the value of an option as kernels take it."""
        if option not in ("sinks", "alibi"):
            return value
        dtype = torch.float32
        if option == "sinks" and self.claims.scores.sinks == "input":
            dtype = query.dtype
        return torch.tensor(value, dtype=dtype, device=query.device)

    def _window(self, bounds: tuple[int | None, int | None]) -> dict[str, Any]:
        """Return a window by the kernel's own names, in the form that is claimed."""
        declared = self.claims.scores.window
        if declared is None or not self.window:
            raise NotExpressed("the kernel has no parameter for a window")
        numbers = declared.numbers(bounds)
        if len(self.window) == len(numbers):
            return dict(zip(self.window, numbers, strict=True))
        return {self.window[0]: numbers}


def _names_of(parameters: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a function's own names for the options, and its one or two for a window."""
    names: dict[str, str] = {}
    for option, known in NAMES.items():
        found = [name for name in known if name in parameters]
        if found:
            names[option] = found[0]
    window = tuple(names.pop(option) for option in ("window",) if option in names)
    for pair in WINDOW_PAIRS:
        if all(name in parameters for name in pair):
            window = pair
    return names, window


def _is_of_each_call(name: str, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter has no default, or one that changes what is computed."""
    is_causal = name in NAMES["is_causal"] and parameter.default is True
    is_required = parameter.default is parameter.empty
    return is_causal or is_required or acts_by_default(name, parameter.default)


def _require_known(parameters: Mapping[str, inspect.Parameter], known: Collection[str]) -> None:
    """Raise ValueError for parameters without a default that no case gives."""
    required = [name for name, p in parameters.items() if p.default is p.empty]
    unknown = [name for name in required if name not in known]
    if unknown:
        raise ValueError(
            f"the kernel needs {', '.join(unknown)}, which no case says: pass call=..., a function"
            " (kernel, query, key, value, options) that calls it"
        )


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters after the first three, as far as they can be read."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # of a function of C
        raise ValueError(f"{error}: wrap it in a Python function, or pass call=...") from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p for p in parameters[3:] if p.kind not in variadic}
