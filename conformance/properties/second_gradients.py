"""GRD-9: gradients that are differentiated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import COMMON
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import zeroed
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close
from mha.conformance.harness.differentiation import gradients_of
from mha.conformance.harness.errors import CallRaised
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.plain import viewed
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import assume_finite, expect_backward
from mha.spec import Problem, oracle
from mha.spec.bounds import Ball


@property_of(
    "GRD-9",
    Domain(
        masks=("none", "queries", "bias"),
        causal=BOTH,
        inputs=("cross", "self"),
        values=("normal",),
        layouts=DENSE,
        modes=WITH_GRADIENT,
        need_weights=(False,),
        dtypes=("float64",),
        scale="wide",  # small, in fact: where the check fails, it is repeated for each number
        sizes={"n_heads": (1, 2), "head_dim": (1, 2), "B": (1, 2), "L": (1, 3), "S": (2, 3)},
    ),
    needs="second_gradients",
    requires="HED-1",
    must_reject=("softmax_gradient_without_row_sum",),
    max_cases=6,
)
def gradgradcheck_passes(session: Session, case: Case) -> None:
    """torch.autograd.gradgradcheck passes in float64, for the inputs and for the weights."""
    assume(not session.claims.narrows, "a step is declared to be in a narrower dtype")
    leaves = case.problem().map_inputs(leaf_of)
    assume_finite(session, leaves)
    attention = session.built(leaves).attention
    inputs = list(leaves.distinct().values())
    if isinstance(attention, nn.Module) and session.claims.weight_gradients:
        inputs += attention.parameters()

    def output(*_: Tensor) -> Tensor:  # the inputs and the weights change in place
        return session.forward(leaves)

    with guarded("torch.autograd.gradgradcheck"):
        passes = torch.autograd.gradgradcheck(
            output, inputs, fast_mode=True, check_undefined_grad=False, raise_exception=False
        )
    expect(
        passes,
        "torch.autograd.gradgradcheck fails: numerical and analytical second derivatives differ",
    )


@property_of(
    "GRD-9",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="second_gradients",
    requires="HED-1",
    must_reject=("detached", "softmax_gradient_without_row_sum", "nan_gradients"),
    max_cases=8,
    number=2,
)
def gradients_that_can_be_differentiated_are_within_the_bound(session: Session, case: Case) -> None:
    """With create_graph=True gradients are within the bound, and so is a derivative of them."""
    leaves = case.problem().map_inputs(leaf_of)
    instance = session.built(leaves)
    upstream = session.upstream(leaves).clone().requires_grad_()
    try:
        output = session.forward(leaves)
        expect_backward(session, leaves, output, "with create_graph=True", instance, upstream)
        _expect_derivative(session, leaves, upstream)
    finally:  # a gradient with a history, and what it belongs to, keep each other alive
        tensors = (*leaves.distinct().values(), *getattr(instance.attention, "parameters", tuple)())
        for tensor in tensors:
            tensor.grad = None


def _expect_derivative(session: Session, leaves: Problem, upstream: Tensor) -> None:
    """Expect the derivative of the value's gradient by the upstream one, times a direction.

    The output is linear in the value, so this is the output without b_v and b_o for the direction
    as the value. It takes the products of the forward pass, from weights that may be recomputed
    from the log-sum-exp: its bound holds. Where the value is the query or the key too, the
    derivative need only exist.
    """
    value, gradient = leaves.value, leaves.value.grad
    if gradient is None:  # which is right if it is zero
        return
    direction = torch.randn(value.shape, generator=session.case.generator, dtype=torch.float64).to(
        value
    )
    with guarded("a backward pass through the gradient of the value"):
        (derivative,) = torch.autograd.grad(gradient, upstream, viewed(direction))
    if value is leaves.query or value is leaves.key:
        return
    along = zeroed(leaves.change(value=direction), "b_v", "b_o")
    recomputed = replace(
        session.claims, rounding=replace(session.claims.rounding, log_normaliser=True)
    )
    with torch.inference_mode():
        expected = oracle(along, recomputed)
    rows = expected.empty.any(1).unsqueeze(-1)  # without a key: the contract leaves them open
    reach = Ball(expected.output.mid, expected.output.rad.masked_fill(rows, math.inf))
    because = (
        "the derivative of the value's gradient with respect to that of the output, times a"
        " direction"
    )
    expect_close(session.unscripted(derivative, "derivative"), reach, because=because)


@property_of(
    "GRD-10",
    Domain(
        masks=COMMON,
        causal=BOTH,
        values=MODERATE,
        layouts=DENSE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
    ),
    needs="gradients",
    requires="HED-1",
    must_reject=("spends_its_graph",),
    max_cases=20,
)
def a_second_backward_pass_gives_the_same(session: Session, case: Case) -> None:
    """A second backward pass of one graph gives the gradients of the first, or raises."""
    leaves = case.problem().map_inputs(leaf_of)
    assume_finite(session, leaves)
    output = session.forward(leaves)
    upstream = session.upstream(leaves)
    inputs = leaves.distinct()
    expected = session.expected_gradients(leaves, upstream)
    given = list(inputs.values())
    with guarded("backward(retain_graph=True)"):
        first = gradients_of(output, upstream, given)
    try:
        with guarded("backward(retain_graph=True)"):
            second = gradients_of(output, upstream, given)
    except CallRaised:
        return
    for name, one, other in zip(inputs, first, second, strict=True):
        if one is None or other is None:
            message = f"the gradient of the {name} is there in one of two backward passes only"
            expect(one is other, message)
            continue
        results = session.unscripted(other, f"{name}.grad"), session.unscripted(one, f"{name}.grad")
        because = "the gradient of the first backward pass (instead of the second)"
        expect_agree(*results, partial(expected.__getitem__, name), because=because)
