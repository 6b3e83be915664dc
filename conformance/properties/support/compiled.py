"""Attention compiled by torch.compile or captured by torch.export, beside the eager one (CMP)."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from getpass import getuser
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOUNDED
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.support.shared_assertions import expect_backward
from mha.spec import Options, Problem

# Like "aot_eager", but without Inductor's partitioner, whose import takes half a second.
CAPTURE = "aot_eager_default_partitioner"


def expect_compiled(session: Session, case: Case, backend: str) -> None:
    """The compiled module gives the outputs of the plain one, and the gradients of the oracle.

    backend: "inductor" generates code, which takes ten seconds; `CAPTURE` only captures the graph.
    """
    problem = case.problem()
    if session.claims.dropout and case.mask != "none":  # none of it in evaluation
        problem = with_dropout(problem, 0.5)
    base = session(problem).output
    torch.compiler.reset()
    differentiable = session.claims.gradients and case.dtype in BOUNDED
    with _generated_code_hidden():
        if not differentiable:
            _expect_compiled_inference(session, problem, base, backend)
        elif backend != "inductor":
            # The graph of both passes has the forward pass; the mode makes a graph of its own,
            # which needs no backend. Inductor's code for both passes includes that of this mode.
            _expect_compiled_inference(session, problem, base, "eager")
        if differentiable:
            _expect_compiled_training(session, problem, base, backend)


def _expect_compiled_inference(
    session: Session, problem: Problem, base: RecordedTensor, backend: str
) -> None:
    """The compiled module gives the eager output without gradients, with empty rows too."""
    instance = _compiled(session, problem, backend)
    because = f"the eager output (instead of compiled with the backend {backend!r}, under no_grad)"
    output = session(problem, via=instance, mode="no_grad").output
    expect_agree(output, base, session.bound_of(problem), because=because)
    emptied = _without_keys(session, problem)
    if emptied is not None:
        eager = session(emptied).output
        output = session(emptied, via=instance, mode="no_grad").output
        because += ", where rows have no allowed key"
        expect_agree(output, eager, session.bound_of(emptied), because=because)


def _expect_compiled_training(
    session: Session, problem: Problem, base: RecordedTensor, backend: str
) -> None:
    """The compiled module gives the eager output with gradients, which are the oracle's."""
    leaves = problem.map_inputs(leaf_of)
    recorded = session.forward(leaves, via=_compiled(session, problem, backend))
    output = session.unscripted(recorded.detach(), "compiled")
    because = f"the eager output (instead of compiled with the backend {backend!r}, with gradients)"
    expect_agree(output, base, session.bound_of(problem), because=because)
    instance = session.built(problem)
    expect_backward(session, leaves, recorded, f"compiled (backend {backend!r})", instance)


def _compiled(session: Session, problem: Problem, backend: str) -> Instance:
    """Return the attention of a problem, compiled by a backend without a break of the graph."""
    return session.derive(
        session.built(problem),
        lambda module: torch.compile(module, backend=backend, fullgraph=True),
        f"torch.compile({{}}, backend={backend!r}, fullgraph=True)",
    )


def expect_generated_inference(session: Session, problem: Problem) -> None:
    """The code that Inductor generates without gradients gives the eager output."""
    base = session(problem).output
    torch.compiler.reset()
    instance = session.derive(
        session.built(problem),
        lambda module: torch.compile(module, fullgraph=True),
        "torch.compile({}, fullgraph=True)",
    )
    with _generated_code_hidden():
        output = session(problem, via=instance, mode="no_grad").output
    because = "the eager output (instead of compiled by Inductor, under no_grad)"
    expect_agree(output, base, session.bound_of(problem), because=because)


@contextmanager
def _generated_code_hidden() -> Iterator[None]:
    """Let the compiler write its modules where Hypothesis does not read them.

    Hypothesis draws constants from the user's own modules, so that later cases would depend on what
    was compiled; it skips folders named "tests". The folder is kept, like the compiler's own: its
    probe of the machine takes seconds.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        user = os.getuid() if hasattr(os, "getuid") else getuser()
        folder = str(Path(gettempdir(), f"mha_conformance_{user}"))
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "tests"))}):
        yield


def _without_keys(session: Session, problem: Problem) -> Problem | None:
    """Return the problem with a mask that leaves the first item no key; None without a mask.

    Where the items share the mask, none of them has a key.
    """
    mask = problem.mask
    if mask is None or session.claims.empty_row == "error":
        return None
    hidden = False if mask.dtype == torch.bool else -torch.inf
    first = torch.zeros(1, dtype=torch.long, device=mask.device)
    return problem.change(mask=mask.index_fill(0, first, hidden))


def assume_code_can_be_generated(device: str) -> None:
    """Discard the case where torch.compile cannot generate code for its device."""
    if device == "cuda":
        found = find_spec("triton") is not None
    else:
        found = bool(shutil.which("g++") or shutil.which("clang++"))
    assume(found, "the machine has no compiler for generated code")


class _Positional(nn.Module):
    """An attention that takes tensors only, as `torch.export` needs it."""

    def __init__(self, attention: Any, options: Options) -> None:
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output (B, L, D) without the weights."""
        options = self.options.change(mask=mask).arguments
        output: Tensor = self.attention(query, key, value, **options).output
        return output


def expect_exported(session: Session, case: Case) -> None:
    """The exported program is within the bound for the sizes of its capture, and for others."""
    problem = case.problem()
    program = _exported(session, problem)
    longer = replace(case, B=case.B + 1, L=case.L + 2, S=case.S + 3).problem()
    for each in (problem, longer.change(weights=problem.weights)):
        with guarded("the exported program"):
            given = session.given.problem(each)
            result = program.module()(given.query, given.key, given.value, given.mask)
        output = session.unscripted(result, "exported")
        batch, _, queries, keys = each.shape
        because = (
            f"the oracle's value, by the exported program for (B, L, S) = {batch, queries, keys}"
        )
        expect_close(output, session.expected(each).output, because=because)


def _exported(session: Session, problem: Problem) -> Any:
    """Return the program of a problem's attention, captured with dynamic B, L and S."""
    B, L, S = (torch.export.Dim(name, min=1, max=1 << 12) for name in ("B", "L", "S"))
    of_mask = None if problem.mask is None else {0: B, 2: L, 3: S}
    sizes: Any = ({0: B, 1: L}, {0: B, 1: S}, {0: B, 1: S}, of_mask)
    given = session.given.problem(problem)
    inputs = given.query, given.key, given.value, given.mask

    def export(module: nn.Module) -> Any:
        positional = _Positional(module.eval(), problem.options)
        return torch.export.export(positional, inputs, dynamic_shapes=sizes)

    code = "{}  # exported by torch.export.export with dynamic B, L and S"
    with _quiet():
        return session.derive(session.built(problem), export, code).attention


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the graphs that the exporter prints where it fails; its error says enough."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)
