"""Tampering: torch as it was before any implementation was imported, on which the judge's own arithmetic relies."""

from __future__ import annotations

from typing import Any

import torch

from mha.conformance.harness.errors import Violation

# Torch itself replaces these: in `torch.compile`, and when the default dtype changes.
REPLACED_BY_TORCH = ("manual_seed", "Storage")
FUNCTIONS = {name: value for name, value in vars(torch).items() if callable(value) and name not in REPLACED_BY_TORCH}
METHODS = dict(vars(torch.Tensor))
_INHERITED = set(dir(torch.Tensor.__base__))
# What an implementation has replaced, by identity; it is kept alive so that its id is not used again.
_replaced: dict[int, tuple[object, str]] = {}


def require_untouched(implementation: object) -> None:
    """Raise a Violation if this implementation replaces functions of torch, now or in an earlier call.

    Once it has, nothing that it returns can be trusted.
    """
    if names := put_back():
        _replaced[id(implementation)] = implementation, names
    if id(implementation) in _replaced:
        _, names = _replaced[id(implementation)]
        raise Violation(f"the call replaced {names}, for everybody", family="STA")


def put_back() -> str:
    """Undo every replacement of a function of torch or a method of its tensors; return their names, "" if none.

    Additions under new names are not replacements. Modules such as `torch.nn.functional` are not checked, since the
    judge computes with none of their functions except `linear`.
    """
    names = []
    if not FUNCTIONS.items() <= vars(torch).items():
        for name, value in FUNCTIONS.items():
            if vars(torch).get(name) is not value:
                names.append(f"torch.{name}")
                setattr(torch, name, value)
    methods = dict(vars(torch.Tensor))
    if methods != METHODS:
        names += [f"torch.Tensor.{name}" for name in methods.keys() | METHODS.keys() if _put_back_method(name, methods)]
    return ", ".join(sorted(names))


def _put_back_method(name: str, methods: dict[str, Any]) -> bool:
    """Undo the replacement of one method; return whether there was one."""
    if name in METHODS and methods.get(name) is not METHODS[name]:
        setattr(torch.Tensor, name, METHODS[name])
        return True
    if name not in METHODS and name in _INHERITED:
        delattr(torch.Tensor, name)
        return True
    return False
