"""Attention that raises what would steer the judge, or the test that runs it: each must fail."""

from __future__ import annotations

import signal
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis.control import _current_build_context
from hypothesis.errors import StopTest, UnsatisfiedAssumption

from mha.conformance.faults.base import Complete, Direct
from mha.conformance.faults.hostile import hostile
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.errors import AdapterError, CallRaised, Discard, GpuLost, Violation
from mha.implementations.discovery.errors import ImplementationError, UnsupportedCallError
from mha.spec import Output

ERROR = ImplementationError("nothing is wrong")


def _raise(error: BaseException) -> None:
    raise error


class Unspeakable(Exception):
    """An exception whose message discards the case."""

    def __str__(self) -> str:
        raise Discard("nothing is wrong")


class Pretending(Exception):
    """An exception that says it is a `Discard`."""

    @property
    def __class__(self) -> Any:
        return Discard


def _invalid() -> None:
    """Tell Hypothesis, behind its back, that the case is invalid."""
    context: Any = _current_build_context.value
    if context is not None:
        context.data.mark_invalid()
    raise UnsatisfiedAssumption


# What each does, by the name of its implementation.
ACTS: dict[str, Callable[[], Any]] = {
    "discards": partial(_raise, Discard("nothing is wrong")),
    "violates": partial(_raise, Violation("nothing is wrong", family="SHP")),
    "raised_already": partial(_raise, CallRaised("nothing is wrong", ERROR)),
    "blames_its_adapter": partial(_raise, AdapterError("nothing is wrong", ERROR)),
    "loses_the_gpu": partial(_raise, GpuLost("nothing is wrong")),
    "is_no_implementation": partial(_raise, ERROR),
    "cannot_express_it": partial(_raise, UnsupportedCallError("nothing is wrong")),
    "assumes": partial(assume, False, "nothing is wrong"),
    "has_no_message": partial(_raise, Unspeakable()),
    "pretends": partial(_raise, Pretending("nothing is wrong")),
    "rejects": hypothesis.reject,
    "assumes_of_hypothesis": partial(hypothesis.assume, False),
    "stops_the_test": partial(_raise, StopTest(0)),
    "marks_invalid": _invalid,
    "skips_of_unittest": partial(_raise, unittest.SkipTest("nothing is wrong")),
    "skips": partial(pytest.skip, "nothing is wrong", allow_module_level=True),
    "fails_as_expected": partial(pytest.xfail, "nothing is wrong"),
    "ends_the_run": partial(pytest.exit, "nothing is wrong", returncode=0),
    "fails_in_pytest": partial(pytest.fail, "nothing is wrong"),
}


def _calling(name: str, act: Callable[[], Any]) -> Direct:
    def attend(self: Complete, *rest: Any) -> Output:
        act()
        return Complete.attend(self, *rest)

    attend.__name__ = name
    return hostile(attend)


RAISING = {name: _calling(name, act) for name, act in ACTS.items()}
globals().update(RAISING)  # so that a command can name them


def _discarding() -> Direct:
    class discards_when_looked_at(Complete):
        """Wrong, and discards the case as soon as its mode is looked at."""

        looked_at = False

        def attend(self, *rest: Any) -> Output:
            """Return a wrong output."""
            self.looked_at = True
            output, weights, _ = Complete.attend(self, *rest)
            return Output(output + 1000, weights)

        def __getattribute__(self, name: str) -> Any:
            if name == "training" and object.__getattribute__(self, "looked_at"):
                raise Discard("nothing is wrong")
            return super().__getattribute__(name)

    return Direct(discards_when_looked_at)


discards_when_looked_at = _discarding()


@hostile
def presses_ctrl_c(self: Complete, *rest: Any) -> Output:
    """Sends its process the signal of Ctrl-C, which nothing tells from that of the user."""
    signal.raise_signal(signal.SIGINT)
    return Complete.attend(self, *rest)
