"""A failure as a script that imports torch and the author's own code, and nothing else.

What reached that code is written: the arguments of the constructor, the state that was loaded,
those of each call. The script is run here before it is shown, and is taken back where it does not
fail as the judge saw it fail.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch

from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep
from mha.conformance.harness.session import Session
from mha.conformance.scripts.calls import Writer
from mha.conformance.scripts.kernel import KernelWriter
from mha.conformance.scripts.literals import assertion_lines, refused
from mha.conformance.scripts.module import ModuleWriter
from mha.conformance.scripts.redrawn import redrawn
from mha.conformance.scripts.terms import Imports, InexpressibleError
from mha.implementations.adapters.calling import CallByName
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.discovery.resolve import original_of
from mha.implementations.process.pristine import as_found
from mha.implementations.process.torch_state import preserved

# What the names of inputs of a call, and of weights before the kernel, begin with in a script.
OF_INPUTS = (
    *("query_", "key_", "value_", "mask_", "upstream_"),
    *("w_q", "w_k", "w_v", "b_q", "b_k", "b_v"),
)
# That of a script which is run here.
NAME = "<script>"


def plain_script(session: Session, violation: Violation, target: str) -> tuple[Imports, list[str]]:
    """Return what a script imports of the author's code, and its lines after the imports.

    Raises InexpressibleError where it would need more than that, or would not fail as the judge saw
    it fail.
    """
    for make in _writers(session, violation, target):
        writer = make()
        try:
            lines = _body(writer, session, violation)
        except InexpressibleError:
            raise
        except Exception as error:  # the author's code may do anything the second time
            raise InexpressibleError(
                f"{type(error).__name__} where its steps are taken again"
            ) from error
        if _fails_alike(session, violation, writer.imports, lines):
            return writer.imports, lines
    raise InexpressibleError("the failure is not seen without its adapter")


def _writers(session: Session, violation: Violation, target: str) -> Iterator[Callable[[], Writer]]:
    """Yield what makes the writers of a script, the one of the shortest script first."""
    original = original_of(session.implementation)
    if session.case.ranks:
        raise InexpressibleError("the ranks are set up by it")
    if not isinstance(original, ModuleImplementation | KernelImplementation):
        raise InexpressibleError("the implementation is written against mha.spec")
    if not isinstance(original.call, CallByName):
        raise InexpressibleError("its declaration calls it with a function of its own, call=...")
    given = session, violation.assertion, target
    if isinstance(original, ModuleImplementation):
        yield lambda: ModuleWriter(*given)
        yield lambda: ModuleWriter(*given, careful=True)
        return
    if _shows_output_alone(session, violation):
        yield lambda: KernelWriter(*given, heads_alone=True)
    yield lambda: KernelWriter(*given)
    yield lambda: KernelWriter(*given, careful=True)


def _shows_output_alone(session: Session, violation: Violation) -> bool:
    """Return whether a failure is of one call, whose output, weights or error show it."""
    if any(isinstance(step, DeriveStep) for step in session.steps):
        return False
    calls = [step for step in session.steps if isinstance(step, CallStep)]
    if len(calls) != 1 or calls[0].upstream is not None:
        return False
    assertion = "\n".join(violation.assertion)
    return not any(name in assertion for name in OF_INPUTS)


def _body(writer: Writer, session: Session, violation: Violation) -> list[str]:
    """Return the lines of a script after its imports."""
    drawn: list[str] = []
    if not getattr(writer, "heads_alone", False):
        drawn = redrawn(session, writer.names)
    lines: list[str] = []
    for step in session.steps:
        of_step = writer.lines(step)
        if violation.must_raise and step is session.steps[-1]:
            of_step = refused(of_step, step.number, builds=isinstance(step, BuildStep))
        lines += of_step
    failing = assertion_lines(violation, writer.assertion_lines())
    return [*drawn, *writer.open_lines(), *lines, *failing]


def _fails_alike(
    session: Session, violation: Violation, imports: Imports, lines: Sequence[str]
) -> bool:
    """Return whether the lines fail as the session did: by the assertion, or the same error."""
    expected = type(violation.error) if isinstance(violation, CallRaised) else AssertionError
    names: dict[str, Any] = {
        "torch": torch,
        "tensor": torch.tensor,
        "inf": torch.inf,
        "nan": torch.nan,
    }
    names |= _standard() | imports.values
    try:
        code = compile("\n".join(lines), NAME, "exec")
        with judging(session.implementation), preserved(), as_found(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            exec(code, names)
    except (Exception, SystemExit) as error:
        in_assertion = _line_of(error) > len(lines) - len(violation.assertion)
        return type(error) is expected and in_assertion == bool(violation.assertion)
    return False


def _line_of(error: BaseException) -> int:
    """Return the line of a script that an error ended."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == NAME:
            return frame.lineno or 0
    return 0


def _standard() -> dict[str, Any]:
    """Return the modules of Python that a script may use, by their names."""
    import base64
    import copy
    import io
    import types
    import zlib

    return {module.__name__: module for module in (base64, copy, io, types, warnings, zlib)}
