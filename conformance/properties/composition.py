"""CMP: attention compiled, exported, transformed by torch.func, and under autocast."""

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
from mha.conformance.cases.mask_kinds import EMPTY
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.modes import MODES
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.plain import viewed
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import AUTOCAST, AUTOCAST_DTYPE
from mha.conformance.properties.support.shared_assertions import (
    as_causal,
    assume_answered,
    expect_backward,
    expect_finite,
    expect_result,
    has_empty_row,
)
from mha.spec import Options, Problem, Weights, oracle
from mha.spec.claims import DTYPES

# A compilation takes a second, and generated code ten, so there is one case of each property. No
# two sizes are equal, and lengths are multiples of 4: at others, Inductor of torch 2.13 may assert
# an alignment of 16 bytes that a part of a tensor does not have, which is not a fault of the
# attention.
ONE_UNMASKED = Domain(
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
ONE_MASKED = replace(ONE_UNMASKED, masks=("items", "bias"), inputs=("self",))
# Those in which code is generated.
GENERATED = tuple(dtype for dtype in DTYPES if dtype != "float64")
# The first of its cases has a mask, unless none is claimed.
ONE_OF_ANY = replace(ONE_MASKED, masks=(*ONE_MASKED.masks, "none"))

# Like "aot_eager", but without Inductor's partitioner, whose import takes half a second.
CAPTURE = "aot_eager_default_partitioner"


@contextmanager
def _generated_code_hidden() -> Iterator[None]:
    """Let the compiler write its modules where Hypothesis does not read them.

    Hypothesis draws constants from the user's own modules, so that later cases would depend on what
    was compiled; it skips folders named "tests". The folder is kept, like the compiler's own: its
    probe of the machine takes seconds.
    """
    user = os.getuid() if hasattr(os, "getuid") else getuser()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(
        gettempdir(), f"mha_conformance_{user}"
    )
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "tests"))}):
        yield


def _expect_compiled(session: Session, case: Case, backend: str) -> None:
    """The compiled module gives the outputs of the plain one, and the gradients of the oracle.

    backend: "inductor" generates code, which takes ten seconds; `CAPTURE` only captures the graph.
    """
    problem = case.problem()
    if session.claims.dropout and case.mask != "none":  # none of it in evaluation
        problem = with_dropout(problem, 0.5)
    bound, base = session.bound_of(problem), session(problem).output
    torch.compiler.reset()
    differentiable = session.claims.gradients and case.dtype in BOUNDED

    def compiled(chosen: str) -> Instance:
        return session.derive(
            session.built(problem),
            lambda module: torch.compile(module, backend=chosen, fullgraph=True),
            f"torch.compile({{}}, backend={chosen!r}, fullgraph=True)",
        )

    with _generated_code_hidden():
        if (
            backend != "inductor" or not differentiable
        ):  # code for both passes includes what this generates
            # Both passes of `CAPTURE` include its forward pass; the mode makes a graph of its own.
            alone = "eager" if differentiable else backend
            instance = compiled(alone)
            because = (
                f"the eager output (instead of compiled with the backend {alone!r}, under no_grad)"
            )
            expect_agree(
                session(problem, via=instance, mode="no_grad").output, base, bound, because=because
            )
            if emptied := _without_keys(session, problem):
                eager, output = (
                    session(emptied).output,
                    session(emptied, via=instance, mode="no_grad").output,
                )
                because += ", where rows have no allowed key"
                expect_agree(output, eager, session.bound_of(emptied), because=because)
        if differentiable:
            leaves = problem.map_inputs(leaf_of)
            recorded = session.forward(leaves, via=compiled(backend))
            output = session.unscripted(recorded.detach(), "compiled")
            because = (
                f"the eager output (instead of compiled with the backend {backend!r}, with"
                " gradients)"
            )
            expect_agree(output, base, bound, because=because)
            expect_backward(
                session, leaves, recorded, f"compiled (backend {backend!r})", session.built(problem)
            )


def _without_keys(session: Session, problem: Problem) -> Problem | None:
    """Return the problem with a mask that leaves the first item no key; None without a mask."""
    mask = problem.mask
    if mask is None or session.claims.empty_row == "error":
        return None
    hidden = False if mask.dtype == torch.bool else -torch.inf
    return problem.change(
        mask=mask.index_fill(0, torch.zeros(1, dtype=torch.long, device=mask.device), hidden)
    )


def _has_compiler(device: str) -> bool:
    """Return whether torch.compile can generate code for a device."""
    if device == "cuda":
        return find_spec("triton") is not None
    return bool(shutil.which("g++") or shutil.which("clang++"))


@property_of(
    "CMP-1", ONE_UNMASKED, needs="composes=compile", requires="HED-1", must_reject=(), max_cases=1
)
def compiled_agrees_with_eager(session: Session, case: Case) -> None:
    """The module compiled by torch.compile agrees with eager, without masks."""
    _expect_compiled(session, case, CAPTURE)


@property_of(
    "CMP-1",
    ONE_MASKED,
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=2,
)
def compiled_mask_agrees(session: Session, case: Case) -> None:
    """The module compiled by torch.compile agrees with eager, with a mask and a causal flag."""
    _expect_compiled(session, as_causal(session.claims, case), CAPTURE)


@property_of(
    "CMP-1",
    replace(ONE_OF_ANY, dtypes=GENERATED),
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=3,
    slow=True,
)
def generated_code_agrees(session: Session, case: Case) -> None:
    """The code that Inductor generates for the module agrees with eager."""
    assume(_has_compiler(case.device), "the machine has no compiler for generated code")
    _expect_compiled(session, as_causal(session.claims, case), "inductor")


@property_of(
    "CMP-1",
    replace(ONE_UNMASKED, dtypes=GENERATED),
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=4,
    slow=True,
)
def generated_code_without_gradients_agrees(session: Session, case: Case) -> None:
    """The code that Inductor generates for inference agrees with eager, for equal sizes too."""
    assume(_has_compiler(case.device), "the machine has no compiler for generated code")
    alike = replace(case, n_heads=4, B=4, L=4, S=4)
    for each in (case, alike):
        problem = each.problem()
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


class _Positional(nn.Module):
    """An attention that takes tensors only, as `torch.export` needs it."""

    def __init__(self, attention: Any, options: Options) -> None:
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output (B, L, D) without the weights."""
        output: Tensor = self.attention(
            query, key, value, **self.options.change(mask=mask).arguments
        ).output
        return output


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


def _expect_exported(session: Session, case: Case) -> None:
    """The exported program is within the bound for the sizes of its capture, and for others."""
    problem = case.problem()
    B, L, S = (torch.export.Dim(name, min=1, max=1 << 12) for name in ("B", "L", "S"))
    sizes: Any = (
        {0: B, 1: L},
        {0: B, 1: S},
        {0: B, 1: S},
        None if problem.mask is None else {0: B, 2: L, 3: S},
    )
    given = session.given.problem(problem)
    inputs = given.query, given.key, given.value, given.mask
    with _quiet():
        wrapped = session.derive(
            session.built(problem),
            lambda module: torch.export.export(
                _Positional(module.eval(), problem.options), inputs, dynamic_shapes=sizes
            ),
            "{}  # exported by torch.export.export with dynamic B, L and S",
        )
    program: Any = wrapped.attention
    longer = (
        replace(case, B=case.B + 1, L=case.L + 2, S=case.S + 3)
        .problem()
        .change(weights=problem.weights)
    )
    for each in (problem, longer):
        with guarded("the exported program"):
            given = session.given.problem(each)
            result = program.module()(given.query, given.key, given.value, given.mask)
        output = session.unscripted(result, "exported")
        because = (
            "the oracle's value, by the exported program for (B, L, S) ="
            f" {each.shape[0], *each.shape[2:]}"
        )
        expect_close(output, session.expected(each).output, because=because)


@property_of(
    "CMP-2",
    ONE_UNMASKED,
    needs=("composes=export", "cross_attention=True"),
    requires="HED-1",
    must_reject=(),
    max_cases=1,
)
def exported_program_agrees(session: Session, case: Case) -> None:
    """A program captured by torch.export with dynamic B, L and S agrees, without masks."""
    _expect_exported(session, case)


@property_of(
    "CMP-2",
    replace(ONE_MASKED, inputs=("cross",)),
    needs=("composes=export", "cross_attention=True"),
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=2,
)
def exported_mask_agrees(session: Session, case: Case) -> None:
    """A program captured by torch.export agrees, with a mask and a causal flag."""
    _expect_exported(session, as_causal(session.claims, case))


@property_of(
    "CMP-3",
    Domain(
        masks=("none", "padding", "queries"),
        causal=BOTH,
        values=MODERATE,
        layouts=DENSE,
        need_weights=(False,),
        max_length=17,
        modes=("eval",),
        dtypes=BOUNDED,
    ),
    needs="composes=func",
    requires="HED-1",
    max_cases=12,
)
def functional_transforms_agree(session: Session, case: Case) -> None:
    """functional_call, vmap over two sets of weights, and grad agree with the plain module."""
    problem = case.problem()
    if not problem.config.projected:
        _expect_func_of_queries(session, problem)
        return
    module = session.built(problem).attention
    assume(isinstance(module, nn.Module), "the attention is not a torch.nn.Module")
    assert isinstance(module, nn.Module)
    others = Weights.random(problem.config, case.seed + 1).to(problem.query.dtype, case.device)
    other = problem.change(weights=others)
    second = session.built(other).attention
    assert isinstance(second, nn.Module)
    own, new = (
        {name: p.detach() for name, p in each.named_parameters()}
        for each in (module.eval(), second)
    )
    given = session.given.problem(problem)
    options = given.options.arguments

    def call(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        key, value = (query if x is given.query else x for x in (given.key, given.value))
        result = torch.func.functional_call(module, parameters, (query, key, value), options)
        output: Tensor = result.output
        return output

    upstream = session.upstream(problem)
    with guarded("torch.func"):
        replaced = call(new, given.query)
        both = {name: torch.stack([own[name], new[name]]) for name in own}
        many = torch.func.vmap(call, in_dims=(0, None))(both, given.query)
        gradient = torch.func.grad(lambda query: (call(new, query) * viewed(upstream)).sum())(
            given.query
        )
    expected = session.expected(problem).output, session.expected(other).output
    because = "the oracle's value for other weights, passed by functional_call"
    expect_close(session.unscripted(replaced, "functional"), expected[1], because=because)
    for index, each in enumerate(expected):
        because = "the oracle's value, under vmap over two sets of weights"
        expect_close(session.unscripted(many[index], f"many[{index}]"), each, because=because)
    slope = session.expected_gradients(other, upstream)["query"]
    expect_close(
        session.unscripted(gradient, "gradient"), slope, because="the gradient, by torch.func.grad"
    )


def _expect_func_of_queries(session: Session, problem: Problem) -> None:
    """Without weights, vmap over two queries and grad of torch.func agree with plain calls."""
    module, given = session.built(problem).attention.eval(), session.given.problem(problem)

    def call(query: Tensor) -> Tensor:
        output: Tensor = given.change(query=query).call(module).output
        return output

    upstream, other = session.upstream(problem), problem.change(query=-problem.query)
    with guarded("torch.func"):
        many = torch.func.vmap(call)(torch.stack([given.query, -given.query]))
        gradient = torch.func.grad(lambda query: (call(query) * viewed(upstream)).sum())(
            given.query
        )
    for index, each in enumerate((problem, other)):
        because = "the oracle's value, under vmap over two queries"
        expect_close(
            session.unscripted(many[index], f"many[{index}]"),
            session.expected(each).output,
            because=because,
        )
    slope = session.expected_gradients(problem, upstream)["query"]
    expect_close(
        session.unscripted(gradient, "gradient"), slope, because="the gradient, by torch.func.grad"
    )


@property_of(
    "CMP-4",
    AUTOCAST,
    needs="composes=autocast",
    requires="HED-1",
    must_reject=("lopsided",),
)
def autocast_is_within_the_low_precision_bound(session: Session, case: Case) -> None:
    """Under autocast results are within the bound of low precision, and gradients finite."""
    problem = case.problem()
    assume_answered(session, problem)
    need_weights = (
        case.need_weights and case.mask not in EMPTY
    )  # MSK-8 tests whether empty rows depend on them
    dtypes = AUTOCAST_DTYPE, problem.query.dtype
    result = session(problem, mode="autocast", need_weights=need_weights, dtypes=dtypes)
    because = "the oracle's value, with each product in bfloat16"
    expect_result(result, oracle(problem, session.claims, autocast=AUTOCAST_DTYPE), because)
    if session.claims.gradients and not has_empty_row(session, problem):
        _expect_finite_gradients_under_autocast(session, problem)


def _expect_finite_gradients_under_autocast(session: Session, problem: Problem) -> None:
    """The output of a call under autocast can be differentiated, and every gradient is finite."""
    leaves, instance = session.given.problem(problem.map_inputs(leaf_of)), session.built(problem)
    called, session.scripted = instance.attention, False
    with guarded("backward() of a call under autocast"):
        with MODES["autocast"].enter(session.case.device):
            output = leaves.call(called).output
        output.float().sum().backward()
    inputs = leaves.distinct().items()
    gradients = [
        session.unscripted(x.grad, f"{name}.grad") for name, x in inputs if x.grad is not None
    ]
    if session.claims.weight_gradients:
        gradients += session.weight_gradients(instance, problem.weights).values()
    for gradient in gradients:
        expect_finite(gradient, "after a call under autocast")
