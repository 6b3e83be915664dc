"""Where the weights of the contract are in the author's module, to load them or for gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.scripts.axes import rearranged, shape_as
from mha.conformance.scripts.terms import InexpressibleError
from mha.implementations.adapters.loading import Entry, ParameterPath, read_entry
from mha.spec import Weights


@dataclass(frozen=True)
class Stored:
    """Tensors of a module that hold weights: one, or one for each layer of a list.

    kind: "w", "b" or "extra".
    tensors: by their dotted names.
    """

    entry: Entry
    kind: str
    tensors: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        """Those of the weights, in the order in which they are stacked."""
        return [f"{self.kind}_{role}" for role in self.entry.roles]

    def pattern(self) -> tuple[str, str, dict[str, int]] | None:
        """Return the layouts of a weight in the contract and in the module, and known sizes."""
        if not self.entry.pattern:
            return None
        left, right = self.entry.sides(self.kind)
        return left, right, {"r": len(self.entry.roles), "e": self.entry.head_dim}

    def values(
        self, weights: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
    ) -> dict[str, str]:
        """Return the code of each tensor.

        weights: names in the script, by those of the contract.
        shapes: of the weights.
        """
        whole = _stacked([weights[name] for name in self.names])
        rows, count = sum(shapes[name][0] for name in self.names), len(self.tensors)
        share = -(-rows // count)
        found: dict[str, str] = {}
        for number, (name, tensor) in enumerate(self.tensors.items()):
            part = whole if count == 1 else f"{whole}[{number * share}:{(number + 1) * share}]"
            if pattern := self.pattern():
                found[name] = rearranged(part, *pattern)
            else:
                shape = rows // count, *shapes[self.names[0]][1:]
                found[name] = shape_as(part, shape, tensor.shape)
        return found

    def gradient(self, name: str, code: str, rows: Mapping[str, int]) -> str:
        """Return the code of the gradient of a weight.

        code: of the module.
        rows: of each weight.
        """
        whole = _stacked([self._in_the_contract(own, x, code) for own, x in self.tensors.items()])
        counts = {each: rows.get(each, rows[f"w{each[1:]}"]) for each in self.names}
        if len(counts) == 1:
            return whole
        before = sum(counts[each] for each in self.names[: self.names.index(name)])
        return f"{whole}[{before}:{before + counts[name]}]"

    def _in_the_contract(self, name: str, tensor: Tensor, code: str) -> str:
        """Return the code of the gradient of one tensor, in the layout of the contract."""
        if not tensor.is_leaf:
            raise InexpressibleError(f"{name} is a part of a parameter")
        gradient = f"{path_code(code, name)}.grad"
        if self.kind == "w" and name.endswith(".weight") and tensor.ndim > 2:
            gradient += ".flatten(1)"
        if pattern := self.pattern():
            left, right, sizes = pattern
            return rearranged(gradient, right, left, sizes)
        return gradient


def _stacked(codes: Sequence[str]) -> str:
    """Return the code of weights below each other."""
    return codes[0] if len(codes) == 1 else f"torch.cat(({', '.join(codes)}))"


def stored(
    module: nn.Module, paths: Mapping[str, ParameterPath], head_dim: int
) -> Iterator[Stored]:
    """Yield where the weights are in a module; paths: see `from_module`."""
    for key, path in paths.items():
        entry = read_entry("", key, path, head_dim)
        if entry is None:
            continue
        members = _members(module, entry.path)
        tensors = {name: each for name, each in members.items() if isinstance(each, Tensor)}
        if tensors:
            yield Stored(entry, entry.kind, tensors)
            continue
        for kind, attribute in (("w", "weight"), ("b", "bias")):
            held: dict[str, Any] = {}
            for name, layer in members.items():
                held[f"{name}.{attribute}"] = getattr(layer, attribute, None)
            if held and all(isinstance(each, Tensor) for each in held.values()):
                yield Stored(entry, kind, held)


def _members(module: nn.Module, path: str) -> dict[str, Any]:
    """Return what is at a path by its dotted name; a `*`, or a list of layers, means several."""
    before, starred, after = path.partition(".*.")
    if starred:
        members: Any = attrgetter(before)(module)
        return {f"{before}.{i}.{after}": attrgetter(after)(each) for i, each in enumerate(members)}
    try:
        target = attrgetter(path)(module)
    except AttributeError:  # of biases that the module does not have
        return {}
    if isinstance(target, nn.ModuleList):
        return {f"{path}.{i}": each for i, each in enumerate(target)}
    return {path: target}


def path_code(code: str, name: str) -> str:
    """Return the code of a part of a module by its dotted name.

    >>> path_code("attention_1", "heads.0.q.weight")
    'attention_1.heads[0].q.weight'
    """
    for part in name.split("."):
        code += f"[{part}]" if part.isdigit() else f".{part}"
    return code


def weight_codes(
    places: Sequence[Stored], weights: Weights, names: Mapping[str, str]
) -> dict[str, str]:
    """Return the code of the tensors that weights are loaded into, by their dotted names.

    names: of the weights in the script. Tensors that these do not give to the bit are left out.
    """
    given = dict(weights.named())
    known: dict[str, Any] = {"torch": torch, **{code: given[name] for name, code in names.items()}}
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    found: dict[str, str] = {}
    for place in places:
        try:
            codes = place.values(names, shapes)
        except (InexpressibleError, KeyError, AssertionError):
            continue
        for name, code in codes.items():
            value = eval(code, dict(known))
            own = place.tensors[name].detach()
            if value.shape == own.shape and value.to(own).equal(own):
                found[name] = code
    return found


def gradient_code(places: Sequence[Stored], name: str, code: str, weights: Weights) -> str:
    """Return the code of the gradient of a weight of the contract; code: of the module.

    Raises InexpressibleError where the module has no such weight, or in a layout without code.
    """
    given = dict(weights.named())
    rows = {each: len(x) for each, x in given.items()}
    having = [place for place in places if name in place.names]
    if not having:
        raise InexpressibleError(f"the module has no {name}")
    place = having[0]
    found = place.gradient(name, code, rows)
    values = place.gradient(name, "module", rows).replace(".grad", "")
    module = _Named(place.tensors)
    own = eval(values, {"torch": torch, "module": module}).detach()
    if own.shape != given[name].shape or not given[name].to(own).equal(own):
        raise InexpressibleError(f"{name} is laid out in a way of its own")
    return found


class _Named:
    """An object that has tensors by dotted names, as a module has them."""

    def __init__(self, tensors: Mapping[str, Any], before: str = "") -> None:
        self.tensors, self.before = tensors, before

    def __getattr__(self, name: str) -> Any:
        path = f"{self.before}.{name}".strip(".")
        if path in self.tensors:
            return self.tensors[path]
        return _Named(self.tensors, path)

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))
