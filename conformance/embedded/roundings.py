"""In half precision: which small defect explains the errors of an output better than rounding.

The theory is that of `mha.spec.directed`; here are the directions, and the part of a large call
that they are tried on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call
from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.directed import allowance
from mha.spec.heads import side_by_side
from mha.spec.problem import Problem
from mha.spec.rounding_graph import RoundingGraph, rounding_graph
from mha.spec.scores import Options
from mha.spec.weights import Weights

# The most scores of the part, numbers of its keys and values, and columns of its contexts: its
# graph has some twenty tensors of the first two, and a square matrix of the last.
MOST_SCORES, MOST_OF_KEYS, MOST_COLUMNS = 1 << 18, 1 << 20, 1 << 10
# The least share of a gross defect, of which no rounding that the graph lacks makes as much.
GROSS = 0.25
# Of queries, as many as the tiles of kernels have at least.
LAST_TILE = 16

# What the results are as if, for a positive and a negative share, and the change of the contexts.
Direction = tuple[str, str, Tensor]


def small_defect(call: Call, context: Tensor, valid: Tensor | None, *, gross: bool) -> str:
    """Return the defect that explains the errors of a context (B, H, L, d_v), in words, or "".

    valid: as for `judge_output`.
    gross: whether it must be a gross one.
    """
    part = _part(call)
    if part is None:
        return ""
    problem, claims, place = part
    items, heads, rows = place
    graph = rounding_graph(problem, claims)
    got = context[items][:, heads][:, :, rows].transpose(1, 2).flatten(2).double()
    known = graph.known
    if valid is not None:
        known = known & valid[items][:, rows].unsqueeze(-1)
    error = (got - graph.output).masked_fill(~known, 0.0)
    # Thresholds have four digits in float32, and take half the time.
    narrow = graph.narrowed()
    found, farthest = "", 1.0
    for more, less, change in _directions(graph):
        direction = graph.output_of(change).masked_fill(~known, 0.0)
        allowed = allowance(narrow, direction)
        if not allowed.is_informative:
            continue
        projected = float((error * direction).sum())
        ratio = abs(projected) / allowed.threshold
        share, least, most = allowed.share(projected)
        at_least = max(least, -most)
        if ratio > farthest and not (gross and at_least < GROSS):
            words = more if share > 0 else less
            size = f"{_percent(share)} ({_percent(least)} to {_percent(most)})"
            found, farthest = f"the context is as if {words.format(size)}", ratio
    return found


def _percent(share: float) -> str:
    return f"{100 * abs(share):.3g}%"


def _directions(graph: RoundingGraph) -> Iterator[Direction]:
    """Yield what small defects do to the contexts (B, H, L, d_v)."""
    p, s, v, o, allowed = graph.weights, graph.scores, graph.value, graph.context, graph.allowed
    # d o / d log tau = sum_j p_j (s_j - sum_l p_l s_l) v_j
    scale = (p * (s - (p * s).sum(-1, keepdim=True))) @ v
    yield "the scores were {} too large", "the scores were {} too small", scale
    yield "the weights were {} too large", "the weights were {} too small", o
    epsilon = -p.amax(-1, keepdim=True) * o
    more = "{} of the largest term were added to each row sum"
    yield more, "{} of the largest term were taken from each row sum", epsilon
    mean = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).to(v) @ v - o
    more = "{} of each weight were spread evenly over the keys"
    yield more, "{} of each weight were taken evenly from the keys", mean
    constant = v.mean((0, 2), keepdim=True).expand_as(o)
    yield "{} of the mean value were added", "{} of the mean value were subtracted", constant
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    last = (place * allowed).amax(-1, keepdim=True)
    for name, keys in {
        "the last allowed key": (place == last) & allowed,
        "the last 16 keys": (place > last - 16) & allowed,
        "every second key": (place % 2 == 1) & allowed,
    }.items():
        yield f"{{}} of {name} were lost", f"{name} counted {{}} more", _without(graph, keys)
    late = torch.arange(allowed.shape[2], device=allowed.device) >= allowed.shape[2] - LAST_TILE
    hidden = ~allowed & late.unsqueeze(1)
    if bool(hidden.any()):
        more = "{} of the masked keys were read by the last queries"
        less = "{} of the masked keys were subtracted in the last queries"
        yield more, less, _reading(graph, hidden)


def _without(graph: RoundingGraph, keys: Tensor) -> Tensor:
    """Return how the contexts move without some keys, (B, H, L, S); a row keeps at least one."""
    p, v, o = graph.weights, graph.value, graph.context
    weights = p * keys
    lost = weights.sum(-1, keepdim=True)
    keeps_none = (graph.allowed & ~keys).sum(-1, keepdim=True) == 0
    change = (lost * o - weights @ v) / (1 - lost).clamp(min=torch.finfo(p.dtype).tiny)
    return change.masked_fill(keeps_none, 0.0)


def _reading(graph: RoundingGraph, keys: Tensor) -> Tensor:
    """Return how the contexts move with some masked keys, (B, H, L, S)."""
    s = graph.scores
    top = s.masked_fill(~graph.allowed, -torch.inf).logsumexp(-1, keepdim=True)
    read = ((s - top).exp() * keys).nan_to_num(nan=0.0, posinf=0.0)
    total = read.sum(-1, keepdim=True)
    return (read @ graph.value - total * graph.context) / (1 + total)


def _part(call: Call) -> tuple[Problem, Claims, tuple[slice, Tensor, Tensor]] | None:
    """Return a part of a call as a problem, its claims, and its items, heads and rows.

    It is None where the graph has no model: of sinks, softcaps and slopes, of partial sums that
    are stored, of casts that truncate, and where nothing is there.
    """
    options, rounding = call.options, call.claims.rounding
    if not _is_modelled(call):
        return None
    items, of_keys, group, rows = _place(call)
    query = call.of_groups(call.query)[items, of_keys, group][:, :, :, rows].flatten(1, 2)
    key, value = call.key[items, of_keys], call.value[items, of_keys]
    place = (items, of_keys, group, rows)
    mask = call.allowed(*place)
    given = call.mask_at(*place)
    if given is not None and given.is_floating_point():
        mask = given.expand(mask.shape).masked_fill(~mask, float("-inf"))
    mask = mask.flatten(1, 2)
    problem = _as_problem(query, key, value, Options(mask=mask, scale=options.scale))
    heads = torch.arange(call.query.shape[1], device=query.device)
    heads = heads.view(-1, call.group)[of_keys, group].flatten()
    return problem, replace(call.claims, rounding=replace(rounding, ranks=1)), (items, heads, rows)


def _is_modelled(call: Call) -> bool:
    """Return whether the graph has all that a call may round, and there is something to round."""
    options, rounding = call.options, call.claims.rounding
    if options.sinks is not None or options.alibi is not None or options.softcap:
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


def _place(call: Call) -> tuple[slice, slice, slice, Tensor]:
    """Return the items, key heads, query heads of each, and rows of the part."""
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
    of_keys = min(kv_heads, pairs, max(1, columns // group))
    items = min(batch, max(1, pairs // of_keys))
    return slice(0, items), slice(0, of_keys), slice(0, group), rows
