"""Options about the scores that a class takes in its constructor, or has as a parameter.

A call that gives one is a call of a module that is built anew with it, and has the same weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mha.implementations.adapters.construction import parameters_of
from mha.implementations.adapters.constructor_names import fields_of
from mha.implementations.adapters.given_configs import config_name, options_of_configs
from mha.implementations.adapters.loading import ParameterPath
from mha.implementations.adapters.score_arguments import Names, ScoreArguments, score_names
from mha.implementations.adapters.signature import Signature
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Claims, Options

# What a constructor may take: no tensors, and nothing that asks for a result.
BUILT = ("scale", "window", "chunk", "softcap", "alibi_switch")
# The key of the map of parameters that says where the sinks of a class are.
SINKS = "sinks"


def built_names(
    constructor: Callable[..., nn.Module], signature: Signature | None
) -> dict[str, tuple[str, ...]]:
    """Return a constructor's names for options about scores, except those that a call takes.

    >>> class Attention(nn.Module):
    ...     def __init__(self, d_model, n_heads, sliding_window=None): ...
    >>> built_names(Attention, None)
    {'window': ('sliding_window',)}

    Those that the class reads from its config come after a dot, as in "config.sliding_window".
    """
    of_calls: Names = {}
    if signature is not None:
        of_calls = signature.scores
    found: dict[str, tuple[str, ...]] = {}
    of_constructor = _names_among(parameters_of(constructor))
    for option, names in {**_names_in_config(constructor), **of_constructor}.items():
        if option in BUILT and option not in of_calls:
            found[option] = names
    return found


def _names_in_config(constructor: Callable[..., nn.Module]) -> Names:
    """Return the names of options that a class reads from its config."""
    found: Names = {}
    for option, names in _names_among(options_of_configs(constructor)).items():
        config = config_name(constructor)
        found[option] = tuple(f"{config}.{name}" for name in names)
    return found


def _names_among(parameters: Mapping[str, inspect.Parameter]) -> Names:
    """Return the names of options about scores that are not given something else."""
    known = fields_of(parameters)
    found = score_names({name: p for name, p in parameters.items() if name not in known})
    for name, meaning in known.items():
        if meaning == "score_scalar":
            found.setdefault("scale", (name,))
    return found


@dataclass(eq=False)
class BuiltOptions:
    """The module of each call, by what the call says about scores and the module is built with.

    arguments: of the constructor, by the option.
    sinks: the dotted name of the parameter that holds the sinks of the heads, or None.
    build: makes a module with further arguments of the constructor.
    """

    arguments: ScoreArguments
    sinks: str | None
    build: Callable[[Mapping[str, Any]], nn.Module]
    built: dict[tuple[Any, ...], nn.Module] = field(default_factory=dict)

    def module_for(
        self, module: nn.Module, options: Options, query: Tensor
    ) -> tuple[nn.Module, Options]:
        """Return the module that is built with the options of a call, and the other options.

        module: the one that is built without options, whose parameters the others share.
        """
        taken = Options(**{name: getattr(options, name) for name in self._taken(options)})
        if taken.of_scores:
            named = tuple(self.arguments.of(taken, query).items())
            if named not in self.built:
                self.built[named] = _sharing(self.build(dict(named)), module)
            called = self.built[named].train(module.training)
        else:
            called = module
        return called, options.change(**dict.fromkeys(taken.of_scores))

    def with_sinks(self, called: nn.Module, options: Options) -> tuple[Callable[..., Any], Options]:
        """Return how a module is called with the sinks of a call, and the other options."""
        if self.sinks is None or options.sinks is None:
            return called, options
        return partial(_with_sinks, called, self.sinks, options.sinks), options.change(sinks=None)

    def _taken(self, options: Options) -> Sequence[str]:
        """Return the options of a call that the constructor takes."""
        names = self.arguments.names
        taken = [name for name in options.of_scores if name in names]
        if options.alibi is not None and "alibi_switch" in names:
            taken.append("alibi")
        return taken


def built_options(
    label: str,
    constructor: Callable[..., nn.Module],
    signature: Signature | None,
    claims: Claims,
    sinks: ParameterPath,
    build: Callable[[Mapping[str, Any]], nn.Module],
) -> BuiltOptions | None:
    """Return the options that a class is built with; None if it has none that are claimed.

    Raises ImplementationError for sinks that are not where a name says.
    """
    if isinstance(sinks, tuple):
        raise ImplementationError(f"{label}: sinks must be the name of a parameter, but is {sinks}")
    names = built_names(constructor, signature)
    claimed = {option: names[option] for option in names if _is_claimed(claims, option)}
    if not claimed and sinks is None:
        return None
    parameters = parameters_of(constructor)
    by_default = {name for name, p in parameters.items() if p.default is None}
    by_default.update(*_names_in_config(constructor).values())
    return BuiltOptions(ScoreArguments(label, claimed, claims, by_default), sinks, build)


def _is_claimed(claims: Claims, option: str) -> bool:
    """Return whether an option is claimed, of which the constructor has a name."""
    if option == "alibi_switch":
        alibi = claims.scores.alibi
        return alibi is not None and alibi.built_in
    return bool(getattr(claims.scores, option))


def _sharing(module: nn.Module, other: nn.Module) -> nn.Module:
    """Give a module the parameters of another one, by their names, and return it."""
    for name, parameter in other.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)
    return module


def without_sinks(module: nn.Module, path: ParameterPath) -> None:
    """Set the sinks of a module, if it has any, to -infinity: a call that gives none has none."""
    if isinstance(path, str):
        nn.init.constant_(module.get_parameter(path), -math.inf)


def _with_sinks(module: nn.Module, path: str, sinks: Any, *args: Any, **named: Any) -> Any:
    """Call a module whose sinks are these, one for each head.

    Its own are left as they are, and sinks that require a gradient get it.
    """
    own = module.get_parameter(path)
    given = torch.as_tensor(sinks, device=own.device).to(own.dtype).view_as(own)
    return functional_call(module, {path: given}, args, named)
