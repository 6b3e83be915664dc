"""How much the tests try: a part by themselves, and everything by `make lattice`."""

from __future__ import annotations

import os

EVERYTHING = bool(os.environ.get("LATTICE"))


def tried(part: int, everything: int) -> int:
    """Return how many problems a test tries of those that `make lattice` does."""
    return everything if EVERYTHING else part
