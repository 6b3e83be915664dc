"""Changes to a problem that the clauses speak of: other weights, other keys, another order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from mha.conformance.harness.assertions import assume, expect, expect_close, expect_unchanged
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedOutput, RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.spec import Expected, Problem
from mha.spec.bounds import Ball
from mha.spec.dtypes import traits_of
from mha.spec.problem import INPUTS


def refuses(session: Session, problem: Problem) -> bool:
    """Whether the declared policy makes every call with this problem raise, as MSK-8 tests."""
    return session.claims.empty_row == "error" and bool(session.expected(problem).empty.any())


def weights_of(observation: RecordedOutput) -> RecordedTensor:
    """Return the weights that were asked for; that none came is a violation where they are claimed."""
    if observation.weights is None:
        name = observation.output.name.replace("output", "weights")
        expect(
            False, "no weights were returned, though they are claimed and were asked for", f"assert {name} is not None"
        )
        raise AssertionError
    return observation.weights


def expect_unread(session: Session, problem: Problem, hidden: Tensor, generator: torch.Generator, why: str) -> None:
    """What is hidden is not read: other keys, other values there change no bit of the rows that cannot see them.

    hidden: boolean (B, L, S). In each item, one row is drawn; what is hidden from it is replaced, once the keys alone
    and once the values alone, by random numbers or by huge ones; every row from which all of it is hidden must stay.
    """
    batch, queries, _ = hidden.shape
    rows = torch.randint(queries, (batch,), generator=generator)
    replaced = hidden[torch.arange(batch), rows]
    unseeing = (hidden | ~replaced.unsqueeze(1)).all(-1)
    noise = torch.randn(problem.key.shape, generator=generator, dtype=torch.float64)
    if torch.rand((), generator=generator) < 0.5:
        # As large as leaves the projections finite.
        noise = noise * traits_of(problem.query.dtype).noise
    base, answer = session(problem).output, cache(partial(session.expected, problem))
    for whole in (problem.key,) if problem.key is problem.value else (problem.key, problem.value):
        other = torch.where(replaced.unsqueeze(-1), noise.to(whole), whole)
        swap = {id(whole): other}
        changed = session(problem.map_inputs(lambda x, swap=swap: swap.get(id(x), x))).output  # type: ignore[misc]  # loop
        # A query that is the key changes with it, so its own row may change.
        staying = unseeing & ~replaced if whole is problem.query else unseeing
        names = [name for name in ("key", "value") if getattr(problem, name) is whole]
        for index in range(batch):
            kept = staying[index].nonzero().flatten()
            gone = replaced[index].nonzero().flatten().tolist()
            if len(kept) and gone:
                because = f"only {' and '.join(names)} changed, at {gone} of item {index}, {why}"
                bound = partial(_rows_of, answer, index, kept)
                expect_unchanged(session, changed[index, kept], base[index, kept], bound=bound, because=because)


def _rows_of(answer: Callable[[], Expected], index: int, rows: Tensor) -> Ball:
    return answer().output[index, rows]


def expect_gradients(session: Session, problem: Problem, rows: Tensor | None, because: str) -> None:
    """The gradients are the right ones within their bounds.

    rows: boolean (B, L), the rows of the output to differentiate; all unless given.
    """
    upstream = session.upstream(problem, rows)
    seen, right = session.gradients(problem, upstream), session.expected_gradients(problem, upstream)
    lost = undetermined_gradients(session, problem)
    known = [name for name in seen if name not in lost and bool(right[name].rad.isfinite().any())]
    assume(bool(known), "a step may overflow, so nothing is known")
    for name in known:
        expect_close(seen[name], right[name], because=f"the gradient, {because}")


def undetermined_gradients(session: Session, problem: Problem) -> set[str]:
    """Return the names of the gradients of which nothing is known: that of W_o, where a context is NaN by policy."""
    return {"w_o"} if session.claims.empty_row == "nan" and bool(session.expected(problem).empty.any()) else set()


def expect_backward(
    session: Session, leaves: Problem, output: Tensor, because: str, of: Instance | None = None
) -> None:
    """Differentiated now, an output that was computed before gives the right gradients of its inputs.

    of: the attention that gave it, if the gradients of its weights, which had none before, are looked at too.
    """
    upstream = session.upstream(leaves)
    with guarded("backward()"):
        output.backward(upstream)
    right = session.expected_gradients(leaves, upstream)
    for name in (name for name in INPUTS if name in right):
        leaf = getattr(leaves, name)
        seen = session.unscripted(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, f"{name}.grad")
        expect_close(seen, right[name], because=f"the gradient, {because}")
    if of is not None and session.claims.weight_gradients:
        told, lost = session.weight_gradients(of, leaves.weights), undetermined_gradients(session, leaves)
        for name in sorted(told.keys() - lost):
            expect_close(told[name], right[name], because=f"the gradient, {because}")


def expect_result(seen: RecordedOutput, answer: Expected, because: str) -> None:
    """The output is right, and so are the weights, if there are any."""
    expect_close(seen.output, answer.output, because=because)
    if seen.weights is not None:
        expect_close(seen.weights, answer.weights, because=because)


def expect_finite(got: RecordedTensor, because: str) -> None:
    """No element is NaN or infinite."""
    wild = (~got.tensor.isfinite()).nonzero()
    if len(wild):
        at = got[tuple(wild[0].tolist())]
        expect(False, f"{at.code} is {float(at.tensor)}, {because}", f"assert {at.code}.isfinite(), {at.code}")
