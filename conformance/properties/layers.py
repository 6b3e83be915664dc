"""STA-9, STA-10, SHP-9: what tools do with a module and its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.masks import COMMON
from mha.conformance.harness.assertions import assume, expect, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import assume_unquantised, module_of
from mha.spec import Problem

FEW = Domain(inputs=("cross", "self"), values=("normal",), layouts=DENSE, modes=("eval", "no_grad"), min_S=2)
# For each dtype, the one that a module is moved to.
MOVED_TO = {"float32": ("float64", "bfloat16", "float16"), "float64": ("float32",)}


@property_of("STA-9", FEW, needs="projections", requires="HED-1", must_reject=(), max_cases=4)
def layers_are_called(session: Session, case: Case) -> None:
    """Every linear layer whose weight counts is called, so that a hook on it, or another layer in its place, counts."""
    problem = case.problem()
    module = module_of(session.built(problem))
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    assume(bool(layers), "the attention has no torch.nn.Linear")
    called = set[str]()
    with _noting_calls(layers, called.add):
        base = session(problem).output
    for name, layer in layers.items():
        if name in called:
            continue
        with _other_weight(layer):
            changed = session(problem).output
        counts = not torch.equal(changed.tensor, base.tensor)
        message = f"the weight of the layer {name!r} counts, but the layer is not called, so hooks on it have no effect"
        expect(not counts, message)


@contextmanager
def _noting_calls(layers: dict[str, nn.Linear], note: Callable[[str], None]) -> Iterator[None]:
    """Note the names of the layers that are called in the block."""

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: note(name)

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _other_weight(layer: nn.Linear) -> Iterator[None]:
    """Let a layer have twice its weight in the block."""
    with torch.no_grad():
        layer.weight.mul_(2)
        try:
            yield
        finally:
            layer.weight.div_(2)


@property_of(
    "STA-10",
    Domain(
        masks=COMMON,
        causal=BOTH,
        inputs=("cross", "self"),
        values=("normal",),
        layouts=DENSE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
        min_S=2,
    ),
    needs=("projections", "gradients"),
    requires="HED-1",
    must_reject=("detached",),
    max_cases=6,
)
def every_parameter_gets_a_gradient(session: Session, case: Case) -> None:
    """Every parameter that requires a gradient gets one."""
    problem = case.problem()
    module = module_of(session.fresh(problem))
    output = session.forward(problem, via=session.latest)
    with guarded("backward()"):
        differentiate(output, session.upstream(problem))
    without = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    expect(not without, f"parameters require a gradient and get none: {', '.join(without)}")


@property_of(
    "SHP-9",
    Domain(
        masks=COMMON, causal=BOTH, values=MODERATE, layouts=DENSE, modes=("eval", "no_grad"), dtypes=tuple(MOVED_TO)
    ),
    needs="projections",
    must_reject=("lopsided", "single_precision"),
    max_cases=8,
)
def a_module_can_be_moved_to_another_dtype(session: Session, case: Case) -> None:
    """`.to(dtype)` after the construction moves everything: outputs have the new dtype, within its bound."""
    assume_unquantised(session)
    claimed = [name for name in MOVED_TO[case.dtype] if name in session.claims.dtypes]
    assume(bool(claimed), "no other dtype is claimed")
    dtype: torch.dtype = getattr(torch, claimed[case.seed % len(claimed)])
    problem = case.problem()
    instance = session.fresh(problem)
    module_of(instance)
    moved = session.derive(instance, lambda module: module.to(dtype), f"{{}}.to({dtype})")
    problem = _in_dtype(problem, dtype)
    output = session(problem, via=moved, dtypes=(dtype,)).output
    expect_close(output, session.expected(problem).output, because=f"the oracle's value, for a module moved to {dtype}")


def _in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return a problem whose inputs, weights and float mask are rounded to a dtype."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype)

    mask = problem.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    weights = {name: rounded(tensor) for name, tensor in problem.weights.named()}
    return problem.map_inputs(rounded).change(mask=mask, **weights)
