"""The faults: classes that are wrong in one way, beside the clause that must catch each."""

from __future__ import annotations

from typing import NamedTuple

import faulty
from correct import PARAMETERS, Correct
from mha.implementations import from_module
from mha.spec import Claims, Implementation

__all__ = ["FAULTS", "PARAMETERS", "Correct", "Fault", "correct", "implementation_of", "implementations"]


class Fault(NamedTuple):
    """A faulty class, the section of the gallery that it is from, and the clause that names its defect."""

    cls: type[Correct]
    section: str
    clause: str
    dtype: str = "float32"


FAULTS = (
    Fault(faulty.Unscaled, "arithmetic", "SMX-6"),
    Fault(faulty.ScaledByModelWidth, "arithmetic", "SMX-6"),
    Fault(faulty.ScaleInSinglePrecision, "arithmetic", "NUM-2", "float64"),
    Fault(faulty.SoftmaxOverQueries, "arithmetic", "SMX-2"),
    Fault(faulty.MaskAfterSoftmax, "arithmetic", "SMX-1"),
    Fault(faulty.NoMaximumTakenOff, "arithmetic", "SMX-4"),
    Fault(faulty.HeadsByViewAlone, "heads", "HED-1"),
    Fault(faulty.HeadsReversed, "heads", "HED-1"),
    Fault(faulty.FirstHeadForAll, "heads", "HED-2"),
    Fault(faulty.PolarityReversed, "masks", "MSK-1"),
    Fault(faulty.MaskOfFirstItem, "masks", "MSK-6"),
    Fault(faulty.LastKeyNeverMasked, "masks", "MSK-7"),
    Fault(faulty.FiniteFill, "masks", "MSK-8"),
    Fault(faulty.NanInEmptyRow, "masks", "MSK-8"),
    Fault(faulty.EmptyRowSpoilsItem, "masks", "MSK-9"),
    Fault(faulty.IntegerMaskAsBoolean, "masks", "MSK-12"),
    Fault(faulty.EmptyUnderCausal, "masks", "MSK-8"),
    Fault(faulty.CausalMaskOfFirstCall, "masks", "MSK-6"),
    Fault(faulty.HeadMaskIgnoredWithoutQueries, "masks", "MSK-5"),
    Fault(faulty.CausalOffByOne, "masks", "CAU-2"),
    Fault(faulty.CausalFromTheRight, "masks", "CAU-3"),
    Fault(faulty.CausalForgottenBesideMask, "masks", "CAU-4"),
    Fault(faulty.LaterGradientLeaks, "gradients", "CAU-5"),
    Fault(faulty.ForgetsMemory, "state", "EQV-8"),
    Fault(faulty.ScalesQueryInPlace, "state", "NUM-1"),
    Fault(faulty.DependsOnBatchSize, "state", "EQV-1"),
    Fault(faulty.ReadsOtherItems, "state", "EQV-1"),
    Fault(faulty.DropsKeyAfterTile, "sizes", "NUM-1"),
    Fault(faulty.SqueezesBatchOfOne, "sizes", "SHP-4"),
    Fault(faulty.ReadsMemoryAsDense, "layouts", "SHP-7"),
    Fault(faulty.BatchOfKeysBroadcast, "shapes", "SHP-6"),
    Fault(faulty.NoValidation, "configuration", "CFG-1"),
    Fault(faulty.RefusesHeadsOfWidthOne, "configuration", "CFG-4"),
    Fault(faulty.MeanOfValues, "cheats", "SMX-2"),
    Fault(faulty.RepeatsItself, "cheats", "EQV-2"),
)


def implementation_of(cls: type[Correct]) -> Implementation:
    """Return a class of this file as an implementation with the default claims."""
    return from_module(cls, name=cls.__name__, parameters=PARAMETERS, claims=Claims())


correct = implementation_of(Correct)
implementations = {fault.cls.__name__: implementation_of(fault.cls) for fault in FAULTS}
# A failure's script imports what was judged by its name in its module.
globals().update({f"faulty_{name}": implementation for name, implementation in implementations.items()})
