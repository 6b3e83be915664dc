"""Tampering: functions of torch that an implementation replaces, on which the judge's own arithmetic relies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mha.conformance.harness.errors import Violation
from mha.implementations.pristine import pristine, put_back

# What an implementation has replaced, by identity; it is kept alive so that its id is not used again.
_replaced: dict[int, tuple[object, str]] = {}


@contextmanager
def judging(implementation: object) -> Iterator[None]:
    """Judge an implementation in the block, with torch as it was at first; see `pristine`."""
    with pristine():
        try:
            yield
        finally:
            _note(implementation)


def require_untouched(implementation: object) -> None:
    """Raise a Violation if this implementation replaces functions of torch, now or in an earlier call.

    Once it has, nothing that it returns can be trusted. What was replaced before the judge started does not count.
    """
    _note(implementation)
    if id(implementation) in _replaced:
        _, names = _replaced[id(implementation)]
        raise Violation(f"the call replaced {names}, for everybody", family="STA")


def _note(implementation: object) -> None:
    """Undo what the implementation has replaced since the last look, and remember it."""
    if names := put_back():
        _replaced[id(implementation)] = implementation, names
