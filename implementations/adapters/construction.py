"""How a module is built for a configuration: what each parameter of its constructor is given, by
its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mha.implementations.adapters.configs import AnyConfig, config_object
from mha.implementations.adapters.constructor_names import (
    BIAS_ROLES,
    CONSTRUCTOR_NAMES,
    IF_REQUIRED,
    KEPT,
    TILE_LENGTHS,
    VARIADIC,
    VARIED,
    by_words,
    fields_of,
    missing_of,
)
from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Config
from mha.spec.claims import DROPS_OUTPUT

# The length for which a module is built that asks for the longest one; no case of self-attention is
# longer. It is more than 2048, for which tables of masks and positions are often made.
MAX_LENGTH = 2304
# The same for everyday cases: filling a table of MAX_LENGTH squared takes longer than judging one
# of them.
SHORT = 512
_length: ContextVar[int] = ContextVar("length", default=MAX_LENGTH)
# The number of items for which a cache is made; trial runs have up to 64.
_batch: ContextVar[int] = ContextVar("batch", default=64)
# Where the arguments that constructors are called with are noted, if anywhere.
_noted: ContextVar[list[Mapping[str, Any]] | None] = ContextVar("noted", default=None)
SMALL = Config(d_model=4, n_heads=2)
# The sizes in the code of a function of d_model and n_heads.
SIZES = {"d_model": "d_model", "n_heads": "n_heads", "head_dim": "d_model // n_heads"}


@contextmanager
def built_for(length: int) -> Iterator[None]:
    """Let constructors that ask for the longest input have this length in the block, within SHORT
    and MAX_LENGTH.
    """
    token = _length.set(min(max(length, SHORT), MAX_LENGTH))
    try:
        yield
    finally:
        _length.reset(token)


@contextmanager
def built_for_calls(longest: int, batch: int) -> Iterator[None]:
    """Let constructors that ask for the longest input, or the largest batch, have room for what
    properties make of one.

    They double its keys or its items, and add some.
    """
    token = _batch.set(3 * max(batch, 2))
    try:
        with built_for(3 * longest):
            yield
    finally:
        _batch.reset(token)


@contextmanager
def noting_arguments() -> Iterator[list[Mapping[str, Any]]]:
    """Note the arguments of each call of a constructor in the block, those of calls that raise too."""
    noted: list[Mapping[str, Any]] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def constructor_arguments(
    label: str, constructor: Callable[..., Any], *, assume: bool = True
) -> dict[str, str]:
    """Return what each parameter of a constructor is given, a key of `CONSTRUCTOR_NAMES`, if its
    name is known.

    Of several names for one thing, those with the default None keep it. assume: whether parameters
    of a class may be d_model and n_heads where no known name says so.

    Raises ImplementationError if no name is known for d_model or n_heads, or a required parameter
    is unknown.
    """
    parameters = parameters_of(constructor)
    required = required_of(parameters)
    arguments = _known(parameters, set_by=getattr(constructor, "keywords", {}))
    arguments |= _assumed(constructor, required, arguments) if assume else {}
    product = {"n_heads", "head_dim"} <= {*arguments.values()}  # which is d_model
    for field in () if product else missing_of(arguments):
        raise ImplementationError(
            f"{label}: none of the parameters of its constructor ({', '.join(parameters)}) has a"
            f" known name of {field}; {building_advice(label, constructor, arguments)}"
        )
    if unknown := [name for name in required if name not in arguments]:
        of_no_name = (
            "which has no known name; supply it"
            if len(unknown) == 1
            else "of no known names; supply them"
        )
        supplied = ", ".join(f"{name}=..." for name in unknown)
        raise ImplementationError(
            f"{label}: its constructor requires {', '.join(unknown)}, {of_no_name} with"
            f" functools.partial({label}, {supplied}), or"
            f" {building_advice(label, constructor, arguments)}"
        )
    return {name: arguments[name] for name in parameters if name in arguments}


def required_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters without a default."""
    return [
        name for name, p in parameters.items() if p.default is p.empty and p.kind not in VARIADIC
    ]


def parameters_of(constructor: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor, with those of the bases to which it passes on what it
    does not name.
    """
    every = own = dict(inspect.signature(constructor).parameters)
    cls = constructor.func if isinstance(constructor, partial) else constructor
    _, *bases = (
        [base for base in inspect.getmro(cls) if "__init__" in vars(base)]
        if inspect.isclass(cls)
        else [None]
    )
    for base in bases:
        requires = any(p.default is p.empty and p.kind not in VARIADIC for p in own.values())
        if requires or not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        own = {p.name: p for p in parameters}
        every = own | every
    return every


def assumed_arguments(constructor: Callable[..., Any], arguments: Mapping[str, str]) -> list[str]:
    """Return the parameters of a constructor that are given something for want of a known name."""
    known = fields_of(parameters_of(constructor))
    return [*getattr(constructor, "widths", {}), *(name for name in arguments if name not in known)]


def _assumed(
    constructor: Callable[..., Any], required: Sequence[str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the parameters of a class that may be d_model, or d_model and n_heads, for want of a
    known name.

    Those that it requires, in this order: beside a known d_model, one may be something else, since
    not every class has several heads. Where it requires no other, positive integers with a word of
    these in their names.
    """
    if not inspect.isclass(constructor.func if isinstance(constructor, partial) else constructor):
        return {}
    unknown, missing = [name for name in required if name not in known], missing_of(known)
    if unknown:
        fits = "d_model" in missing and len(unknown) == len(missing)
        return dict(zip(unknown, missing, strict=True)) if fits else {}
    kept = {*known, *getattr(constructor, "keywords", {})}
    defaults = {
        name: p.default for name, p in parameters_of(constructor).items() if name not in kept
    }
    return by_words(defaults, missing)


def _known(
    parameters: Mapping[str, inspect.Parameter], set_by: Mapping[str, object]
) -> dict[str, str]:
    """Return what each parameter whose name is known is given, except where the default is kept.

    set_by: what a `functools.partial` sets.
    """
    known = fields_of(parameters)
    given = {field for name, field in known.items() if parameters[name].default is not None}

    def keeps_default(name: str, field: str) -> bool:
        of_two = parameters[name].default is None and field in given
        return of_two or _is_kept(parameters[name], field, is_set=name in set_by)

    return {name: field for name, field in known.items() if not keeps_default(name, field)}


def _is_kept(parameter: inspect.Parameter, field: str, *, is_set: bool) -> bool:
    """Return whether a parameter keeps its default, or what a partial sets: None is no number of a
    layer.
    """
    is_tile = (
        parameter.name == "block_size"
        and type(parameter.default) is int
        and parameter.default in TILE_LENGTHS
    )
    if is_tile or (is_set and field not in VARIED):
        return True
    has_none = field.startswith("layer_") and parameter.default is None
    return field in IF_REQUIRED and parameter.default is not parameter.empty and not has_none


def makes_modules(function: Callable[..., Any]) -> bool:
    """Return whether the parameters of a function are those of a constructor.

    >>> makes_modules(lambda d_model, n_heads: ...), makes_modules(lambda query, key, value: ...)
    (True, False)
    """
    try:
        return bool(constructor_arguments("", function))
    except ImplementationError:
        return False


def read_from_module(constructor: Callable[..., Any]) -> dict[str, str]:
    """Return the sizes that a constructor reads from variables of its module, by their names: what
    each one is.
    """
    cls = constructor.func if isinstance(constructor, partial) else constructor
    function = getattr(cls, "__init__", None) if inspect.isclass(cls) else cls
    code, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    read = [name for name in code.co_names if type(variables.get(name)) is int] if code else []
    return {name: field for field in SIZES for name in CONSTRUCTOR_NAMES[field] if name in read}


def building_advice(
    label: str, constructor: Callable[..., Any], arguments: Mapping[str, str]
) -> str:
    """Return the advice to write a function that builds the module."""
    parameters, variables = parameters_of(constructor), read_from_module(constructor)
    required = required_of(parameters)
    given = [f"{name}={SIZES[field]}" for name, field in arguments.items() if field in SIZES]
    given += [f"{name}=..." for name in required if name not in arguments]
    given += [] if {"d_model", "n_heads"} <= {*arguments.values(), *variables.values()} else ["..."]
    made = f"return {label}({', '.join(given)})"
    if variables:
        assigned = ", ".join(f"{name}={SIZES[field]}" for name, field in variables.items())
        made = f"globals().update({assigned}); {made}"
    return f"name a function that builds it: def attention(d_model, n_heads): {made}"


def module_class(constructor: Callable[..., Any]) -> type[nn.Module] | None:
    """Return the class of the modules that a class, a function or a `functools.partial` of one
    makes.

    A function is called once, with small sizes. Returns None for what makes no `torch.nn.Module`.

    Raises what the function raises, and ImplementationError for parameters that are not recognised.
    """
    target = constructor.func if isinstance(constructor, partial) else constructor
    if inspect.isfunction(target):
        label = target.__name__
        made: Any = type(construct(constructor, constructor_arguments(label, constructor), SMALL))
    else:
        made = target
    return made if inspect.isclass(made) and issubclass(made, nn.Module) else None


def construct(
    constructor: Callable[..., nn.Module],
    arguments: Mapping[str, str],
    config: Config,
    dropout: bool | str = False,
    device: str = "cpu",
) -> nn.Module:
    """Call a constructor for a configuration.

    arguments: what each of its parameters is given. dropout: what `Config.dropout` applies to, as
        in `Claims.dropout`.
    device: where the module will be called.
    """
    _require_product(arguments, config)
    values = _values(config, dropout, has_output_dropout="output_dropout" in arguments.values()) | {
        "device": device
    }
    if _is_widened(constructor):
        values["max_length"] = MAX_LENGTH
    given = {}
    for name, field in arguments.items():
        if field == "config":
            given[name] = config_object(constructor, name, _every(values), KEPT)
        elif field.endswith("_layer"):
            given[name] = _layer(config, field[0])
        else:
            given[name] = values[field]
        if given[name] is None:  # a width of key or value that is not set
            default = parameters_of(constructor)[name].default
            given[name] = config.d_model if default is inspect.Parameter.empty else default
    configs = [name for name, field in arguments.items() if field == "config"]
    others = (AnyConfig(**_every(values)), _every(values)) if configs else ()
    choices = [given, *(given | dict.fromkeys(configs, other) for other in others)]
    return _materialised(_first_made(constructor, choices), config)


def _first_made(
    constructor: Callable[..., nn.Module], choices: Sequence[Mapping[str, Any]]
) -> nn.Module:
    """Return what a constructor makes of the first arguments whose config has what it reads.

    Raises the first error; but where the first config lacks an attribute, and the constructor
    refuses the sizes in another one, that ValueError.
    """
    raised: Exception | None = None
    noted = _noted.get()
    for given in choices:
        if noted is not None:
            noted.append(given)
        try:
            return constructor(**given)
        except (AttributeError, AssertionError, TypeError) as error:
            raised = raised or error
        except Exception as error:
            if raised is None or (
                isinstance(raised, AttributeError) and isinstance(error, ValueError)
            ):
                raise
    assert raised is not None
    raise raised


def _require_product(arguments: Mapping[str, str], config: Config) -> None:
    """Raise UnsupportedCallError for a d_model that a constructor of heads and their width cannot
    be given.
    """
    is_given = not {"d_model", "config"}.isdisjoint(arguments.values())
    if not is_given and config.n_heads > 0 and config.d_model != config.n_heads * config.head_dim:
        raise UnsupportedCallError(
            f"its constructor takes no d_model ({config.d_model}), only the number and the width of"
            " the heads"
        )
    given_width = "head_dim" in arguments.values() and config.d_head is None
    if given_width and config.n_heads > 0 and config.d_model % config.n_heads:
        raise UnsupportedCallError(
            f"its constructor takes the width of a head, and {config.n_heads} heads of one width do"
            f" not make {config.d_model}"
        )


def fixed_dropout(module: nn.Module) -> list[_DropoutNd]:
    """Return the dropout layers of a module that was constructed without dropout, and that drop all
    the same.
    """
    return [layer for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.p]


def _is_widened(constructor: Callable[..., Any]) -> bool:
    """Return whether a partial sets a window of MAX_LENGTH, which may need a table as long."""
    return any(
        type(x) is int and x == MAX_LENGTH for x in getattr(constructor, "keywords", {}).values()
    )


def _materialised(module: nn.Module, config: Config) -> nn.Module:
    """Give lazy layers, which have no shape before the first call, an input of the width of the
    model.
    """
    for layer in module.modules() if isinstance(module, nn.Module) else ():
        if isinstance(layer, nn.LazyLinear) and layer.has_uninitialized_params():
            layer.initialize_parameters(torch.empty(0, config.d_model))
    return module


def _every(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by all the names of `CONSTRUCTOR_NAMES`."""
    return {
        known: values[field]
        for field, names in CONSTRUCTOR_NAMES.items()
        if field in values
        for known in names
    }


def _values(config: Config, dropout: bool | str, *, has_output_dropout: bool) -> dict[str, Any]:
    """Return what a parameter of each meaning is given, by the keys of `CONSTRUCTOR_NAMES`."""
    fields = ("d_model", "n_heads", "dropout", "kdim", "vdim", "bias_kv", "zero_key")
    values: dict[str, Any] = {field: getattr(config, field) for field in fields}
    values |= {
        field: any(config.has_bias(role) for role in roles) for field, roles in BIAS_ROLES.items()
    }
    values |= {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_dim if config.n_heads else config.d_model,
    }
    values |= {"max_length": _length.get(), "max_batch": _batch.get()}
    values |= {"batch_first": not config.length_first, "causal": False}
    values |= {"layer_index": 0, "layer_number": 1}  # numbers count from 1, as in Megatron
    values["output_dropout"] = config.dropout_of_output if dropout in DROPS_OUTPUT else 0.0
    if dropout == "output" and has_output_dropout:
        values["dropout"] = 0.0
    return values


def _layer(config: Config, role: str) -> nn.Linear:
    """Return a linear layer for a projection that the constructor takes."""
    kv_width = config.kv_heads * config.head_dim if config.n_heads else config.d_model
    widths = {
        "q": (config.d_model, config.inner_width),
        "k": (config.key_width, kv_width),
        "v": (config.value_width, kv_width),
        "o": (config.inner_width, config.d_model),
    }
    rows, columns = (
        max(1, width) for width in widths[role]
    )  # refusing a size is the constructor's task
    return nn.Linear(rows, columns, bias=config.has_bias(role))
