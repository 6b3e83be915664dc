"""Decoding with a cache that a call is given, or that a method of the module makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from mha.implementations.adapters.called import call_parameters, forward_of
from mha.implementations.adapters.calling import CallByName
from mha.implementations.discovery.loaded import module_named, variables_of
from mha.spec import Claims, Output
from mha.spec.option_names import listed

# Query, key and value.
Inputs = tuple[Tensor, Tensor, Tensor]
# Of an object whose `update(keys, values, layer)` returns all keys and values so far.
CACHE_NAMES = listed("cache past_key_values past_key_value kv_cache layer_past past_kv past")
# Of the attribute of a module that holds its cache, and of the methods that make one.
ATTRIBUTES = listed("kv_cache cache")
MAKERS = listed("setup_cache setup_caches setup_kv_cache build_kv_cache init_kv_cache")
# Of the positions of the tokens of a call.
POSITION_NAMES = listed("input_pos cache_position")
# What a method that makes a cache is given, by the names of its parameters.
SIZES = {
    "batch": listed("batch_size max_batch_size bsz"),
    "length": listed("max_seq_len max_seq_length max_length max_len seq_len"),
    "dtype": listed("dtype"),
    "device": listed("device"),
    "rotated": listed("rope_cache_length"),
}
# A cache is cropped by a number below zero of this name, or else to a length.
REMOVED = listed("tokens_to_remove")
# The length of a cache that is made for one.
LENGTH = 512


class Kept(NamedTuple):
    """A cache between two calls.

    held: what the module keeps its keys and values in.
    length: the number of positions that it has.
    """

    held: Any
    length: int


class PlainCache:
    """A cache for calls that say nothing of its class: it concatenates what it is given."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(
        self, keys: Tensor, values: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values so far, (B, H, S, d_k) each, with these as the last ones."""
        del others, named
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self, *layer: int) -> int:
        """Return the number of positions so far."""
        del layer
        return 0 if self.keys is None else self.keys.shape[-2]

    def reorder_cache(self, items: Tensor) -> None:
        """Let each item be the one at its place in `items`."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[items], self.values[items]


@dataclass(frozen=True)
class CacheForm:
    """Where a class keeps the keys and values of decoding.

    name: what a declaration calls it.
    """

    name: str

    @property
    def parameters(self) -> set[str]:
        """The parameters of a call that are about it."""
        raise NotImplementedError

    def made(self, call: CallByName, module: nn.Module, query: Tensor) -> Kept:
        """Return an empty cache for a module; query: of the first call."""
        raise NotImplementedError

    def called(
        self, call: CallByName, module: nn.Module, inputs: Inputs, kept: Kept
    ) -> tuple[Output, Kept]:
        """Return what a module gives at the next positions, and the cache for those after.

        inputs: query, key and value at the next positions, as the module takes them.
        """
        raise NotImplementedError

    def reordered(self, kept: Kept, items: Tensor) -> Kept:
        """Return a cache whose items are those at some places (B,)."""
        raise NotImplementedError(f"the cache {self.name!r} cannot be reordered")

    def cropped(self, kept: Kept, length: int) -> Kept:
        """Return a cache of the first positions."""
        raise NotImplementedError(f"the cache {self.name!r} cannot be cropped")


@dataclass(frozen=True)
class ObjectCache(CacheForm):
    """An object that a call is given, or that an attribute of the module holds during a call.

    name: of the parameter, or of the attribute.
    maker: the method that makes the cache of an attribute; "" for one that calls are given.
    positions: the parameter of a call that is given the positions of its tokens; "" without one.
    """

    maker: str = ""
    positions: str = ""

    @property
    def parameters(self) -> set[str]:
        """The parameters of a call that are about it."""
        return {self.name, self.positions}

    def made(self, call: CallByName, module: nn.Module, query: Tensor) -> Kept:
        """Return an empty cache for a module; query: of the first call."""
        if not self.maker:
            return Kept(_made_for(type(module), self.name), 0)
        sizes: dict[str, Any] = {"batch": query.shape[call.batch_axis], "length": LENGTH}
        sizes |= {"dtype": query.dtype, "device": query.device, "rotated": call.rotated_width}
        method: Callable[..., Any] = getattr(module, self.maker)
        arguments = {}
        for parameter in inspect.signature(method).parameters:
            for size, names in SIZES.items():
                if parameter in names:
                    arguments[parameter] = sizes[size]
        with self._held_by(module, None):
            held = method(**arguments)
            if held is None:
                held = getattr(module, self.name)
        return Kept(held, 0)

    @contextmanager
    def _held_by(self, module: nn.Module, held: Any) -> Iterator[None]:
        """Give the attribute of a module a value in the block."""
        before = getattr(module, self.name, None)
        setattr(module, self.name, held)
        try:
            yield
        finally:
            setattr(module, self.name, before)

    def called(
        self, call: CallByName, module: nn.Module, inputs: Inputs, kept: Kept
    ) -> tuple[Output, Kept]:
        """Return what a module gives at the next positions, and the cache for those after."""
        call, query, start = call_of(call, inputs), inputs[0], kept.length
        end = start + query.shape[call.length_axis]
        more: dict[str, Any] = {}
        if self.positions:
            more[self.positions] = torch.arange(start, end, device=query.device)
        if not self.maker:
            more[self.name] = kept.held
            call = replace(call, past=start, keys=end, more=more)
            options = options_at(call, start, end, query)
            return call(module, *inputs, **options), Kept(kept.held, end)
        call = replace(call, past=start, keys=LENGTH, more=more)
        options = options_at(call, start, end, query, has_room=True)
        with self._held_by(module, kept.held):
            return call(module, *inputs, **options), Kept(kept.held, end)

    def reordered(self, kept: Kept, items: Tensor) -> Kept:
        """Return a cache whose items are those at some places (B,)."""
        kept.held.reorder_cache(items)
        return kept

    def cropped(self, kept: Kept, length: int) -> Kept:
        """Return a cache of the first positions."""
        (name, *_) = inspect.signature(kept.held.crop).parameters
        kept.held.crop(length - kept.length if name in REMOVED else length)
        return Kept(kept.held, length)


def options_at(
    call: CallByName, start: int, end: int, query: Tensor, *, has_room: bool = False
) -> dict[str, Any]:
    """Return the mask and flags of a call at the positions from `start` to `end`.

    A single query needs no mask, unless the cache has room for more keys than those of the past.

    has_room: whether it has.
    """
    claims = call.claims
    options: dict[str, Any] = {"mask": None, "is_causal": False, "need_weights": False}
    if claims.always_causal or call.masks.convention is None:
        options["is_causal"] = claims.always_causal
    elif end - start == 1 and not has_room:
        options["is_causal"] = call.masks.causal_by_default
    else:
        places = torch.arange(call.keys or end, device=query.device)
        own = torch.arange(start, end, device=query.device)
        options["mask"] = (places <= own.unsqueeze(-1))[None, None]
    return options


def object_caches(module_class: type) -> Iterator[ObjectCache]:
    """Yield the objects that may hold a class's cache, by the names of parameters and methods."""
    parameters = call_parameters(forward_of(module_class))
    positions = _first(POSITION_NAMES, parameters)
    for name in CACHE_NAMES:
        if name in parameters:
            yield ObjectCache(name, "", positions)
    maker = _first(MAKERS, dir(module_class))
    if maker:
        for name in ATTRIBUTES:
            yield ObjectCache(name, maker, positions)


def inputs_of(claims: Claims, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """Return query, key and value as one tensor where a module takes one.

    Those of a sequence that is decoded are parts of one tensor, which nothing says.
    """
    if not claims.cross_attention:
        return query, query, query
    return query, key, key if claims.cross_attention == "memory" else value


def call_of(call: CallByName, inputs: Inputs) -> CallByName:
    """Return the call that leaves out a memory where there is none, if that is known."""
    query, key, value = inputs
    return call.alone if call.alone and query is key is value else call


def _first(names: tuple[str, ...], known: Container[str]) -> str:
    """Return the first of some names that is known, or ""."""
    return next((name for name in names if name in known), "")


def _made_for(module_class: type, name: str) -> Any:
    """Return an empty cache of the class that the annotation of a parameter names.

    Where that cannot be made without arguments, it is one of a class derived from it.
    """
    parameter = call_parameters(forward_of(module_class))[name]
    variables = variables_of(module_named(module_class.__module__))
    for cls in _annotated(parameter.annotation, variables):
        for each in _with_derived(cls):
            try:
                return each()
            except Exception:  # of the author, which may want sizes
                continue
    return PlainCache()


def _annotated(annotation: Any, variables: Mapping[str, Any]) -> Iterator[type]:
    """Yield the classes with `update` that an annotation names."""
    if isinstance(annotation, str):
        for part in annotation.replace("Optional[", "").rstrip("]").split("|"):
            annotation = variables.get(part.strip(" '\""))
            yield from _annotated(annotation, {})
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _annotated(each, variables)
    elif inspect.isclass(annotation) and hasattr(annotation, "update") and annotation is not dict:
        yield annotation


def _with_derived(cls: type) -> Iterator[type]:
    """Yield a class, then those that are derived from it."""
    yield cls
    derived: list[type] = cls.__subclasses__()
    for each in derived:
        yield from _with_derived(each)
