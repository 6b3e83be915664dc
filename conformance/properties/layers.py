"""STA-9, STA-10, SHP-9, CFG-7: what tools do with a module and its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import assume_unquantised, module_of
from mha.implementations.adapters.construction import construct, parameters_of
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.discovery.resolve import original_of
from mha.spec import Problem

FEW = Domain(
    inputs=("cross", "self"), values=("normal",), layouts=DENSE, modes=("eval", "no_grad"), min_S=2
)
# For each dtype, the one that a module is moved to.
MOVED_TO = {"float32": ("float64", "bfloat16", "float16"), "float64": ("float32",)}


@property_of("STA-9", FEW, needs="projections", requires="HED-1", must_reject=(), max_cases=4)
def layers_are_called(session: Session, case: Case) -> None:
    """Every linear layer whose weight counts is called, so that a hook on it counts too."""
    problem = case.problem()
    module = module_of(session.built(problem))
    layers = {name: layer for name, layer in module.named_modules() if name and _is_linear(layer)}
    assume(bool(layers), "the attention has no linear layer")
    called = set[str]()
    with _noting_calls(layers, called.add):
        base = session(problem).output
    for name, layer in layers.items():
        if name in called:
            continue
        with _other_weight(layer):
            changed = session(problem).output
        counts = not torch.equal(changed.tensor, base.tensor)
        message = (
            f"the weight of the layer {name!r} counts, but the layer is not called, so hooks on it"
            " have no effect"
        )
        expect(not counts, message)


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a linear one: of torch, or of a class of its own, as in GPT-2."""
    if isinstance(layer, nn.Linear):
        return True
    weight = layer._parameters.get("weight")
    is_of_torch = type(layer).__module__.startswith("torch.")
    return weight is not None and weight.ndim == 2 and not (is_of_torch or layer._modules)


@contextmanager
def _noting_calls(layers: dict[str, nn.Module], note: Callable[[str], None]) -> Iterator[None]:
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
def _other_weight(layer: nn.Module) -> Iterator[None]:
    """Let a layer have twice its weight in the block."""
    weight: Any = layer.weight
    with torch.no_grad():
        weight.mul_(2)
        try:
            yield
        finally:
            weight.div_(2)


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
        masks=COMMON,
        causal=BOTH,
        values=MODERATE,
        layouts=DENSE,
        modes=("eval", "no_grad"),
        dtypes=tuple(MOVED_TO),
    ),
    needs="projections",
    must_reject=("lopsided", "single_precision"),
    max_cases=8,
)
def a_module_can_be_moved_to_another_dtype(session: Session, case: Case) -> None:
    """`.to(dtype)` moves everything: outputs have the new dtype, and are within its bound."""
    assume_unquantised(session)
    claimed = [name for name in MOVED_TO[case.dtype] if name in session.claims.dtypes]
    assume(bool(claimed), "no other dtype is claimed")
    for name in claimed:
        dtype: torch.dtype = getattr(torch, name)
        instance = session.fresh(case.problem())
        module_of(instance)
        moved = session.derive(instance, _move_to(dtype), f"{{}}.to({dtype})")
        problem = _in_dtype(case.problem(), dtype)
        output = session(problem, via=moved, dtypes=(dtype,)).output
        because = f"the oracle's value, for a module moved to {dtype}"
        expect_close(output, session.expected(problem).output, because=because)


def _move_to(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    return lambda module: module.to(dtype)


def _in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    """Return a problem whose inputs, weights and float mask are rounded to a dtype."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype)

    mask = problem.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    weights = {name: rounded(tensor) for name, tensor in problem.weights.named()}
    return problem.map_inputs(rounded).change(mask=mask, **weights)


@property_of("CFG-7", FEW, needs="projections", must_reject=(), max_cases=3)
def a_module_is_filled_after_construction_without_memory(session: Session, case: Case) -> None:
    """Built on the meta device and filled with another's weights, it gives the same results."""
    original = _adapted(session)
    problem = case.problem()
    instance = session.built(problem)
    state = module_of(instance).state_dict()
    dtype = getattr(torch, case.dtype)

    def filled(_: Any) -> nn.Module:
        with torch.device("meta"):
            module = original.as_constructed(
                problem.config, problem.weights, dtype=dtype, device="meta"
            )
        module.to_empty(device=case.device)
        _fill_with_nan(module)
        module.load_state_dict(state)
        return module

    session.scripted = False
    code = "{}, constructed on the meta device, after to_empty and load_state_dict"
    empty = session.derive(instance, filled, code)
    output, base = session(problem, via=empty).output, session(problem).output
    because = (
        "the output as constructed (instead of on the meta device, then to_empty and"
        " load_state_dict)"
    )
    expect_agree(output, base, session.bound_of(problem), because=because)


def _fill_with_nan(module: nn.Module) -> None:
    """Let memory that nothing has filled yet show."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


@property_of("CFG-7", FEW, needs="projections", must_reject=(), max_cases=1, number=2)
def the_constructor_makes_parameters_of_the_dtype_and_device(session: Session, case: Case) -> None:
    """A constructor that takes a dtype or a device makes every parameter of it."""
    original = _adapted(session)
    set_by_user = getattr(original.constructor, "keywords", {})
    taken = {"dtype", "device"} & parameters_of(original.constructor).keys() - set_by_user.keys()
    assume(bool(taken), "the constructor takes neither dtype nor device")
    others: dict[str, Any] = {"dtype": torch.float64, "device": "meta"}
    asked = {name: others[name] for name in sorted(taken)}
    arguments = {name: field for name, field in original.arguments.items() if name not in taken}
    given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    with guarded(f"construction with {given}"):
        module = construct(
            partial(original.constructor, **asked), arguments, case.config, session.claims.dropout
        )
    for name, parameter in module.named_parameters():
        made = {"dtype": parameter.dtype, "device": parameter.device.type}
        unlike = [field for field in asked if made[field] != asked[field]]
        message = (
            f"constructed with {given}, its parameter {name!r} is {made['dtype']} on"
            f" {made['device']!r}"
        )
        expect(not unlike, message)


def _adapted(session: Session) -> ModuleImplementation:
    """Return what `from_module` made; discard the case where the constructor is not known."""
    original = original_of(session.implementation)
    assume(isinstance(original, ModuleImplementation), "how the module is constructed is not known")
    assert isinstance(original, ModuleImplementation)
    return original
