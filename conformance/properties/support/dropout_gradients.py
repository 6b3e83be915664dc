"""Gradients under dropout, which must drop what the outputs dropped (GRD-1)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.transforms import passing_heads, with_dropout, with_width, zeroed
from mha.conformance.harness.assertions import assume, expect_close
from mha.conformance.harness.differentiation import differentiate
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.support.dropout_statistics import showing_dropped_weights
from mha.conformance.properties.support.shared_assertions import assume_unquantised
from mha.spec import Problem
from mha.spec.bounds import Ball, units_of

# Of both: twice a number is exact.
PROBABILITY = 0.5


def expect_gradients_of_kept_values(session: Session, case: Case) -> None:
    """The sum of the values against their gradient is that of the outputs against the upstream.

    An output is linear in its values, and values are the inputs, since W_v is the identity: the two
    sums are equal if forward and backward pass dropped the same.
    """
    assume_unquantised(session)
    assume(
        case.config.kv_heads == case.n_heads,
        "heads that share a value have no columns of their own in it",
    )
    problem = with_dropout(passing_heads(case.problem()), PROBABILITY)
    eye = torch.eye(problem.config.d_model, dtype=problem.query.dtype, device=case.device)
    problem = zeroed(problem, "w_q", "b_q", "b_v").change(w_v=eye).map_inputs(leaf_of)
    upstream = session.upstream(problem)
    output = _forward_and_backward(session, problem, upstream)
    gradient = problem.value.grad
    assert gradient is not None
    of_outputs = _column_sums(output, upstream)
    of_values = _column_sums(problem.value, gradient)
    slack = _slack(session, problem)
    values = _magnitudes(case, problem.value)
    reach = 2 * (_magnitudes(case, upstream) * (slack @ values)).sum(2).flatten(1)
    result = session.unscripted(of_values, "(value * value.grad).sum(1)")
    because = "(output * upstream).sum(1), since what is dropped is the same"
    expect_close(result, Ball(of_outputs, reach), because=because)
    # Where weights are dropped, not outputs, so before W_o.
    if session.claims.weight_gradients and session.claims.dropout is True:
        error = 2 * (slack @ values).transpose(1, 2).flatten(2)
        contexts = Ball(output.detach().double(), error)
        _expect_dropped_contexts(session, problem, contexts, upstream)


def expect_gradients_of_kept_weights(session: Session, case: Case) -> None:
    """Query and key have the gradients of the weights that the outputs kept.

    Where an output is a weight, dropping that weight is dropping the gradient of that output.
    """
    length = 17
    queries = length if case.inputs == "self" else length - 1
    case = with_width(replace(case, L=queries, S=length), session.claims, 2 * length)
    dropping = with_dropout(case.problem(), PROBABILITY)
    problem = showing_dropped_weights(session, dropping, uniform=False).map_inputs(leaf_of)
    upstream = session.upstream(problem)
    output = _forward_and_backward(session, problem, upstream)
    kept = upstream * (output.detach() != 0) / (1 - PROBABILITY)
    found = {}
    for name, leaf in problem.distinct().items():
        if leaf is not problem.value:
            found[name] = torch.zeros(()) if leaf.grad is None else leaf.grad
    if session.claims.weight_gradients:
        gradients = session.weight_gradients(session.built(problem), problem.weights)
        for name, recorded in gradients.items():
            if name in ("w_q", "w_k", "b_q", "b_k"):
                found[name] = recorded.tensor
    assume(bool(found), "all inputs are one tensor, and the gradients of weights are not reported")
    expected = session.expected_gradients(problem, kept)
    without = session.expected_gradients(problem, upstream)
    shows = any(_stand_apart(expected[name], without[name]) for name in found)
    assume(shows, "rounding, as it is declared, may hide whether the gradients dropped anything")
    because = "the gradient of the weights that were kept, with p = 0.5"
    for name, gradient in found.items():
        result = session.unscripted(gradient, f"{name}.grad")
        expect_close(result, expected[name], because=because)


def _column_sums(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the products over the positions, (B, D), for two tensors (B, N, D)."""
    return (x.detach().double() * y.detach().double()).sum(1)


def _stand_apart(one: Ball, other: Ball) -> bool:
    """Return whether two bounds, each twice as wide, exclude one another somewhere."""
    return bool(((one.mid - other.mid).abs() > 2 * (one.rad + other.rad)).any())


def _forward_and_backward(session: Session, problem: Problem, upstream: Tensor) -> Tensor:
    """Return the output of a call with the seed of the case, after its backward pass."""
    session.built(problem)  # now, since a construction may draw random numbers
    with torch.random.fork_rng():
        torch.manual_seed(session.case.seed)
        output = session.forward(problem)
    with guarded("backward()"):
        differentiate(output, upstream)
    return output


def _slack(session: Session, problem: Problem) -> Tensor:
    """Return how far a weight may be off in either direction, (B, H, L, S).

    In each direction a dropped or doubled weight carries its own error and that of the sums that it
    enters.
    """
    units = units_of(problem.query.dtype, session.claims.rounding)
    weights = session.expected(problem).weights
    terms = problem.query.shape[1] + problem.key.shape[1] + 2 * problem.config.d_model + 8
    error = weights.rad.nan_to_num(nan=1.0).clamp(max=1.0)  # weights are from 0 to 1
    size = weights.mid.abs() + error
    return 2 * (error + (units.products(terms) + 4 * units.store) * size)


def _magnitudes(case: Case, x: Tensor) -> Tensor:
    """Return the absolute values of a tensor (B, length, D) by heads, (B, H, length, d_k)."""
    by_heads: Tensor = x.detach().double().abs().unflatten(-1, (case.n_heads, case.head_dim))
    return by_heads.transpose(1, 2)


def _expect_dropped_contexts(
    session: Session, problem: Problem, output: Ball, upstream: Tensor
) -> None:
    """The gradient of W_o is that of contexts after dropout: the outputs, as W_o is the identity.

    output: (B, L, D), with the error of contexts that are computed again.
    """
    units = units_of(problem.query.dtype, session.claims.rounding)
    arrived, items = upstream.double().flatten(0, 1), len(upstream)
    contexts, error = output.mid.flatten(0, 1), output.rad.flatten(0, 1)
    # A pass for each item may be stored; output and context may each be rounded once more.
    relative = units.products(len(contexts) + items) + (items + 3) * units.store
    reach = arrived.mT.abs() @ (error + relative * (contexts.abs() + error))
    reach += len(contexts) * (units.flush + units.subnormal)
    gradient = session.weight_gradients(session.built(problem), problem.weights)["w_o"]
    expect_close(
        gradient,
        Ball(arrived.mT @ contexts, reach),
        because="upstream.T @ output, as W_o is the identity",
    )
