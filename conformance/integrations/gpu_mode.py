"""GPU MODE's problems: a `check_implementation(data, output) -> (bool, str)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mha.conformance.integrations.reading import Reading
from mha.spec.claims import Claims

Check = Callable[[Any, Any], tuple[bool, str]]


def check_implementation(read: Callable[[Any], Reading], claims: Claims) -> Check:
    """Return a check for the `reference.py` of a problem.

    read: what the data of the problem, as `generate_input` returns them, say about the call.
    claims: what a submission must do.

    >>> import torch
    >>> claims = Claims(projections=False, returns_weights=False)
    >>> check = check_implementation(lambda data: Reading(data), claims)
    >>> x = torch.ones(1, 1, 2, 4)
    >>> check((x, x, x), x), check((x, x, x), 0 * x)[0]
    ((True, ''), False)
    """

    def check(data: Any, output: Any) -> tuple[bool, str]:
        verdict = read(data).judge(output, claims)
        if verdict.ok:
            return True, ""
        return False, verdict.text

    return check
