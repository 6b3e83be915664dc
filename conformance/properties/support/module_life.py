"""The life of one module: inference, training, new weights, and inference again."""

from __future__ import annotations

import torch
from torch import nn

from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.mask_kinds import FEW
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.support.shared_assertions import (
    expect_backward,
    module_of,
    undetermined_gradients,
)
from mha.spec import Problem
from mha.spec.bounds import Ball, units_of

LIFETIME = Domain(
    masks=("none", *FEW), causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED
)


def expect_lifetime(session: Session, problem: Problem) -> None:
    """One module is correct in inference, in two training steps, and with other weights.

    The other weights are half of the first, written into the same parameters.
    """
    instance = session.built(problem)
    module = instance.attention
    for mode in ("inference", "no_grad"):
        session(problem, mode=mode)
    # Only a module's gradients can be cleared.
    with_gradients = instance if isinstance(module, nn.Module) else None
    for step in ("first", "second"):
        if isinstance(module, nn.Module):
            module.zero_grad()
        leaves = problem.map_inputs(leaf_of)
        because = f"in the {step} training step of one module"
        expect_backward(session, leaves, session.forward(leaves), because, with_gradients)
    if not problem.config.projected:  # a kernel has no weights
        return
    module = module_of(instance)
    if session.claims.weight_gradients:
        _expect_accumulated(session, instance, problem)
    halved = problem.change(**{name: tensor / 2 for name, tensor in problem.weights.named()})
    _copy_weights(session, session.built(halved).attention, module)
    for mode in ("eval", "inference"):
        output = session(problem, mode=mode, via=instance).output
        expect_close(
            output,
            session.expected(halved).output,
            because="the oracle's value for the weights as they are",
        )


def _expect_accumulated(session: Session, instance: Instance, problem: Problem) -> None:
    """After a second step without zero_grad() the gradients of the weights are twice as large."""
    leaves = problem.map_inputs(leaf_of)
    upstream = session.upstream(leaves)
    output = session.forward(leaves)
    with guarded("backward()"):
        differentiate(output, upstream)
    units = units_of(problem.query.dtype, session.claims.rounding)
    expected = session.expected_gradients(leaves, upstream)
    gradients = session.weight_gradients(instance, problem.weights)
    for name in sorted(gradients.keys() - undetermined_gradients(session, problem)):
        twice = Ball(2 * expected[name].mid, 2 * expected[name].rad).stored(units)
        expect_close(
            gradients[name],
            twice,
            because="the sum of the gradients of two steps, without zero_grad()",
        )


def _copy_weights(session: Session, source: object, module: nn.Module) -> None:
    """Write the weights of one module into another."""
    assert isinstance(source, nn.Module)
    if session.claims.weight_gradients:
        with torch.no_grad():
            for parameter, new in zip(module.parameters(), source.parameters(), strict=True):
                parameter.copy_(new)
    else:  # the weights need not be parameters
        module.load_state_dict(source.state_dict(), strict=False)
