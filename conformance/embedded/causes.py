"""The known defect that a wrong output is the result of: a few of its rows, solved wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call
from mha.conformance.embedded.defects import Change, defects, defects_of_lse
from mha.conformance.embedded.solving import Rows, rows_of

# At most so many heads, and rows of each, are looked at.
MOST_HEADS, MOST_ROWS_OF_HEAD = 4, 12
# A defect explains what it leaves less of than this share of the error.
EXPLAINS = 0.25

Results = Callable[[Rows], Tensor]


def cause_of(call: Call, results: Mapping[str, Tensor], places: Sequence[tuple[int, ...]]) -> str:
    """Return the known defect that explains these wrong rows, in words, or "".

    results: the context (B, H, L, d_v) and perhaps the log-sum-exp (B, H, L).
    places: (item, head, row) of wrong rows; without any, the first rows are looked at.
    """
    some = _some_rows(call, places)
    if not some:
        return ""
    of_context = [(rows, _taken(results["context"], rows)) for rows in some]
    found = _best(of_context, _wrong_contexts(of_context, _output_or_rows(results["context"])))
    if found or "lse" not in results:
        return found
    of_lse = [(rows, _taken(results["lse"], rows).unsqueeze(-1)) for rows in some]
    return _best(of_lse, defects_of_lse(), Rows.lse)


def _output_or_rows(context: Tensor) -> str:
    """Return what is zeros or the mean of the values where wrong rows are, in words."""
    all_alike = torch.equal(context, context[:, :, :1].expand_as(context))
    return "the output is" if all_alike else "some rows of the output are"


def _some_rows(call: Call, places: Sequence[tuple[int, ...]]) -> list[Rows]:
    """Return the rows to look at, by head."""
    by_head: dict[tuple[int, int], list[int]] = {}
    if not places and call.query.numel():
        places = [(0, 0, row) for row in range(min(call.query.shape[2], MOST_ROWS_OF_HEAD))]
    for item, head, row in places:
        rows = by_head.setdefault((item, head), [])
        if row not in rows and len(rows) < MOST_ROWS_OF_HEAD:
            rows.append(row)
    heads = list(by_head)[:MOST_HEADS]
    return [rows_of(call, item, head, by_head[item, head]) for item, head in heads]


def _taken(result: Tensor, rows: Rows) -> Tensor:
    """Return a result for these rows, in float64."""
    return result[rows.item, rows.head, rows.places].double()


def _best(
    given: Sequence[tuple[Rows, Tensor]],
    wrong: Iterator[tuple[str, Results]],
    right: Results = Rows.context,
) -> str:
    """Return the words for the defect that leaves least of the errors, if that is little."""
    errors = [_distance(got, right(rows)) for rows, got in given]
    whole = sum(errors)
    if not whole or not math.isfinite(whole):
        return ""
    best, words = EXPLAINS**2 * whole, ""
    for text, result in wrong:
        left = 0.0
        for rows, got in given:
            left += _distance(got, result(rows))
        if left < best:
            best, words = left, text
    return words


def _distance(got: Tensor, other: Tensor) -> float:
    """Return the square of the distance of two results; infinities that are the same count 0."""
    difference = (got - other).masked_fill(got == other, 0.0)
    return float(difference.square().nan_to_num(nan=math.inf).sum())


def _wrong_contexts(
    given: Sequence[tuple[Rows, Tensor]], these_are: str
) -> Iterator[tuple[str, Results]]:
    """Yield defects in words, and their contexts.

    these_are: how to say what all the output is, or some rows of it.
    """
    yield f"{these_are} zeros", lambda rows: torch.zeros_like(rows.context())
    yield f"{these_are} the mean of the values", _mean
    for text, change in defects(given[0][0].call):
        yield text, _context_with(change)
    factor = _factor(given)
    text = f"the output is {factor:.4g} times what it should be"
    yield text, lambda rows: factor * rows.context()
    scale = _scale_factor(given)
    text = f"the scores are {scale:.4g} times what they should be"
    yield text, lambda rows: replace(rows, scale=scale * rows.scale).context()
    if _are_exchanged(given):
        exchanged = {id(rows): got for rows, got in given}
        text = "the numbers of each row are right, but in another order"
        yield text, lambda rows: exchanged[id(rows)]


def _mean(rows: Rows) -> Tensor:
    return rows.v.mean(0).expand(len(rows.q), -1)


def _context_with(change: Change) -> Results:
    """Return what gives the contexts with a defect; NaN where the call has nothing of the kind."""

    def result(rows: Rows) -> Tensor:
        changed = change(rows)
        if changed is None:
            return torch.full_like(rows.context(), math.nan)
        return changed.context()

    return result


def _factor(given: Sequence[tuple[Rows, Tensor]]) -> float:
    """Return the factor between the right contexts and those that were returned."""
    along = size = 0.0
    for rows, got in given:
        right = rows.context()
        along += float((got * right).sum())
        size += float(right.square().sum())
    return along / size if size else 1.0


def _scale_factor(given: Sequence[tuple[Rows, Tensor]]) -> float:
    """Return the factor of the scores that explains the errors best, 1 where none does.

    Two steps of Newton's method, from 1.
    """
    factor = 1.0
    for _ in range(2):
        along = size = 0.0
        for rows, got in given:
            scaled = replace(rows, scale=factor * rows.scale)
            p = scaled.weights()
            s = (scaled.scale * scaled.q @ scaled.k.mT) * (p > 0)
            moved = (p * (s - (p * s).sum(-1, keepdim=True))) @ scaled.v
            along += float(((got - p @ scaled.v) * moved).sum())
            size += float(moved.square().sum())
        if not size or not math.isfinite(along):
            return 1.0
        factor *= 1 + max(-0.9, along / size)
    return factor


def _are_exchanged(given: Sequence[tuple[Rows, Tensor]]) -> bool:
    """Return whether the rows have the right numbers in another order."""
    left = whole = 0.0
    for rows, got in given:
        right = rows.context()
        left += _distance(got.sort(-1).values, right.sort(-1).values)
        whole += _distance(got, right)
    return left < EXPLAINS**2 * whole
