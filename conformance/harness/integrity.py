"""Tampering: what an implementation changes for everybody, and the judge relies on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mha.conformance.harness.errors import Violation
from mha.conformance.harness.provenance import note_adapter
from mha.implementations.discovery.loaded import attribute
from mha.implementations.discovery.originals import Changes, changes, new_changes
from mha.implementations.discovery.resolve import original_of
from mha.implementations.process.pristine import pristine, put_back
from mha.implementations.process.surroundings import Surroundings
from mha.spec import Implementation

# What an implementation has changed, in words, by identity; it is kept alive so that its id is not
# used again.
_changed: dict[int, tuple[object, str]] = {}
# The most names of functions in a message.
MOST = 3


@contextmanager
def judging(implementation: Implementation) -> Iterator[None]:
    """Judge an implementation in the block, with torch as it was at first; see `pristine`.

    What it does to the judge itself is undone at the end, and noted for `require_untouched`. What
    is used at the end is taken before, so that it cannot be replaced in between.
    """
    note_adapter(attribute(original_of(implementation), "call"))
    look, code, note = new_changes, new_changes.__code__, _note
    with pristine():
        found, around = _changes_before(), Surroundings(of_many=True)
        try:
            yield
        finally:
            look.__code__ = code
            note(implementation, look(found), around.put_back())


# What was replaced when the judge looked first, in a process in which no test replaces something in
# between.
_first_look: list[Changes] = []


def _changes_before() -> Changes:
    """Return what others than judged code have replaced, as found now or at the first look.

    A look takes a millisecond. Only tests, and programs that call `check` more than once, replace
    something later.
    """
    if not _first_look or "_pytest" in sys.modules:
        _first_look[:] = [changes()]
    return _first_look[0]


def look_again() -> None:
    """Let the next look be the first one."""
    _first_look.clear()


def require_untouched(implementation: object) -> None:
    """Raise a Violation if this implementation changes for everybody what the judge relies on.

    Once it has, also earlier, nothing that it returns can be trusted. What was changed before the
    judge started does not count.
    """
    _note(implementation, {}, [])
    require_never_touched(implementation)


def require_never_touched(implementation: object) -> None:
    """Raise a Violation if that was found earlier."""
    if id(implementation) in _changed:
        _, what = _changed[id(implementation)]
        raise Violation(f"the call {what}, for everybody", family="STA")


def _note(implementation: object, replaced: Changes, others: list[str]) -> None:
    """Undo what the implementation has replaced, and remember it with what else it did."""
    for change in replaced.values():
        change.undo()
    deeds = [put_back()]
    if replaced:
        deeds.append(f"replaced {', '.join(sorted(replaced)[:MOST])}")
    what = " and ".join(filter(None, [*deeds, *others]))
    if what:
        _changed.setdefault(id(implementation), (implementation, what))
