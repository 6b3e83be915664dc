"""Attention that works against the suite: each fails with its own message, and nothing else."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from mha.conformance.faults.base import Complete, Direct
from mha.spec import Output


def hostile(attend: Callable[..., Any]) -> Direct:
    """Return an implementation whose `attend` is the decorated function."""
    return Direct(type(attend.__name__, (Complete,), {"attend": attend, "__doc__": attend.__doc__}))


@hostile
def loops(self: Complete, *rest: Any) -> Output:
    """Never returns."""
    while True:
        time.sleep(1)


@hostile
def segfaults(self: Complete, *rest: Any) -> Output:
    """Crashes the interpreter."""
    ctypes.string_at(0)
    return Complete.attend(self, *rest)


@hostile
def exits_hard(self: Complete, *rest: Any) -> Output:
    """Ends the process with status 0, without cleanup."""
    os._exit(0)


@hostile
def exits(self: Complete, *rest: Any) -> Output:
    """Raises SystemExit with status 0."""
    sys.exit(0)


@hostile
def closes(self: Complete, *rest: Any) -> Output:
    """Raises GeneratorExit, which is not an Exception."""
    raise GeneratorExit


@hostile
def interrupts(self: Complete, *rest: Any) -> Output:
    """Pretends that the user pressed Ctrl-C."""
    raise KeyboardInterrupt


@hostile
def shouts(self: Complete, *rest: Any) -> Output:
    """Correct, but writes a megabyte to the terminal in each call."""
    sys.stdout.write("x" * (1 << 20))
    return Complete.attend(self, *rest)


@hostile
def gives_nothing(self: Complete, *rest: Any) -> Any:
    """Returns None instead of tensors."""
    return Output(None, None)


@hostile
def leaves_out_empty_rows(self: Complete, query: torch.Tensor, *rest: Any) -> Output:
    """Returns too short an output where a row is empty, which no clause on shapes tries."""
    output, weights, _ = Complete.attend(self, query, *rest)
    mask = rest[2].mask
    empty = mask is not None and mask.dtype == torch.bool and not bool(mask.any(-1).all())
    return Output(output[:, :-1] if empty else output, weights)


@hostile
def gives_elsewhere(self: Complete, *rest: Any) -> Output:
    """Returns a tensor on another device."""
    output, weights, _ = Complete.attend(self, *rest)
    return Output(output.to("meta"), weights)


class Lazy(torch.Tensor):
    """A tensor that could defer its work until it is read."""


@hostile
def gives_lazy(self: Complete, *rest: Any) -> Output:
    """Returns a subclass of Tensor."""
    output, weights, _ = Complete.attend(self, *rest)
    return Output(output.as_subclass(Lazy), weights)


@hostile
def writes_later(self: Complete, *rest: Any) -> Output:
    """Returns at once, and writes its result from a thread."""
    output, weights, _ = Complete.attend(self, *rest)
    promised = torch.zeros_like(output)

    def write() -> None:
        time.sleep(0.05)
        promised.data.copy_(output.detach())

    threading.Thread(target=write).start()
    return Output(promised, weights)


@hostile
def replaces_comparisons(self: Complete, query: torch.Tensor, *rest: Any) -> Output:
    """Returns zeros, and makes every comparison succeed."""
    torch.allclose = torch.equal = lambda *_, **__: True
    torch.Tensor.all = lambda self, *_, **__: torch.tensor(True)
    return Output(torch.zeros_like(query), None)


@hostile
def replaces_softmax(self: Complete, *rest: Any) -> Output:
    """Makes every softmax uniform, that of the suite too."""
    torch.softmax = torch.Tensor.softmax = lambda x, dim: torch.full_like(
        x, 1 / max(x.shape[dim], 1)
    )
    return Complete.attend(self, *rest)


@hostile
def seeks_the_oracle(self: Complete, query: torch.Tensor, *rest: Any) -> Output:
    """Looks for the expected output among all tensors of the process."""
    for candidate in gc.get_objects():
        # Not `isinstance`, which raises for a weak proxy of what is gone.
        if (
            issubclass(type(candidate), torch.Tensor)
            and candidate.dtype == torch.float64
            and candidate.shape == query.shape
        ):
            return Output(candidate.to(query), None)
    return Output(torch.zeros_like(query), None)


@hostile
def hoards(self: Complete, *rest: Any) -> Output:
    """Allocates memory until there is none left."""
    taken = []
    while True:
        taken.append(torch.ones(1 << 26))
