"""The gallery: classes that are wrong in one way, beside the clause that must catch each."""

from __future__ import annotations

import gallery_behaviour
import gallery_results
from fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS = (*gallery_results.FAULTS, *gallery_behaviour.FAULTS)
