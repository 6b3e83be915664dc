"""The gallery: classes that are wrong in one way, beside the clause that must catch each."""

from __future__ import annotations

import gallery_behaviour
import gallery_results
import tutorials
from fault import Fault

__all__ = ["FAULTS", "Fault"]

TUTORIALS = (
    Fault(tutorials.Vectorized, "tutorials", "MSK-8"),
    Fault(tutorials.Minimal, "tutorials", "MSK-9"),
    Fault(tutorials.Modular, "tutorials", "NUM-2", "float64"),
    Fault(tutorials.Einops, "tutorials", "SMX-6"),
    Fault(tutorials.FusedQKV, "tutorials", "MSK-1"),
)
FAULTS = (*gallery_results.FAULTS, *gallery_behaviour.FAULTS, *TUTORIALS)
