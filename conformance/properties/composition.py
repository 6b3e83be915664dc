"""CMP: what an attention may be combined with."""

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
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.dropout import dropping
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_backward
from mha.spec import Weights

MASKS = ("none", "padding", "queries")
SMALL = Domain(masks=MASKS, causal=BOTH, values=MODERATE, layouts=DENSE, need_weights=(False,), max_length=17)
EVALUATED = replace(SMALL, modes=("eval",))
WRONGS = ("zeros", "mean", "noise")


# A compilation takes seconds: one case with all that an everyday case has, and one without masks and causal flag;
# no two sizes are equal, and lengths are multiples of 4: at others, Inductor of torch 2.13 may assert an alignment of
# 16 bytes that a part of a tensor does not have, which is no fault of the attention.
PLAIN = Domain(
    inputs=("cross",),
    values=("normal",),
    layouts=DENSE,
    modes=("eval",),
    need_weights=(False,),
    min_heads=2,
    min_head_dim=16,
    min_B=3,
    min_L=4,
    min_S=8,
    max_length=8,
)
FULL = replace(PLAIN, masks=("items", "bias"), inputs=("self",))


@contextmanager
def _generated_code_apart() -> Iterator[None]:
    """Let the compiler write its modules where Hypothesis does not read them.

    It draws constants of the modules that it takes for the user's own, so that later cases would depend on what was
    compiled; what lies in a folder named "tests" it leaves out. The folder stays, as the compiler's own does: what it
    learns there of the machine takes seconds.
    """
    user = os.getuid() if hasattr(os, "getuid") else getuser()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(gettempdir(), f"mha_conformance_{user}")
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "tests"))}):
        yield


def _expect_compiled(session: Session, case: Case, generate: bool) -> None:
    """Compiled, it gives the results that it gives otherwise, and the right gradients.

    generate: whether to generate code, if possible, which takes ten seconds; else the graph is captured alone.
    """
    problem = case.problem()
    if session.claims.dropout and case.mask != "none":  # none of it in evaluation
        problem = dropping(problem, 0.5)
    bound, base = session.expected(problem).output, session(problem).output
    able = find_spec("triton") if case.device == "cuda" else shutil.which("g++") or shutil.which("clang++")
    backend = "inductor" if able and generate and case.dtype != "float64" else "aot_eager"
    torch.compiler.reset()
    differentiable = session.claims.gradients and case.dtype in BOUNDED

    def compiled(chosen: str) -> Instance:
        return session.derive(
            session.built(problem),
            lambda module: torch.compile(module, backend=chosen, fullgraph=True),
            f"torch.compile({{}}, backend={chosen!r}, fullgraph=True)",
        )

    with _generated_code_apart():
        # Inputs with a gradient are compiled anew: code is generated for these, if any, as both passes come of it.
        plain = "aot_eager" if differentiable else backend
        seen = session(problem, via=compiled(plain), mode="no_grad").output
        because = f"what it gives uncompiled, under no_grad (backend {plain!r})"
        expect_agree(seen, base, bounds=(bound, bound), because=because)
        if differentiable:
            leaves = problem.map_inputs(leaf_of)
            output = session.forward(leaves, via=compiled(backend))
            because = f"what it gives uncompiled, with inputs that require gradients (backend {backend!r})"
            expect_agree(session.unscripted(output.detach(), "compiled"), base, bounds=(bound, bound), because=because)
            expect_backward(session, leaves, output, f"compiled (backend {backend!r})", session.built(problem))


@property_of("CMP-1", PLAIN, needs="composes=compile", requires="HED-1", must_reject=(), max_cases=1)
def compiled_agrees_with_eager(session: Session, case: Case) -> None:
    _expect_compiled(session, case, generate=not session.claims.masks)


@property_of("CMP-1", FULL, needs="composes=compile", requires="HED-1", must_reject=(), max_cases=1, number=2)
def compiled_mask_agrees(session: Session, case: Case) -> None:
    _expect_compiled(session, replace(case, causal=session.claims.causal is not None), generate=True)


class _Positional(nn.Module):
    """An attention without options, as `torch.export` wants it."""

    def __init__(self, attention: Any, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = attention, is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output alone."""
        output: Tensor = self.attention(query, key, value, mask=mask, is_causal=self.is_causal).output
        return output


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the terminal the graphs that the exporter prints of what it cannot export; its error says enough."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _expect_exported(session: Session, case: Case) -> None:
    """The program that is captured gives the right results for sizes other than those it was captured with."""
    problem = case.problem()
    B, L, S = (torch.export.Dim(name, min=1, max=1 << 12) for name in ("B", "L", "S"))
    sizes: Any = ({0: B, 1: L}, {0: B, 1: S}, {0: B, 1: S}, None if problem.mask is None else {0: B, 2: L, 3: S})
    inputs = problem.query, problem.key, problem.value, problem.mask
    with _quiet():
        wrapped = session.derive(
            session.built(problem),
            lambda module: torch.export.export(
                _Positional(module.eval(), problem.is_causal), inputs, dynamic_shapes=sizes
            ),
            "{}  # exported by torch.export.export with dynamic B, L and S",
        )
    program: Any = wrapped.attention
    longer = replace(case, B=case.B + 1, L=case.L + 2, S=case.S + 3).problem().change(weights=problem.weights)
    for each in (problem, longer):
        with guarded("the exported program"):
            result = program.module()(each.query, each.key, each.value, each.mask)
        seen = session.unscripted(result, "exported")
        because = f"what the exported program should give for (B, L, S) = {(*each.query.shape[:2], each.key.shape[1])}"
        expect_close(seen, session.expected(each).output, because=because)


@property_of("CMP-2", PLAIN, needs="composes=export", requires="HED-1", must_reject=(), max_cases=1)
def exported_program_agrees(session: Session, case: Case) -> None:
    _expect_exported(session, case)


@property_of(
    "CMP-2",
    replace(FULL, inputs=("cross",)),
    needs="composes=export",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=2,
)
def exported_mask_agrees(session: Session, case: Case) -> None:
    _expect_exported(session, replace(case, causal=session.claims.causal is not None))


@property_of("CMP-3", replace(EVALUATED, dtypes=BOUNDED), needs="composes=func", requires="HED-1", max_cases=12)
def functional_transforms_agree(session: Session, case: Case) -> None:
    problem = case.problem()
    module = session.built(problem).attention
    assume(isinstance(module, nn.Module), "the attention is no torch.nn.Module")
    assert isinstance(module, nn.Module)
    others = Weights.random(problem.config, case.seed + 1).to(problem.query.dtype, case.device)
    other = problem.change(weights=others)
    second = session.built(other).attention
    assert isinstance(second, nn.Module)
    held, new = ({name: p.detach() for name, p in each.named_parameters()} for each in (module.eval(), second))
    options = {"mask": problem.mask, "is_causal": problem.is_causal}

    def call(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        key, value = (query if x is problem.query else x for x in (problem.key, problem.value))
        result = torch.func.functional_call(module, parameters, (query, key, value), options)
        output: Tensor = result.output
        return output

    upstream = session.upstream(problem)
    with guarded("torch.func"):
        replaced = call(new, problem.query)
        both = {name: torch.stack([held[name], new[name]]) for name in held}
        many = torch.func.vmap(call, in_dims=(0, None))(both, problem.query)
        slope = torch.func.grad(lambda query: (call(new, query) * upstream).sum())(problem.query)
    answers = session.expected(problem).output, session.expected(other).output
    because = "the oracle's value for other weights, given by functional_call"
    expect_close(session.unscripted(replaced, "functional"), answers[1], because=because)
    for index, answer in enumerate(answers):
        because = "the oracle's value under vmap over two sets of weights"
        expect_close(session.unscripted(many[index], f"many[{index}]"), answer, because=because)
    right = session.expected_gradients(other, upstream)["query"]
    expect_close(session.unscripted(slope, "slope"), right, because="the gradient, by torch.func.grad")
