"""Whether keys and values that are hidden from a query are read (MSK-1, MSK-7, CAU-1)."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.assertions import assume, expect_unchanged
from mha.conformance.harness.session import Session
from mha.conformance.properties.support.shared_assertions import rows_of, with_other
from mha.spec import Problem
from mha.spec.dtypes import traits_of

# How far sums of squares of normed keys stay below the largest number.
SQUARES = 8


def expect_unread(
    session: Session, problem: Problem, hidden: Tensor, generator: torch.Generator, why: str
) -> None:
    """Expect other keys and values, where they are hidden, to change no bit of the output.

    One query is drawn in each item. The keys that are hidden from it get other numbers, in a second
    call the values. The outputs of that query, and of each other one that sees none of these keys,
    must be equal in all calls. In self-attention the replaced positions are queries too, whose
    outputs change: a draw that leaves no other query to compare is discarded.

    hidden: boolean (B, L, S), which keys are hidden from which query.
    why: how they are hidden, for a message that goes on with the queries: "which are masked for".
    """
    assume(bool(hidden.any()), f"no keys are hidden, {why} a query")
    # Which keys are replaced, (B, S), and which queries see none of them, (B, L).
    replaced = _hidden_from_one_query(hidden, generator)
    unchanged = (hidden | ~replaced.unsqueeze(1)).all(-1)
    if problem.key is problem.query or problem.value is problem.query:
        unchanged &= ~replaced
    compared = unchanged & replaced.any(-1, keepdim=True)
    assume(bool(compared.any()), "each query that sees none of the replaced keys is replaced, too")
    is_normed = session.claims.qk_norm is not None
    noise = _other_numbers(problem, generator, is_normed=is_normed)
    base = session(problem).output
    expected = cache(partial(session.expected, problem))
    for name, tensor in problem.distinct(("key", "value")).items():
        other = torch.where(replaced.unsqueeze(-1), noise.to(tensor), tensor)
        output = session(with_other(problem, tensor, other)).output
        what = "key and value" if problem.key is problem.value else name
        for item in range(len(hidden)):
            rows = compared[item].nonzero().flatten()
            if not len(rows):
                continue
            positions = replaced[item].nonzero().flatten().tolist()
            queries = "query" if len(rows) == 1 else "queries"
            because = (
                f"only the {what} of item {item} changed, at positions {_first_few(positions)},"
                f" {why} {queries} {_first_few(rows.tolist())}"
            )
            bound = partial(rows_of, expected, item, rows)
            expect_unchanged(
                session, output[item, rows], base[item, rows], bound=bound, because=because
            )


def _hidden_from_one_query(hidden: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a query of each item; return which keys are hidden from it, boolean (B, S).

    It is one that some key is hidden from, wherever the item has such a query.
    """
    has_hidden_keys = hidden.any(-1)
    item_has_none = ~has_hidden_keys.any(-1, keepdim=True)
    drawable = (has_hidden_keys | item_has_none).double().cpu()
    query = torch.multinomial(drawable, 1, generator=generator).squeeze(1)
    return hidden[torch.arange(len(hidden)), query]


def _other_numbers(problem: Problem, generator: torch.Generator, *, is_normed: bool) -> Tensor:
    """Return numbers like a key (B, S, kdim): normal ones, or, half of the time, huge ones.

    is_normed: whether keys are divided by a norm.
    """
    noise = torch.randn(problem.key.shape, generator=generator, dtype=torch.float64)
    noise = noise.to(problem.query.device)
    if torch.rand((), generator=generator) < 0.5:
        huge = noise * traits_of(problem.query.dtype).noise
        return _of_finite_scores(problem, huge, is_normed=is_normed)
    return noise


def _of_finite_scores(problem: Problem, key: Tensor, *, is_normed: bool) -> Tensor:
    """Return a key (B, S, kdim), smaller where its scores might overflow: inf - inf is NaN.

    Neither may its squares, if it is normed: a variance of infinity makes NaN of numbers.
    """
    weights, heads = problem.weights.to(torch.float64), (-1, problem.config.head_dim)
    q = F.linear(problem.query.double(), weights.w_q, weights.b_q).unflatten(-1, heads)
    k = F.linear(key, weights.w_k, weights.b_k).unflatten(-1, heads)
    largest = q.norm(dim=-1).amax() * k.norm(dim=-1).amax()
    most = torch.finfo(problem.query.dtype).max
    factor = float(most / 2 / largest)
    if is_normed:
        factor = min(factor, float((most / SQUARES) ** 0.5 / k.flatten(-2).norm(dim=-1).amax()))
    return key * min(1.0, factor)


def _first_few(places: list[int], most: int = 4) -> str:
    """Return the first places as text, and "..." for more."""
    shown = [str(place) for place in places[:most]]
    if len(places) > most:
        shown.append("...")
    return ", ".join(shown)
