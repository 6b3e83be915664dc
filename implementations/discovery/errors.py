"""The errors of finding, loading and adapting implementations, and the words of messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# What code does that raises KeyboardInterrupt by itself.
INTERRUPTED = "it raised KeyboardInterrupt, as if someone had stopped the run"


class ImplementationError(ValueError):
    """An implementation cannot be found, loaded or adapted; the message says what to do.

    >>> from mha.implementations import resolve
    >>> resolve("no_such_file.py:Attention")
    Traceback (most recent call last):
    mha.implementations.discovery.errors.ImplementationError: there is no file 'no_such_file.py'
    """


class UnavailableError(ImplementationError):
    """An implementation lacks something optional, such as a package or a device.

    It is raised while the implementation is imported. `mha list` shows the message, and a run of
    all implementations leaves it out without failing.

    >>> raise UnavailableError("needs triton: pip install triton")
    Traceback (most recent call last):
    mha.implementations.discovery.errors.UnavailableError: needs triton: pip install triton
    """


class UnsupportedCallError(ImplementationError):
    """An adapter cannot express a call, or a configuration, in the conventions of what it adapts.

    The judge asks for none that is claimed. Of others it asks whether they are refused; then the
    adapter's refusal counts for nothing.

    >>> raise UnsupportedCallError("MyAttention takes no causal flag")
    Traceback (most recent call last):
    mha.implementations.discovery.errors.UnsupportedCallError: MyAttention takes no causal flag
    """


def one_line(error: BaseException) -> str:
    """Return the message of an exception as one line; of more than 300 characters, both ends.

    >>> one_line(ValueError("no rope:\\n    odd width"))
    'no rope: odd width'
    """
    try:
        line = " ".join(str(error).split())
        return line if len(line) <= 300 else f"{line[:147]} ... {line[-148:]}"
    except Exception:  # it may have a message that cannot be made
        return "an exception without a message"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return what to add to a message about a name that is not known; "" where none is near.

    >>> did_you_mean("lop", ["loop", "einops"])
    '; did you mean loop?'
    """
    near = get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(near)}?" if near else ""
