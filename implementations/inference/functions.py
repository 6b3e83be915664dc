"""The functions of torch that a module calls, as trial runs see them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.overrides import TorchFunctionMode

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import outputs_of

# What functions of torch do in a layer of attention, where its outputs are not those of attention
# alone.
TURNING = frozenset({"cos", "sin", "polar", "view_as_complex"})
NORMALISING = frozenset({"normalize", "rms_norm", "layer_norm"})
# Of norms that are written out.
ROOTS = frozenset({"rsqrt", "sqrt", "norm", "std", "var"})


class CalledFunctions(TorchFunctionMode):
    """Records the names of the functions of torch that are called.

    left_out: those that return their first argument instead.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.left_out = left_out

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.names.add(name)
        return args[0] if name in self.left_out else function(*args, **(kwargs or {}))


def functions_of(candidate: Candidate) -> frozenset[str]:
    """Return the names of the functions of torch that are called to build it and to call it."""
    with CalledFunctions() as functions:
        outputs_of(candidate)
    return frozenset(functions.names)
