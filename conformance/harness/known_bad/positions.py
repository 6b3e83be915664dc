"""How a rotation or a norm of queries and keys goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, defect
from mha.conformance.harness.textbook import TextbookAttention
from mha.implementations.formula import on_the_way
from mha.spec import QkNorm, Rotary

# Of known models.
BASES = (10000.0, 500000.0, 1000000.0)
PAIR_WORDS = {"half": "half-split", "interleaved": "interleaved"}
PART_WORDS = {1.0: "", 0.5: ", half of each head", 0.25: ", a quarter of each head"}
Change = Callable[[Any], Any]


def _other(name: str, text: str, roles: str = "qk", **changes: Change) -> Defect:
    """Return a defect of queries or keys, for which another rotation or norm is declared.

    roles: of "q" and "k", those that it is in.
    changes: what becomes of `rotary` or `qk_norm`, where it is declared.
    """

    def step(self: TextbookAttention, heads: Tensor, role: str) -> Tensor:
        claims = self.claims
        for claim, change in changes.items():
            if role in roles and getattr(claims, claim):
                claims = replace(claims, **{claim: change(getattr(claims, claim))})
        weight = getattr(self, f"{role}_norm", None)
        if role == "v" or not claims.changes_heads:
            return heads
        if weight is not None and weight.shape[0] not in _widths(heads, claims.qk_norm):
            weight = None
        return on_the_way(heads, claims, weight, self.positions(heads))

    return defect(name, text, on_the_way=step)


def _widths(heads: Tensor, norm: QkNorm | None) -> tuple[int, ...]:
    """Return how many weights a norm of these heads may have."""
    width = heads.shape[-1]
    if norm and norm.over == "width":
        return width, width * heads.shape[1]
    return (width,)


def _with_other_pairs(rotary: Rotary) -> Rotary:
    return replace(rotary, pairs="interleaved" if rotary.pairs == "half" else "half")


def _turned_back(rotary: Rotary) -> Rotary:
    return replace(rotary, direction="backward" if rotary.direction == "forward" else "forward")


def _with_base(base: float) -> Change:
    return lambda rotary: replace(rotary, base=base)


def _of_other_kind(norm: QkNorm) -> QkNorm:
    return replace(norm, kind="layer" if norm.kind == "rms" else "rms")


def _over_other_axes(norm: QkNorm) -> QkNorm:
    return replace(norm, over="width" if norm.over == "head" else "head")


def _without_weight(norm: QkNorm) -> QkNorm:
    return replace(norm, weight=None)


def _positions_restart(self: TextbookAttention, x: Tensor) -> Tensor:
    """Let the positions of each call count from 0."""
    return torch.arange(x.shape[2], device=x.device)


def _with_coarse_frequencies(self: TextbookAttention, heads: Tensor, role: str) -> Tensor:
    """Round frequencies as a buffer of a module in half precision is."""
    narrow = heads.dtype if heads.dtype == torch.float16 else torch.bfloat16
    self.frequencies = narrow
    return TextbookAttention.on_the_way(self, heads, role)


ROTARY_IGNORED = _other(
    "rotary_ignored", "queries and keys are not rotated", rotary=lambda rotary: None
)
KEY_NOT_ROTATED = _other(
    "key_not_rotated", "the keys are not rotated", "k", rotary=lambda rotary: None
)
OTHER_PAIRS = _other(
    "other_pairs",
    "the pairs of columns that are rotated are the other ones: halves for neighbours, or neighbours"
    " for halves",
    rotary=_with_other_pairs,
)
COARSE_FREQUENCIES = defect(
    "coarse_frequencies",
    "the frequencies of the rotation are rounded to half precision",
    on_the_way=_with_coarse_frequencies,
)
POSITIONS_RESTART = defect(
    "positions_restart",
    "the positions of each call of a decoder count from 0",
    positions=_positions_restart,
)
NORM_IGNORED = _other("norm_ignored", "queries and keys are not normed", qk_norm=lambda norm: None)
NORM_OVER_OTHERS = _other(
    "norm_over_others",
    "the norm of queries and keys is over the other axes: each head for all heads, or all for each",
    qk_norm=_over_other_axes,
)
# So small that it changes no number but 0.
NO_EPS = _other(
    "no_eps",
    "the norm of queries and keys has no eps",
    qk_norm=lambda norm: replace(norm, eps=1e-300),
)


def _unclaimed(name: str, text: str, rotary: Rotary | None, norm: QkNorm | None) -> Defect:
    """Return the defect that heads are rotated or normed where neither is claimed."""

    def step(self: TextbookAttention, heads: Tensor, role: str) -> Tensor:
        if role == "v" or self.claims.changes_heads or not self.config.projected:
            return TextbookAttention.on_the_way(self, heads, role)
        claims = replace(self.claims, extras=(), rotary=rotary, qk_norm=norm)
        return on_the_way(heads, claims, None, self.positions(heads))

    # An eps that is not known leaves a part of the error.
    return replace(defect(name, text, on_the_way=step), unexplained=0.02 if norm else 0.0)


def unclaimed() -> Iterator[Defect]:
    """Yield what may stand between projections and scores, where no claim says so."""
    of_norms = {
        "rms_head": ("by the root mean square of each head", QkNorm(weight=None)),
        "layer_head": ("by a layer norm of each head", QkNorm("layer", weight=None)),
        "rms_width": ("by the root mean square of all heads", QkNorm("rms", "width", weight=None)),
        "layer_width": ("by a layer norm of all heads", QkNorm("layer", "width", weight=None)),
    }
    for base, pairs, part in product(BASES, PAIR_WORDS, PART_WORDS):
        turned = f"(rotary, {PAIR_WORDS[pairs]}, base {base:.0f}{PART_WORDS[part]})"
        rotary = Rotary(base, pairs, part)  # type: ignore[arg-type]  # a word of it
        name = f"unclaimed_{pairs}_{base:.0f}_{part}"
        text = f"the scores depend on positions {turned}"
        yield _unclaimed(name, text, rotary, None)
        normed, norm = of_norms["rms_head"]
        text = f"the queries and keys are normed {normed}, and depend on positions {turned}"
        yield _unclaimed(f"{name}_normed", text, rotary, norm)
    for name, (normed, norm) in of_norms.items():
        text = f"the queries and keys are normed {normed}"
        yield _unclaimed(f"unclaimed_{name}", text, None, norm)


def rotations() -> Iterator[Defect]:
    """Yield rotations that are left out, or are others."""
    yield ROTARY_IGNORED
    yield KEY_NOT_ROTATED
    yield _other(
        "query_not_rotated", "the queries are not rotated", "q", rotary=lambda rotary: None
    )
    yield OTHER_PAIRS
    yield _other("turned_back", "the rotation is in the other direction", rotary=_turned_back)
    for base in BASES:
        text = f"the base of the rotation is {base:.0f}"
        yield _other(f"base_{base:.0f}", text, rotary=_with_base(base))
    yield COARSE_FREQUENCIES
    yield POSITIONS_RESTART


def norms() -> Iterator[Defect]:
    """Yield norms that are left out, or are others."""
    yield NORM_IGNORED
    yield _other("key_not_normed", "the keys are not normed", "k", qk_norm=lambda norm: None)
    yield _other("query_not_normed", "the queries are not normed", "q", qk_norm=lambda norm: None)
    yield NORM_OVER_OTHERS
    text = "the weight of the norm of queries and keys is left out"
    yield _other("norm_without_weight", text, qk_norm=_without_weight)
    text = "the norm of queries and keys is of the other kind: a layer norm for a root mean square"
    yield _other("other_norm", f"{text}, or the other way round", qk_norm=_of_other_kind)
    text = "the norm of queries and keys is on the other side of the rotation"
    yield _other(
        "norm_elsewhere",
        text,
        qk_norm=lambda norm: replace(norm, before_rotary=not norm.before_rotary),
    )
    yield NO_EPS
