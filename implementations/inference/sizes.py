"""The sizes that trial runs show: widths of heads, lengths of which not all are taken, and the
longest input.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from time import process_time
from typing import Any

import torch

from mha.implementations.adapters.construction import MAX_LENGTH, SHORT
from mha.implementations.inference.candidate import Candidate, Kind
from mha.implementations.inference.probes import CONFIG, Probe, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import Sizes
from mha.spec.claims import Claims

# In seconds of CPU time, for a call with long inputs, and for all trial runs in few sizes.
PATIENCE = 4.0
# What lengths may have to be multiples of, as the edges of tiles, and lengths that are no multiple
# of them.
TILES = (1, 4, 8, 16, 32, 64, 128)
NO_TILES = (50, 257)
# Widths of heads: those that show a multiple below 8, and common ones, one of which any kernel
# takes.
SHOWN_BY = {5: 1, 6: 2, 4: 4}  # in this order
WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256)
COMMON = 64


def in_whole_tiles(candidate: Candidate) -> Candidate:
    """Return a candidate that claims the lengths alone that fill the tiles of any module."""
    sizes = replace(candidate.sizes, length_multiple=TILES[-1])
    return replace(candidate, claims=candidate.claims | {"sizes": sizes})


def in_few_sizes(candidate: Kind) -> Kind:
    """Return a candidate that claims what any kernel takes: as many keys as queries, whole tiles, a
    common width.
    """
    sizes = Sizes(head_dims={COMMON}, length_multiple=TILES[-1])
    return replace(candidate, claims=candidate.claims | {"cross_attention": False, "sizes": sizes})


def claim_more_lengths(candidate: Candidate) -> None:
    """Claim all lengths for which a module does not raise that was found in few.

    Raises Unclear as `claim_more_sizes` does.
    """
    if candidate.sizes.length_multiple > 1:
        multiple, candidate.other_lengths = _least_tile(candidate, explained=False)
        candidate.claims = candidate.claims | {
            "sizes": replace(candidate.sizes, length_multiple=multiple)
        }
    if candidate.signature.inputs and not candidate.cross_attention:
        claims = {
            name: claim for name, claim in candidate.claims.items() if name != "cross_attention"
        }
        candidate.other_keys = _problem_with_lengths(
            replace(candidate, claims=claims), explained=False
        )
        candidate.claims = candidate.claims if candidate.other_keys else claims


def claim_more_sizes(candidate: Candidate, *, explained: bool) -> None:
    """Claim all sizes that a kernel takes which was found in few.

    explained: only those of which its formula gives the output; otherwise all for which it does not
    raise. Then raises Unclear if it raises for sizes between those that it takes, which no claim
    describes.
    """
    few = in_few_sizes(candidate)
    multiple, candidate.other_lengths = _least_tile(few, explained=explained)

    def problem_of(width: int) -> str:
        tried = replace(few, claims=few.claims | {"sizes": replace(few.sizes, head_dims={width})})
        return _problem(tried, tried.probes[0], explained=explained)

    widths, candidate.other_widths = _widths(problem_of)
    sizes = Sizes(length_multiple=multiple, **widths)
    claims = {
        name: claim
        for name, claim in candidate.claims.items()
        if name not in ("cross_attention", "sizes")
    }
    claims |= {} if sizes == Sizes() else {"sizes": sizes}
    candidate.other_keys = _problem_with_lengths(
        replace(candidate, claims=claims), explained=explained
    )
    candidate.claims = claims | ({"cross_attention": False} if candidate.other_keys else {})


def _problem_with_lengths(candidate: Candidate, *, explained: bool) -> str:
    """Return what a candidate raises with other numbers of keys than queries; see
    `claim_more_sizes`.
    """
    more_keys, more_queries = (
        _problem(candidate, probe, explained=explained) for probe in candidate.probes
    )
    if bool(more_keys) != bool(more_queries) and not explained:
        raise Unclear(
            f"with unequal lengths it raises {more_keys or more_queries}, but not with all"
        )
    return more_keys or more_queries


def _least_tile(candidate: Candidate, *, explained: bool) -> tuple[int, str]:
    """Return what lengths must be multiples of, and what others raise; see `claim_more_sizes`."""
    problems = dict[int, str]()
    for multiple in TILES:
        sizes = replace(candidate.sizes, length_multiple=multiple)
        tried = replace(candidate, claims=candidate.claims | {"sizes": sizes})
        found = [_problem(tried, probe, explained=explained) for probe in tried.probes]
        problems[multiple] = next(filter(None, found), "")
        if not problems[multiple]:
            break
    between = [Probe(2, length, length, candidate.cross_attention) for length in NO_TILES]
    taken = [probe.keys for probe in between if not _problem(candidate, probe, explained=explained)]
    if problems[1] and taken:
        raise Unclear(f"with some lengths it raises {problems[1]}, but not with {taken[0]}")
    return multiple, problems[1]


def _widths(problem_of: Callable[[int], str]) -> tuple[dict[str, Any], str]:
    """Return the widths of heads that cause no problem, as arguments of `Sizes`, and what others
    raise.

    problem_of: returns the problem with a width. Raises Unclear if each causes one.
    """
    problem_of = cache(problem_of)
    problems = {width: problem_of(width) for width in (5, WIDTHS[-1])}
    raised = next(
        (f"with {width}, {problem}" for width, problem in problems.items() if problem), ""
    )
    if not raised:
        return {}, ""
    shown = [multiple for width, multiple in SHOWN_BY.items() if not problem_of(width)]
    taken = [width for width in WIDTHS if not problem_of(width)]
    if not taken:
        raise Unclear(
            f"{raised}, and the same for others; claim those that it takes:"
            " sizes=Sizes(head_dims=...)"
        )
    return _as_claims(taken, shown[:1] or [8, 16]), raised


def _as_claims(taken: Sequence[int], multiples: Iterable[int]) -> dict[str, Any]:
    """Return those of `WIDTHS` that are taken as arguments of `Sizes`: all multiples, those up to
    one, or a few.
    """
    for multiple in multiples:
        fitting = [width for width in WIDTHS if width % multiple == 0]
        if taken == fitting[: len(taken)]:
            return {"head_dim_multiple": multiple} | (
                {} if taken == fitting else {"max_head_dim": taken[-1]}
            )
    return {"head_dims": {*taken}}


def _problem(candidate: Candidate, probe: Probe, *, explained: bool) -> str:
    """Return what a candidate raises, or, if it is to be explained, that its formula does not;
    empty if neither.
    """
    tried = replace(candidate, problem="")
    result = tried.call(probe.inputs, is_causal=bool(tried.claims.get("always_causal")))
    if result is None:
        return tried.problem
    matches = not explained or is_close(
        result.output, tried.formula(probe.inputs, tried.weights, None)
    )
    return "" if matches else "another output"


def find_widths(candidate: Candidate) -> None:
    """Claim the widths of heads for which a module does not raise, if it does for some.

    Rotary embeddings take even widths, or multiples of 4, and kernels those that they are made for.
    Raises Unclear as `_widths` does.
    """
    counts = sorted({1, 2, 3}.intersection(candidate.sizes.n_heads or {1, 2, 3}))

    def problem_of(width: int, dtypes: Iterable[torch.dtype] = (candidate.dtype,)) -> str:
        tried = {5: [CONFIG.n_heads]}.get(width, counts if width in SHOWN_BY else counts[:1])
        in_each = product([replace(candidate, dtype=dtype) for dtype in dtypes], tried)
        return next(filter(None, (_problem_with_heads(*each, width) for each in in_each)), "")

    _, raised = _widths(problem_of)
    if not raised:
        return
    dtypes = [
        getattr(torch, name) for name in sorted(candidate.claims.get("dtypes", Claims().dtypes))
    ]
    widths, _ = _widths(
        partial(problem_of, dtypes=[candidate.dtype, *dtypes])
    )  # others may take fewer
    candidate.other_widths = raised
    candidate.claims["sizes"] = replace(candidate.sizes, **widths)


def _problem_with_heads(candidate: Candidate, count: int, width: int) -> str:
    """Return what a module raises that has so many heads of a width; empty if it takes them."""
    own = "own_head_dim" in candidate.claims
    sizes = {"n_heads": count} | ({"d_head": width} if own else {"d_model": count * width})
    tried, inputs = (
        replace(candidate, changes=candidate.changes | sizes),
        candidate.probes[0].inputs,
    )
    d_model = tried.config.d_model
    # One tensor stays one tensor, and in one piece.
    given = {
        id(x): x.repeat(1, 1, -(-d_model // CONFIG.d_model))[..., :d_model].contiguous()
        for x in inputs
    }
    returned = tried.call_plainly(tuple(given[id(x)] for x in inputs))
    return tried.problem if returned is None else ""


def find_longest(candidate: Candidate) -> None:
    """Claim the longest inputs that a module takes, where a table of its own is shorter than those
    of the cases.

    A module is not tried with inputs of which a call would take too long.
    """
    has_single = "float32" in candidate.claims.get("dtypes", Claims().dtypes)
    tried = replace(candidate, longest=MAX_LENGTH)
    if has_single:  # which takes half the time
        tried = replace(tried, dtype=torch.float32)
    step = candidate.sizes.length_multiple

    def takes(length: int, queries: int = 0) -> bool:
        probe = Probe(1, queries or length, length, candidate.cross_attention)
        return tried.call_plainly(probe.inputs) is not None

    def claim(longest: int) -> None:
        candidate.too_long = tried.problem
        candidate.claims["sizes"] = replace(candidate.sizes, max_length=longest)

    # Keys may be more than queries ever are.
    if candidate.cross_attention and not takes(MAX_LENGTH + step, queries=step):
        claim(MAX_LENGTH)
    shorter, seconds = candidate.probes[0].keys, 0.0
    for length in _longer(shorter, step):
        expected = seconds / shorter**2
        if expected * length**2 > PATIENCE:
            return
        if length == SHORT and expected * MAX_LENGTH**2 < PATIENCE and takes(MAX_LENGTH):
            return  # as most do, and the lengths between take as long again
        begun = process_time()
        if not takes(length):
            between = range(shorter + step, length, step)
            claim(shorter + step * bisect(between, False, key=lambda longer: not takes(longer)))
            return
        shorter, seconds = length, process_time() - begun


def _longer(shorter: int, step: int) -> list[int]:
    """Return the lengths to try that are longer than one, multiples of a step."""
    powers = [2**power for power in range(5, MAX_LENGTH.bit_length())]
    return [*(power for power in powers if power > shorter and power % step == 0), MAX_LENGTH]
