"""The faults as implementations, beside what they are based on."""

from __future__ import annotations

import tutorials
from complete import CLAIMS, Complete, Direct, complete
from gallery import FAULTS, Fault
from torch import nn

from correct import PARAMETERS, Correct
from mha.implementations import from_module
from mha.spec import Claims, Implementation

__all__ = [
    "FAULTS",
    "PARAMETERS",
    "Complete",
    "Correct",
    "Fault",
    "complete",
    "correct",
    "implementation_of",
    "implementations",
]


def implementation_of(cls: type[nn.Module], claims: Claims | None = None) -> Implementation:
    """Return a class of these files as an implementation, with the claims of its base unless others are given."""
    if cls in tutorials.IMPLEMENTATIONS:
        return tutorials.IMPLEMENTATIONS[cls]
    if issubclass(cls, Complete):
        return Direct(cls, claims or CLAIMS)
    return from_module(cls, name=cls.__name__, parameters=PARAMETERS, claims=claims or Claims())


correct = implementation_of(Correct)
implementations = {fault.cls.__name__: implementation_of(fault.cls, fault.claims) for fault in FAULTS}
# A failure's script imports what was judged by its name in its module.
globals().update({f"faulty_{name}": implementation for name, implementation in implementations.items()})
