"""Tensors at the border: copies of what judged code returns, and other objects to give to it.

An attribute of an instance hides a method: a tensor whose `detach` returns another one would be
compared as that one. What is used here was taken before any judged code was imported, and looks at
no attribute of an instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mha.spec import Config, Problem, Weights

_detach, _clone = torch._C.TensorBase.detach, torch._C.TensorBase.clone
_view_as = torch._C.TensorBase.view_as
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]  # a property of C
_version_of = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]  # a property of C
_variables, _as_plain = object.__getattribute__, torch._C.DisableTorchFunctionSubclass
_fields_of = attrgetter(*Config.__dataclass_fields__)
_tensors_of = attrgetter(*Weights.__dataclass_fields__)
# The judge's own leaves that judged code was given last, by identity; so many are kept, those of
# two calls.
KEPT = 8
_leaves: dict[int, Tensor] = {}


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return int(_version_of(tensor))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy without a history, which later changes of the tensor do not reach."""
    if type(tensor) is Tensor:
        return _clone(_detach(tensor))
    with _as_plain():
        return _clone(_detach(tensor))


def viewed(tensor: Tensor) -> Tensor:
    """Return another object for a tensor, with its memory and its history."""
    if type(tensor) is Tensor:
        return _view(tensor)
    with _as_plain():
        return _view(tensor)


def _view(tensor: Tensor) -> Tensor:
    if _requires_grad(tensor):
        return _view_as(tensor, tensor)
    return _detach(tensor)


class Given:
    """What judged code is given instead of the judge's own tensors, in one session.

    That is another object for each tensor, always the same one, so that what it keeps by the object
    is found again. A tensor that requires a gradient is given itself, since nothing else is a leaf;
    see `clean`.
    """

    def __init__(self) -> None:
        self._others: dict[int, tuple[Tensor, Tensor]] = {}
        _leaves.clear()

    def other(self, tensor: Tensor) -> Tensor:
        """Return the object that stands for a tensor."""
        if _requires_grad(tensor):
            _leaves[id(tensor)] = tensor
            if len(_leaves) > KEPT:
                del _leaves[next(iter(_leaves))]
            return tensor
        if id(tensor) not in self._others:
            self._others[id(tensor)] = tensor, _detach(tensor)
        return self._others[id(tensor)][1]

    def problem(self, problem: Problem) -> Problem:
        """Return a problem whose inputs and mask are these objects."""
        return _with(problem, problem.weights, self.other)


def clean() -> None:
    """Take off what judged code left on the judge's own leaves: attributes, and another class."""
    for tensor in _leaves.values():
        if type(tensor) is not Tensor:
            object.__setattr__(tensor, "__class__", Tensor)
        _variables(tensor, "__dict__").clear()


def weights_given(weights: Weights) -> Weights:
    """Return weights whose tensors are other objects, with the memory of these."""
    given = list[Any]()
    for tensor in _tensors_of(weights):
        given.append(None if tensor is None else _detach(tensor))
    return Weights(*given)


def config_given(config: Config) -> Config:
    """Return another object for a configuration, which judged code could write into."""
    return Config(*_fields_of(config))


def untouched(problem: Problem) -> Problem:
    """Return the problem with other objects for its tensors, on which nothing was left."""
    others: dict[int, Tensor] = {}

    def other(tensor: Tensor) -> Tensor:
        if id(tensor) not in others:
            others[id(tensor)] = _detach(tensor)
        return others[id(tensor)]

    return _with(problem, weights_given(problem.weights), other)


def _with(problem: Problem, weights: Weights, other: Callable[[Tensor], Tensor]) -> Problem:
    """Return a problem with these weights, and another object for each input and the mask."""
    query, key, value = other(problem.query), other(problem.key), other(problem.value)
    mask = None if problem.mask is None else other(problem.mask)
    return problem.change(weights=weights, query=query, key=key, value=value, mask=mask)


def all_plain(tensors: Iterable[object]) -> bool:
    """Return whether these are tensors of torch itself, or its parameters."""
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
