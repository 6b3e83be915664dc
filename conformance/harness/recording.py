"""What a session records: its steps, in order, and the tensors that came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mha.conformance.harness.plain import copied
from mha.spec import Config, Problem, Weights
from mha.spec.problem import INPUTS


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """A tensor that the implementation returned, with the expression that names it in a script.

    note_margin: called with the largest error/bound of each comparison with a bound.
    index: of the part of `name` that the tensor is; empty for the whole.
    returned: what the implementation returned, with its own memory; for comparisons there is a
        copy, which no later call changes.
    """

    tensor: Tensor
    name: str
    note_margin: Callable[[float], None]
    index: tuple[Any, ...] = ()
    returned: Tensor | None = None

    @property
    def code(self) -> str:
        """The expression: the name, and the index of a part."""
        if not self.index:
            return self.name
        return f"{self.name}[{', '.join(map(index_code, self.index))}]"

    def __getitem__(self, index: Any) -> RecordedTensor:
        part = index if isinstance(index, tuple) else (index,)
        # One index in the script for both, if there is one.
        if all(isinstance(place, int) for place in self.index):
            return replace(self, tensor=self.tensor[index], index=self.index + part)
        whole = _composed(self.index, part)
        if whole:
            return replace(self, tensor=self.tensor[index], index=whole)
        return RecordedTensor(self.tensor[index], self.code, self.note_margin, part)

    def detached(self) -> RecordedTensor:
        """Return a copy of the same tensor without its history, for comparisons."""
        return RecordedTensor(
            copied(self.tensor), self.name, self.note_margin, self.index, self.tensor
        )

    def map(self, change: Callable[[Tensor], Tensor], code: str) -> RecordedTensor:
        """Return the tensor changed; `code` is the change, with {} for the tensor."""
        return RecordedTensor(change(self.tensor), code.format(self.code), self.note_margin)

    def row_sums(self) -> RecordedTensor:
        """Return the sums over the last dimension, taken in float64."""
        return self.map(lambda x: x.double().sum(-1), "{}.double().sum(-1)")


@dataclass(frozen=True, eq=False)
class RecordedOutput:
    """What a call returned.

    output: (B, L, D).
    weights: (B, H, L, S), or None if not asked for or not returned.
    lse: (B, H, L), if it was asked for.
    """

    output: RecordedTensor
    weights: RecordedTensor | None
    lse: RecordedTensor | None = None

    def detached(self) -> RecordedOutput:
        """Return copies of the same tensors without their history, for comparisons."""
        weights = None if self.weights is None else self.weights.detached()
        lse = None if self.lse is None else self.lse.detached()
        return RecordedOutput(self.output.detached(), weights, lse)


@dataclass(frozen=True, eq=False)
class BuildStep:
    """An attention was built."""

    number: int
    config: Config
    weights: Weights


@dataclass(frozen=True, eq=False)
class DeriveStep:
    """An attention was made from another one; `code` is the expression, with {} for the origin."""

    number: int
    origin: int
    code: str


@dataclass(frozen=True, eq=False)
class CallStep:
    """An attention was called.

    build: the number of the step that made the attention.
    seed: set before the call, if any.
    upstream: what the output was multiplied by for `backward`, if anything.
    wanted: the inputs whose gradients were asked for then.
    switches: whether the call of `train()` or `eval()` was needed first.
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

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of the inputs, and of the mask, that have a gradient, wanted ones first."""
        leaves = list(self.wanted)
        for name in (*INPUTS, "mask"):
            tensor = getattr(self.problem, name)
            if tensor is not None and tensor.requires_grad and name not in leaves:
                leaves.append(name)
        return tuple(leaves)


def _composed(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the one index that selects what two do; empty if there is no simple one.

    second: with numbers alone.

    >>> _composed((0, [3, 5]), (1, 2))
    (0, 5, 2)
    """
    numbers, whole = list(second), list[Any]()
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return ()
    for place in first:
        if isinstance(place, int):
            whole.append(place)
        elif numbers and isinstance(place, list | Tensor | slice):
            whole.append(_element(place, numbers.pop(0)))
        else:
            return ()
    if None in whole:
        return ()
    return (*whole, *numbers)


def _element(places: list[int] | Tensor | slice, number: int) -> int | None:
    """Return one of the places that an index selects; None where that depends on the length."""
    if not isinstance(places, slice):
        return int(places[number])
    start = places.start or 0
    return start + number if places.step is None and start >= 0 else None


Step = BuildStep | DeriveStep | CallStep


def index_code(index: Any) -> str:
    """Return the source of an index.

    >>> index_code((0, slice(1, None), ...))
    '0, 1:, ...'
    """
    if isinstance(index, tuple):
        return ", ".join(map(index_code, index))
    if isinstance(index, slice):
        start = "" if index.start is None else index.start
        stop = "" if index.stop is None else index.stop
        return f"{start}:{stop}"
    if isinstance(index, Tensor):
        return repr(index.tolist())
    return "..." if index is Ellipsis else repr(index)
