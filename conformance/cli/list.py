"""`mha list`: the registered implementations."""

from __future__ import annotations

from collections.abc import Iterable

from mha.conformance.cli.printing import print_folded
from mha.implementations import Registered, discover

# In columns: a name or a target that is longer moves the rest of its line.
WIDEST_NAME, WIDEST_TARGET = 24, 60


def list_registered() -> int:
    """Print a line for each implementation; return the exit status: 2 if one of them is broken."""
    entries = discover()
    names = _width([entry.name for entry in entries], WIDEST_NAME)
    targets = _width([entry.target for entry in entries], WIDEST_TARGET)
    for entry in entries:
        line = f"{entry.name:{names}} {entry.target:{targets}} {_state(entry)}"
        print_folded(line, " " * (names + 1))
    broken = any(entry.broken for entry in entries)
    return 2 if broken else 0


def _width(texts: Iterable[str], widest: int) -> int:
    """Return the width of a column, which is that of its longest text, but `widest` at most."""
    return min(max(map(len, texts), default=0), widest)


def _state(entry: Registered) -> str:
    """Return the dtypes that an implementation claims, or why it is unavailable."""
    if entry.implementation is None:
        return f"unavailable: {entry.error}"
    return ", ".join(sorted(entry.implementation.claims.dtypes))
