"""What a parameter of a constructor is given for a configuration, by what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mha.implementations.adapters.constructor_names import BIAS_ROLES, CONSTRUCTOR_NAMES
from mha.spec import Config
from mha.spec.claims import DROPS_OUTPUT

# Meanings that are fields of a configuration.
FIELDS = ("d_model", "n_heads", "dropout", "kdim", "vdim", "bias_kv", "zero_key")


def values_of(
    config: Config, dropout: bool | str, *, has_output_dropout: bool, length: int, batch: int
) -> dict[str, Any]:
    """Return what a parameter of each meaning is given, by the keys of `CONSTRUCTOR_NAMES`.

    dropout: what `Config.dropout` applies to, as in `Claims.dropout`.
    has_output_dropout: whether the constructor takes the dropout of the output separately.
    length, batch: the longest input and the largest batch.
    """
    values: dict[str, Any] = {field: getattr(config, field) for field in FIELDS}
    for field, roles in BIAS_ROLES.items():
        values[field] = any(config.has_bias(role) for role in roles)
    values["n_kv_heads"] = config.kv_heads
    # Of no heads, which the constructor has to refuse, there is no width.
    values["head_dim"] = config.head_dim if config.n_heads else config.d_model
    values["score_scalar"] = values["head_dim"]
    values["max_length"] = length
    values["max_batch"] = batch
    values["batch_first"] = not config.length_first
    values["causal"] = False
    values["eps"] = 1e-5
    values["layer_index"] = 0
    values["layer_number"] = 1  # numbers count from 1, as in Megatron
    values["output_dropout"] = config.dropout_of_output if dropout in DROPS_OUTPUT else 0.0
    if dropout == "output" and has_output_dropout:
        values["dropout"] = 0.0
    return values


def by_every_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by all the names of `CONSTRUCTOR_NAMES`."""
    every: dict[str, Any] = {}
    for field, names in CONSTRUCTOR_NAMES.items():
        if field in values:
            every |= dict.fromkeys(names, values[field])
    return every


def layer_of(config: Config, role: str) -> nn.Linear:
    """Return a linear layer for a projection that the constructor takes."""
    kv_width = config.kv_heads * config.head_dim if config.n_heads else config.d_model
    widths = {
        "q": (config.d_model, config.inner_width),
        "k": (config.key_width, kv_width),
        "v": (config.value_width, kv_width),
        "o": (config.inner_width, config.d_model),
    }
    inputs, outputs = widths[role]
    # Refusing a size is the constructor's task.
    return nn.Linear(max(1, inputs), max(1, outputs), bias=config.has_bias(role))
