"""What small defects do to an output: the directions of NUM-7, from a rounding graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.mask_kinds import OF_NUMBERS
from mha.conformance.properties.support.directed_script import (
    EPSILON,
    LAST_KEY,
    MASK,
    MASKED_KEY,
    MEAN,
    SCALE,
    VALUE,
    late_key_formula,
    random_formula,
)
from mha.spec.rounding_graph import RoundingGraph


@dataclass(frozen=True, eq=False)
class Direction:
    """What a small defect does to the results.

    change: of each result that is looked at, by name, for the whole defect or for each unit of a
        parameter.
    more, less: what the results are as if, for a positive and a negative share, with {} for how
        much.
    contexts: the change of the contexts (B, H, L, d_k), if it is one of them.
    formula: of the change, as lines of a script; see `directed_script`.
    """

    change: Mapping[str, Tensor]
    more: str
    less: str
    contexts: Tensor | None = None
    formula: tuple[str, ...] = ()

    def times(self, other: Direction) -> float:
        """Return the scalar product of two."""
        product = 0.0
        for name, change in self.change.items():
            if name in other.change:
                product += float((change * other.change[name]).sum())
        return product


def directions(graph: RoundingGraph, case: Case) -> Iterator[Direction]:
    """Yield what defects do to the output: derivatives, whole defects, and a random direction."""
    p, s, v, o, allowed = graph.weights, graph.scores, graph.value, graph.context, graph.allowed
    # d o / d log tau = sum_j p_j (s_j - sum_l p_l s_l) v_j
    scale = (p * (s - (p * s).sum(-1, keepdim=True))) @ v
    yield _of_contexts(
        graph, scale, "the scores were {} too large", "the scores were {} too small", SCALE
    )
    yield _of_contexts(
        graph, o, "the weights were {} too large", "the weights were {} too small", ("change = o",)
    )
    # d o / d epsilon, for a row sum of exp(s - max s) + epsilon: the row sum itself is 1 / max p
    epsilon = -p.amax(-1, keepdim=True) * o
    more = "{} of the largest term were added to each row sum"
    yield _of_contexts(
        graph, epsilon, more, "{} of the largest term were taken from each row sum", EPSILON
    )
    if case.mask in OF_NUMBERS:
        # d o / d log mask; log p - s is the mask, up to a number for each row
        added = (p.log() - s).masked_fill(p == 0, 0.0)
        mask = (p * (added - (p * added).sum(-1, keepdim=True))) @ v
        more = "the mask's numbers were {} too large"
        yield _of_contexts(graph, mask, more, "the mask's numbers were {} too small", MASK)
    constant = v.mean((0, 2), keepdim=True).expand_as(o)
    more = "{} of the mean value were added"
    yield _of_contexts(graph, constant, more, "{} of the mean value were subtracted", VALUE)
    yield from _keys(graph)
    mean = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).to(v) @ v - o
    more = "{} of each weight were spread evenly over the keys"
    yield _of_contexts(graph, mean, more, "{} of each weight were taken evenly from the keys", MEAN)
    drawn = random_signs(graph.output, case)
    more = "{} of an output of random signs were added"
    random = _of_output(graph, drawn, more, "{} of an output of random signs were taken")
    yield replace(random, formula=random_formula(case.seed))


def _keys(graph: RoundingGraph) -> Iterator[Direction]:
    """Yield the directions of single keys lost, and of the first masked key read."""
    v, o, allowed = graph.value, graph.context, graph.allowed
    more, less = "{} of the last allowed key were lost", "the last allowed key counted {} more"
    yield _without_key(graph, last_key(allowed), more, less, LAST_KEY)
    late = key_of_late_tile(allowed.shape[-1])
    if late:
        more, less = f"{{}} of key {late} were lost", f"key {late} counted {{}} more"
        lost = (torch.arange(allowed.shape[-1], device=allowed.device) == late) & allowed
        yield _without_key(graph, lost, more, less, late_key_formula(late))
    if not bool(allowed.all()):
        # With key j, o moves by r (v_j - o) / (1 + r), for r = exp(s_j - log sum exp(s)).
        first = first_masked_key(allowed)
        read = masked_weight(graph).sum(-1, keepdim=True)
        change = read / (1 + read) * ((first.to(v) @ v) - o)
        more = "{} of a masked key were read"
        yield _of_contexts(graph, change, more, "{} of a masked key were subtracted", MASKED_KEY)


def _without_key(
    graph: RoundingGraph, key: Tensor, more: str, less: str, formula: tuple[str, ...]
) -> Direction:
    """Return the direction of a key of each row lost; key: where it is, boolean (B, H, L, S)."""
    p, v, o = graph.weights, graph.value, graph.context
    # Without key j, o moves by -p_j (v_j - o) / (1 - p_j); a row's only key cannot be lost.
    lost = (p * key).sum(-1, keepdim=True)
    lost = lost.masked_fill(graph.allowed.sum(-1, keepdim=True) < 2, 0.0)
    return _of_contexts(graph, -lost / (1 - lost) * ((key.to(v) @ v) - o), more, less, formula)


def key_of_late_tile(keys: int) -> int:
    """Return the first key after the largest power of two below the number of keys; 0 for the last.

    Tiles, blocks and buffers are powers of two, and what is wrong from one of them on is so from
    there.

    >>> key_of_late_tile(600), key_of_late_tile(33)
    (512, 0)
    """
    late = 1 << (keys - 1).bit_length() >> 1
    return late if late < keys - 1 else 0


def last_key(allowed: Tensor) -> Tensor:
    """Return where the last allowed key of each row is, boolean (B, H, L, S)."""
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    last: Tensor = ((place * allowed).amax(-1, keepdim=True) == place) & allowed
    return last


def first_masked_key(allowed: Tensor) -> Tensor:
    """Return where the first masked key of each row is, boolean (B, H, L, S)."""
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    # Where there is none, this place is that of no key.
    first_masked = torch.where(allowed, len(place), place).amin(-1, keepdim=True)
    first: Tensor = (first_masked == place) & ~allowed
    return first


def masked_weight(graph: RoundingGraph) -> Tensor:
    """Return exp(s) of the first masked key over the sum of the allowed ones, (B, H, L, S)."""
    allowed, s = graph.allowed, graph.scores
    top = s.masked_fill(~allowed, -torch.inf).logsumexp(-1, keepdim=True)
    return ((s - top).exp() * first_masked_key(allowed)).nan_to_num(nan=0.0, posinf=0.0)


def random_signs(like: Tensor, case: Case) -> Tensor:
    """Return numbers as large as the mean magnitude of others, with random signs."""
    signs = torch.randint(0, 2, like.shape, generator=case.generator).to(like) * 2 - 1
    return signs * like.abs().mean()


def _of_contexts(
    graph: RoundingGraph, contexts: Tensor, more: str, less: str, formula: tuple[str, ...] = ()
) -> Direction:
    """Return the direction of a change of the contexts, (B, H, L, d_k)."""
    whole = _of_output(graph, graph.output_of(contexts), more, less)
    return replace(whole, contexts=contexts, formula=formula)


def _of_output(graph: RoundingGraph, change: Tensor, more: str, less: str) -> Direction:
    """Return the direction of a change of the output, (B, L, D), in the rows that are known."""
    return Direction({"output": change.masked_fill(~graph.known, 0.0)}, more, less)
