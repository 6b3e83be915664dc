"""Whether a class decodes with the cache that its calls take, or that it holds, by trial runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mha.implementations.adapters.caches import POSITION_NAMES, CacheForm
from mha.implementations.adapters.kept_caches import kept_caches, possible_caches
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import is_close
from mha.implementations.process.pristine import as_found

# What may become of a cache after the first positions, and the words for that.
EDITS = {"copy": "copied", "reorder": "reordered", "crop": "cropped"}
# Of the positions of trial runs.
ONE_BY_ONE = (0, 1, 2, 3, 4)
IN_CHUNKS = (0, 2, 3, 5)


def find_decoding(candidate: Candidate) -> Candidate:
    """Claim that a class decodes, if calls with its cache give what one causal pass does."""
    cls = candidate.declared.built_class
    if not candidate.explained or candidate.claimed("causal") is None or hasattr(cls, "decode"):
        return candidate
    for form in possible_caches(cls):
        tried = candidate.declaring(cache=form.name)
        if _decodes(tried, ONE_BY_ONE):
            return _with_claims(tried, form)
    return _decoding_otherwise(candidate)


def _decoding_otherwise(candidate: Candidate) -> Candidate:
    """Claim that a class decodes whose own cache gives something else: it is judged, and fails.

    Callers of one that is given positions may mean others than trial runs do.
    """
    declared = candidate.declared
    positions = {*POSITION_NAMES}.intersection(declared.forward_parameters)
    if positions or candidate.signature.tables:
        return candidate
    for form in kept_caches(declared.built_class):
        tried = candidate.declaring(cache=form.name)
        if _keeps(tried):
            finding = f"{form.name}: decodes position by position"
            wrong = "assumed: it gives something else than one causal pass"
            return tried.claiming(decodes=True).noting("cache", finding, wrong)
    return candidate


def _keeps(candidate: Candidate) -> bool:
    """Return whether decoding gives the first position, and others depend on that two calls later.

    So a cache is given and kept as the class means it, even if what it gives is wrong.
    """
    inputs = _sequence(candidate, ONE_BY_ONE[-1])
    others = torch.cat([inputs[:, :1].flip(-1), inputs[:, 1:]], 1)
    formula = replace(candidate.formula, causal="top_left")
    expected = formula(_three(inputs, candidate.cross_attention), candidate.weights, None)
    with torch.no_grad(), as_found():
        try:
            attention = _built(candidate)
            decoded, changed = (_decoded(attention, x, ONE_BY_ONE) for x in (inputs, others))
        except Exception:  # the class may raise anything
            return False
    is_given = is_close(decoded[:, :1], expected[:, :1])
    return is_given and not is_close(decoded[:, 2:], changed[:, 2:])


def _built(candidate: Candidate) -> Any:
    """Return the attention of a candidate, in evaluation mode."""
    attention: Any = candidate.implementation().build(
        candidate.config, candidate.weights, dtype=torch.float64, device=candidate.device
    )
    return attention.eval()


def _with_claims(candidate: Candidate, form: CacheForm) -> Candidate:
    """Return a candidate that decodes position by position with what else its cache allows."""
    several = _decodes(candidate, IN_CHUNKS)
    edits = [edit for edit in EDITS if _decodes(candidate, ONE_BY_ONE, edit)]
    claims: dict[str, Any] = {"decodes": "chunks" if several else True}
    finding = f"{form.name}: decodes position by position"
    if several:
        finding = f"{finding}, and several at once"
    if edits:
        claims["cache_edits"] = {*edits}
        finding = f"{finding}; may be {', '.join(EDITS[edit] for edit in edits)}"
    return candidate.claiming(**claims).noting("cache", finding)


def _decodes(candidate: Candidate, ends: Sequence[int], edit: str = "") -> bool:
    """Return whether decoding positions in pieces gives what one causal pass does.

    edit: of the cache after some positions.
    """
    inputs = _sequence(candidate, ends[-1])
    expected_inputs, change = inputs, None
    middle = ends[2]
    if edit == "copy":
        change = _used_copy(inputs[:, middle:].flip(1))
    elif edit == "reorder":
        items = torch.arange(len(inputs) - 1, -1, -1)
        expected_inputs = torch.cat([inputs[items, :middle], inputs[:, middle:]], 1)
        change = _reordered(items)
    elif edit == "crop":
        change = _cropped(inputs[:, middle:].flip(1), middle)
    with torch.no_grad(), as_found():
        try:
            decoded = _decoded(_built(candidate), inputs, ends, middle, change)
        except Exception:  # the class may raise anything
            return False
    formula = replace(candidate.formula, causal="top_left")
    all_inputs = _three(expected_inputs, candidate.cross_attention)
    expected = formula(all_inputs, candidate.weights, None)
    start = middle if edit else 0
    return is_close(decoded[:, start:], expected[:, start:])


def _sequence(candidate: Candidate, length: int) -> Tensor:
    """Return inputs of several items, (B, L, D)."""
    generator = torch.Generator().manual_seed(4)
    shape = 2, length, candidate.config.d_model
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _decoded(
    attention: Any,
    inputs: Tensor,
    ends: Sequence[int],
    middle: int = 0,
    change: Callable[[Any, Any], Any] | None = None,
) -> Tensor:
    """Return the outputs of all positions; after those before the middle, the cache is changed."""
    cache, outputs = None, []
    for start, end in pairwise(ends):
        if change is not None and start == middle:
            cache = change(attention, cache)
        output, cache = _next(attention, inputs[:, start:end], cache)
        outputs.append(output)
    return torch.cat(outputs, 1)


def _next(attention: Any, query: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Return what an attention decodes at the next positions, and its cache."""
    inputs = _three(query, attention.adapter.claims.cross_attention)
    decoded: tuple[Tensor, Any] = attention.decode(*inputs, cache)
    return decoded


def _three(
    query: Tensor, cross_attention: bool | Literal["memory"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value: the query is all of them, unless there may be others.

    cross_attention: as in `Claims`.
    """
    if not cross_attention:
        return query, query, query
    key = query.flip(-1)
    return query, key, key if cross_attention == "memory" else query.roll(1, -1)


def _used_copy(others: Tensor) -> Callable[[Any, Any], Any]:
    """Return what makes a copy of a cache, and decodes other positions with the first one."""

    def change(attention: Any, cache: Any) -> Any:
        copied = deepcopy(cache)
        _next(attention, others[:, :1], cache)
        return copied

    return change


def _reordered(items: Tensor) -> Callable[[Any, Any], Any]:
    """Return what reorders the items of a cache."""
    return lambda attention, cache: attention.reorder_cache(cache, items)


def _cropped(others: Tensor, length: int) -> Callable[[Any, Any], Any]:
    """Return what decodes other positions, and crops the cache to the length before them."""

    def change(attention: Any, cache: Any) -> Any:
        _, cache = _next(attention, others[:, :1], cache)
        return attention.crop_cache(cache, length)

    return change
