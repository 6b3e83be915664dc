"""Loading the contract's weights into a module, by a map of names."""

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
    " extra_k, extra_v, q_norm and k_norm"
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

    label: the module's name in messages.
    parameters: see `from_module`; without an entry for W_o, it is not loaded.
    head_dim: d_k.

    Raises ImplementationError for a name that the module does not have, an unknown key, a
    projection that is left out, a shape that does not fit, and a weight that is computed rather
    than stored.
    """
    given = _given(parameters, weights)
    of_layers = _of_layers(parameters, given)
    loaded: set[str] = set()
    for key, path in parameters.items():
        if path is None:  # of a projection, or a norm's weight, that the module does not have
            loaded.add(key)
            loaded |= {f"w{key[1:]}", f"b{key[1:]}"}
    for entry in entries_of(label, module, parameters, given, head_dim):
        where = f"{label}: {entry.key} ({entry.path})"
        target = member_at(label, module, entry.path)
        held = of_layers if entry.kind == "w" else given
        _fill(where, entry, target, held)
        _require_stored(where, target, member_at(label, module, entry.path))
        is_layer = entry.kind == "w" and not isinstance(target, Tensor)
        kinds = ("w", "b") if is_layer else (entry.kind,)
        for kind in kinds:
            loaded.update(entry.names(kind))
    missing = [name for name in given if name not in loaded]
    if missing:
        raise ImplementationError(
            f"{label}: parameters has no entry for {', '.join(missing)}; the parameters of the"
            f" module are {_parameter_names(module)}"
        )


def _given(parameters: Mapping[str, ParameterPath], weights: Weights) -> dict[str, Tensor]:
    """Return the weights to load by name; those of W_o only if the map has an entry for it."""
    given = dict(weights.named())
    if not projects(parameters):
        given = {name: tensor for name, tensor in given.items() if name not in ("w_o", "b_o")}
    return given


def projects(parameters: Mapping[str, ParameterPath]) -> bool:
    """Return whether a map has an entry for the output projection, be it that there is none."""
    return any("o" in key[2:] for key in parameters if not key.endswith("_norm"))


def output_projection(weights: Weights, like: Tensor) -> nn.Linear:
    """Return a layer of W_o and b_o, like another parameter in dtype, device and gradients."""
    rows, columns = weights.w_o.shape
    layer = nn.Linear(columns, rows, weights.b_o is not None, device=like.device, dtype=like.dtype)
    held = {"weight": weights.w_o}
    if weights.b_o is not None:
        held["bias"] = weights.b_o
    layer.load_state_dict(held)
    return layer.requires_grad_(like.requires_grad)


def _of_layers(
    parameters: Mapping[str, ParameterPath], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights that layers hold: no bias with an entry of its own is in a layer."""
    separate: set[str] = set()
    for key in parameters:
        if key[:2] == "b_":
            separate.update(f"b_{role}" for role in STACKED.get(key[2:], (key[2:],)))
    return {name: tensor for name, tensor in given.items() if name not in separate}


@dataclass(frozen=True)
class Entry:
    """One entry of `parameters`: which weights are at a path, and in which layout.

    kind: "w", "b", "extra", or "norm", of the weight of a norm.
    roles: of "q", "k", "v" and "o", stacked in this order.
    pattern: an einops pattern from the contract's weight (out, in), or empty; its axis r counts the
        roles, and e the columns of a head, `head_dim`.
    """

    key: str
    kind: str
    roles: tuple[str, ...]
    path: str
    pattern: str
    head_dim: int

    def names(self, kind: str) -> list[str]:
        """Return the names of its weights ("w") or biases ("b"), as `Weights` has them."""
        if kind == "norm":
            return [f"{role}_norm" for role in self.roles]
        return [f"{kind}_{role}" for role in self.roles]

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
        """Return both sides of the pattern; that of a bias lacks the axis of the inputs."""
        left, _, right = self.pattern.partition("->")
        if kind == "b" and self.kind == "w":
            inputs = {*axes_of(groups_of(left)[-1])}  # the last axis of the weight
            return _without_axes(left, inputs), _without_axes(right, inputs)
        return left, right

    def _rearranged(self, value: Tensor, left: str, right: str) -> Tensor:
        known = {"r": len(self.roles), "e": self.head_dim}
        sizes = {axis: size for axis, size in known.items() if axis in axes_of(left)}
        return rearrange(value, f"{left} -> {right}", **sizes)


def groups_of(side: str) -> list[str]:
    """Split one side of an einops pattern into its axes, those in parentheses as one."""
    return re.findall(r"\([^)]*\)|\S+", side)


def _without_axes(side: str, axes: set[str]) -> str:
    """Return one side of an einops pattern without the groups that consist of some axes."""
    kept = [group for group in groups_of(side) if not axes.issuperset(axes_of(group))]
    return " ".join(kept)


def read_entry(label: str, key: str, path: ParameterPath, head_dim: int) -> Entry | None:
    """Read an entry of `parameters`; None for a projection that the module does not have.

    Raises ImplementationError for an unknown key, and for a path that is not a `ParameterPath`.
    """
    kind, _, role = key.partition("_")
    if role == "norm":
        kind, role = role, kind
    roles = STACKED.get(role, (role,))
    known = {
        "w": {"q", "k", "v", "o"},
        "b": {"q", "k", "v", "o"},
        "extra": {"k", "v"},
        "norm": {"q", "k"},
    }
    if not set(roles) <= known.get(kind, set()):
        raise ImplementationError(
            f"{label}: parameters has the key {key!r}; the known keys are {KEYS}"
        )
    if path is None:
        return None
    name, pattern = path if isinstance(path, tuple) else (path, "")
    if not name or not isinstance(name, str):
        raise ImplementationError(
            f"{label}: parameters[{key!r}] must be a dotted name, a dotted name and an einops"
            f" pattern, or None, but is {path!r}"
        )
    return Entry(key, kind, roles, name, pattern, head_dim)


def entries_of(
    label: str,
    module: nn.Module,
    parameters: Mapping[str, ParameterPath],
    names: Collection[str],
    head_dim: int,
) -> Iterator[Entry]:
    """Yield the entries of what a module has, or should have.

    names: of the weights.
    """
    for key, path in parameters.items():
        entry = read_entry(label, key, path, head_dim)
        if entry is not None and not _has_no_bias(module, entry, names):
            yield entry


def _has_no_bias(module: nn.Module, entry: Entry, names: Collection[str]) -> bool:
    """Return whether an entry is of biases that neither the weights nor the module have."""
    if entry.kind != "b" or ".*." in entry.path:
        return False
    if not {*names}.isdisjoint(entry.names("b")):
        return False
    target: Any = module
    for part in entry.path.split("."):
        target = getattr(target, part, None)
    return target is None


def member_at(label: str, module: nn.Module, path: str) -> object:
    """Return what is at a path; a `*` stands for each member of an nn.ModuleList, in order."""
    before, starred, after = path.partition(".*.")
    if starred:
        members = member_at(label, module, before)
        if not isinstance(members, nn.ModuleList):
            raise ImplementationError(
                f"{label}: {path!r} needs an nn.ModuleList at {before!r}, which is not one"
            )
        return nn.ModuleList(member_at(label, member, after) for member in members)  # type: ignore[misc]  # _fill checks
    target: object = module
    for part in path.split("."):
        if not hasattr(target, part):
            raise ImplementationError(
                f"{label}: the module has no {path!r}; its parameters are"
                f" {_parameter_names(module)}"
            )
        target = getattr(target, part)
    return target


def _require_stored(where: str, target: object, again: object) -> None:
    """Raise ImplementationError if reading a target a second time gives another tensor.

    Nothing can be loaded into it.
    """
    tensors = _tensors(target)
    if all(isinstance(tensor, nn.Parameter) for tensor in tensors):
        return
    for first, second in zip(tensors, _tensors(again), strict=True):
        if first.data_ptr() != second.data_ptr():
            raise ImplementationError(
                f"{where} is computed each time it is read, as with a parametrization, so weights"
                " cannot be loaded into it; name a stored parameter, or judge the module without"
                " the parametrization"
            )


def _tensors(target: object) -> list[Tensor]:
    """Return the tensor itself, or the weights and biases of a layer or a list of layers."""
    if isinstance(target, Tensor):
        return [target]
    tensors = []
    for layer in layers_of(target):
        for name in ("weight", "bias"):
            held = getattr(layer, name, None)
            if isinstance(held, Tensor):
                tensors.append(held)
    return tensors


def _parameter_names(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_parameters()) or "none"


def layers_of(target: object) -> list[Any]:
    """Return the layers of a list of layers, or the one that it is."""
    return list(target) if isinstance(target, nn.ModuleList) else [target]


def _fill(where: str, entry: Entry, target: object, given: Mapping[str, Tensor]) -> None:
    """Fill one layer, list of layers or parameter with the weights of its roles."""
    if isinstance(target, nn.Module) and entry.kind == "w":
        _fill_layers(where, entry, layers_of(target), given)
        return
    if entry.kind == "norm":
        _fill_norm(where, entry, target, given)
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


def _fill_norm(where: str, entry: Entry, target: object, given: Mapping[str, Tensor]) -> None:
    """Fill a norm, or the parameter that is its weight, if there is one; its bias becomes zero."""
    weight, bias = target, None
    if isinstance(target, nn.Module):
        weight, bias = getattr(target, "weight", None), getattr(target, "bias", None)
    value = _stacked(entry, "norm", given)
    if value is not None:
        _copy(where, weight, entry, value, "norm")
    if isinstance(bias, Tensor):
        torch.nn.init.zeros_(bias)


def _stacked(entry: Entry, kind: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weights ("w") or biases ("b") of an entry, stacked; None if it has none of them.

    A missing bias beside others is zero.
    """
    names = entry.names(kind)
    if given.keys().isdisjoint(names):
        return None
    parts = []
    for name in names:
        part = given.get(name)
        if part is None:
            part = _zero_bias(given[f"w{name[1:]}"])
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _zero_bias(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))


def _fill_layers(
    where: str, entry: Entry, layers: Sequence[Any], given: Mapping[str, Tensor]
) -> None:
    """Fill each layer with its share of the rows of weight and bias.

    Without biases, a bias becomes zero.
    """
    weight = _stacked(entry, "w", given)
    assert weight is not None
    bias = _stacked(entry, "b", given)
    has_bias = bias is not None
    if bias is None:
        bias = _zero_bias(weight)
    weights: Sequence[Tensor] = [weight]
    biases: Sequence[Tensor] = [bias]
    if len(layers) != 1:
        weights, biases = weight.chunk(len(layers)), bias.chunk(len(layers))
    for layer, own_weight, own_bias in zip(layers, weights, biases, strict=False):
        _copy(f"{where}.weight", getattr(layer, "weight", None), entry, own_weight, "w")
        held = getattr(layer, "bias", None)
        if held is not None or has_bias:
            _copy(f"{where}.bias", held, entry, own_bias, "b")


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
