"""Configs that a partial gives a constructor, and options that a class reads from its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from types import CodeType, SimpleNamespace
from typing import Any

from torch import nn

from mha.implementations.adapters.configs import (
    NUMBER,
    AnyConfig,
    attributes_read,
    config_class,
    config_object,
    filled,
)
from mha.implementations.adapters.constructor_names import (
    KEPT,
    VARIED_NAMES,
    fields_of,
    without_partial,
)
from mha.spec.option_names import CHUNK_NAMES, SOFTCAP_NAMES, WINDOW_NAMES, WINDOW_PAIRS

# What a config may ask for and None switches off, so that calls without the option have none.
SWITCHED_OFF = frozenset(chain(SOFTCAP_NAMES, WINDOW_NAMES, CHUNK_NAMES, *WINDOW_PAIRS))


@dataclass(frozen=True, eq=False)
class Changed:
    """A config with other values for some of its options.

    config: the one that is changed; None for one with only the sizes of a case.
    options: the values by name.
    """

    config: Any
    options: Mapping[str, Any]


def with_options(
    constructor: Callable[..., nn.Module], options: Mapping[str, Any]
) -> Callable[..., nn.Module]:
    """Return a constructor with arguments; "config.softcap" is the name of an option of a config.

    >>> made = with_options(nn.Linear, {"bias": False, "config.softcap": 50.0})
    >>> made.keywords["bias"], made.keywords["config"].options
    (False, {'softcap': 50.0})
    """
    arguments, of_configs = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in options.items():
        config, dot, option = name.rpartition(".")
        if dot:
            of_configs.setdefault(config, {})[option] = value
        else:
            arguments[name] = value
    for config, changes in of_configs.items():
        given, before = _given(constructor, config)
        arguments[config] = Changed(given, {**before, **changes})
    return partial(constructor, **arguments)


def _given(constructor: Callable[..., Any], name: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the config that a partial sets, None without one, and the options that it changes."""
    given = getattr(constructor, "keywords", {}).get(name)
    if isinstance(given, Changed):
        return given.config, given.options
    return given, {}


def configs_to_try(
    constructor: Callable[..., Any], name: str, every: Mapping[str, Any]
) -> list[Any]:
    """Return the configs that a constructor may take, in the order in which to try them.

    name: of the parameter.
    every: the sizes of a case by every name.

    Raises what a class of configs raises for these sizes.
    """
    given, changed = _given(constructor, name)
    off = {option: None for option in options_of_configs(constructor) if option in SWITCHED_OFF}
    attempts: list[Mapping[str, None]] = [{}] if changed.keys() >= off.keys() else [off, {}]
    configs, refusals = [], []
    for switched_off in attempts:
        try:
            if given is not None:
                configs.append(_config_like(given, every, switched_off, changed))
            else:
                options = {**switched_off, **changed}
                configs.append(config_object(constructor, name, every, KEPT, options))
        except Exception as error:  # such as that of a class that takes no None
            refusals.append(error)
    if not configs:
        raise refusals[-1]
    if given is None:
        without_class = {**every, **changed}
        configs += [AnyConfig(**without_class), without_class]
        target = without_partial(constructor)
        none = frozenset[str]()
        if inspect.isclass(target):
            none = _switched_off_by(target)  # type: ignore[arg-type]  # classes are hashable
        if none:
            configs.append(AnyConfig(**{**dict.fromkeys(none), **without_class}))
    return configs


@lru_cache(8)  # it parses source, and a module is built for each case
def _switched_off_by(cls: type) -> frozenset[str]:
    """Return the options that None switches off which the constructor of a class reads."""
    return SWITCHED_OFF.intersection(attributes_read(cls.__init__) or ())  # type: ignore[misc]  # of this class


def _config_like(
    given: Any, every: Mapping[str, Any], off: Mapping[str, None], changed: Mapping[str, Any]
) -> Any:
    """Return a config like the one that a partial gives a constructor, with the sizes of a case.

    The case decides the names of `VARIED_NAMES`. Of the others, what a call changes comes before
    what the config says, and that before what is switched off.

    Raises what its class raises for these sizes.
    """
    if isinstance(given, Mapping):
        return {**every, **off, **_without(given, VARIED_NAMES), **changed}
    if isinstance(given, SimpleNamespace):
        return AnyConfig(**{**every, **off, **_without(vars(given), VARIED_NAMES), **changed})
    own = {size: value for size, value in every.items() if value is not None and size not in KEPT}
    said = _without(_said_by(_Held(given)), VARIED_NAMES)
    try:
        return filled(type(given), own, {**off, **said, **changed})
    except (TypeError, AttributeError):  # it cannot be made by the names of its attributes
        made = copy(given)
    for size in VARIED_NAMES:
        if size in own and isinstance(getattr(made, size, ""), NUMBER):
            setattr(made, size, own[size])
    for option, value in {**_without(off, said), **changed}.items():
        setattr(made, option, value)
    return made


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return values by name, except those of some names."""
    return {name: value for name, value in values.items() if name not in names}


class _Held:
    """A config as a key, equal to itself only."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.config is self.config

    def __hash__(self) -> int:
        return id(self.config)


@lru_cache(8)  # making the configs of large packages takes milliseconds
def _said_by(held: _Held) -> dict[str, Any]:
    """Return what a config says that one without arguments does not.

    These are arguments of its class, and what does not follow from them, as if it was set later.
    """
    config, cls = held.config, type(held.config)
    arguments = {}
    for name in inspect.signature(cls).parameters:
        if hasattr(config, name):
            arguments[name] = getattr(config, name)
    try:
        again = cls(**arguments)
    except Exception:  # a class of the author's
        return {}
    said = arguments
    with suppress(Exception):  # a class that requires some, so that all of them are said
        said = _different(arguments, cls())
    return said | _different(getattr(config, "__dict__", {}), again)


def _different(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the values that a config does not hold under their names."""
    found = {}
    for name, value in values.items():
        try:
            is_held = hasattr(config, name) and bool(getattr(config, name) == value)
        except (RuntimeError, ValueError):  # tensors of several elements
            is_held = False
        if not is_held:
            found[name] = value
    return found


def options_of_configs(constructor: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of the class of a config that a class reads from its config.

    Of a config without a class, these are the options that `SWITCHED_OFF` has.
    """
    target = without_partial(constructor)
    if not inspect.isclass(target):
        return {}
    config = config_name(constructor)
    if config is None:
        return {}
    given, _ = _given(constructor, config)
    cls = config_class(constructor, config)
    if given is not None:
        cls = type(given)
    if cls is None or issubclass(cls, Mapping | SimpleNamespace):
        read = SWITCHED_OFF & names_read(target)  # type: ignore[arg-type]  # classes are hashable
        return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in read}
    return _options_taken(cls, target)  # type: ignore[arg-type]  # classes are hashable


@lru_cache(8)
def _options_taken(cls: type, target: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class of configs that another class reads."""
    read = names_read(target)
    return {name: p for name, p in inspect.signature(cls).parameters.items() if name in read}


def config_name(constructor: Callable[..., Any]) -> str | None:
    """Return the parameter of a class that is a config; None without one."""
    parameters = inspect.signature(without_partial(constructor)).parameters
    for name, field in fields_of(parameters).items():
        if field == "config":
            return name
    return None


@lru_cache(8)
def names_read(cls: type) -> frozenset[str]:
    """Return the names of attributes in the methods of a class, those of `getattr` among them."""
    names = set[str]()
    for each in cls.__mro__:
        if each in nn.Module.__mro__:
            continue
        for member in vars(each).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if isinstance(code, CodeType):
                names.update(code.co_names)
                names.update(value for value in code.co_consts if isinstance(value, str))
    return frozenset(names)
