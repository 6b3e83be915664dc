"""Caches of classes that keep their own: returned by a call, in a dictionary, or in the module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.caches import (
    ATTRIBUTES,
    CACHE_NAMES,
    MAKERS,
    CacheForm,
    Inputs,
    Kept,
    call_of,
    object_caches,
    options_at,
)
from mha.implementations.adapters.called import call_parameters, forward_of
from mha.implementations.adapters.calling import CallByName
from mha.implementations.adapters.names import NEUTRAL_NAMES, words_of
from mha.implementations.discovery.errors import ImplementationError
from mha.spec import Output

# The parameters that say where the tokens of a call begin, in what the module has kept.
START_NAMES = NEUTRAL_NAMES["start"]
# How a declaration calls the other kinds: "past_kv (returned)".
RETURNED, JOINED, IN_DICTIONARY = "returned", "joined", "dict"
# Keys and values in one tensor have an axis for both, then those of heads.
STACKED_AXES = 5


@dataclass(frozen=True)
class OwnCache(CacheForm):
    """A cache that a class keeps itself, and that starts empty.

    name: of the parameter, and the kind of cache in brackets, if it has none of its own.
    """

    @property
    def parameters(self) -> set[str]:
        """The parameters of a call that are about it."""
        return {self.name.partition(" ")[0]}

    def given(self, kept: Kept) -> dict[str, Any]:
        """Return what a call is given, by the names of its parameters."""
        (name,) = self.parameters
        return {name: kept.held}

    def left(self, module: nn.Module, returned: Any, kept: Kept) -> Any:
        """Return what is kept after a call."""
        raise NotImplementedError

    def called(
        self, call: CallByName, module: nn.Module, inputs: Inputs, kept: Kept
    ) -> tuple[Output, Kept]:
        """Return what a module gives at the next positions, and the cache for those after."""
        call, query = call_of(call, inputs), inputs[0]
        end = kept.length + query.shape[call.length_axis]
        call = replace(call, past=kept.length, keys=end, more=self.given(kept))
        all_returned = []

        def recorded(*args: Any, **named: Any) -> Any:
            all_returned.append(module(*args, **named))
            return all_returned[-1]

        output = call(recorded, *inputs, **options_at(call, kept.length, end, query))
        return output, Kept(self.left(module, all_returned[-1], kept), end)


@dataclass(frozen=True)
class ReturnedCache(OwnCache):
    """What a call returns beside its output is given to the next one: a pair, or both stacked.

    switch: the flag that asks for it; "" without one.
    joined: whether it has the new positions only, and callers join them to those before.
    """

    switch: str = ""
    joined: bool = False

    @property
    def parameters(self) -> set[str]:
        """The parameters of a call that are about it."""
        return {*super().parameters, self.switch}

    def made(self, call: CallByName, module: nn.Module, query: Tensor) -> Kept:
        """Return an empty cache."""
        del call, module, query
        return Kept(None, 0)

    def given(self, kept: Kept) -> dict[str, Any]:
        """Return what the last call returned, and the flag that asks for more."""
        given = {self.name.partition(" ")[0]: kept.held}
        if self.switch:
            given[self.switch] = True
        return given

    def left(self, module: nn.Module, returned: Any, kept: Kept) -> Any:
        """Return the pair of keys and values, or both in one tensor, beside an output.

        Raises TypeError without one.
        """
        del module
        others = returned[1:] if isinstance(returned, tuple | list) else ()
        for value in others:
            is_pair = isinstance(value, tuple | list | dict) and len(value) > 1
            if is_pair or (isinstance(value, Tensor) and value.ndim == STACKED_AXES):
                if self.joined and kept.held is not None:
                    return _joined(kept.held, value)
                return value
        raise TypeError("it returns no cache beside its output")


@dataclass(frozen=True)
class DictionaryCache(OwnCache):
    """A dictionary that calls fill."""

    def made(self, call: CallByName, module: nn.Module, query: Tensor) -> Kept:
        """Return an empty cache."""
        del call, module, query
        return Kept({}, 0)

    def left(self, module: nn.Module, returned: Any, kept: Kept) -> Any:
        """Return the same dictionary."""
        del module, returned
        return kept.held


@dataclass(frozen=True)
class CacheByStart(OwnCache):
    """Tensors of the module, filled from the position on that a call is given.

    They are put in place before each call, so that each sequence has its own.
    """

    def made(self, call: CallByName, module: nn.Module, query: Tensor) -> Kept:
        """Return what the module has kept so far, from which no position is read."""
        del call, query
        return Kept((module, _tensors_of(module)), 0)

    def given(self, kept: Kept) -> dict[str, Any]:
        """Return where the tokens begin, with the tensors of the sequence in place."""
        module, tensors = kept.held
        for (path, name), value in deepcopy(tensors).items():
            setattr(module.get_submodule(path), name, value)
        return {self.name: kept.length}

    def left(self, module: nn.Module, returned: Any, kept: Kept) -> Any:
        """Return copies of the tensors."""
        del returned, kept
        return module, _tensors_of(module)


def possible_caches(module_class: type) -> Iterator[CacheForm]:
    """Yield the forms of caches that a class may have; those that it keeps itself come last."""
    yield from object_caches(module_class)
    yield from kept_caches(module_class)


def cache_of(module_class: type, name: str | None) -> CacheForm | None:
    """Return the form of a cache of this name; None without a name.

    Raises ImplementationError where the class has no such cache.
    """
    if name is None:  # also of functions, which have no calls of a module
        return None
    for form in possible_caches(module_class):
        if form.name == name:
            return form
    raise ImplementationError(
        f"{module_class.__name__}: cache={name!r}, but a call has no parameter of this name that is"
        f" known ({', '.join(CACHE_NAMES)}), and the class no attribute ({', '.join(ATTRIBUTES)})"
        f" with a method that makes it ({', '.join(MAKERS)}); of a class that keeps its own, say"
        ' how, as in "past_kv (returned)"'
    )


def kept_caches(module_class: type) -> Iterator[CacheForm]:
    """Yield the forms of caches of a class that keeps them itself, by the names of parameters."""
    parameters = call_parameters(forward_of(module_class))
    for name in CACHE_NAMES:
        if name in parameters:
            switch = _switch(parameters)
            yield ReturnedCache(f"{name} ({RETURNED})", switch=switch)
            yield ReturnedCache(f"{name} ({JOINED})", switch=switch, joined=True)
            yield DictionaryCache(f"{name} ({IN_DICTIONARY})")
    for name in START_NAMES:
        if name in parameters:
            yield CacheByStart(name)


def _switch(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the flag that asks for a cache: use_cache, return_cache."""
    for name, parameter in parameters.items():
        if parameter.default is False and not {"cache", "past"}.isdisjoint(words_of(name)):
            return name
    return ""


def _joined(before: Any, new: Any) -> Any:
    """Return keys and values (..., S, d_k), a pair or one tensor, with new ones after them."""
    if isinstance(new, Tensor):
        return torch.cat([before, new], -2)
    return tuple(torch.cat(pair, -2) for pair in zip(before, new, strict=True))


def _tensors_of(module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return copies of the tensors of a module and its parts that are no parameters, by names.

    Those that share memory do so as copies too: a module may write into a buffer, and read views.
    """
    found = {}
    for path, part in module.named_modules():
        for name, value in (*vars(part).items(), *part._buffers.items()):
            if isinstance(value, Tensor):
                found[path, name] = value.detach()
    return deepcopy(found)
