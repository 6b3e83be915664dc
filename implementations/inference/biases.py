"""Which projections have a bias: by an argument called bias, and what it builds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from torch import nn

from mha.implementations.adapters.construction import SHORT, Room, construct
from mha.implementations.inference.building import trial_config
from mha.implementations.inference.projections import ParameterMap, Unclear, parameter_maps
from mha.implementations.process.pristine import as_found
from mha.spec import Config


def biases_of_arguments(
    constructor: Callable[..., nn.Module], arguments: Mapping[str, str], module: nn.Module
) -> dict[str, str]:
    """Return what an argument bias means that is not about all projections: "qk_bias".

    It is empty if it is about all of them, or none.

    arguments: what the parameters of the constructor are given.
    module: built with all biases.
    """
    names = [name for name, field in arguments.items() if field == "bias"]
    if len(names) != 1:
        return {}
    config = trial_config(constructor)
    with suppress(Exception, SystemExit), as_found():
        without = construct(constructor, arguments, replace(config, bias=False), room=Room(SHORT))
        with suppress(Unclear):
            paths = parameter_maps(module, config)[0]
            before, after = _biased(module, paths), _biased(without, paths)
            if before == set("qkvo") and after and after != before:
                lost = [role for role in "qkvo" if role not in after]
                return {names[0]: f"{''.join(lost)}_bias"}
    return {}


def _biased(module: nn.Module, paths: ParameterMap) -> set[str]:
    """Return the projections whose layers have a bias; paths: of their weights."""
    layers, roles = dict(module.named_modules()), set[str]()
    for key, path in paths.items():
        name = path if isinstance(path, str) else (path or ("",))[0]
        if key.startswith("w_") and getattr(layers.get(name), "bias", None) is not None:
            roles.update(key[2:])
    return roles


def most_biases(biases: Collection[bool | str]) -> bool | str:
    """Return the value of `Config.bias`, of those given, with which most projections have a bias.

    >>> most_biases({False, "qvo"})
    'qvo'
    """
    return max(biases, key=lambda bias: len(biased_roles(bias)), default=False)


def biased_roles(bias: bool | str) -> str:
    """Return the projections that have a bias with a value of `Config.bias`, such as "qkvo"."""
    config = Config(1, 1, bias=bias)
    return "".join(role for role in "qkvo" if config.has_bias(role))
