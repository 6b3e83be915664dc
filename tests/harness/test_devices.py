"""Tensors are made on the device of the inputs, as meta tensors show without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.registry import implementations as faults
from mha.implementations.discovery.resolve import available, discover
from mha.implementations.process.torch_state import preserved
from mha.spec import Claims, Config, Implementation, Weights
from support.effort import EVERYTHING

DTYPES = {"bool": torch.bool, "float": torch.float32}
MIXED = re.compile("same device|expected device")


def inputs(implementation: Implementation, *, training: bool) -> tuple[Any, Tensor]:
    """Return attention and an input of 20 positions, both on the meta device."""
    config = Config(8, 2, dropout=0.5 if implementation.claims.dropout and training else 0.0)
    weights = Weights.random(config, 0).to(torch.float32, "meta")
    attention: Any = implementation.build(config, weights, dtype=torch.float32, device="meta")
    return attention.train(training), torch.ones(2, 20, 8, device="meta")


@contextmanager
def unmixed(name: str) -> Iterator[None]:
    """Fail if devices are mixed; a call may be refused, or read a number that meta tensors lack."""
    raised = None
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        raised = error
    assert not MIXED.search(str(raised)), f"{name}: {raised}"


def calls(claims: Claims, all_of_them: bool) -> list[tuple[torch.dtype | None, bool]]:
    """Return the dtypes of masks to call with, and whether in training; of faults, two of all."""
    if "cuda" not in claims.devices:
        return []
    masks = [None, *(DTYPES[mask] for mask in sorted(claims.masks) if mask in DTYPES)]
    if all_of_them:
        return list(product(masks, (False, True)))
    return [(None, False), (masks[-1], True)]


def test_tensors_are_made_on_the_device_of_the_inputs() -> None:
    registered = {each.target: each.implementation for each in available(discover())}
    # Of the faults, `make lattice` tries all.
    tried = dict([*faults.items()][:: 1 if EVERYTHING else 4])
    for name, implementation in (registered | tried).items():
        claims = implementation.claims
        for dtype, training in calls(claims, all_of_them=EVERYTHING or name in registered):
            with preserved(), unmixed(name), torch.no_grad():
                attention, x = inputs(implementation, training=training)
                mask = (
                    None if dtype is None else torch.ones(2, 1, 20, 20, device="meta", dtype=dtype)
                )
                causal = training and claims.causal is not None
                output = attention(x, x, x, mask=mask, is_causal=causal, need_weights=False).output
                assert output.device.type == "meta", name
                if claims.decodes and not training and mask is None:
                    _, cache = attention.decode(*[x[:, :1]] * 3)
                    attention.decode(*[x[:, :1]] * 3, cache)
