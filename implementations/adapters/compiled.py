"""Calls of compiled code with more kinds of inputs than `torch.compile` allows by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
MANY = 1_000_000


def compiled_again(call: Callable[[], T]) -> T:
    """Return what a call returns, again where `torch.compile(fullgraph=True)` refuses to compile.

    By default it allows for 8 kinds of inputs. A program has few; trial runs and clauses have many.

    >>> compiled_again(lambda: 1)
    1
    """
    try:
        return call()
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        return call()
