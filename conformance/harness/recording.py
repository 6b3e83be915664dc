"""What a trial does and sees: its steps, in order, and the tensors that came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mha.spec import Config, Problem, Weights


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """A tensor that the implementation gave; `code` is the expression that names it in a script.

    note_margin: called with the largest error/bound of each comparison with a bound.
    """

    tensor: Tensor
    name: str
    note_margin: Callable[[float], None]
    index: tuple[Any, ...] = ()

    @property
    def code(self) -> str:
        """The name, and the index if it is a part."""
        return f"{self.name}[{', '.join(map(index_code, self.index))}]" if self.index else self.name

    def __getitem__(self, index: Any) -> RecordedTensor:
        part = index if isinstance(index, tuple) else (index,)
        if all(isinstance(place, int) for place in self.index):
            return replace(self, tensor=self.tensor[index], index=self.index + part)
        return RecordedTensor(self.tensor[index], self.code, self.note_margin, part)

    def detached(self) -> RecordedTensor:
        """The same without its history, for comparing."""
        return replace(self, tensor=self.tensor.detach())

    def map(self, change: Callable[[Tensor], Tensor], code: str) -> RecordedTensor:
        """The tensor changed; `code` is the change, with {} for the tensor."""
        return RecordedTensor(change(self.tensor), code.format(self.code), self.note_margin)

    def row_sums(self) -> RecordedTensor:
        """The sums over the last dimension, taken in float64."""
        return self.map(lambda x: x.double().sum(-1), "{}.double().sum(-1)")


@dataclass(frozen=True, eq=False)
class RecordedOutput:
    """What one call gave; `weights` is None where none were asked for, or none came."""

    output: RecordedTensor
    weights: RecordedTensor | None


@dataclass(frozen=True, eq=False)
class BuildStep:
    """One construction: what the implementation was built from."""

    number: int
    config: Config
    weights: Weights


@dataclass(frozen=True, eq=False)
class DeriveStep:
    """An attention made from another: `code` is the expression, with {} for the other."""

    number: int
    origin: int
    code: str


@dataclass(frozen=True, eq=False)
class CallStep:
    """One call: of which attention, with what, in which mode.

    seed: set before the call, if any. upstream: what the output was multiplied by for `backward`, and wanted: the
    names of the inputs whose gradients were asked for, if any were. switches: whether its mode was set before.
    """

    number: int
    build: int
    problem: Problem
    need_weights: bool
    mode: str
    seed: int | None = None
    upstream: Tensor | None = None
    wanted: tuple[str, ...] = ()
    switches: bool = True


Step = BuildStep | DeriveStep | CallStep


def index_code(index: Any) -> str:
    """Return an index as code."""
    if isinstance(index, tuple):
        return ", ".join(map(index_code, index))
    if isinstance(index, slice):
        bounds = ("" if bound is None else str(bound) for bound in (index.start, index.stop))
        return ":".join(bounds)
    if isinstance(index, Tensor):
        return repr(index.tolist())
    return "..." if index is Ellipsis else repr(index)
