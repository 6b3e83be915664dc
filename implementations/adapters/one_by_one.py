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


def _own_part(given: Any, number: int, query: Tensor) -> Any:
    """Return the part of an argument for one of many; what has other axes is for all of them."""
    is_of_many = isinstance(given, Tensor) and given.ndim == query.ndim
    return given[number] if is_of_many else given


def _stacked(results: Sequence[Any]) -> Any:
    """Return the results for each as one."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(map(_stacked, zip(*results, strict=True)))
    return torch.stack([*results]) if isinstance(first, Tensor) else first
