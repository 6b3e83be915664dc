"""Hypothesis looks for constants in each module that is loaded, and some raise at that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from mha.implementations.discovery.loaded import attribute, every_module, file_of

# Within Hypothesis; a version without these names does not look.
PLACE, LOOKS, SEEN, FOUND = (
    "hypothesis.internal.conjecture.providers",
    "_get_local_constants",
    "_seen_modules",
    "_local_constants",
)


@contextmanager
def only_readable_modules() -> Iterator[None]:
    """Let Hypothesis pass over the modules that it cannot read, in the block.

    It reads `__file__` of each module that is loaded since it looked last, and takes it for a
    string, or None.
    """
    try:
        providers: Any = import_module(PLACE)
    except ImportError:
        providers = None
    looks, seen = attribute(providers, LOOKS), attribute(providers, SEEN, set())
    if looks is None:
        yield
        return

    count = 0

    @wraps(looks)
    def constants() -> Any:
        nonlocal count
        if count != len(sys.modules):
            count = len(sys.modules)
            seen.update(id(module) for _, module in every_module() if not _is_readable(module))
        try:
            return looks()
        except Exception:  # another version may read more
            return getattr(providers, FOUND)

    setattr(providers, LOOKS, constants)
    try:
        yield
    finally:
        setattr(providers, LOOKS, looks)


def _is_readable(module: object) -> bool:
    """Return whether a module has a file, or says without raising that it has none."""
    return bool(file_of(module)) or attribute(module, "__file__", module) is None
