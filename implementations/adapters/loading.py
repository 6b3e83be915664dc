"""Loading the contract's weights into a module, by a map of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mha.implementations.errors import ImplementationError
from mha.spec import Weights

STACKED = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}
# Where a weight is: a dotted name, that and how it lies there, or nowhere.
Place = str | tuple[str, str] | None
KEYS = "w_q, w_k, w_v, w_o, w_qkv, w_kv, the same with b_, extra_k and extra_v"


@torch.no_grad()
def load(label: str, module: nn.Module, parameters: Mapping[str, Place], weights: Weights, head_dim: int) -> None:
    """Copy `weights` into `module`.

    parameters: see `from_module`. Raises ImplementationError for a name that the module does not have, a key that the
    contract does not know, a projection left out, or a shape that does not fit.
    """
    given = dict(weights.named())
    loaded: set[str] = set()
    for key, place in parameters.items():
        entry = _entry(label, key, place)
        if entry is None:
            loaded.update(f"{kind}{key[1:]}" for kind in "wb")
            continue
        target = _find(label, module, entry.path)
        _fill(label, entry, target, given, head_dim)
        if not all(isinstance(tensor, nn.Parameter) for tensor in _tensors(target)):
            again = _find(label, module, entry.path)
            _require_kept(f"{label}: {key} ({entry.path})", _tensors(target), _tensors(again))
        kinds = (entry.kind,) if isinstance(target, Tensor) else ("w", "b")
        loaded.update(f"{kind}_{role}" for kind in kinds for role in entry.roles)
    missing = [name for name in given if name not in loaded]
    if missing:
        raise ImplementationError(
            f"{label}: parameters says nothing of {', '.join(missing)}; the module has {_names(module)}"
        )


def weight_gradients(
    module: nn.Module, parameters: Mapping[str, Place], rows: Mapping[str, int], head_dim: int
) -> dict[str, Tensor]:
    """Collect the gradients of what `load` has filled, by the names of `Weights`; zeros where there is none.

    rows: the length of the first dimension of each weight that was loaded.
    """
    found: dict[str, Tensor] = {}
    for key, place in parameters.items():
        entry = _entry("", key, place)
        target: Any = None if entry is None else _find("", module, entry.path)
        if entry is None or target is None:
            continue
        words = {entry.kind: None} if isinstance(target, Tensor) else {"w": "weight", "b": "bias"}
        for kind, word in words.items():
            names = [name for role in entry.roles if (name := f"{kind}_{role}") in rows]
            if names:
                tensors: list[Any] = [getattr(layer, word) for layer in _layers(target)] if word else [target]
                whole = torch.cat([entry.back(_gradient(tensor), kind, head_dim) for tensor in tensors])
                counts = [rows[name] for name in names]
                split = whole.reshape(sum(counts), *([-1] if kind == "w" else [])).split(counts)
                found |= dict(zip(names, split, strict=True))
    return found


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a parameter, or of a view of one; zeros where there is none."""
    whole = tensor if tensor.is_leaf else tensor._base
    if whole is None or whole.grad is None:
        return torch.zeros_like(tensor)
    if whole is tensor:
        return whole.grad
    gradient = torch.empty_like(whole).copy_(whole.grad)  # which lies in memory as the parameter does
    return gradient.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - whole.storage_offset())


@dataclass(frozen=True)
class Entry:
    """One line of a map: what is at a place, and how it lies there.

    kind: "w", "b" or "extra". roles: of "q", "k", "v", "o", stacked in this order. pattern: of einops, from the
    contract's weight; r counts the roles, e the columns of a head.
    """

    key: str
    kind: str
    roles: tuple[str, ...]
    path: str
    pattern: str

    def there(self, value: Tensor, kind: str, head_dim: int) -> Tensor:
        """Arrange the contract's weight or bias as it lies in the module."""
        return self._arranged(value, *self._sides(kind), head_dim) if self.pattern else value

    def back(self, value: Tensor, kind: str, head_dim: int) -> Tensor:
        """Arrange what lies in the module as in the contract."""
        if not self.pattern:
            return value
        left, right = self._sides(kind)
        return self._arranged(value, right, left, head_dim)

    def _sides(self, kind: str) -> tuple[str, str]:
        """The pattern's two sides; a bias has no axis of inputs, which is the weight's last."""
        left, _, right = self.pattern.partition("->")
        if kind == "b" and self.kind == "w":
            inputs = left.split()[-1]
            left, right = (" ".join(axis for axis in side.split() if axis != inputs) for side in (left, right))
        return left, right

    def _arranged(self, value: Tensor, left: str, right: str, head_dim: int) -> Tensor:
        sizes = {axis: size for axis, size in (("r", len(self.roles)), ("e", head_dim)) if axis in _axes(left)}
        return rearrange(value, f"{left} -> {right}", **sizes)


def _axes(side: str) -> list[str]:
    return side.replace("(", " ").replace(")", " ").split()


def _entry(label: str, key: str, place: Place) -> Entry | None:
    kind, _, role = key.partition("_")
    roles = STACKED.get(role, (role,))
    if not set(roles) <= ({"k", "v"} if kind == "extra" else {"q", "k", "v", "o"} if kind in ("w", "b") else set()):
        raise ImplementationError(f"{label}: parameters has the key {key!r}; the known keys are {KEYS}")
    if place is None:
        return None
    path, pattern = (place, "") if isinstance(place, str) else place if isinstance(place, tuple) else ("", "")
    if not path or not isinstance(path, str):
        raise ImplementationError(
            f"{label}: parameters[{key!r}] must be a dotted name, a dotted name and an einops pattern, or None, "
            f"but is {place!r}"
        )
    return Entry(key, kind, roles, path, pattern)


def _find(label: str, module: nn.Module, path: str) -> object:
    """Return what is at a path; a `*` stands for each member of a list of layers, in their order."""
    before, starred, after = path.partition(".*.")
    if starred:
        members = _find(label, module, before)
        if not isinstance(members, nn.ModuleList):
            raise ImplementationError(f"{label}: {before!r} is no nn.ModuleList, though {path!r} says so")
        return nn.ModuleList(_find(label, member, after) for member in members)  # type: ignore[misc]  # _fill looks
    target: object = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise ImplementationError(f"{label}: it has no {path!r}; the module has {_names(module)}")
        target = getattr(target, part)
    return target


def _require_kept(what: str, tensors: list[Tensor], again: list[Tensor]) -> None:
    """Raise ImplementationError where a tensor is another one each time it is read, so that nothing can be loaded."""
    if any(first.data_ptr() != second.data_ptr() for first, second in zip(tensors, again, strict=True)):
        told = "is computed anew each time it is read, as with a parametrization, so nothing can be loaded into it"
        raise ImplementationError(f"{what} {told}; name parameters, or judge the module without the parametrization")


def _tensors(target: object) -> list[Tensor]:
    """Return the tensor itself, or those of a layer or a list of layers."""
    if isinstance(target, Tensor):
        return [target]
    found = (getattr(layer, word, None) for layer in _layers(target) for word in ("weight", "bias"))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_parameters()) or "no parameters"


def _layers(target: object) -> list[Any]:
    return list(target) if isinstance(target, nn.ModuleList) else [target]


def _fill(label: str, entry: Entry, target: object, given: Mapping[str, Tensor], head_dim: int) -> None:
    """Fill one layer, list of layers or parameter with the weights of its roles; a layer takes its bias too."""
    what = f"{entry.key} ({entry.path})"
    values = [given[f"{entry.kind}_{role}"] for role in entry.roles if f"{entry.kind}_{role}" in given]
    if isinstance(target, nn.Module) and entry.kind == "w":
        biases = [given[f"b_{role}"] for role in entry.roles if f"b_{role}" in given]
        wanted = bool(biases)
        stacked = torch.cat(biases if wanted else [torch.zeros(value.shape[0]) for value in values])
        for layer, weight, bias in _shares(_layers(target), torch.cat(values), stacked):
            _copy(label, f"{what}.weight", getattr(layer, "weight", None), entry, weight, "w", head_dim)
            if getattr(layer, "bias", None) is not None or wanted:
                _copy(label, f"{what}.bias", getattr(layer, "bias", None), entry, bias, "b", head_dim)
    elif isinstance(target, Tensor):
        if values:
            _copy(label, what, target, entry, torch.cat(values), entry.kind, head_dim)
        else:
            torch.nn.init.zeros_(target)
    elif target is not None or values:
        raise ImplementationError(f"{label}: {what} is {type(target).__name__}, neither a layer nor a parameter")


def _shares(layers: list[Any], weight: Tensor, bias: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Give each layer its rows of weight and bias."""
    count = len(layers)
    yield from zip(layers, weight.chunk(count), bias.chunk(count), strict=False)


def _copy(label: str, what: str, target: object, entry: Entry, value: Tensor, kind: str, head_dim: int) -> None:
    if not isinstance(target, Tensor):
        raise ImplementationError(f"{label}: {what} is missing, though the weights have it; see Claims.bias")
    if is_lazy(target):
        raise ImplementationError(f"{label}: {what} has no shape before the first call; use a layer that has its shape")
    try:
        value = entry.there(value, kind, head_dim)
    except EinopsError as error:
        raise ImplementationError(f"{label}: {what}: {str(error).splitlines()[0]}") from None
    if target.squeeze().shape != value.squeeze().shape:
        raise ImplementationError(f"{label}: {what} has {tuple(target.shape)}, but should have {tuple(value.shape)}")
    target.copy_(value.view_as(target) if not entry.pattern else value)
