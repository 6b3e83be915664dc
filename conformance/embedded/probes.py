"""Probes around a call: what kernels do that no comparison of one result shows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mha.conformance.embedded.state import put_back, settings

# What is wrong: the clause that it violates, and the facts.
Problem = tuple[str, str]
# Torch replaces these itself, when the default dtype changes or something is compiled.
REPLACED_BY_TORCH = ("manual_seed", "Storage")
# So many blocks of memory are filled before a call, so that one of them becomes its output.
POISONED = 4


def _functions(owner: Any) -> dict[str, object]:
    """Return the functions of a module or a class, by name."""
    found: dict[str, object] = {}
    for name, value in vars(owner).items():
        if callable(value) and name not in REPLACED_BY_TORCH and not isinstance(value, ModuleType):
            found[name] = value
    return found


def _owners() -> dict[str, Any]:
    """Return what holds functions that a judge relies on: torch's, and the judge's own."""
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": Tensor,
        "torch.nn.functional": torch.nn.functional,
        "torch.linalg": torch.linalg,
        "torch.testing": torch.testing,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith(("mha.spec", "mha.conformance.embedded")):
            owners[name] = module
    return owners


@dataclass(frozen=True, eq=False)
class Functions:
    """The functions of torch and of the judge as they are at one time.

    codes: those of the functions in Python, which can be replaced within them.
    """

    found: dict[str, dict[str, object]]
    codes: dict[str, dict[str, CodeType]]

    @classmethod
    def now(cls) -> Functions:
        """Return them as they are."""
        found = {name: _functions(owner) for name, owner in _owners().items()}
        codes: dict[str, dict[str, CodeType]] = {}
        for owner, functions in found.items():
            own = codes.setdefault(owner, {})
            for name, value in functions.items():
                if isinstance(value, FunctionType):
                    own[name] = value.__code__
        return cls(found, codes)

    def put_back(self) -> list[str]:
        """Undo what others have replaced since; return the names."""
        names = []
        owners, now = _owners(), Functions.now()
        for owner, before in self.found.items():
            functions, codes = now.found.get(owner, {}), now.codes.get(owner, {})
            for name, value in before.items():
                code = self.codes[owner].get(name)
                if functions.get(name) is not value:
                    setattr(owners[owner], name, value)
                elif codes.get(name) is code:
                    continue
                if isinstance(value, FunctionType) and code is not None:
                    value.__code__ = code
                names.append(f"{owner}.{name}")
        return names


@dataclass(frozen=True, eq=False)
class Watched:
    """A tensor that is given to a kernel, and all of it that a call must leave alone."""

    name: str
    tensor: Tensor
    copy: Tensor
    version: int
    place: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Watched:
        """Note a tensor."""
        copy = tensor.detach().clone()
        return cls(name, tensor, copy, tensor._version, _place(tensor))

    def problems(self) -> Iterator[Problem]:
        """Yield how the tensor has changed."""
        if _place(self.tensor) != self.place:
            yield "STA-1", f"the call changed the storage, shape or strides of {self.name}"
        elif not same_bits(self.tensor, self.copy):
            yield "STA-1", f"the call wrote into {self.name}"
        elif self.tensor._version != self.version:
            yield "STA-1", f"the call wrote into {self.name}, and put it back"


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal numbers, where NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


@dataclass(eq=False)
class Watch:
    """The process around one call: its tensors, threads and settings, and torch's functions.

    functions: those of torch and the judge, as they should be.
    """

    functions: Functions
    tensors: Sequence[Watched]
    threads: set[int] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=settings)

    def __post_init__(self) -> None:
        """Note the threads that run."""
        self.threads = {thread.ident or 0 for thread in threading.enumerate()}

    def problems(self) -> Iterator[Problem]:
        """Yield what the call has done beside its result."""
        replaced = self.functions.put_back()
        if replaced:
            yield "STA-5", f"the call replaced {', '.join(replaced[:3])}, for everybody"
        changed = put_back(self.settings)
        if changed:
            yield "STA-5", f"the call changed {', '.join(changed)}, for everybody"
        left = [t.name for t in threading.enumerate() if (t.ident or 0) not in self.threads]
        if left:
            yield "STA-5", f"the call left {len(left)} threads running: {', '.join(left[:3])}"
        for watched in self.tensors:
            yield from watched.problems()


def poison(like: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
    """Fill memory that the call may get for its results with NaN, and give it back."""
    filled = []
    for shape, dtype in like:
        for _ in range(POISONED):
            filled.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
    del filled


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill all memory that it hands out with NaN; its settings are as before afterwards.

    That is a part of its deterministic mode, which only warns here.
    """
    # `torch.use_deterministic_algorithms` imports the compiler, which takes seconds.
    before = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(before)


def of_result(name: str, result: object, inputs: Sequence[Tensor], most: int) -> Iterator[Problem]:
    """Yield what is wrong with a result, its numbers aside: its type and its memory.

    most: how many numbers it may have.
    """
    if not isinstance(result, Tensor):
        yield "SHP-1", f"the {name} is {type(result).__name__}, not a tensor"
        return
    if type(result) is not Tensor:
        yield "SHP-1", f"the {name} is a {type(result).__name__}, not a plain tensor"
        return
    if result.layout is not torch.strided:
        yield "SHP-1", f"the {name} is a tensor of layout {result.layout}, not a dense one"
        return
    if result.device != inputs[0].device:
        yield "SHP-3", f"the {name} is on {result.device}, but the query on {inputs[0].device}"
        return
    if result.numel() > most:
        yield "SHP-1", f"the {name} has the shape {tuple(result.shape)}"
        return
    if not result.numel():
        return
    memory = result.untyped_storage().data_ptr()
    if any(memory == each.untyped_storage().data_ptr() for each in inputs):
        yield "STA-2", f"the {name} shares memory with an input"


def is_plain(result: object, device: torch.device, most: int) -> bool:
    """Return whether a result is a dense tensor of torch's own class, and no larger than this."""
    if type(result) is not Tensor or result.layout is not torch.strided:
        return False
    return result.device.type == device.type and result.numel() <= most


def synchronise(device: torch.device) -> None:
    """Wait for what a call has started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
