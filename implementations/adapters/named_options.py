"""Which parameter of a function is which option of an attention, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping

from mha.implementations.adapters.names import (
    FLAGS,
    MEMORY_WORDS,
    NO_MEMORY_WORDS,
    NUMBERS,
    OPTION_NAMES,
    OTHER_MASKS,
    SLOPES_BY_WORD,
    is_called_mask,
    is_causal_flag,
    is_option,
    words_of,
)
from mha.spec.option_names import WINDOW_NAMES, WINDOW_PAIRS

# Options that are numbers, and no flags.
OF_NUMBERS = ("scale", "softcap", "sinks", "alibi", "chunk")


def option_name(option: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return a function's name for an option of `OPTION_NAMES`; None if it does not have it.

    >>> option_name("is_causal", inspect.signature(lambda x, causal_mask=False: x).parameters)
    'causal_mask'
    """
    for name in OPTION_NAMES[option]:
        if name in parameters and _may_be(option, parameters[name]):
            return name
    if option == "is_causal":
        for name, parameter in parameters.items():
            if is_causal_flag(name, parameter.default):
                return name
    return None


def _may_be(option: str, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter of a known name is the option, by whether it is a flag."""
    name, is_flag = parameter.name, _is_flag(parameter)
    if option == "alibi_switch":
        return is_flag or name in SLOPES_BY_WORD
    # A flag of the name of a number switches something on, and a flag's name may be a mask's.
    return not is_flag if option in OF_NUMBERS else is_flag or name not in FLAGS


def window_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return a function's names for a window: two for two numbers, or one; empty if it has none.

    >>> window_names(inspect.signature(lambda q, k, v, window_left=-1: q).parameters)
    ('window_left',)
    """
    for pair in WINDOW_PAIRS:
        if all(name in parameters for name in pair):
            return pair
    for name in WINDOW_NAMES:
        if name in parameters and not _is_flag(parameters[name]):
            return (name,)
    return ()


def first_known(known: Iterable[str], parameters: Collection[str]) -> str | None:
    """Return the first of some known names that a function has; None without one."""
    for name in known:
        if name in parameters:
            return name
    return None


def optional_memory(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the one parameter that may be a memory by the words of its name, and is left out.

    >>> optional_memory(inspect.signature(lambda X, X_KV=None, kv_cache=None: X).parameters)
    'X_KV'
    """
    named = []
    for name, parameter in parameters.items():
        words = {*words_of(name)}
        is_other = is_option(name) or not words.isdisjoint(NO_MEMORY_WORDS)
        if parameter.default is None and words & MEMORY_WORDS and not is_other:
            named.append(name)
    return named[0] if len(named) == 1 else None


def _is_flag(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")


def is_unknown_mask(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is called a mask, and may be a tensor."""
    name, annotation = parameter.name, annotation_of(parameter)
    is_unknown = is_called_mask(name) and name not in (*OTHER_MASKS, *OPTION_NAMES["mask"])
    if name == "M" and parameter.default is None:  # as in softmax(Q K^T + M) V
        return True
    has_value = parameter.default is not None and parameter.default is not parameter.empty
    return is_unknown and not has_value and not annotation.startswith(NUMBERS)


def may_be_mask(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter may be a mask of queries or keys: those of heads are not."""
    is_flag = isinstance(parameter.default, bool)
    is_of_heads = "head" in words_of(parameter.name)
    return is_called_mask(parameter.name) and not (is_flag or is_of_heads)


def annotation_of(parameter: inspect.Parameter) -> str:
    return inspect.formatannotation(parameter.annotation).strip("'")
