"""Collecting the gradients of the weights that were loaded into a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.loading import (
    Entry,
    ParameterPath,
    entries_of,
    layers_of,
    member_at,
)
from mha.spec import Config


def weight_gradients(
    module: nn.Module,
    parameters: Mapping[str, ParameterPath],
    rows: Mapping[str, int],
    head_dim: int,
) -> dict[str, Tensor]:
    """Collect the gradients of the weights that `load` has filled, by the names of `Weights`.

    They are zero where none is set.

    parameters: as for `load`.
    rows: the first dimension of each weight.
    head_dim: d_k.
    """
    gradients: dict[str, Tensor] = {}
    for entry in entries_of("", module, parameters, rows, head_dim):
        target = member_at("", module, entry.path)
        for kind, parts in _held_by(target, entry.kind).items():
            is_asked_for = not rows.keys().isdisjoint(entry.names(kind))
            if parts and is_asked_for:
                gradients |= _split(entry, kind, parts, rows)
    return gradients


def zero_gradients(rows: Mapping[str, int], config: Config, like: Tensor) -> dict[str, Tensor]:
    """Return zeros for each weight, as a projection has them that a module lacks.

    rows: as for `weight_gradients`.
    like: a tensor of their dtype and device.
    """
    widths = {"w_k": config.key_width, "w_v": config.value_width, "w_o": config.inner_width}
    zeros = dict[str, Tensor]()
    for name, length in rows.items():
        shape = [length]
        if name[0] == "w":
            shape.append(widths.get(name, config.d_model))
        zeros[name] = like.new_zeros(shape)
    return zeros


def _held_by(target: Any, kind: str) -> dict[str, list[Tensor]]:
    """Return the gradients of a parameter, or of the weights and biases of layers, by their kind.

    kind: of the entry, which is that of a parameter.
    """
    if target is None:
        return {}
    if isinstance(target, Tensor):
        return {kind: [_gradient(target)]}
    if kind == "norm":
        return {kind: [_gradient(target.weight)]}
    layers = layers_of(target)
    # The weight of a convolution has an axis of positions.
    held = {"w": [_gradient(layer.weight).flatten(1) for layer in layers]}
    if layers[0].bias is not None:
        held["b"] = [_gradient(layer.bias) for layer in layers]
    return held


def _split(
    entry: Entry, kind: str, parts: Sequence[Tensor], rows: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the gradients by name: those of all layers are joined along the rows, then split.

    parts: the gradient of each layer.
    rows: of the weights of the configuration; others may be stacked with them.
    """
    names = entry.names(kind)
    counts = [rows[name] if name in rows else rows[f"w{name[1:]}"] for name in names]
    whole = torch.cat([entry.to_contract(part, kind) for part in parts])
    shape = (sum(counts), -1) if kind == "w" else (sum(counts),)
    split = whole.reshape(shape).split(counts)
    return {name: gradient for name, gradient in zip(names, split, strict=True) if name in rows}


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a copy of the gradient of a parameter; zeros where none is set."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.clone()


def _gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a parameter, or of a view of one; zeros where none is set."""
    whole = tensor if tensor.is_leaf else tensor._base
    if whole is None or whole.grad is None:
        return torch.zeros_like(tensor)
    if whole is tensor:
        return whole.grad
    gradient = torch.empty_like(whole).copy_(whole.grad)  # with the strides of the parameter
    offset = tensor.storage_offset() - whole.storage_offset()
    return gradient.as_strided(tensor.shape, tensor.stride(), offset)
