"""Loading the contract's weights into a module, by a map of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.errors import ImplementationError
from mha.spec import Weights

STACKED = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}


def load(label: str, module: nn.Module, parameters: Mapping[str, str], weights: Weights) -> None:
    """Copy `weights` into `module`.

    parameters: see `from_module`. Raises ImplementationError for a name that the module does not have, a key that the
    contract does not know, a projection left out, or a shape that does not fit.
    """
    given = dict(weights.named())
    loaded: set[str] = set()
    for key, path in parameters.items():
        kind, _, role = key.partition("_")
        roles = STACKED.get(role, (role,))
        if not set(roles) <= ({"k", "v"} if kind == "extra" else {"q", "k", "v", "o"} if kind in ("w", "b") else set()):
            known = "w_q, w_k, w_v, w_o, w_qkv, w_kv, the same with b_, extra_k and extra_v"
            raise ImplementationError(f"{label}: parameters has the key {key!r}; the known keys are {known}")
        if not isinstance(path, str):
            raise ImplementationError(f"{label}: parameters[{key!r}] must be a dotted name, but is {path!r}")
        target = _find(label, module, path)
        _fill(label, f"{key} ({path})", target, kind, roles, given)
        kinds = ("w", "b") if isinstance(target, nn.Module) else (kind,)
        loaded.update(f"{kind}_{role}" for kind in kinds for role in roles)
    missing = [name for name in given if name not in loaded]
    if missing:
        raise ImplementationError(
            f"{label}: parameters says nothing of {', '.join(missing)}; the module has {_names(module)}"
        )


def _find(label: str, module: nn.Module, path: str) -> object:
    target: object = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise ImplementationError(f"{label}: it has no {path!r}; the module has {_names(module)}")
        target = getattr(target, part)
    return target


def _names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_parameters()) or "no parameters"


def _fill(
    label: str, what: str, target: object, kind: str, roles: tuple[str, ...], given: Mapping[str, Tensor]
) -> None:
    """Fill one layer, list of layers or parameter with the weights of `roles`, stacked; a layer takes its bias too."""
    values = [given[f"{kind}_{role}"] for role in roles if f"{kind}_{role}" in given]
    if isinstance(target, nn.Module) and kind == "w":
        layers = list(target) if isinstance(target, nn.ModuleList) else [target]
        biases = [given[f"b_{role}"] for role in roles if f"b_{role}" in given]
        for layer, part in zip(layers, torch.cat(values).chunk(len(layers)), strict=False):
            _copy(label, f"{what}.weight", getattr(layer, "weight", None), part)
        if not biases:
            biases = [torch.zeros(value.shape[0]) for value in values]
        for layer, part in zip(layers, torch.cat(biases).chunk(len(layers)), strict=False):
            if getattr(layer, "bias", None) is not None or any(f"b_{role}" in given for role in roles):
                _copy(label, f"{what}.bias", getattr(layer, "bias", None), part)
    elif isinstance(target, Tensor):
        _copy(label, what, target, torch.cat(values) if values else torch.zeros_like(target))
    elif target is not None or values:
        raise ImplementationError(f"{label}: {what} is {type(target).__name__}, neither a layer nor a parameter")


def _copy(label: str, what: str, target: object, value: Tensor) -> None:
    if not isinstance(target, Tensor):
        raise ImplementationError(f"{label}: {what} is missing, though the weights have it; see Claims.bias")
    if target.squeeze().shape != value.squeeze().shape:
        raise ImplementationError(f"{label}: {what} has {tuple(target.shape)}, but should have {tuple(value.shape)}")
    with torch.no_grad():
        target.copy_(value.view_as(target))


def weight_gradients(module: nn.Module, parameters: Mapping[str, str], rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Collect the gradients of what `load` has filled, by the names of `Weights`; zeros where there is none.

    rows: the length of the first dimension of each weight that was loaded.
    """
    found: dict[str, Tensor] = {}
    for key, path in parameters.items():
        kind, _, role = key.partition("_")
        target: Any = _find("", module, path)
        words = {"w": "weight", "b": "bias"} if isinstance(target, nn.Module) else {kind: None}
        layers = list(target) if isinstance(target, nn.ModuleList) else [target]
        for each, word in words.items():
            names = [name for part in STACKED.get(role, (role,)) if (name := f"{each}_{part}") in rows]
            if names:
                tensors: list[Any] = [getattr(layer, word) if word else layer for layer in layers]
                whole = torch.cat([torch.zeros_like(t) if t.grad is None else t.grad for t in tensors])
                width = whole.shape[-1:] if each == "w" else ()
                parts = whole.view(-1, *width).split([rows[name] for name in names])
                found |= dict(zip(names, parts, strict=True))
    return found
