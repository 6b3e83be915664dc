"""The sizes that trial runs show: widths of heads, lengths, and the longest input."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from time import process_time
from typing import Any

import torch
from torch import Tensor

from mha.implementations.adapters.construction import MAX_LENGTH, SHORT
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import CONFIG, Probe, each_once, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import Sizes

# In seconds of CPU time, for a call with long inputs, and for all trial runs in few sizes.
PATIENCE = 4.0
# What lengths may have to be multiples of, as the edges of tiles, and lengths that are no multiple
# of them.
TILES = (1, 4, 8, 16, 32, 64, 128)
NO_TILES = (50, 257)
# Widths of heads: by a multiple below 8, those that are taken where it is the one, in this order;
# and common ones, one of which any kernel takes. A head of one pair is tried too: tables of
# rotations that are stretched for long inputs divide by the width less 2.
SHOWN_BY = {1: (5,), 2: (6, 2), 4: (4,)}
NARROW = frozenset(chain.from_iterable(SHOWN_BY.values()))
WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256)
COMMON = 64


def in_whole_tiles(candidate: Candidate) -> Candidate:
    """Return a candidate that claims only the lengths that fill the tiles of any module."""
    return candidate.claiming(sizes=replace(candidate.sizes, length_multiple=TILES[-1]))


def in_few_sizes(candidate: Candidate) -> Candidate:
    """Return a candidate that claims what any kernel takes.

    That is as many keys as queries, whole tiles, and a common width.
    """
    sizes = Sizes(head_dims={COMMON}, length_multiple=TILES[-1])
    return candidate.claiming(cross_attention=False, sizes=sizes).trying(few_sizes=True)


def claim_more_lengths(candidate: Candidate) -> Candidate:
    """Claim all lengths for which a module does not raise that was found in few.

    Raises Unclear as `claim_more_sizes` does.
    """
    other_lengths, other_keys = "", ""
    if candidate.sizes.length_multiple > 1:
        multiple, other_lengths = _least_tile(candidate, explained=False)
        candidate = candidate.claiming(sizes=replace(candidate.sizes, length_multiple=multiple))
    if candidate.signature.inputs and not candidate.cross_attention:
        general = candidate.without_claims("cross_attention")
        other_keys = _problem_with_lengths(general, explained=False)
        if not other_keys:
            candidate = general
    return _with_lengths(candidate, other_keys, other_lengths)


def claim_explained_sizes(candidate: Candidate) -> Candidate:
    """Claim the sizes of a kernel, found in few, of which its formula gives the output."""
    return claim_more_sizes(candidate, explained=True)


def claim_all_sizes(candidate: Candidate) -> Candidate:
    """Claim all sizes for which a kernel, found in few, does not raise."""
    wider = claim_more_sizes(candidate, explained=False)
    if wider.claims == candidate.claims:
        return wider
    return replace(wider, shown="for some of the sizes that it takes")


def claim_more_sizes(candidate: Candidate, *, explained: bool) -> Candidate:
    """Claim all sizes that a kernel takes which was found in few.

    explained: only those of which its formula gives the output; otherwise all for which it does not
        raise.

    Raises Unclear, if not explained, for a kernel that raises for sizes between those that it
    takes, which no claim describes.
    """
    few = in_few_sizes(candidate)
    multiple, other_lengths = _least_tile(few, explained=explained)

    def problem_of(width: int) -> str:
        tried = few.claiming(sizes=replace(few.sizes, head_dims={width}))
        return _problem(tried, tried.probes[0], explained=explained)

    widths, other_widths = _widths(problem_of)
    sizes = Sizes(length_multiple=multiple, **widths)
    general = candidate.without_claims("cross_attention", "sizes")
    if sizes != Sizes():
        general = general.claiming(sizes=sizes)
    other_keys = _problem_with_lengths(general, explained=explained)
    if other_keys:
        general = general.claiming(cross_attention=False)
    if "3" in candidate.declared.layout.split():
        other_keys = ""  # none can be given
    return _with_widths(_with_lengths(general, other_keys, other_lengths), other_widths)


def _with_lengths(candidate: Candidate, other_keys: str, other_lengths: str) -> Candidate:
    """Return the candidate with the row about lengths, of what others raise."""
    found = []
    if other_keys:
        found.append(f"as many keys as queries: others raise {other_keys}")
    if other_lengths:
        multiple = candidate.sizes.length_multiple
        found.append(f"multiples of {multiple}: others raise {other_lengths}")
    return candidate.noting("lengths", "; ".join(found))


def _with_widths(candidate: Candidate, raised: str) -> Candidate:
    """Return the candidate with the row about widths of heads, of what others raise."""
    if not raised:
        return candidate.noting("head_dim", "")
    sizes, limits = candidate.sizes, []
    if sizes.head_dims:
        limits.append(either(sizes.head_dims))
    if sizes.head_dim_multiple > 1:
        limits.append(f"a multiple of {sizes.head_dim_multiple}")
    if sizes.max_head_dim:
        limits.append(f"at most {sizes.max_head_dim}")
    return candidate.noting("head_dim", f"{', '.join(limits)}: {raised}")


def either(numbers: Collection[int]) -> str:
    """Return numbers as alternatives: "1, 2 or 4"."""
    *fewer, most = map(str, sorted(numbers))
    if not fewer:
        return most
    return f"{', '.join(fewer)} or {most}"


def _problem_with_lengths(candidate: Candidate, *, explained: bool) -> str:
    """Return what is raised with other numbers of keys than queries; see `claim_more_sizes`."""
    of_keys, of_queries = candidate.probes
    more_keys = _problem(candidate, of_keys, explained=explained)
    more_queries = _problem(candidate, of_queries, explained=explained)
    if bool(more_keys) != bool(more_queries) and not explained:
        raise Unclear(
            f"with unequal lengths it raises {more_keys or more_queries}, but not with all"
        )
    return more_keys or more_queries


def _least_tile(candidate: Candidate, *, explained: bool) -> tuple[int, str]:
    """Return what lengths must be multiples of, and what others raise; see `claim_more_sizes`."""
    problems = dict[int, str]()
    for multiple in TILES:
        tried = candidate.claiming(sizes=replace(candidate.sizes, length_multiple=multiple))
        found = [_problem(tried, probe, explained=explained) for probe in tried.probes]
        problems[multiple] = found[0] or found[1]
        if not problems[multiple]:
            break
    if problems[1]:
        for length in NO_TILES:
            probe = Probe(2, length, length, candidate.cross_attention)
            if not _problem(candidate, probe, explained=explained):
                raise Unclear(f"with some lengths it raises {problems[1]}, but not with {length}")
    return multiple, problems[1]


def _widths(problem_of: Callable[[int], str]) -> tuple[dict[str, Any], str]:
    """Return the widths of heads without a problem, as arguments of `Sizes`, and that of others.

    problem_of: returns the problem with a width.

    Raises Unclear if each causes one.
    """
    problem_of = cache(problem_of)
    refused = [width for width in (5, WIDTHS[-1]) if problem_of(width)]
    if not refused:
        return {}, ""
    shown = []
    for multiple, widths in SHOWN_BY.items():
        if not any(map(problem_of, widths)):
            shown.append(multiple)
    if shown[:1] == [4] and not problem_of(6):
        refused = [2]  # and not only what is odd
    raised = f"with {refused[0]}, {problem_of(refused[0])}"
    taken = [width for width in WIDTHS if not problem_of(width)]
    if not taken:
        raise Unclear(
            f"{raised}, and the same for others; claim those that it takes:"
            " sizes=Sizes(head_dims=...)"
        )
    return _as_claims(taken, shown[:1] or [8, 16]), raised


def _as_claims(taken: Sequence[int], multiples: Iterable[int]) -> dict[str, Any]:
    """Return those of `WIDTHS` that are taken as arguments of `Sizes`.

    They are all multiples, those up to one, or a few.
    """
    for multiple in multiples:
        fitting = [width for width in WIDTHS if width % multiple == 0]
        if taken == fitting:
            return {"head_dim_multiple": multiple}
        if taken == fitting[: len(taken)]:
            return {"head_dim_multiple": multiple, "max_head_dim": taken[-1]}
    return {"head_dims": {*taken}}


def _problem(candidate: Candidate, probe: Probe, *, explained: bool) -> str:
    """Return what a candidate raises, or that its formula does not give the output; else "".

    explained: whether the formula has to.
    """
    # A call that is causal by default is made without a mask.
    is_causal = candidate.claimed("always_causal") or bool(candidate.declared.causal_by_default)
    result = candidate.call(probe.inputs, is_causal=is_causal)
    if result is None:
        return candidate.problem
    if explained:
        expected = candidate.formula(probe.inputs, candidate.weights, None)
        if not is_close(result.output, expected):
            return "another output"
    return ""


def find_widths(candidate: Candidate) -> Candidate:
    """Claim the widths of heads for which a module does not raise, if it does for some.

    Rotary embeddings take even widths, or multiples of 4, and kernels those that they are made for.
    Raises Unclear as `_widths` does.
    """
    own = candidate.trial.dtype
    _, raised = _widths(lambda width: _problem_with_width(candidate, width, [own]))
    if not raised:
        return candidate
    # Other dtypes may take fewer.
    claimed = [getattr(torch, name) for name in sorted(candidate.claimed("dtypes"))]
    widths, _ = _widths(lambda width: _problem_with_width(candidate, width, [own, *claimed]))
    found = candidate.claiming(sizes=replace(candidate.sizes, **widths))
    return _with_widths(found, raised)


def _problem_with_width(candidate: Candidate, width: int, dtypes: Iterable[torch.dtype]) -> str:
    """Return what a module raises whose heads have a width, in the first dtype in which it does."""
    counts = sorted({1, 2, 3}.intersection(candidate.sizes.n_heads or {1, 2, 3}))
    if width == 5:
        counts = [candidate.config.n_heads]
    elif width not in NARROW:
        counts = counts[:1]
    for dtype in dtypes:
        tried = candidate.trying(dtype=dtype)
        for count in counts:
            problem = _problem_with_heads(tried, count, width)
            if problem:
                return problem
    return ""


def _problem_with_heads(candidate: Candidate, count: int, width: int) -> str:
    """Return what a module raises that has so many heads of a width; "" if it takes them."""
    sizes = {"n_heads": count, "d_model": count * width}
    if "own_head_dim" in candidate.claims:
        sizes = {"n_heads": count, "d_head": width}
    tried = candidate.trying(changes={**candidate.trial.changes, **sizes})
    d_model = tried.config.d_model
    repeats = -(-d_model // CONFIG.d_model)

    def widened(x: Tensor) -> Tensor:
        return x.repeat(1, 1, repeats)[..., :d_model].contiguous()

    returned = tried.call_plainly(each_once(widened, candidate.probes[0].inputs))
    return tried.problem if returned is None else ""


def find_longest(candidate: Candidate) -> Candidate:
    """Claim the longest inputs that a module takes, where its own table is shorter than the cases'.

    A module is not tried with inputs of which a call would take too long.
    """
    tried = candidate.trying(longest=MAX_LENGTH)
    if "float32" in candidate.claimed("dtypes"):
        tried = tried.trying(dtype=torch.float32)  # which takes half the time
    step, found = candidate.sizes.length_multiple, candidate
    # Keys may be more than queries ever are.
    if candidate.cross_attention and not _takes_length(tried, MAX_LENGTH + step, queries=step):
        found = _with_longest(candidate, MAX_LENGTH, tried.problem)
    shorter, seconds = candidate.probes[0].keys, 0.0
    for length in _longer(shorter, step):
        expected = seconds / shorter**2
        if expected * length**2 > PATIENCE:
            return found
        is_quick = expected * MAX_LENGTH**2 < PATIENCE
        if length == SHORT and is_quick and _takes_length(tried, MAX_LENGTH):
            return found  # as most do, and the lengths between take as long again
        begun = process_time()
        if not _takes_length(tried, length):
            between = range(shorter + step, length, step)
            fewer = bisect(between, False, key=lambda each: not _takes_length(tried, each))
            return _with_longest(candidate, shorter + step * fewer, tried.problem)
        shorter, seconds = length, process_time() - begun
    return found


def _takes_length(candidate: Candidate, length: int, queries: int = 0) -> bool:
    """Return whether a call with so many keys, and by default queries, returns anything."""
    probe = Probe(1, queries or length, length, candidate.cross_attention)
    return candidate.call_plainly(probe.inputs) is not None


def _with_longest(candidate: Candidate, longest: int, raised: str) -> Candidate:
    """Return the candidate with the claim of its longest inputs, and what longer ones raise."""
    found = f"at most {longest}: others raise {raised}"
    known = candidate.rows["lengths"].finding
    if known:
        found = f"{known}; {found}"
    claiming = candidate.claiming(sizes=replace(candidate.sizes, max_length=longest))
    return claiming.noting("lengths", found)


def _longer(shorter: int, step: int) -> list[int]:
    """Return the lengths to try that are longer than one, multiples of a step."""
    lengths = []
    for power in range(5, MAX_LENGTH.bit_length()):
        if 2**power > shorter and 2**power % step == 0:
            lengths.append(2**power)
    return [*lengths, MAX_LENGTH]
