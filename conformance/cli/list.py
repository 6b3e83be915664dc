"""`mha list`: the registered implementations."""

from __future__ import annotations

from mha.implementations import Registered, discover


def registered() -> tuple[list[str], int]:
    """Return a line for each registered implementation, and the exit status: 2 if one of them is
    broken.
    """
    entries = discover()
    return [line(entry) for entry in entries], 2 if any(entry.broken for entry in entries) else 0


def line(entry: Registered) -> str:
    """Return the name of an implementation, where it is, and the dtypes that it claims or why it is
    unavailable.
    """
    claims = entry.implementation.claims if entry.implementation else None
    state = f"unavailable: {entry.error}" if claims is None else ", ".join(sorted(claims.dtypes))
    return f"{entry.name:15} {entry.target:48} {state}"
