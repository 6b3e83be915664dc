"""The registry of faults: every fault in one order, and implementations by class name."""

from __future__ import annotations

from importlib import import_module

from mha.conformance.faults.base import (
    PARAMETERS,
    Complete,
    Correct,
    complete,
    correct,
    implementation_of,
)
from mha.conformance.faults.fault import Fault, declared
from mha.spec import CLAUSES, Implementation

__all__ = [
    "FAULTS",
    "MODULES",
    "PARAMETERS",
    "Complete",
    "Correct",
    "Fault",
    "complete",
    "correct",
    "implementation_of",
    "implementations",
]

# Every module that declares faults.
MODULES = (
    "accuracy",
    "alibi",
    "caches",
    "caps",
    "causal",
    "chunks",
    "composition",
    "configuration",
    "decoding",
    "decoding_options",
    "directed",
    "directed_variants",
    "dropout",
    "float8",
    "gradients",
    "heads",
    "layers",
    "lengths",
    "long_rows",
    "lse",
    "merges",
    "mask_edges",
    "masks",
    "memory",
    "options",
    "packing",
    "paths",
    "positions",
    "reported",
    "repeats",
    "requested_gradients",
    "scores",
    "shapes",
    "sharding",
    "sharding_edges",
    "sharding_in_half",
    "sinks",
    "sizes",
    "softmax",
    "state",
    "symmetries",
    "tutorials",
    "variants",
    "windows",
)


def _order(fault: Fault) -> tuple[int, str]:
    """Sort by clause, then by module; a module's faults stay in the order of declaration.

    The lowest of several decorators on a class declares first.
    """
    return list(CLAUSES).index(fault.clause), fault.cls.__module__


for _module in MODULES:
    import_module(f"mha.conformance.faults.{_module}")
FAULTS: tuple[Fault, ...] = tuple(sorted(declared, key=_order))
implementations: dict[str, Implementation] = {fault.name: fault.implementation for fault in FAULTS}
