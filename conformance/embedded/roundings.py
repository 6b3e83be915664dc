"""In half precision: which small defect explains the errors of an output better than rounding.

The theory is that of `mha.spec.directed`; here are the directions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call
from mha.conformance.embedded.parts import Part, parts_of
from mha.spec.directed import allowance
from mha.spec.heads import side_by_side
from mha.spec.rounding_graph import RoundingGraph, rounding_graph

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
    found, farthest = "", 1.0
    for part in parts_of(call):
        for words, ratio in _unexplained(part, call.key.shape[2], context, valid, gross=gross):
            if ratio > farthest:
                found, farthest = f"the context is as if {words}", ratio
    return found


def _unexplained(
    part: Part, keys: int, context: Tensor, valid: Tensor | None, *, gross: bool
) -> Iterator[tuple[str, float]]:
    """Yield the defects that rounding does not explain, and the error over what it does explain."""
    graph = rounding_graph(part.problem, part.claims)
    got = side_by_side(part.of(context)).double()
    known = graph.known
    if valid is not None:
        known = known & valid[part.items][:, part.rows].unsqueeze(-1)
    error = (got - graph.output).masked_fill(~known, 0.0)
    # Thresholds have four digits in float32, and take half the time.
    narrow = graph.narrowed()
    for more, less, change in _directions(graph, keys):
        direction = graph.output_of(change).masked_fill(~known, 0.0)
        allowed = allowance(narrow, direction)
        if not allowed.is_informative:
            continue
        projected = float((error * direction).sum())
        share, least, most = allowed.share(projected)
        if gross and max(least, -most) < GROSS:
            continue
        words = more if share > 0 else less
        size = f"{_percent(share)} ({_percent(least)} to {_percent(most)})"
        yield words.format(size), abs(projected) / allowed.threshold


def _percent(share: float) -> str:
    return f"{100 * abs(share):.3g}%"


def _directions(graph: RoundingGraph, keys: int) -> Iterator[Direction]:
    """Yield what small defects do to the contexts (B, H, L, d_v).

    keys: how many there are; a key after these is a sink.
    """
    p, s, v, o = graph.weights, graph.scores, graph.value, graph.context
    place = torch.arange(p.shape[-1], device=p.device)
    allowed = graph.allowed & (place < keys)
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
    if p.shape[-1] > keys:
        of_sink = p[..., keys:]
        without = of_sink / (1 - of_sink).clamp(min=torch.finfo(p.dtype).tiny) * o
        yield "{} of the sink were left out", "the sink counted {} more", without
    last = (place * allowed).amax(-1, keepdim=True)
    for name, lost in {
        "the last allowed key": (place == last) & allowed,
        "the last 16 keys": (place > last - 16) & allowed,
        "every second key": (place % 2 == 1) & allowed,
    }.items():
        yield f"{{}} of {name} were lost", f"{name} counted {{}} more", _without(graph, lost)
    late = torch.arange(allowed.shape[2], device=allowed.device) >= allowed.shape[2] - LAST_TILE
    hidden = ~allowed & (place < keys) & late.unsqueeze(1)
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
