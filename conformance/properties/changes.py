"""Changes to a problem that the clauses speak of: other weights, other keys, another order."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.conformance.expect import expect, expect_equal
from mha.conformance.trial import Observation, Observed, Trial
from mha.spec import Problem


def passing_heads(problem: Problem) -> Problem:
    """Make W_o the identity and b_o zero, so that the output is the heads' contexts side by side."""
    eye = torch.eye(problem.config.d_model, dtype=problem.query.dtype, device=problem.query.device)
    b_o = problem.weights.b_o
    return problem.change(w_o=eye, b_o=None if b_o is None else torch.zeros_like(b_o))


def is_self(problem: Problem) -> bool:
    """Whether one tensor is given three times."""
    return problem.query is problem.key and problem.key is problem.value


def with_keys(problem: Problem, key: Tensor | None = None, value: Tensor | None = None) -> Problem:
    """Replace key, value or both; in self-attention the one tensor is replaced, and stays one."""
    if is_self(problem):
        x = key if key is not None else value
        return problem.change(query=x, key=x, value=x)
    return problem.change(key=problem.key if key is None else key, value=problem.value if value is None else value)


def select_keys(problem: Problem, keys: Tensor) -> Problem:
    """Keep some keys and values, in the order given; in self-attention the queries go with them. The mask stays."""
    if is_self(problem):
        return with_keys(problem, key=problem.key[:, keys])
    return with_keys(problem, problem.key[:, keys], problem.value[:, keys])


def item(problem: Problem, index: int) -> Problem:
    """Take one item of the batch, as a batch of one."""
    own = slice(index, index + 1)
    mask = problem.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[own]
    if is_self(problem):
        return with_keys(problem, key=problem.key[own]).change(mask=mask)
    return problem.change(query=problem.query[own], key=problem.key[own], value=problem.value[own], mask=mask)


def weights_of(observation: Observation) -> Observed:
    """Return the weights that were asked for; that none came is a violation where they are claimed."""
    if observation.weights is None:
        expect(False, "no weights were returned, though they are claimed and were asked for")
        raise AssertionError
    return observation.weights


def expect_unread(attention: Trial, problem: Problem, hidden: Tensor, generator: torch.Generator, why: str) -> None:
    """What is hidden is not read: other keys, other values there change no bit of the rows that cannot see them.

    hidden: boolean (B, L, S). In each item, one row is drawn; what is hidden from it is replaced, once the keys alone
    and once the values alone, by random numbers or by huge ones; every row from which all of it is hidden must stay.
    """
    batch, queries, _ = hidden.shape
    rows = torch.randint(queries, (batch,), generator=generator)
    replaced = hidden[torch.arange(batch), rows]
    unseeing = (hidden | ~replaced.unsqueeze(1)).all(-1)
    if is_self(problem):
        unseeing = unseeing & ~replaced
    noise = torch.randn(problem.key.shape, generator=generator, dtype=torch.float64)
    huge = 1e30 if torch.rand((), generator=generator) < 0.5 else 1.0
    other = torch.where(replaced.unsqueeze(-1), (huge * noise).to(problem.key), problem.key)
    base = attention(problem)
    changes = {"keys and values": {"key": other}} if is_self(problem) else {"keys": {"key": other}}
    if not is_self(problem):
        changes["values"] = {
            "value": torch.where(replaced.unsqueeze(-1), (huge * noise).to(problem.value), problem.value)
        }
    for what, change in changes.items():
        changed = attention(with_keys(problem, **change))
        for index in range(batch):
            kept = unseeing[index].nonzero().flatten()
            gone = replaced[index].nonzero().flatten().tolist()
            if len(kept) and gone:
                because = f"only {what} {gone} of item {index} changed, {why}"
                expect_equal(changed.output[index, kept], base.output[index, kept], because=because)
