"""What a module or a kernel returns, as an `Output`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from mha.implementations.adapters.names import DESTINATION_NAMES
from mha.spec import Lse, Output


def as_output(
    returned: Any,
    shape: torch.Size | None = None,
    weights: int | None = None,
    lse: Lse | None = None,
) -> Output:
    """Return what a module returned as an `Output`.

    Of several tensors, the output is the first one of the shape of the query, or else the first
    one, and the weights are the first of the others. What holds no tensor becomes the output as it
    is, so that the clauses about outputs report it.

    returned: an output, or a tuple, list, mapping or dataclass that holds one.
    shape: of the query.
    weights: the place of the weights in what holds them, counted from 0, if they are not the first.
    lse: what is claimed of a log-sum-exp, which is then the first of the others with as many axes,
        as it is returned.

    >>> as_output((torch.zeros(2, 3, 8), None, None)).output.shape
    torch.Size([2, 3, 8])
    >>> returned = {"attentions": torch.zeros(2, 4, 3, 3), "hidden_states": torch.zeros(2, 3, 8)}
    >>> as_output(returned, torch.Size([2, 3, 8])).weights.shape
    torch.Size([2, 4, 3, 3])
    """
    if isinstance(returned, Output):
        return returned
    if isinstance(returned, Tensor):
        return Output(returned)
    held = [*_held(returned)]
    tensors = [value for value in held if isinstance(value, Tensor)]
    if not tensors:
        return Output(returned)
    output = _output_among(tensors, shape)
    others = [tensor for tensor in tensors if tensor is not output]
    of_rows = _log_sum_exp(others, lse)
    if weights is not None:
        return Output(output, held[weights] if weights < len(held) else None, of_rows)
    for tensor in others:
        if tensor is not of_rows:
            return Output(output, tensor, of_rows)
    return Output(output, None, of_rows)


def per_head(weights: Any, layout: str | None, n_heads: int) -> Any:
    """Return weights (B, H, L, S) for those of another layout; what does not fit, as it is.

    layout: an einops pattern, such as "b l s h", "(b h) l s", or "b l s" of a single head; None for
        (B, H, L, S).

    >>> per_head(torch.zeros(3, 5, 7, 2), "b l s h", n_heads=2).shape
    torch.Size([3, 2, 5, 7])
    """
    if layout is None or not isinstance(weights, Tensor):
        return weights
    with suppress(EinopsError):
        if "h" not in layout:
            return rearrange(weights, f"{layout} -> b 1 l s")
        return rearrange(weights, f"{layout} -> b h l s", h=n_heads)
    return weights


def _output_among(tensors: Sequence[Tensor], shape: torch.Size | None) -> Tensor:
    """Return the first tensor of the shape of the query, or else the first one."""
    for tensor in tensors:
        if tensor.shape == shape:
            return tensor
    return tensors[0]


def _log_sum_exp(tensors: Sequence[Tensor], lse: Lse | None) -> Tensor | None:
    """Return the first of these with as many axes as a log-sum-exp, if one is claimed."""
    if lse is None:
        return None
    axes = len(lse.layout.replace("(b h)", "b").split())
    for tensor in tensors:
        if tensor.ndim == axes:
            return tensor
    return None


def _held(returned: Any) -> Collection[Any]:
    """Return the members of a tuple, list, mapping, namespace or dataclass."""
    if isinstance(returned, Mapping):
        return returned.values()
    if is_dataclass(returned):
        return [getattr(returned, field.name) for field in fields(returned)]
    if isinstance(returned, SimpleNamespace):
        return vars(returned).values()
    return returned if isinstance(returned, (tuple, list)) else ()


def returned_or_written(returned: Any, arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns, or the tensor that it was given to write to."""
    if returned is not None:
        return returned
    written = [arguments[name] for name in DESTINATION_NAMES if name in arguments]
    return written[0] if written else None
