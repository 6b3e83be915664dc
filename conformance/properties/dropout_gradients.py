"""GRD-1 in training with dropout: gradients drop what the outputs dropped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.transforms import passing_heads, zeroed
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.dropout import DRAWN, TRAINING, dropping
from mha.conformance.properties.registry import property_of
from mha.spec import Problem
from mha.spec.bounds import Ball, units_of


@property_of(
    "GRD-1",
    replace(DRAWN, masks=("none",), causal=(False,), values=("integers",), modes=TRAINING),
    needs=("dropout", "gradients"),
    must_reject=("noise",),
    max_cases=12,
    number=7,
)
def gradients_drop_what_the_outputs_dropped(session: Session, case: Case) -> None:
    """An output is linear in its values: summed against the upstream, it is the values against their gradient."""
    problem = dropping(passing_heads(case.problem()), 0.5)
    width, heads = problem.config.d_model, (case.n_heads, case.head_dim)
    eye = torch.eye(width, dtype=problem.query.dtype, device=case.device)
    problem = zeroed(problem, "w_q", "b_q", "b_v").change(w_v=eye).map_inputs(leaf_of)
    upstream = session.upstream(problem)
    session.built(problem)  # now, since a construction may draw random numbers
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        output = session.forward(problem)
    with guarded("backward()"):
        output.backward(upstream)
    gradient = problem.value.grad
    assert gradient is not None
    sums = [
        (x.detach().double() * y.detach().double()).sum(1) for x, y in ((output, upstream), (problem.value, gradient))
    ]
    # In each direction a dropped or doubled weight carries its own error and that of the sums it enters.
    units, weights = units_of(problem.query.dtype), session.expected(problem).weights
    terms = case.L + problem.key.shape[1] + 2 * width + 8
    slack = 2 * (weights.rad + (units.gamma(terms) + 4 * units.store) * weights.size)
    sizes = [x.detach().double().abs().unflatten(-1, heads).transpose(1, 2) for x in (upstream, problem.value)]
    reach = 2 * (sizes[0] * (slack @ sizes[1])).sum(2).flatten(1)
    seen = session.unscripted(sums[1], "(value * value.grad).sum(1)")
    expect_close(seen, Ball(sums[0], reach), because="(output * upstream).sum(1), since what is dropped is the same")
    if session.claims.weight_gradients and session.claims.dropout is True:  # of the weights, so before W_o
        error = 2 * (slack @ sizes[1]).transpose(1, 2).flatten(2)
        _expect_dropped_contexts(session, problem, Ball(output.detach().double(), error), upstream)


def _expect_dropped_contexts(session: Session, problem: Problem, output: Ball, upstream: Tensor) -> None:
    """The gradient of W_o comes of the contexts after dropout: these are the outputs, since W_o is the identity.

    output: with the error of contexts that are computed again.
    """
    units, arrived, items = units_of(problem.query.dtype), upstream.double().flatten(0, 1), len(upstream)
    contexts, error = output.mid.flatten(0, 1), output.rad.flatten(0, 1)
    # A pass for each item may be stored; output and context may each be rounded once more.
    relative = units.gamma(len(contexts) + items) + (items + 3) * units.store
    reach = arrived.mT.abs() @ (error + relative * (contexts.abs() + error))
    reach += len(contexts) * (units.flush + units.subnormal)
    told = session.weight_gradients(session.built(problem), problem.weights)["w_o"]
    expect_close(told, Ball(arrived.mT @ contexts, reach), because="upstream.T @ output, as W_o is the identity")
