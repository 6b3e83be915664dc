"""What the judge's own arithmetic stands on: torch as it was before any implementation was imported."""

from __future__ import annotations

from typing import Any

import torch

from mha.conformance.harness.errors import Violation

TENSOR = dict(vars(torch.Tensor))
# Torch itself replaces these: in `torch.compile`, and with the default dtype.
OF_TORCH = ("manual_seed", "Storage")
FUNCTIONS = {name: value for name, value in vars(torch).items() if callable(value) and name not in OF_TORCH}
_INHERITED = set(dir(torch.Tensor.__base__))
# What an implementation was seen to replace: nothing that it does afterwards can be trusted.
_replaced: dict[int, str] = {}


def require_untouched(implementation: object) -> None:
    """Raise a Violation if this implementation replaces functions of torch, now or earlier."""
    found = put_back() or _replaced.get(id(implementation), "")
    if found:
        _replaced[id(implementation)] = found
        raise Violation(f"the call replaced {found}, for everybody", family="STA")


def put_back() -> str:
    """Undo every replacement of a function of torch or a method of its tensors; return the names, "" if there is none.

    What is added under a name of its own is no replacement. Modules such as `torch.nn.functional` are not looked at,
    since the judge computes with none of their functions but `linear`.
    """
    found = []
    if not FUNCTIONS.items() <= vars(torch).items():
        for name, value in FUNCTIONS.items():
            if vars(torch).get(name) is not value:
                found.append(f"torch.{name}")
                setattr(torch, name, value)
    now = dict(vars(torch.Tensor))
    if now != TENSOR:
        for name in now.keys() | TENSOR.keys():
            found += _put_back_method(name, now)
    return ", ".join(sorted(found))


def _put_back_method(name: str, now: dict[str, Any]) -> list[str]:
    if name in TENSOR and now.get(name) is not TENSOR[name]:
        setattr(torch.Tensor, name, TENSOR[name])
    elif name not in TENSOR and name in _INHERITED:
        delattr(torch.Tensor, name)
    else:
        return []
    return [f"torch.Tensor.{name}"]
