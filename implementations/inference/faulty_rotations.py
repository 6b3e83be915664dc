"""Rotations by positions that change the lengths of queries and keys, so that they are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from mha.implementations.adapters.names import names_used, words_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.functions import TURNING, functions_of
from mha.implementations.inference.nearest_projections import outputs_of, with_formula
from mha.implementations.inference.probes import (
    CONFIG,
    SCALES,
    WITHOUT_QUERIES,
    Formula,
    Inputs,
    SpecialCase,
)
from mha.implementations.inference.rotations import bases_of, words_of_rotary
from mha.spec import Rotary, Sizes, Weights

ROTARY_WORDS = frozenset({"rotary", "rope", "rotate", "rotated"})
# The positions of trial runs; the first one has a query and a key of zeros.
LENGTH = 6
# Of scores of one query with its own key, which a rotation keeps.
TOLERANCE = 1e-3


def with_faulty_rotation(candidates: Sequence[Candidate], module: nn.Module) -> Candidate | None:
    """Return the first candidate that rotates, by its names, and changes lengths, with the nearest
    rotation.

    A rotation of any frequencies, and of images or a part of the positions, keeps lengths: one that
    is merely unknown is none of these.

    candidates: the ways to understand a module, none of which explains its outputs.
    module: that of the trial runs.
    """
    if not candidates or not _is_called_rotation(module):
        return None
    if candidates[0].config.n_heads != CONFIG.n_heads:  # for which the weights below are
        return None
    if not functions_of(candidates[0]) & TURNING:
        return None
    for each in candidates:
        without_scores = with_formula(each.trying(special=WITHOUT_QUERIES))
        if without_scores and _changes_lengths(each):
            return _with_nearest(replace(without_scores, shown=WITHOUT_QUERIES.name), each, module)
    return None


def _is_called_rotation(module: nn.Module) -> bool:
    """Return whether a function, a method or a part that it uses says that it rotates."""
    names = set[str]()
    for part in module.modules():
        names |= names_used(type(part)) | {type(part).__name__}
    return any(ROTARY_WORDS & {*words_of(name)} for name in names)


def _changes_lengths(candidate: Candidate) -> bool:
    """Return whether scores of equal queries and keys at the same position depend on that."""
    tried = candidate.trying(special=SpecialCase("", _as_weights))
    result = tried.call_plainly(_inputs())
    if result is None or not isinstance(result.output, Tensor):
        return False
    weights = result.output[0, :, :LENGTH].double()
    own = weights.diagonal()[1:].log() - weights[1:, 0].log()
    if weights.shape != (LENGTH, LENGTH) or not own.isfinite().all():
        return False
    return bool((own - own[0]).abs().max() > TOLERANCE * own.abs().max())


def _inputs() -> Inputs:
    """Return tokens (1, L, D) of one content, except for the first, and of their own positions.

    The content is in the first half of the columns; the first token has none.
    """
    half = CONFIG.d_model // 2
    x = torch.zeros(1, LENGTH, CONFIG.d_model, dtype=torch.float64)
    x[:, 1:, :half] = torch.linspace(-1, 2, half, dtype=torch.float64)
    x[0, :, half : half + LENGTH] = torch.eye(LENGTH, dtype=torch.float64)
    return x, x, x


def _as_weights(weights: Weights) -> Weights:
    """Return weights with which outputs are the weights of the first head.

    Queries are keys, and read the content; values are the positions.
    """
    half, head_dim = CONFIG.d_model // 2, CONFIG.head_dim
    generator = torch.Generator().manual_seed(3)
    of_head = torch.zeros(head_dim, CONFIG.d_model, dtype=torch.float64)
    of_head[:, :half] = torch.randn(head_dim, half, generator=generator).double() / half**0.5
    positions = torch.zeros_like(of_head)
    positions[:, half:] = torch.eye(head_dim, half, dtype=torch.float64)
    changed = {name: torch.zeros_like(x) for name, x in weights.named() if name[0] == "b"}
    for name, rows in (("w_q", of_head), ("w_k", of_head), ("w_v", positions)):
        heads = len(dict(weights.named())[name]) // head_dim
        changed[name] = rows.repeat(heads, 1)
    changed["w_o"] = torch.eye(*weights.w_o.shape, dtype=torch.float64)
    return replace(weights, **changed)


def _with_nearest(found: Candidate, candidate: Candidate, module: nn.Module) -> Candidate:
    """Return a found candidate that claims the rotation whose outputs are nearest to its own."""
    outputs, probes = outputs_of(candidate), candidate.probes
    errors = dict[Rotary, float]()
    for base, pairs in product(bases_of(module)[:1], ("half", "interleaved")):
        rotary = Rotary(base, pairs)  # type: ignore[arg-type]  # words of it
        formula = Formula(next(iter(SCALES)), found.formula.causal, found.formula.projected)
        formula = replace(formula, rotary=rotary)
        error = 0.0
        for output, probe in zip(outputs, probes, strict=True):
            expected = formula(probe.inputs, candidate.weights, None)
            error += float((output.double() - expected).abs().mean())
        errors[rotary] = error
    nearest = min(errors, key=lambda rotary: errors[rotary])
    finding = f"{words_of_rotary(nearest)}: it is the nearest one"
    claiming = found.claiming(rotary=nearest, sizes=Sizes(head_dim_multiple=nearest.multiple))
    evidence = "assumed: it changes the lengths of queries and keys, which no rotation does"
    return claiming.noting("positions", finding, evidence)
