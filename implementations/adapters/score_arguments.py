"""What a call says about the scores, by the names of a function, or of a constructor."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha.implementations.adapters.constructor_names import SCALARS
from mha.implementations.adapters.named_options import option_name, window_names
from mha.implementations.adapters.names import SLOPES_BY_WORD, SLOPES_SWITCHES, WIDE_LENGTHS
from mha.implementations.discovery.errors import UnsupportedCallError
from mha.spec import Claims, Options
from mha.spec.option_names import acts_by_default
from mha.spec.scores import Bounds, stand_in

# The options of `OPTION_NAMES` that are about the scores; a window may have two names.
OF_SCORES = (
    "scale",
    "softcap",
    "sinks",
    "alibi",
    "alibi_switch",
    "chunk",
    "return_lse",
    "key_lengths",
    "query_lengths",
)
OF_LENGTHS = ("key_lengths", "query_lengths")
# Options that ask for a result, which a function may return without being asked.
RESULTS = ("return_lse",)

Names = dict[str, tuple[str, ...]]


def score_names(parameters: Mapping[str, inspect.Parameter]) -> dict[str, tuple[str, ...]]:
    """Return a function's names for the options about scores that it has.

    >>> score_names(inspect.signature(lambda q, k, v, window_size=-1, softcap=0.0: q).parameters)
    {'softcap': ('softcap',), 'window': ('window_size',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for option in OF_SCORES:
        name = option_name(option, parameters)
        if name:
            found[option] = (name,)
    window = window_names(parameters)
    if window:
        found["window"] = window
    return found


def acting_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return the options about the scores whose default is that of one model.

    >>> def gemma(q, k, v, softcap=50.0, window=(127, 0), scale=1.0): ...
    >>> acting_names(inspect.signature(gemma).parameters)
    ('softcap', 'window')
    """
    return tuple(name for name, each in parameters.items() if acts_by_default(name, each.default))


def has_number_for_none(option: str, name: str) -> bool:
    """Return whether some number, given as an argument, says that its option is left out.

    >>> has_number_for_none("alibi", "slopes"), has_number_for_none("alibi", "use_alibi")
    (True, False)
    """
    if option == "alibi":
        return name not in SLOPES_SWITCHES
    return option in ("sinks", "softcap")


@dataclass(frozen=True)
class ScoreArguments:
    """How options about scores become arguments.

    label: the name in messages.
    names: of the arguments, by the option.
    claims: what they mean.
    none_by_default: the arguments with the default None.
    """

    label: str
    names: Names
    claims: Claims
    none_by_default: Collection[str] = ()

    def of(self, options: Options, query: Tensor) -> dict[str, Any]:
        """Return the arguments of a call; raises UnsupportedCallError for one that is not taken.

        query: whose dtype and device tensors get.
        """
        arguments: dict[str, Any] = {}
        for option, value in options.of_scores.items():
            if option == "window":
                arguments.update(self._window(value))
            elif option == "alibi" and self._has_built_in_slopes:
                arguments.update(self._switched_slopes())
            elif option == "batch_invariant":
                arguments.update(self._of_invariance())
            elif option in self.names:
                (name,) = self.names[option]
                arguments[name] = self._value(option, name, value, query)
            elif option not in RESULTS:
                raise UnsupportedCallError(f"{self.label} takes no {option}")
        return arguments

    def without(self, name: str, query: Tensor, n_heads: int) -> Any:
        """Return what an argument is given in calls without its option; None if nothing is known.

        query: whose dtype and device tensors get.
        """
        for option, own in self.names.items():
            if own == (name,) and has_number_for_none(option, name):
                return stand_in(option, query, n_heads)
        if name in self.names.get("window", ()) and self.claims.scores.window:
            return self._window((None, None))[name]
        return None

    def _value(self, option: str, name: str, value: Any, query: Tensor) -> Any:
        """Return the value of an option as it is taken."""
        if option in ("sinks", "alibi"):
            in_dtype = option == "sinks" and self.claims.scores.sinks == "input"
            dtype = query.dtype if in_dtype else torch.float32
            return torch.as_tensor(value, dtype=dtype, device=query.device)
        if option in OF_LENGTHS:
            dtype = torch.int64 if name in WIDE_LENGTHS else torch.int32
            return torch.tensor(value, dtype=dtype, device=query.device)
        if name.rpartition(".")[2] in SCALARS:
            return value**-2
        if option == "softcap" and not value and name in self.none_by_default:
            return None  # what stands for no cap, where 0 is one
        return value

    @property
    def _has_built_in_slopes(self) -> bool:
        declared = self.claims.scores.alibi
        return declared is not None and declared.built_in

    def _of_invariance(self) -> dict[str, Any]:
        """Return what makes the bits of an item independent of others, if anything has to."""
        declared = self.claims.batch_invariant
        return {} if isinstance(declared, bool) else dict(declared)

    def _switched_slopes(self) -> dict[str, Any]:
        """Return what switches on slopes that are built in."""
        if "alibi_switch" not in self.names:
            raise UnsupportedCallError(f"{self.label} has no switch of ALiBi")
        (name,) = self.names["alibi_switch"]
        return {name: SLOPES_BY_WORD.get(name, True)}

    def _window(self, bounds: Bounds) -> dict[str, Any]:
        """Return a window in the form that is claimed."""
        declared, names = self.claims.scores.window, self.names.get("window")
        if declared is None or not names:
            raise UnsupportedCallError(f"{self.label} takes no window")
        numbers = declared.numbers(bounds)
        if len(names) == len(numbers):
            return dict(zip(names, numbers, strict=True))
        if len(names) > 1:
            raise UnsupportedCallError(
                f"{self.label} takes a window as two numbers, {' and '.join(names)}"
            )
        return {names[0]: numbers}
