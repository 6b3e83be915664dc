"""The sizes that trial runs show: widths of heads, lengths of which not all are taken, and the longest input."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn

from mha.implementations.adapters.construction import MAX_LENGTH, SHORT, built_for, parameters_of
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.inference.candidate import Candidate, Kind
from mha.implementations.inference.probes import CONFIG, Probe, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import Sizes
from mha.spec.claims import Claims

# In seconds of CPU time, for a call with long inputs.
PATIENCE = 4.0
# What lengths may have to be multiples of, as the edges of tiles.
TILES = (1, 16, 32, 64, 128)
# Widths of heads that show what they may have to be multiples of, and those that kernels are made for.
SHOWN_BY = {5: 1, 6: 2, 4: 4}
WIDTHS = (8, 16, 32, 64, 128, 256)
COMMON = (64,)


def with_own_tiles(constructor: Callable[..., nn.Module]) -> list[Callable[..., nn.Module]]:
    """Return a constructor that keeps a default named as the longest length, if it may be the length of a tile."""
    names = parameters_of(constructor).items()
    kept = {name: p.default for name, p in names if name in CONSTRUCTOR_NAMES["max_length"] and _is_tile(p.default)}
    return [partial(constructor, **kept)] if kept else []


def _is_tile(default: object) -> bool:
    return type(default) is int and default in TILES[1:]


def in_whole_tiles(candidate: Candidate) -> Candidate:
    """Return a candidate that claims the lengths alone that fill the tiles of any module."""
    sizes = replace(candidate.sizes, length_multiple=TILES[-1])
    return replace(candidate, claims=candidate.claims | {"sizes": sizes})


def claim_more_lengths(candidate: Candidate) -> None:
    """Claim all lengths for which a module does not raise that was found in whole tiles."""
    for multiple in TILES:
        sizes = replace(candidate.sizes, length_multiple=multiple)
        tried = replace(candidate, claims=candidate.claims | {"sizes": sizes}, problem="")
        problem = _problem(tried, explained=False)
        if multiple == 1:
            candidate.other_lengths = problem
        if not problem:
            candidate.claims = tried.claims
            return


def in_few_sizes(candidate: Kind) -> Kind:
    """Return a candidate that claims what any kernel takes: as many keys as queries, whole tiles, a common width."""
    sizes = Sizes(head_dims=COMMON, length_multiple=TILES[-1])
    return replace(candidate, claims=candidate.claims | {"cross_attention": False, "sizes": sizes})


def claim_more_sizes(candidate: Candidate, *, explained: bool) -> None:
    """Claim all sizes that a kernel takes which was found in few.

    explained: only those of which its formula gives the output; otherwise all for which it does not raise.
    """
    few = in_few_sizes(candidate)

    def problem_with(claims: dict[str, Any]) -> str:
        return _problem(replace(few, claims=claims, problem=""), explained=explained)

    def problem_of(**changes: Any) -> str:
        return problem_with(few.claims | {"sizes": replace(few.sizes, **changes)})

    candidate.other_lengths, candidate.other_widths = problem_of(length_multiple=1), problem_of(head_dims={5})
    multiple = next((each for each in TILES if not problem_of(length_multiple=each)), TILES[-1])
    sizes = Sizes(length_multiple=multiple, **_widths(problem_of))
    claims = {name: claim for name, claim in candidate.claims.items() if name not in ("cross_attention", "sizes")}
    claims |= {} if sizes == Sizes() else {"sizes": sizes}
    candidate.other_keys = problem_with(claims)
    candidate.claims = claims | ({"cross_attention": False} if candidate.other_keys else {})


def _widths(problem_of: Callable[..., str]) -> dict[str, Any]:
    """Return the widths of heads that cause no problem, as arguments of `Sizes`."""
    for width, multiple in SHOWN_BY.items():
        if not problem_of(head_dims={width}):
            return {"head_dim_multiple": multiple}
    return {"head_dims": {width for width in WIDTHS if width in COMMON or not problem_of(head_dims={width})}}


def _problem(tried: Candidate, *, explained: bool) -> str:
    """Return what a candidate raises in its trial runs, or that its formula does not explain them; empty if none."""
    for probe in tried.probes:
        result = tried.call(probe.inputs) if explained else tried.call_plainly(probe.inputs)
        if result is None:
            return tried.problem
        if explained and not is_close(result.output, tried.formula(probe.inputs, tried.weights, None)):
            return "another output"
    return ""


def find_widths(candidate: Candidate) -> None:
    """Claim even widths of heads alone, or multiples of 4, where a module raises for others, as rotary ones do.

    Raises Unclear if it does not take these either.
    """
    raised = _problem_with_heads(candidate, 5, CONFIG.n_heads)
    if not raised:
        return
    claimed, problem = candidate.sizes, ""
    counts = sorted({1, 2, 3}.intersection(claimed.n_heads or {1, 2, 3}))
    for multiple, width in ((2, 6), (4, 4)):
        problem = next(filter(None, (_problem_with_heads(candidate, width, count) for count in counts)), "")
        if not problem:
            candidate.other_widths = raised
            candidate.claims["sizes"] = replace(claimed, head_dim_multiple=multiple)
            return
    both = f"with heads of width 5 it raises {raised}, and with heads of width 4 {problem}"
    raise Unclear(f"{both}; claim those that it takes: sizes=Sizes(head_dims=...)")


def _problem_with_heads(candidate: Candidate, width: int, count: int) -> str:
    """Return what a module raises that has so many heads of a width; empty if it takes them."""
    own = "own_head_dim" in candidate.claims
    sizes = {"n_heads": count} | ({"d_head": width} if own else {"d_model": count * width})
    tried, inputs = replace(candidate, changes=candidate.changes | sizes), candidate.probes[0].inputs
    # One tensor stays one tensor, and in one piece.
    narrow = {id(x): x[..., : tried.config.d_model].contiguous() for x in inputs}
    returned = tried.call_plainly(tuple(narrow[id(x)] for x in inputs))
    return tried.problem if returned is None else ""


@built_for(MAX_LENGTH)
def find_longest(candidate: Candidate) -> None:
    """Claim the longest inputs that a module takes, where a table of its own is shorter than those of the cases.

    A module is not tried with inputs of which a call would take too long, nor one that takes whole tiles alone.
    """
    if candidate.sizes.length_multiple > 1:
        return
    has_single = "float32" in candidate.claims.get("dtypes", Claims().dtypes)
    tried = replace(candidate, dtype=torch.float32) if has_single else candidate  # which takes half the time

    def takes(length: int, queries: int = 0) -> bool:
        probe = Probe(1, queries or length, length, candidate.cross_attention)
        return tried.call_plainly(probe.inputs) is not None

    def claim(longest: int) -> None:
        candidate.too_long = tried.problem
        candidate.claims["sizes"] = replace(candidate.sizes, max_length=longest)

    if candidate.cross_attention and not takes(MAX_LENGTH + 1, queries=1):  # keys may be more than queries ever are
        claim(MAX_LENGTH)
    shorter, seconds = candidate.probes[0].keys, 0.0
    for length in (*(2**power for power in range(5, MAX_LENGTH.bit_length())), MAX_LENGTH):
        expected = seconds / shorter**2
        if expected * length**2 > PATIENCE:
            return
        if length == SHORT and expected * MAX_LENGTH**2 < PATIENCE and takes(MAX_LENGTH):
            return  # as most do, and the lengths between take as long again
        begun = process_time()
        if not takes(length):
            claim(shorter + bisect(range(shorter + 1, length), False, key=lambda longer: not takes(longer)))
            return
        shorter, seconds = length, process_time() - begun
