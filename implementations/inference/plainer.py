"""Options of a constructor about what is beside the formula, set so that they change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from mha.implementations.adapters.construction import MAX_LENGTH, parameters_of
from mha.implementations.adapters.constructor_names import fields_of
from mha.implementations.adapters.names import words_of
from mha.implementations.inference.candidate import Candidate
from mha.spec.option_names import SCALE_NAMES, SOFTCAP_NAMES

# In the names of arguments of a constructor.
WINDOW_WORDS = frozenset({"window", "sliding"})
# Of a rotation, and of what its positions, or its base, are multiplied by.
ROTATION_WORDS = frozenset({"rope", "rotary", "ntk", "position", "pos", "interpolation"})
FACTOR_WORDS = frozenset({"factor", "scaling", "scale", "alpha", "ratio"})
FACTOR_NAMES = frozenset({"scaling_factor"})
# Of positions that are not rotated: that of the class of an image, registers.
PREFIX_WORDS = frozenset({"prefix", "cls", "register", "registers"})
COUNT_WORDS = frozenset({"num", "n", "tokens", "token"})


def plainer(candidate: Candidate) -> Candidate | None:
    """Return the candidate without a window, a cap, or a factor of its positions by default.

    A window and a cap are then tried in calls of their own. None where it has none of these.
    """
    constructor = candidate.declared.constructor
    settings = plain_settings(constructor)
    if not settings:
        return None
    shown = []
    for name, value in settings.items():
        shown.append(f"{name}={value!r}, not {parameters_of(constructor)[name].default!r}")
    set_so = candidate.declaring(constructor=partial(constructor, **settings))
    return set_so.noting("set", "; ".join(shown), "so that a formula gives what it computes")


def plain_settings(constructor: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return the arguments of a constructor that a default other than none makes count.

    >>> def attention(d_model, n_heads, window=7, rope_scaling_factor=2.0, eps=1e-6): ...
    >>> plain_settings(attention)
    {'window': 2304, 'rope_scaling_factor': 1.0}
    """
    parameters = parameters_of(constructor)
    given: Mapping[str, Any] = getattr(constructor, "keywords", {})
    known = {*fields_of(parameters), *given}
    settings = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if name in known or isinstance(default, bool) or not isinstance(default, int | float):
            continue
        value = _plain_value(name, parameter)
        if value != default:
            settings[name] = value
    return settings


def _plain_value(name: str, parameter: inspect.Parameter) -> Any:
    """Return the value with which an option, by its name, adds nothing; else its default."""
    words, may_be_none = {*words_of(name)}, "None" in str(parameter.annotation)
    if name in SOFTCAP_NAMES and may_be_none:
        return None
    if words & WINDOW_WORDS and type(parameter.default) is int and parameter.default > 0:
        return None if may_be_none else max(MAX_LENGTH, parameter.default)
    if words & PREFIX_WORDS and words & COUNT_WORDS:
        return 0
    if is_factor(name, words):
        return type(parameter.default)(1)
    return parameter.default


def is_factor(name: str, words: set[str]) -> bool:
    """Return whether a name is that of a factor of positions, or of the base of a rotation."""
    is_of_rotation = bool(words & ROTATION_WORDS) or name in FACTOR_NAMES
    return is_of_rotation and bool(words & FACTOR_WORDS) and name not in SCALE_NAMES
