"""Code of the implementation under test is run here: whatever it raises is its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mha.conformance.violation import Refusal


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn what the implementation raises into a `Refusal`; its warnings decide nothing, also where they are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (Exception, SystemExit) as error:
        raise Refusal(f"{what} raised {_told(error)}", error, what) from error


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
