"""Parts of a call as problems of the contract, for the tests that need a rounding graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mha.conformance.embedded.call import Call
from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.heads import side_by_side
from mha.spec.problem import Problem
from mha.spec.scores import Options
from mha.spec.weights import Weights

# The most scores of a part, numbers of its keys and values, and columns of its contexts: its
# graph has some twenty tensors of the first two, and a square matrix of the last.
MOST_SCORES, MOST_OF_KEYS, MOST_COLUMNS = 1 << 18, 1 << 20, 1 << 10
# Of a large call, so many are looked at.
MOST_PARTS = 4


@dataclass(frozen=True, eq=False)
class Part:
    """Some items, heads and rows of a call.

    problem: these, without projections.
    claims: those of the call.
    """

    problem: Problem
    claims: Claims
    items: slice
    heads: Tensor
    rows: Tensor

    def of(self, context: Tensor) -> Tensor:
        """Return the part of a context (B, H, L, d_v)."""
        part: Tensor = context[self.items][:, self.heads][:, :, self.rows]
        return part


def parts_of(call: Call) -> Iterator[Part]:
    """Yield parts of a call, spread over its items and heads; the whole call where it is small.

    There is none where the graph has no model: of softcaps, of partial sums that are stored, of
    casts that truncate.
    """
    if not _is_modelled(call):
        return
    places = list(_places(call))
    last = len(places) - 1
    count = min(MOST_PARTS, len(places))
    chosen = {number * last // max(1, count - 1) for number in range(count)}
    for number in sorted(chosen):
        yield _part(call, *places[number])


def _part(call: Call, items: slice, of_keys: slice, group: slice, rows: Tensor) -> Part:
    """Return the part of a call at a place."""
    query = call.of_groups(call.query)[items, of_keys, group][:, :, :, rows].flatten(1, 2)
    key, value = call.key[items, of_keys], call.value[items, of_keys]
    mask = _mask(call, items, of_keys, group, rows)
    if call.options.sinks is not None:
        # A sink is one more key, of zeros, whose score the mask gives.
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    options = Options(mask=mask, scale=call.options.scale)
    heads = torch.arange(call.query.shape[1], device=query.device)
    return Part(
        problem=_as_problem(query, key, value, options),
        claims=replace(call.claims, rounding=replace(call.claims.rounding, ranks=1)),
        items=items,
        heads=heads.view(-1, call.group)[of_keys, group].flatten(),
        rows=rows,
    )


def _mask(call: Call, items: slice, of_keys: slice, group: slice, rows: Tensor) -> Tensor:
    """Return the mask of a part with all that is added to its scores, (B, H, L, S).

    Where nothing is, it is boolean. Slopes are in it, and the sinks in a last column.
    """
    allowed = call.allowed(items, of_keys, group, rows)
    bias = call.bias(items, of_keys, group, rows)
    if bias is None and call.options.sinks is None:
        return allowed.flatten(1, 2)
    if bias is None:
        bias = torch.zeros(allowed.shape, dtype=torch.float64, device=allowed.device)
    mask = bias.masked_fill(~allowed, float("-inf"))
    if call.options.sinks is not None:
        sinks = call.sinks(of_keys, group, rows).unsqueeze(-1).expand(*mask.shape[:-1], 1)
        mask = torch.cat([mask, sinks], -1)
    return mask.flatten(1, 2)


def _is_modelled(call: Call) -> bool:
    """Return whether the graph has all that a call may round, and there is something to round."""
    options, rounding = call.options, call.claims.rounding
    if options.softcap:
        return False
    if rounding.reductions or rounding.accumulator == "float16" or rounding.mode == "toward_zero":
        return False
    return all(x.numel() for x in (call.query, call.key, call.value))


def _as_problem(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Problem:
    """Return a call as a problem without projections; the tensors are (B, H, length, d)."""
    d, d_v = query.shape[-1], value.shape[-1]
    n_heads, kv_heads = query.shape[1], key.shape[1]
    config = Config(
        d_model=n_heads * d,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        kdim=kv_heads * d,
        vdim=kv_heads * d_v,
        bias=False,
        projected=False,
        d_value=d_v,
    )
    weights = Weights.identity(config, query.dtype, query.device)
    inputs = [side_by_side(x) for x in (query, key, value)]
    return Problem(config, weights, inputs[0], inputs[1], inputs[2], options)


def _places(call: Call) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield the items, key heads, query heads of each, and rows of all parts."""
    batch, kv_heads, keys, width = call.key.shape
    of_keys_and_values = keys * (width + call.value.shape[-1])
    columns = max(1, MOST_COLUMNS // call.value.shape[-1])
    group = min(call.group, columns)
    most_rows = max(1, MOST_SCORES // (group * keys))
    rows = call.rows
    if len(rows) > most_rows:
        # The last rows have the most keys where there is a causal mask.
        rows = rows[-most_rows:]
    pairs = max(1, MOST_SCORES // (group * keys * len(rows)))
    pairs = min(pairs, max(1, MOST_OF_KEYS // of_keys_and_values))
    heads_at_once = min(kv_heads, pairs, max(1, columns // group))
    items_at_once = 1
    if heads_at_once == kv_heads:
        items_at_once = max(1, pairs // kv_heads)
    for item in range(0, batch, items_at_once):
        for head in range(0, kv_heads, heads_at_once):
            items, of_keys = slice(item, item + items_at_once), slice(head, head + heads_at_once)
            yield items, of_keys, slice(0, group), rows
