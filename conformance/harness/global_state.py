"""Global state: what a call must leave as it was. It is read here, compared, and put back."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

import torch

from mha.conformance.cases.case import Case
from mha.conformance.harness.errors import CALL, AdapterError, Violation
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import attributed
from mha.conformance.harness.session import Session
from mha.spec import Implementation, Problem


class Setting(NamedTuple):
    """A part of the global state: how it is read, and how it is set; shown: whether its value fits in a message."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    shown: bool = True


@dataclass(frozen=True)
class GlobalState:
    """The value of each of the `SETTINGS` at one moment, the filters of warnings, and the names of loaded modules."""

    values: dict[str, Any]
    filters: list[Any]
    modules: frozenset[str]

    @staticmethod
    def read() -> GlobalState:
        """Return the state as it is now."""
        return GlobalState(_values(), list(warnings.filters), frozenset(sys.modules))

    def changes(self) -> list[str]:
        """Return a description of each change since this state was read."""
        now = GlobalState.read()
        changed = [
            f"{name} from {value} to {now.values[name]}" if SETTINGS[name].shown else name
            for name, value in self.values.items()
            if now.values[name] != value
        ]
        # A filter for warnings of a module that was not loaded before says nothing about any other warning.
        filters = [each for each in now.filters if each in self.filters or each[2].__module__ in self.modules]
        imported = warnings.filters.imported if isinstance(warnings.filters, WatchedFilters) else []
        kept = ([each for each in both if each not in imported] for both in (filters, self.filters))
        return changed if next(kept) == next(kept) else [*changed, "the warnings filter"]


class WatchedFilters(list[Any]):
    """The filters of warnings; those that are added while a module is imported are `imported`.

    An import may add some wherever it stands: torch imports SymPy in the first call of flex_attention.
    """

    def __init__(self, filters: Iterable[Any]) -> None:
        super().__init__(filters)
        self.imported: list[Any] = []
        self._outside = sys._getframe(1)

    def insert(self, index: SupportsIndex, each: Any) -> None:
        """Add a filter, as `warnings.filterwarnings` does."""
        self._note(each)
        super().insert(index, each)

    def append(self, each: Any) -> None:
        """Add a filter, as `warnings.filterwarnings` does with append=True."""
        self._note(each)
        super().append(each)

    def _note(self, each: Any) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._outside:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                self.imported.append(each)
                return
            frame = frame.f_back


@contextmanager
def preserved() -> Iterator[None]:
    """Put global state back at the end of the block, so that no case depends on those before it."""
    before = _values()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, value in before.items():
            if SETTINGS[name].read() != value:
                SETTINGS[name].write(value)


def changes_of_call(session: Session, problem: Problem) -> list[str]:
    """Call the attention of a problem once; return what it changed, which is put back. Raises CallRaised."""
    called = session.built(problem).attention  # a construction may draw random numbers
    with preserved():
        torch.set_flush_denormal(False)
        # Warnings decide nothing. A plain "ignore" filter would hide that the call adds the same.
        warnings.filterwarnings("ignore", message=".*")
        warnings.filters = WatchedFilters(warnings.filters)
        before = GlobalState.read()
        with attributed(CALL):
            called(problem.query, problem.key, problem.value, mask=problem.mask, is_causal=problem.is_causal)
        return before.changes()


# By implementation, dtype and device: what the first call changed. The implementation is kept alive so that its id is
# not used again.
_first_calls: dict[tuple[int, str, str], tuple[Implementation, list[str]]] = {}


def observe_first_call(implementation: Implementation, case: Case) -> None:
    """Make the first call of an implementation in this process, if it has had none in the dtype and on the device.

    Later calls do not show what only the first one changes, so STA-5 would depend on what was judged before it.
    """
    key = id(implementation), case.dtype, case.device
    if key not in _first_calls:
        _first_calls[key] = implementation, []
        with preserved(), suppress(Violation, AdapterError):  # what a call raises is for the properties to find
            _first_calls[key] = implementation, changes_of_call(Session(implementation, case), case.problem())
            require_untouched(implementation)


def changes_of_first_call(implementation: Implementation, case: Case) -> list[str]:
    """Return what the first call in this dtype and on this device changed; nothing if it was not observed."""
    _, changes = _first_calls.get((id(implementation), case.dtype, case.device), (implementation, []))
    return changes


def _values() -> dict[str, Any]:
    return {name: setting.read() for name, setting in SETTINGS.items()}


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _subnormals() -> str:
    return "kept" if (torch.full((1,), 1e-39, dtype=torch.float32, device="cpu") * 1).item() else "flushed to 0"


def _sdpa_backends() -> tuple[bool, bool, bool]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()


def _set_sdpa_backends(enabled: tuple[bool, bool, bool]) -> None:
    cuda = torch.backends.cuda
    for enable, value in zip(
        (cuda.enable_flash_sdp, cuda.enable_math_sdp, cuda.enable_mem_efficient_sdp), enabled, strict=True
    ):
        enable(value)


SETTINGS = {
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": Setting(torch.get_default_device, _set_default_device),
    "the gradient mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's random state": Setting(
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        shown=False,
    ),
    "Python's random state": Setting(random.getstate, random.setstate, shown=False),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "the handling of subnormal numbers": Setting(
        _subnormals, lambda handling: torch.set_flush_denormal(handling != "kept")
    ),
    "the deterministic flag": Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the precision of float32 products": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the SDPA backends": Setting(_sdpa_backends, _set_sdpa_backends),
}
