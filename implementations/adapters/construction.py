"""How a module is built for a configuration, by the names of its constructor's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from mha.implementations.adapters.constructor_names import (
    CONSTRUCTOR_NAMES,
    IF_REQUIRED,
    TILE_LENGTHS,
    VARIADIC,
    VARIED,
    by_words,
    fields_of,
    missing_of,
    without_partial,
)
from mha.implementations.adapters.constructor_values import by_every_name, layer_of, values_of
from mha.implementations.adapters.given_configs import configs_to_try
from mha.implementations.adapters.widened import Widened
from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Config

# The length for which a module is built that asks for the longest one, more than tables often have
# (2048); no case of self-attention is longer.
MAX_LENGTH = 2304
# The same for everyday cases: filling a table of MAX_LENGTH squared takes longer than judging one
# of them.
SHORT = 512
SMALL = Config(d_model=4, n_heads=2)
# The sizes in the code of a function of d_model and n_heads.
SIZES = {"d_model": "d_model", "n_heads": "n_heads", "head_dim": "d_model // n_heads"}


@dataclass(frozen=True)
class Room:
    """For what a module is built that asks for the longest input, or for the largest batch.

    length: in positions.
    batch: the number of items for which a cache is made; trial runs have up to 64.
    """

    length: int = MAX_LENGTH
    batch: int = 64

    @classmethod
    def for_calls(cls, longest: int, batch: int) -> Room:
        """Return room for what properties make of a call: they double its keys or items, and more.

        longest: the longest input of the call.
        batch: its number of items.
        """
        return cls(min(max(3 * longest, SHORT), MAX_LENGTH), 3 * max(batch, 2))


LARGE = Room()


def constructor_arguments(
    label: str, constructor: Callable[..., Any], *, assume: bool = True
) -> dict[str, str]:
    """Return what each known parameter of a constructor is given, a key of `CONSTRUCTOR_NAMES`.

    Of several names for one thing, those with the default None keep it.

    label: the name in messages.
    assume: whether parameters of a class may be d_model and n_heads where no known name says so.

    Raises ImplementationError if no name is known for d_model or n_heads, or a required parameter
    is unknown.
    """
    parameters = parameters_of(constructor)
    required = required_of(parameters)
    arguments = _known(parameters, set_by=getattr(constructor, "keywords", {}))
    if assume:
        arguments |= _assumed(constructor, required, arguments)
    # Of the number and the width of the heads and d_model, their product, two give the third.
    given = {"d_model", "n_heads", "head_dim"} & {*arguments.values()}
    missing = missing_of(arguments)
    if missing and len(given) < 2:
        raise ImplementationError(
            f"{label}: none of the parameters of its constructor ({', '.join(parameters)}) has a"
            f" known name of {missing[0]}; {building_advice(label, constructor, arguments)}"
        )
    unknown = [name for name in required if name not in arguments]
    if unknown:
        of_no_name = "of no known names; supply them"
        if len(unknown) == 1:
            of_no_name = "which has no known name; supply it"
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
    """Return the parameters of a constructor, with those that it passes on to its bases."""
    target = without_partial(constructor)
    if isinstance(target, Widened):
        return _with_defaults(target.parameters, getattr(constructor, "keywords", {}))
    own = dict(inspect.signature(constructor).parameters)
    every = own
    if not inspect.isclass(target):
        return every
    _, *bases = [base for base in inspect.getmro(target) if "__init__" in vars(base)]
    for base in bases:
        passes_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
        if required_of(own) or not passes_on:
            break
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        own = {p.name: p for p in parameters}
        every = own | every
    return every


def _with_defaults(
    parameters: Mapping[str, inspect.Parameter], defaults: Mapping[str, Any]
) -> dict[str, inspect.Parameter]:
    """Return parameters with the defaults that a `functools.partial` gives some of them."""
    return {
        name: parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in parameters.items()
    }


def assumed_arguments(constructor: Callable[..., Any], arguments: Mapping[str, str]) -> list[str]:
    """Return the parameters of a constructor that are given something for want of a known name."""
    known = fields_of(parameters_of(constructor))
    open_widths = getattr(constructor, "widths", {})
    return [*open_widths, *(name for name in arguments if name not in known)]


def _assumed(
    constructor: Callable[..., Any], required: Sequence[str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the parameters of a class that may be d_model, or d_model and n_heads.

    Those that it requires and that have no known name, in this order: beside a known d_model, one
    may be something else, since not every class has several heads. Where it requires no other,
    positive integers with a word of these in their names.
    """
    if not inspect.isclass(without_partial(constructor)):
        return {}
    missing = missing_of(known)
    unknown = [name for name in required if name not in known]
    if unknown:
        if "d_model" not in missing or len(unknown) != len(missing):
            return {}
        return dict(zip(unknown, missing, strict=True))
    kept = {*known, *getattr(constructor, "keywords", {})}
    parameters = parameters_of(constructor)
    defaults = {name: p.default for name, p in parameters.items() if name not in kept}
    return by_words(defaults, missing)


def _known(
    parameters: Mapping[str, inspect.Parameter], set_by: Mapping[str, object]
) -> dict[str, str]:
    """Return what each parameter of a known name is given, except where the default is kept.

    set_by: what a `functools.partial` sets.
    """
    known = fields_of(parameters)
    # Of two names for one thing, that with the default None means that the other one counts.
    not_none = {field for name, field in known.items() if parameters[name].default is not None}
    given = {}
    for name, field in known.items():
        parameter = parameters[name]
        is_second = parameter.default is None and field in not_none
        if not is_second and not _is_kept(parameter, field, is_set=name in set_by):
            given[name] = field
    return given


def _is_kept(parameter: inspect.Parameter, field: str, *, is_set: bool) -> bool:
    """Return whether a parameter keeps its default, or what a partial sets."""
    default = parameter.default
    if parameter.name == "block_size" and type(default) is int and default in TILE_LENGTHS:
        return True
    if is_set and field not in VARIED:
        return True
    if field.startswith("layer_") and default is None:  # which is no number of a layer
        return False
    return field in IF_REQUIRED and default is not parameter.empty


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
    """Return what the sizes mean that a constructor reads from variables of its module, by name."""
    target = without_partial(constructor)
    function = getattr(target, "__init__", None) if inspect.isclass(target) else target
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    variables = getattr(function, "__globals__", {})
    found: dict[str, str] = {}
    for field in SIZES:
        for name in CONSTRUCTOR_NAMES[field]:
            if name in code.co_names and type(variables.get(name)) is int:
                found[name] = field
    return found


def building_advice(
    label: str, constructor: Callable[..., Any], arguments: Mapping[str, str]
) -> str:
    """Return the advice to write a function that builds the module."""
    required = required_of(parameters_of(constructor))
    variables = read_from_module(constructor)
    given = _assigned(arguments)
    given += [f"{name}=..." for name in required if name not in arguments]
    if not {"d_model", "n_heads"} <= {*arguments.values(), *variables.values()}:
        given.append("...")
    made = f"return {label}({', '.join(given)})"
    if variables:
        made = f"globals().update({', '.join(_assigned(variables))}); {made}"
    return f"name a function that builds it: def attention(d_model, n_heads): {made}"


def _assigned(meanings: Mapping[str, str]) -> list[str]:
    """Return the code of the arguments that are sizes; meanings: of each name."""
    return [f"{name}={SIZES[field]}" for name, field in meanings.items() if field in SIZES]


def module_class(constructor: Callable[..., Any]) -> type[nn.Module] | None:
    """Return the class of the modules that a constructor makes; None where it makes none.

    constructor: a class, a function or a `functools.partial` of one. A function is called once,
        with small sizes.

    Raises what the function raises, and ImplementationError for parameters that are not recognised.
    """
    made: Any = without_partial(constructor)
    if isinstance(made, Widened):
        made = without_partial(made.cls)
    if inspect.isfunction(made):
        arguments = constructor_arguments(made.__name__, constructor)
        made = type(construct(constructor, arguments, SMALL, room=Room(SHORT)))
    return made if inspect.isclass(made) and issubclass(made, nn.Module) else None


def construct(  # noqa: PLR0913  where and for what it is built
    constructor: Callable[..., nn.Module],
    arguments: Mapping[str, str],
    config: Config,
    dropout: bool | str = False,
    device: str = "cpu",
    *,
    room: Room = LARGE,
    noted: list[Mapping[str, Any]] | None = None,
) -> nn.Module:
    """Call a constructor for a configuration.

    arguments: what each of its parameters is given.
    dropout: what `Config.dropout` applies to, as in `Claims.dropout`.
    device: where the module will be called.
    room: the longest input and the largest batch.
    noted: gets the arguments of each call of the constructor, of those that raise too.
    """
    _require_product(arguments, config)
    length = MAX_LENGTH if _is_widened(constructor) else room.length
    has_output_dropout = "output_dropout" in arguments.values()
    values = values_of(
        config, dropout, has_output_dropout=has_output_dropout, length=length, batch=room.batch
    )
    values["device"] = device
    choices = _arguments_to_try(constructor, arguments, config, values)
    module = _first_made(constructor, choices, noted)
    _materialise(module, config)
    return module


def _arguments_to_try(
    constructor: Callable[..., Any],
    arguments: Mapping[str, str],
    config: Config,
    values: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the arguments of a constructor; with a config, others that have other configs."""
    every = by_every_name(values)
    given: dict[str, Any] = {}
    configs: dict[str, list[Any]] = {}
    for name, field in arguments.items():
        if field == "config":
            configs[name] = configs_to_try(constructor, name, every)
        elif field.endswith("_layer"):
            given[name] = layer_of(config, field[0])
        else:
            given[name] = values[field]
            if given[name] is None:  # a width of key or value that is not set
                given[name] = parameters_of(constructor)[name].default
                if given[name] is inspect.Parameter.empty:
                    given[name] = config.d_model
    if not configs:
        return [given]
    # A constructor with two configs has them of one kind.
    together = zip(*configs.values(), strict=False)
    return [{**given, **dict(zip(configs, each, strict=True))} for each in together]


def _first_made(
    constructor: Callable[..., nn.Module],
    choices: Sequence[Mapping[str, Any]],
    noted: list[Mapping[str, Any]] | None,
) -> nn.Module:
    """Return what a constructor makes of the first arguments whose config has what it reads.

    Raises the first error; but where the first config lacks an attribute, and the constructor
    refuses the sizes in another one, that ValueError.
    """
    raised: Exception | None = None
    for given in choices:
        if noted is not None:
            noted.append(given)
        try:
            return constructor(**given)
        except (AttributeError, AssertionError, TypeError) as error:
            raised = raised or error
        except Exception as error:
            refuses_sizes = isinstance(raised, AttributeError) and isinstance(error, ValueError)
            if raised is None or refuses_sizes:
                raise
    assert raised is not None
    raise raised


def _require_product(arguments: Mapping[str, str], config: Config) -> None:
    """Raise UnsupportedCallError for a d_model that heads of one width do not make.

    Only where the constructor is given their width and their number, or one of these and d_model.
    """
    given = {*arguments.values()}
    is_product = config.n_heads > 0 and config.d_model == config.n_heads * config.head_dim
    if given.isdisjoint({"n_heads", "config"}) and not is_product:
        what = f"its constructor takes no number of heads ({config.n_heads}), only their width"
        raise UnsupportedCallError(what)
    if config.n_heads <= 0:
        return
    has_width = not given.isdisjoint({"d_model", "config"})
    if not has_width and config.d_model != config.n_heads * config.head_dim:
        raise UnsupportedCallError(
            f"its constructor takes no d_model ({config.d_model}), only the number and the width of"
            " the heads"
        )
    if "head_dim" in given and config.d_head is None and config.d_model % config.n_heads:
        raise UnsupportedCallError(
            f"its constructor takes the width of a head, and {config.n_heads} heads of one width do"
            f" not make {config.d_model}"
        )


def fixed_dropout(module: nn.Module) -> list[_DropoutNd]:
    """Return the dropout layers that drop, of a module that was constructed without dropout."""
    return [layer for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.p]


def _is_widened(constructor: Callable[..., Any]) -> bool:
    """Return whether a partial sets a window of MAX_LENGTH, which may need a table as long."""
    for value in getattr(constructor, "keywords", {}).values():
        if type(value) is int and value == MAX_LENGTH:
            return True
    return False


def _materialise(module: nn.Module, config: Config) -> None:
    """Give lazy layers, which have no shape before the first call, the width of the model."""
    if not isinstance(module, nn.Module):  # a function may return anything
        return
    for layer in module.modules():
        if isinstance(layer, nn.LazyLinear) and layer.has_uninitialized_params():
            layer.initialize_parameters(torch.empty(0, config.d_model))
