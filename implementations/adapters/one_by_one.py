"""A kernel of one head, or of one item, called for each of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def one_by_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of many heads or items, for a kernel of one.

    Its inputs are (B * H, L, d_k) or (B, L, H, d_k), and it takes as many masks.
    """

    def attend(*inputs: Any, **options: Any) -> Any:
        tensors = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor)]
        query = tensors[0]
        results = []
        for number in range(len(query)):
            own_inputs = [_own_part(given, number, query) for given in inputs]
            own_options = {name: _own_part(given, number, query) for name, given in options.items()}
            results.append(kernel(*own_inputs, **own_options))
        return _stacked(results) if results else query  # of no items

    return attend


def query_by_query(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of many items and queries, for a kernel of one query, as of decoding.

    Its inputs are (B, L, H, d_k) and (B, S, H_kv, d_k). The kernel gets each query (H, d_k) with
    all keys, or in causal calls with those up to its own place, of which it is the last one.
    """

    def attend_of_item(*inputs: Any, is_causal: bool = False, **options: Any) -> Any:
        given = [*inputs, *options.values()]
        query, key, value = [x for x in given if isinstance(x, Tensor) and x.ndim == 3][:3]
        queries, keys = len(query), len(key)
        results = list[Any]()
        for place in range(queries):
            seen = keys - queries + place + 1 if is_causal else keys
            parts = {id(query): query[place], id(key): key[:seen], id(value): value[:seen]}
            own = [parts.get(id(x), x) for x in inputs]
            own_options = {name: parts.get(id(x), x) for name, x in options.items()}
            if seen > 0:
                results.append(kernel(*own, **own_options))
        if not results:  # there is no key at all
            return query.new_zeros(*query.shape[:2], value.shape[-1])
        return _stacked([*_of_no_key(results, queries), *results])

    return one_by_one(attend_of_item)


def of_one_query(kernel: Callable[..., Any], *, heads_first: bool) -> Callable[..., Any]:
    """Return a function of many queries, for a kernel of one query of each item, as of decoding.

    Its inputs are (B, L, H, d_k) and (B, S, H_kv, d_k). The kernel gets each query (B, H, d_k). In
    causal calls, it sees the keys up to its own place, of which it is the last one: by the lengths
    of the items where the kernel is given these, (B,), and else by fewer keys.

    heads_first: whether its keys and values are (B, H_kv, S, d_k).
    """

    def attend(*inputs: Any, is_causal: bool = False, **options: Any) -> Any:
        given = [*inputs, *options.values()]
        query, key, value = [x for x in given if isinstance(x, Tensor) and x.ndim == 4][:3]
        queries, keys = query.shape[1], key.shape[1]
        has_lengths = any(_is_of_items(x, query) for x in options.values())

        def part(x: Any, place: int, later: int) -> Any:
            if x is query:
                return query[:, place]
            seen = keys if has_lengths else keys - later
            if x is key or x is value:
                return x[:, :seen].transpose(1, 2) if heads_first else x[:, :seen]
            if _is_of_items(x, query):
                return (x - later).clamp_min(0)
            # Slopes of each item and head, (B, H), are no mask, however many heads there are.
            is_mask = isinstance(x, Tensor) and (x.dtype == torch.bool or x.ndim == 4)
            return x[..., :seen] if is_mask and x.shape[-1] == keys else x

        results = list[Any]()
        for place in range(queries):
            later = queries - 1 - place if is_causal else 0
            if has_lengths or later < keys:
                own = [part(x, place, later) for x in inputs]
                own_options = {name: part(x, place, later) for name, x in options.items()}
                results.append(kernel(*own, **own_options))
        if not results:
            return query.new_zeros(*query.shape[:3], value.shape[-1])
        return _stacked([*_of_no_key(results, queries), *results], axis=1)

    return attend


def _is_of_items(x: Any, query: Tensor) -> bool:
    """Return whether an argument is a whole number of each item: its length."""
    is_tensor = isinstance(x, Tensor) and x.shape == query.shape[:1]
    return is_tensor and not (x.is_floating_point() or x.dtype == torch.bool)


def _of_no_key(results: Sequence[Any], queries: int) -> list[Any]:
    """Return what stands for the first queries, which have no key: zeros, -inf as log-sum-exp."""
    if not results:
        return []
    first = results[0]
    if isinstance(first, Tensor):
        empty: Any = torch.zeros_like(first)
    else:
        empty = tuple(_empty(each, first[0].ndim) for each in first)
    return [empty] * (queries - len(results))


def _empty(result: Any, axes: int) -> Any:
    """Return a context of zeros, or a log-sum-exp, which has an axis less, of -infinity."""
    if not isinstance(result, Tensor):
        return result
    return torch.full_like(result, -torch.inf if result.ndim < axes else 0.0)


def _own_part(given: Any, number: int, query: Tensor) -> Any:
    """Return the part of an argument for one of many; what has other axes is for all of them."""
    is_of_many = isinstance(given, Tensor) and given.ndim == query.ndim
    return given[number] if is_of_many else given


def _stacked(results: Sequence[Any], axis: int = 0) -> Any:
    """Return the results for each as one, along a new axis."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_stacked(each, axis) for each in zip(*results, strict=True))
    return torch.stack([*results], axis) if isinstance(first, Tensor) else first
