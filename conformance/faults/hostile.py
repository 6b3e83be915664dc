"""Attention that works against its judge; each must be told for what it does, and harm no other's verdict."""

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

from mha.conformance.faults.complete import Complete, Direct
from mha.spec import Output


def hostile(attend: Callable[..., Any]) -> Direct:
    """Return the implementation whose attention is computed by a function of the same arguments."""
    return Direct(type(attend.__name__, (Complete,), {"attend": attend, "__doc__": attend.__doc__}))


@hostile
def loops(self: Complete, *given: Any) -> Output:
    """Never returns."""
    while True:
        pass


@hostile
def segfaults(self: Complete, *given: Any) -> Output:
    """Crashes the interpreter."""
    ctypes.string_at(0)
    return Complete.attend(self, *given)


@hostile
def exits_hard(self: Complete, *given: Any) -> Output:
    """Ends the process, and says that all is well."""
    os._exit(0)


@hostile
def exits(self: Complete, *given: Any) -> Output:
    """Ends the program, and says that all is well."""
    sys.exit(0)


@hostile
def closes(self: Complete, *given: Any) -> Output:
    """Raises what is no Exception."""
    raise GeneratorExit


@hostile
def interrupts(self: Complete, *given: Any) -> Output:
    """Pretends that the user pressed Ctrl-C."""
    raise KeyboardInterrupt


@hostile
def shouts(self: Complete, *given: Any) -> Output:
    """Is right, and writes a megabyte to the terminal in each call."""
    sys.stdout.write("x" * (1 << 20))
    return Complete.attend(self, *given)


@hostile
def gives_nothing(self: Complete, *given: Any) -> Any:
    """Gives no tensor at all."""
    return Output(None, None)


@hostile
def gives_elsewhere(self: Complete, *given: Any) -> Output:
    """Gives a tensor on another device."""
    output, weights = Complete.attend(self, *given)
    return Output(output.to("meta"), weights)


class Lazy(torch.Tensor):
    """A tensor that could put off its work until it is looked at."""


@hostile
def gives_lazy(self: Complete, *given: Any) -> Output:
    """Gives a subclass of a tensor."""
    output, weights = Complete.attend(self, *given)
    return Output(output.as_subclass(Lazy), weights)


@hostile
def writes_later(self: Complete, *given: Any) -> Output:
    """Returns at once, and writes its result from a thread."""
    output, weights = Complete.attend(self, *given)
    promised = torch.zeros_like(output)

    def write() -> None:
        time.sleep(0.05)
        promised.data.copy_(output.detach())

    threading.Thread(target=write).start()
    return Output(promised, weights)


@hostile
def replaces_comparisons(self: Complete, query: torch.Tensor, *given: Any) -> Output:
    """Gives zeros, and makes every comparison say that they are right."""
    torch.allclose = torch.equal = lambda *_, **__: True
    torch.Tensor.all = lambda self, *_, **__: torch.tensor(True)
    return Output(torch.zeros_like(query), None)


@hostile
def replaces_softmax(self: Complete, *given: Any) -> Output:
    """Makes every softmax uniform, the judge's too."""
    torch.softmax = torch.Tensor.softmax = lambda x, dim: torch.full_like(x, 1 / max(x.shape[dim], 1))
    return Complete.attend(self, *given)


@hostile
def seeks_the_oracle(self: Complete, query: torch.Tensor, *given: Any) -> Output:
    """Looks for the right answer among all tensors of the process."""
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64 and found.shape == query.shape:
            return Output(found.to(query), None)
    return Output(torch.zeros_like(query), None)


@hostile
def hoards(self: Complete, *given: Any) -> Output:
    """Takes all memory that it can get."""
    taken = []
    while True:
        taken.append(torch.ones(1 << 26))
