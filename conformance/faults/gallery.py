"""The gallery: classes that are wrong in one way, each beside the clause that must catch it, as implementations."""

from __future__ import annotations

from torch import nn

from mha.conformance.faults import gallery_behaviour, gallery_results, tutorials
from mha.conformance.faults.complete import CLAIMS, Complete, Direct, complete
from mha.conformance.faults.correct import PARAMETERS, Correct
from mha.conformance.faults.fault import Fault
from mha.implementations import from_module
from mha.spec import Claims, Implementation

__all__ = ["FAULTS", "Complete", "Correct", "Fault", "complete", "correct", "implementation_of", "implementations"]

TUTORIALS = (
    Fault(tutorials.Vectorized, "tutorials", "MSK-8"),
    Fault(tutorials.Minimal, "tutorials", "MSK-9"),
    Fault(tutorials.Modular, "tutorials", "NUM-2", "float64"),
    Fault(tutorials.Einops, "tutorials", "SMX-6"),
    Fault(tutorials.FusedQKV, "tutorials", "MSK-1"),
)
FAULTS = (*gallery_results.FAULTS, *gallery_behaviour.FAULTS, *TUTORIALS)


def implementation_of(cls: type[nn.Module], claims: Claims | None = None) -> Implementation:
    """Return a faulty class as an implementation, with the claims of its base unless others are given."""
    if cls in tutorials.IMPLEMENTATIONS:
        return tutorials.IMPLEMENTATIONS[cls]
    if issubclass(cls, Complete):
        return Direct(cls, claims or CLAIMS)
    return from_module(cls, name=cls.__name__, parameters=PARAMETERS, claims=claims or Claims())


correct = implementation_of(Correct)
implementations = {fault.cls.__name__: implementation_of(fault.cls, fault.claims) for fault in FAULTS}
# A failure's script imports what was judged by its name in its module.
globals().update({f"faulty_{name}": implementation for name, implementation in implementations.items()})
