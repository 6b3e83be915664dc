"""Global state that a call must leave as it was: it is read, compared, and put back."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, SupportsIndex

import torch

from mha.conformance.cases.case import Case
from mha.conformance.harness.errors import CALL, AdapterError, GpuLost, Violation
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import attributed
from mha.conformance.harness.session import Session
from mha.implementations.discovery.loaded import attribute, module_named
from mha.implementations.process.pristine import as_found
from mha.implementations.process.torch_state import SETTINGS, preserved, settings
from mha.spec import Implementation, Problem


@dataclass(frozen=True)
class GlobalState:
    """The global state at one moment.

    values: of each of the `SETTINGS`.
    filters: of warnings.
    modules: the names of loaded ones.
    numpy_state: NumPy's global random state, None until NumPy is loaded.
    """

    values: dict[str, Any]
    filters: list[Any]
    modules: frozenset[str]
    numpy_state: bytes | None

    @staticmethod
    def read() -> GlobalState:
        """Return the state as it is now."""
        get_state = attribute(module_named("numpy.random"), "get_state")
        numpy_state = pickle.dumps(get_state()) if callable(get_state) else None
        return GlobalState(settings(), list(warnings.filters), frozenset(sys.modules), numpy_state)

    def changes(self) -> list[str]:
        """Return a description of each change since this state was read."""
        now, changed = GlobalState.read(), list[str]()
        for name, value in self.values.items():
            if now.values[name] == value:
                continue
            if SETTINGS[name].shown:
                changed.append(f"{name} from {value} to {now.values[name]}")
            else:
                changed.append(name)
        if self.numpy_state not in (None, now.numpy_state):
            changed.append("NumPy's random state")
        if self._own_filters(now.filters) != self._own_filters(self.filters):
            changed.append("the warnings filter")
        return changed

    def _own_filters(self, filters: list[Any]) -> list[Any]:
        """Return the filters without those that imports add.

        A filter for warnings of a module that was not loaded before says nothing about any other
        warning.
        """
        imported = list[Any]()
        if isinstance(warnings.filters, WatchedFilters):
            imported = warnings.filters.imported
        kept = list[Any]()
        for each in filters:
            is_known = each in self.filters or each[2].__module__ in self.modules
            if is_known and each not in imported:
                kept.append(each)
        return kept


class WatchedFilters(list[Any]):
    """The filters of warnings; those that are added while a module is imported are `imported`.

    An import may add some wherever it stands: torch imports SymPy in the first call of
    flex_attention.
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


def changes_of_call(session: Session, problem: Problem) -> list[str]:
    """Call the attention of a problem once; return what it changed, which is put back.

    Raises CallRaised.
    """
    called = session.built(problem).attention  # a construction may draw random numbers
    problem = session.given.problem(problem)
    with preserved():
        torch.set_flush_denormal(False)
        # Warnings decide nothing. A plain "ignore" filter would hide that the call adds the same.
        warnings.filterwarnings("ignore", message=".*")
        warnings.filters = WatchedFilters(warnings.filters)
        with as_found():
            before = GlobalState.read()
            with attributed(CALL):
                problem.call(called)
            return before.changes()


RANDOM = ("torch's random state", "Python's random state")


def changes_of_construction(session: Session, problem: Problem) -> list[str]:
    """Build the attention of a problem; return what that changed, which is put back.

    Initial weights may be drawn, but not so that a random state is always the same afterwards.
    Raises CallRaised.
    """
    with preserved(), as_found():
        before, states = GlobalState.read(), []
        for seed in range(2):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            session.fresh(problem)
            states.append(settings())
        reset = [name for name in RANDOM if states[0][name] == states[1][name]]
        changes = [each for each in before.changes() if "random state" not in each]
        return changes + [f"{name}, to the same each time" for name in reset]


# By implementation, dtype and device: what the first call changed. The implementation is kept alive
# so that its id is not used again.
_first_calls: dict[tuple[int, str, str], tuple[Implementation, list[str]]] = {}


def observe_first_call(implementation: Implementation, case: Case) -> None:
    """Make the first call of an implementation in this process, in the dtype and on the device.

    Later calls do not show what only the first one changes, so STA-5 would depend on what was
    judged before it.
    """
    key = id(implementation), case.dtype, case.device
    if key not in _first_calls:
        _first_calls[key] = implementation, []
        try:
            # What a call raises is for the properties to find.
            with preserved(), suppress(Violation, AdapterError):
                changes = changes_of_call(Session(implementation, case), case.problem())
                _first_calls[key] = implementation, changes
                require_untouched(implementation)
        except GpuLost as lost:
            lost.case = case
            raise


def changes_of_first_call(implementation: Implementation, case: Case) -> list[str]:
    """Return what the first call in this dtype and on this device changed, if it was observed."""
    key = id(implementation), case.dtype, case.device
    _, changes = _first_calls.get(key, (implementation, []))
    return changes
