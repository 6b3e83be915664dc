"""Whether a call returns the weights of its heads, and where they are."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.dropout import near
from mha.implementations.inference.probes import is_close, tolerance_of
from mha.spec import causal_mask

# How many results of a call are looked at for weights.
MOST_RESULTS = 5
# The layouts of weights, other than (b, h, l, s), the last one of a single head.
LAYOUTS = ("b l s h", "b l h s", "h b l s", "(b h) l s", "(h b) l s", "b l s")
RETURNED, NOT_RETURNED = "returned per head", "not returned"


def find_weights(candidate: Candidate) -> Candidate:
    """Claim that it returns weights (B, H, L, S), or not, and note where they are."""
    probe = candidate.probes[0]
    result = candidate.call(probe.inputs, need_weights=True, is_causal=candidate.plainly_causal)
    left_behind = _left_behind(candidate)
    queries, keys = probe.lengths
    expected = (probe.batch, probe.n_heads, queries, keys)
    weights = torch.empty(0)
    if result and isinstance(result.weights, Tensor):
        weights = result.weights
    has_shape = tuple(weights.shape) == expected
    if has_shape and bool(((weights >= 0) & (weights <= 1)).all()):
        return candidate.noting("weights", RETURNED)  # to be judged
    laid_out = _with_layout(candidate, expected)
    if laid_out:
        return laid_out
    place = _only_place(candidate, range(MOST_RESULTS), expected)
    if place is None and not has_shape:
        place = _only_place(candidate, left_behind, expected)
        if place is None:
            return _not_returning(candidate, _shape_of(weights, expected))
    if place is None and _are_scores(candidate, weights):
        return _not_returning(candidate, "per head, but the scores before the softmax")
    found = RETURNED
    if isinstance(place, str):
        found = f"per head, on the attribute {place}"
    return candidate.declaring(weights=place).noting("weights", found)


def _with_layout(candidate: Candidate, shape: tuple[int, ...]) -> Candidate | None:
    """Return the candidate with the one layout in which it returns weights of a shape, if any."""
    if candidate.is_kernel:
        return None
    for layout in LAYOUTS:
        has_heads = "h" in layout
        if has_heads != (candidate.config.n_heads > 1):
            continue
        tried = candidate.declaring(weights_layout=layout)
        if not holds_weights(tried, shape):
            continue
        if "(" in layout and not _are_those_of_formula(tried):  # the same shape has two orders
            continue
        axes = layout.replace("(b h)", "b*h").replace("(h b)", "h*b").split()
        return tried.noting("weights", f"{RETURNED}, of shape ({', '.join(axes)})")
    return None


def _are_those_of_formula(candidate: Candidate) -> bool:
    """Return whether the weights of a call are those of the formula that gives its output."""
    probe = candidate.probes[0]
    result = candidate.call_plainly(probe.inputs, need_weights=True)
    if result is None or not candidate.explained:
        return False
    query, key, _ = probe.inputs
    scores = candidate.formula.scores(query, key, candidate.weights)
    hidden = _hidden(candidate, scores)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return is_close(result.weights, scores.softmax(-1))


def _hidden(candidate: Candidate, scores: Tensor) -> Tensor | None:
    """Return which scores are of later keys, if the formula is always causal."""
    alignment = candidate.formula.causal
    if alignment is None:
        return None
    return ~causal_mask(scores.shape[2], scores.shape[3], alignment, scores.device)


def _not_returning(candidate: Candidate, beside: str) -> Candidate:
    """Return the candidate with the claim that it returns no weights.

    beside: what it returns beside its output.
    """
    claiming = candidate.claiming(returns_weights=False)
    return claiming.noting("weights", f"{NOT_RETURNED} {beside}".rstrip())


def _left_behind(candidate: Candidate) -> list[str]:
    """Return the dotted names of the tensors that the last call left on attributes of a module."""
    module = getattr(candidate.calls.module, "module", None)
    if candidate.is_kernel or not isinstance(module, nn.Module):
        return []  # a function has no attributes
    names = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                names.append(f"{path}.{name}".removeprefix("."))
    return names


def _only_place(
    candidate: Candidate, places: Iterable[str | int], shape: tuple[int, ...]
) -> str | int | None:
    """Return the one of several places at which a call has weights of a shape."""
    found = [place for place in places if holds_weights(candidate.declaring(weights=place), shape)]
    return found[0] if len(found) == 1 else None


def holds_weights(tried: Candidate, shape: tuple[int, ...]) -> bool:
    """Return whether a call returns weights of a shape, with rows of sum 1."""
    result = tried.call_plainly(tried.probes[0].inputs, need_weights=True)
    if result is None or not isinstance(result.weights, Tensor):
        return False
    if tuple(result.weights.shape) != shape:
        return False
    sums = result.weights.double().sum(-1)
    return bool(near(sums, torch.ones_like(sums), tolerance_of(result.weights.dtype)).all())


def _shape_of(returned: Tensor, expected: tuple[int, ...]) -> str:
    """Return what is returned beside the output, in words, if its rows may be weights; else ""."""
    shape = tuple(returned.shape)
    if shape == (expected[0], *expected[2:]):
        return "per head, but of shape (b, l, s)"
    if shape[-2:] == expected[2:]:
        return f"per head, but of shape {shape}"
    return ""


def _are_scores(candidate: Candidate, returned: Tensor) -> bool:
    """Return whether a tensor (B, H, L, S) that nobody asked for holds the scores.

    Otherwise it may hold incorrect weights.
    """
    if candidate.signature.need_weights or not candidate.explained:
        return False
    query, key, _ = candidate.probes[0].inputs
    scores = candidate.formula.scores(query, key, candidate.weights)
    hidden = _hidden(candidate, scores)
    if hidden is not None and returned.shape == scores.shape:  # what is hidden may have been filled
        returned, scores = returned.masked_fill(hidden, 0.0), scores.masked_fill(hidden, 0.0)
    return is_close(returned, scores)
