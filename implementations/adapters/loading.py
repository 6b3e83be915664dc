"""Loading the contract's weights into a module, and collecting their gradients, by a map of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mha.implementations.adapters.mask_forms import axes_of
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Weights

# Projections that may be stacked, in any order.
STACKED = {"".join(order): order for roles in ("qkv", "kv", "qk") for order in permutations(roles)}
# Where a weight is in a module: a dotted name; a dotted name and the weight's layout there, as an
# einops pattern; or None for a projection that the module does not have.
ParameterPath = str | tuple[str, str] | None
KEYS = (
    "w_q, w_k, w_v, w_o, w_qkv, w_kv, w_qk (or in another order, such as w_kqv), the same with b_,"
    " extra_k and extra_v"
)


@torch.no_grad()
def load(
    label: str,
    module: nn.Module,
    parameters: Mapping[str, ParameterPath],
    weights: Weights,
    head_dim: int,
) -> None:
    """Copy `weights` into `module`.

    label: the module's name in messages. parameters: see `from_module`; without an entry for W_o,
        it is not loaded.
    head_dim: d_k.

    Raises ImplementationError for a name that the module does not have, an unknown key, a
    projection that is left out, a shape that does not fit, and a weight that is computed rather
    than stored.
    """
    given = _given(parameters, weights)
    held = {"w": _of_layers(parameters, given)}
    loaded = {f"{kind}{key[1:]}" for key in _left_out(parameters) for kind in "wb"}
    for entry in _entries(label, module, parameters, given, head_dim):
        where, target = f"{label}: {entry.key} ({entry.path})", _find(label, module, entry.path)
        _fill(where, entry, target, held.get(entry.kind, given))
        if not all(isinstance(tensor, nn.Parameter) for tensor in _tensors(target)):
            _require_stored(where, _tensors(target), _tensors(_find(label, module, entry.path)))
        kinds = (entry.kind,) if isinstance(target, Tensor) else ("w", "b")
        loaded.update(f"{kind}_{role}" for kind in kinds for role in entry.roles)
    if missing := [name for name in given if name not in loaded]:
        raise ImplementationError(
            f"{label}: parameters has no entry for {', '.join(missing)}; the parameters of the"
            f" module are {_parameter_names(module)}"
        )


def _given(parameters: Mapping[str, ParameterPath], weights: Weights) -> dict[str, Tensor]:
    """Return the weights to load by name; those of W_o only if the map has an entry for it."""
    left_out = () if projects(parameters) else ("w_o", "b_o")
    return {name: tensor for name, tensor in weights.named() if name not in left_out}


def projects(parameters: Mapping[str, ParameterPath]) -> bool:
    """Return whether a map has an entry for the output projection, if only to say that there is
    none.
    """
    return any("o" in key[2:] for key in parameters)


def _of_layers(
    parameters: Mapping[str, ParameterPath], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that layers hold: a bias with an entry of its own is not looked for in a
    layer.
    """
    separate = {
        f"b_{role}"
        for key in parameters
        if key[:2] == "b_"
        for role in STACKED.get(key[2:], (key[2:],))
    }
    return {name: tensor for name, tensor in given.items() if name not in separate}


def weight_gradients(
    module: nn.Module,
    parameters: Mapping[str, ParameterPath],
    rows: Mapping[str, int],
    head_dim: int,
) -> dict[str, Tensor]:
    """Collect the gradients of the weights that `load` has filled, by the names of `Weights`; zeros
    where none is set.

    parameters: as for `load`. rows: the first dimension of each weight. head_dim: d_k.
    """
    gradients: dict[str, Tensor] = {}
    for entry in _entries("", module, parameters, rows, head_dim):
        target: Any = _find("", module, entry.path)
        if target is None:
            continue
        attributes = (
            {entry.kind: ""} if isinstance(target, Tensor) else {"w": "weight", "b": "bias"}
        )
        for kind, attribute in attributes.items():
            tensors = (
                [getattr(layer, attribute) for layer in _layers(target)] if attribute else [target]
            )
            if tensors[0] is not None and any(f"{kind}_{role}" in rows for role in entry.roles):
                gradients |= _split_gradient(entry, kind, _gradients(tensors, attribute), rows)
    return gradients


def _split_gradient(
    entry: Entry, kind: str, parts: Sequence[Tensor], rows: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the gradients by name: those of all layers are joined along the rows, then split.

    parts: the gradient of each layer. rows: of the weights of the configuration; others may be
    stacked with them.
    """
    names = [f"{kind}_{role}" for role in entry.roles]
    counts = [rows[name] if name in rows else rows[f"w{name[1:]}"] for name in names]
    whole = torch.cat([entry.to_contract(part, kind) for part in parts])
    split = whole.reshape(sum(counts), *([-1] if kind == "w" else [])).split(counts)
    return {name: gradient for name, gradient in zip(names, split, strict=True) if name in rows}


def _gradients(tensors: Sequence[Tensor], attribute: str) -> list[Tensor]:
    """Return the gradients of parameters; without the axis of positions that the weight of a
    convolution has.
    """
    return [
        _gradient(tensor).flatten(1) if attribute == "weight" else _gradient(tensor)
        for tensor in tensors
    ]


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a parameter, or of a view of one; zeros where none is set."""
    whole = tensor if tensor.is_leaf else tensor._base
    if whole is None or whole.grad is None:
        return torch.zeros_like(tensor)
    if whole is tensor:
        return whole.grad
    gradient = torch.empty_like(whole).copy_(whole.grad)  # with the strides of the parameter
    return gradient.as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset() - whole.storage_offset()
    )


@dataclass(frozen=True)
class Entry:
    """One entry of `parameters`: which weights are at a path, and in which layout.

    kind: "w", "b" or "extra". roles: of "q", "k", "v" and "o", stacked in this order. pattern: an
    einops pattern from the contract's weight (out, in), or empty; its axis r counts the roles, and
    e the columns of a head, `head_dim`.
    """

    key: str
    kind: str
    roles: tuple[str, ...]
    path: str
    pattern: str
    head_dim: int

    def to_module(self, value: Tensor, kind: str) -> Tensor:
        """Rearrange a weight ("w") or bias ("b") of the contract into the module's layout."""
        return self._rearranged(value, *self.sides(kind)) if self.pattern else value

    def to_contract(self, value: Tensor, kind: str) -> Tensor:
        """Rearrange a weight ("w") or bias ("b") of the module into the contract's layout."""
        if not self.pattern:
            return value
        left, right = self.sides(kind)
        return self._rearranged(value, right, left)

    def sides(self, kind: str) -> tuple[str, str]:
        """Return both sides of the pattern; a bias lacks the axis of the inputs, which is the
        weight's last.
        """
        left, _, right = self.pattern.partition("->")
        if kind == "b" and self.kind == "w":
            inputs = {*axes_of(groups_of(left)[-1])}
            kept = (
                [group for group in groups_of(side) if not inputs.issuperset(axes_of(group))]
                for side in (left, right)
            )
            left, right = map(" ".join, kept)
        return left, right

    def _rearranged(self, value: Tensor, left: str, right: str) -> Tensor:
        known = {"r": len(self.roles), "e": self.head_dim}
        sizes = {axis: size for axis, size in known.items() if axis in axes_of(left)}
        return rearrange(value, f"{left} -> {right}", **sizes)


def groups_of(side: str) -> list[str]:
    """Split one side of an einops pattern into its axes, those in parentheses as one."""
    return re.findall(r"\([^)]*\)|\S+", side)


def read_entry(label: str, key: str, path: ParameterPath, head_dim: int) -> Entry | None:
    """Read an entry of `parameters`; None for a projection that the module does not have.

    Raises ImplementationError for an unknown key, and for a path that is not a `ParameterPath`.
    """
    kind, _, role = key.partition("_")
    roles = STACKED.get(role, (role,))
    known = {"w": {"q", "k", "v", "o"}, "b": {"q", "k", "v", "o"}, "extra": {"k", "v"}}
    if not set(roles) <= known.get(kind, set()):
        raise ImplementationError(
            f"{label}: parameters has the key {key!r}; the known keys are {KEYS}"
        )
    if path is None:
        return None
    name, pattern = (
        (path, "") if isinstance(path, str) else path if isinstance(path, tuple) else ("", "")
    )
    if not name or not isinstance(name, str):
        raise ImplementationError(
            f"{label}: parameters[{key!r}] must be a dotted name, a dotted name and an einops"
            f" pattern, or None, but is {path!r}"
        )
    return Entry(key, kind, roles, name, pattern, head_dim)


def _left_out(parameters: Mapping[str, ParameterPath]) -> list[str]:
    """Return the keys of the projections that a module does not have."""
    return [key for key, path in parameters.items() if path is None]


def _entries(
    label: str,
    module: nn.Module,
    parameters: Mapping[str, ParameterPath],
    names: Collection[str],
    head_dim: int,
) -> Iterator[Entry]:
    """Yield the entries of what a module has, or should have; names: of the weights."""
    for key, path in parameters.items():
        entry = read_entry(label, key, path, head_dim)
        if entry is not None and not _has_no_bias(module, entry, names):
            yield entry


def _has_no_bias(module: nn.Module, entry: Entry, names: Collection[str]) -> bool:
    """Return whether an entry is of biases that the weights lack, and so does a module that has no
    such attribute.
    """
    if (
        entry.kind != "b"
        or any(f"b_{role}" in names for role in entry.roles)
        or ".*." in entry.path
    ):
        return False
    target: Any = module
    for part in entry.path.split("."):
        target = getattr(target, part, None)
    return target is None


def _find(label: str, module: nn.Module, path: str) -> object:
    """Return what is at a path; a `*` stands for each member of an nn.ModuleList, in order."""
    before, starred, after = path.partition(".*.")
    if starred:
        members = _find(label, module, before)
        if not isinstance(members, nn.ModuleList):
            raise ImplementationError(
                f"{label}: {path!r} needs an nn.ModuleList at {before!r}, which is not one"
            )
        return nn.ModuleList(_find(label, member, after) for member in members)  # type: ignore[misc]  # _fill checks
    target: object = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise ImplementationError(
                f"{label}: the module has no {path!r}; its parameters are"
                f" {_parameter_names(module)}"
            )
        target = getattr(target, part)
    return target


def _require_stored(where: str, tensors: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Raise ImplementationError if reading a tensor a second time gives another one: nothing can be
    loaded into it.
    """
    if any(
        first.data_ptr() != second.data_ptr() for first, second in zip(tensors, again, strict=True)
    ):
        raise ImplementationError(
            f"{where} is computed each time it is read, as with a parametrization, so weights"
            " cannot be loaded into it; name a stored parameter, or judge the module without the"
            " parametrization"
        )


def _tensors(target: object) -> list[Tensor]:
    """Return the tensor itself, or the weights and biases of a layer or a list of layers."""
    if isinstance(target, Tensor):
        return [target]
    held = (getattr(layer, name, None) for layer in _layers(target) for name in ("weight", "bias"))
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def _parameter_names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_parameters()) or "none"


def _layers(target: object) -> list[Any]:
    return list(target) if isinstance(target, nn.ModuleList) else [target]


def _fill(where: str, entry: Entry, target: object, given: Mapping[str, Tensor]) -> None:
    """Fill one layer, list of layers or parameter with the weights of its roles."""
    if isinstance(target, nn.Module) and entry.kind == "w":
        _fill_layers(where, entry, _layers(target), given)
        return
    value = _stacked(entry, entry.kind, given)
    if isinstance(target, Tensor):
        if value is not None:
            _copy(where, target, entry, value, entry.kind)
        else:
            torch.nn.init.zeros_(target)
    elif target is not None or value is not None:
        raise ImplementationError(
            f"{where} is of type {type(target).__name__}, but should be a layer or a parameter"
        )


def _stacked(entry: Entry, kind: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weights ("w") or biases ("b") of an entry, stacked; None if it has none of them.

    A missing bias beside others is zero.
    """
    names = [f"{kind}_{role}" for role in entry.roles]
    if not any(name in given for name in names):
        return None
    parts = [given[name] if name in given else _zero_bias(given[f"w{name[1:]}"]) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _zero_bias(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))


def _fill_layers(
    where: str, entry: Entry, layers: Sequence[Any], given: Mapping[str, Tensor]
) -> None:
    """Fill each layer with its share of the rows of weight and bias; without biases, a bias becomes
    zero.
    """
    weights, biases = _stacked(entry, "w", given), _stacked(entry, "b", given)
    assert weights is not None
    for layer, weight, bias in _shares(
        layers, weights, _zero_bias(weights) if biases is None else biases
    ):
        _copy(f"{where}.weight", getattr(layer, "weight", None), entry, weight, "w")
        if getattr(layer, "bias", None) is not None or biases is not None:
            _copy(f"{where}.bias", getattr(layer, "bias", None), entry, bias, "b")


def _shares(
    layers: Sequence[Any], weight: Tensor, bias: Tensor
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield each layer with its rows of weight and bias."""
    count = len(layers)
    shares = ([weight], [bias]) if count == 1 else (weight.chunk(count), bias.chunk(count))
    yield from zip(layers, *shares, strict=False)


def _copy(where: str, target: object, entry: Entry, value: Tensor, kind: str) -> None:
    """Copy a weight or bias of the contract into a tensor of the module."""
    if not isinstance(target, Tensor):
        raise ImplementationError(
            f"{where} is missing, but the configuration has it; see Claims.bias"
        )
    if is_lazy(target):
        raise ImplementationError(
            f"{where} has no shape before the first call; use a layer that is not lazy"
        )
    try:
        value = entry.to_module(value, kind)
    except EinopsError as error:
        raise ImplementationError(f"{where}: {str(error).splitlines()[0]}") from None
    if target.shape != value.shape and target.squeeze().shape != value.squeeze().shape:
        raise ImplementationError(
            f"{where} has the shape {tuple(target.shape)}, but should have {tuple(value.shape)}"
        )
    target.copy_(value.reshape(target.shape))
