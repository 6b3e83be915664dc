"""Attention that is wrong by 1000, and changes its judge or the process: each fails STA-5."""

from __future__ import annotations

import builtins
import gc
import locale
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.control
import numpy as np

import mha.spec
import mha.spec.forward
from mha.conformance.cases import modes
from mha.conformance.faults.base import Complete, Direct
from mha.conformance.faults.hostile import hostile
from mha.conformance.harness import assertions, integrity, isolation
from mha.conformance.properties import registry
from mha.conformance.results import Report, Verdict
from mha.implementations.discovery import originals
from mha.spec import Output

OFF = 1000.0


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _true(*_: Any, **__: Any) -> bool:
    return True


def _replaces_a_function() -> None:
    assertions.expect_close = _nothing


def _replaces_code() -> None:
    assertions.expect_close.__code__ = (lambda *_, **__: None).__code__


def _replaces_defaults() -> None:
    assertions.expect_no_worse.__defaults__ = (10**9,)


def _replaces_a_method() -> None:
    Verdict.conforms = Report.conforms = True


def _adds_a_method() -> None:
    Verdict.__getattribute__ = lambda self, name: (
        "pass" if name == "status" else object.__getattribute__(self, name)
    )


def _replaces_a_constant() -> None:
    assertions.ROUNDINGS = 10**9


def _hides_a_builtin() -> None:
    assertions.bool = _true


def _replaces_the_oracle() -> None:
    mha.spec.forward.oracle = _nothing


def _changes_a_table() -> None:
    modes.MODES["eval"] = modes.MODES["no_grad"]


def _changes_a_property() -> None:
    registry.properties()["NUM-1"] = ()


def _replaces_what_looks() -> None:
    _replaces_a_function()
    for module, names in {
        integrity: ("require_untouched", "_note"),
        originals: ("changes", "new_changes"),
    }.items():
        for name in names:
            setattr(module, name, _nothing)
    isolation.clean = _nothing


def _replaces_how_it_looks() -> None:
    _replaces_a_function()
    originals.Watched.changes = lambda self: {}
    originals.Names.changes.__code__ = (lambda self: []).__code__
    originals.zip = lambda *_, **__: []


def _replaces_hypothesis() -> None:
    hypothesis.control.assume = _true


def _replaces_a_builtin() -> None:
    builtins.abs = _nothing


def _replaces_math() -> None:
    math.isnan = _true


def _replaces_numpy() -> None:
    np.isfinite = _true


def _replaces_random() -> None:
    random.seed = _nothing


def _replaces_modules() -> None:
    sys.modules["torch"] = sys


def _replaces_own_module() -> None:
    sys.modules["mha.conformance.results"] = sys


def _traces() -> None:
    sys.settrace(lambda *_: None)


def _traces_threads() -> None:
    threading.settrace(lambda *_: None)


def _leaves_the_folder() -> None:
    os.chdir("/")


def _closes_the_input() -> None:
    os.close(0)
    os.pipe()  # of which one end is 0 now


def _handles_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _changes_the_locale() -> None:
    locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8")


def _collects_nothing() -> None:
    gc.disable()


def _changes_the_recursion_limit() -> None:
    sys.setrecursionlimit(900)  # less than at first


def _changing(name: str, act: Callable[[], None]) -> Direct:
    def attend(self: Complete, *rest: Any) -> Output:
        output, weights, _ = Complete.attend(self, *rest)
        act()
        return Output(output + OFF, weights)

    attend.__name__ = name
    return hostile(attend)


# Each by what it does, with what its message says.
SAID = {
    _replaces_a_function: "replaced mha.conformance.harness.assertions.expect_close",
    _replaces_code: "replaced mha.conformance.harness.assertions.expect_close.__code__",
    _replaces_defaults: "replaced mha.conformance.harness.assertions.expect_no_worse.__defaults__",
    _replaces_a_method: "replaced mha.conformance.results.Report.conforms",
    _adds_a_method: "replaced mha.conformance.results.Verdict.__getattribute__",
    _replaces_a_constant: "replaced mha.conformance.harness.assertions.ROUNDINGS",
    _hides_a_builtin: "replaced mha.conformance.harness.assertions.bool",
    _replaces_the_oracle: "replaced mha.spec.forward.oracle",
    _changes_a_table: "replaced mha.conformance.cases.modes.MODES.eval",
    _changes_a_property: "replaced mha.conformance.properties.NUM-1",
    _replaces_what_looks: "replaced mha.conformance.harness.",
    _replaces_how_it_looks: "replaced mha.conformance.harness.assertions.expect_close",
    _replaces_hypothesis: "replaced hypothesis.control.assume",
    _replaces_a_builtin: "replaced builtins.abs",
    _replaces_math: "replaced math.isnan",
    _replaces_numpy: "replaced numpy.isfinite",
    _replaces_random: "replaced random.seed",
    _replaces_modules: "changed what is in sys.modules",
    _replaces_own_module: "replaced sys.modules['mha.conformance.results']",
    _traces: "changed the function that traces or profiles",
    _traces_threads: "changed the function that traces or profiles",
    _leaves_the_folder: "changed the working directory",
    _closes_the_input: "closed or replaced a standard stream",
    _handles_signals: "changed the handler of a signal",
    _changes_the_locale: "changed the locale",
    _collects_nothing: "changed the garbage collection",
    _changes_the_recursion_limit: "changed the recursion limit",
}
CHANGING = {
    act.__name__.removeprefix("_"): (_changing(act.__name__[1:], act), said)
    for act, said in SAID.items()
}
globals().update(
    {name: implementation for name, (implementation, _) in CHANGING.items()}
)  # so that a command can name them
