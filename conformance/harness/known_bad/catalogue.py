"""The defects that a diagnosis can name, and those with a number that is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

from mha.conformance.harness.known_bad.calls import stale, tiles
from mha.conformance.harness.known_bad.defect import Defect, defect
from mha.conformance.harness.known_bad.heads import heads, merging, projections
from mha.conformance.harness.known_bad.lengths import lengths
from mha.conformance.harness.known_bad.masks import causal, empty_rows, layouts, masks
from mha.conformance.harness.known_bad.options import (
    caps,
    chunks,
    ignored_options,
    sinks,
    slopes,
    windows,
)
from mha.conformance.harness.known_bad.positions import norms, rotations, unclaimed
from mha.conformance.harness.known_bad.scores import (
    outputs,
    precisions,
    products,
    scales,
    softmaxes,
)
from mha.conformance.harness.textbook import TextbookAttention


def scores_times(factor: float) -> Defect:
    """Return the defect that the scores are multiplied by a number."""
    text = f"the scores are {factor:.6g} times what they should be"
    return defect("scores_times", text, scale=lambda self: factor * TextbookAttention.scale(self))


def scale_of(scale: float) -> Defect:
    """Return the defect that the scale is one number, whatever d_k is."""
    width = 1 / scale**2 if scale else 0.0
    is_usual = scale > 0 and abs(width - round(width)) < 1e-3 * width
    number = f"{scale:.6g} = 1/sqrt({round(width)})" if is_usual else f"{scale:.6g}"
    return defect(
        "scale_of", f"the scores are scaled by {number}, whatever d_k is", scale=lambda self: scale
    )


def outputs_times(factor: float) -> Defect:
    """Return the defect that the output is multiplied by a number."""
    text = f"the output is {factor:.6g} times what it should be"
    return defect(
        "outputs_times",
        text,
        combine=lambda self, weights, v, query: (
            factor * TextbookAttention.combine(self, weights, v, query)
        ),
    )


def sums_times(factor: float) -> Defect:
    """Return the defect that scores and float mask together are multiplied by a number."""
    text = f"the scores are {factor:.6g} times what they should be"
    return defect(
        "sums_times",
        text,
        weigh=lambda self, scores, allowed, bias: TextbookAttention.weigh(
            self, factor * (scores + bias), allowed, 0 * bias
        ),
    )


def contexts_times(factor: float) -> Defect:
    """Return the defect that the weights are multiplied by a number."""
    text = f"the weights are {factor:.6g} times what they should be"
    return defect("contexts_times", text, merge=merging(lambda x: x * factor))


def _together(pairs: Iterable[tuple[Defect, ...]]) -> Iterator[Defect]:
    """Yield each two defects that override other steps, as one."""
    for one, other in pairs:
        steps, more = _steps_of(one), _steps_of(other)
        if steps.keys() & more.keys():
            continue
        name, text = f"{one.name}+{other.name}", f"{one.text}, and {other.text}"
        family = f"{one.text}, and {other.family}" if other.family else ""
        yield defect(name, text, family, **steps, **more)


def _steps_of(one: Defect) -> dict[str, Any]:
    """Return the steps of the textbook's formula that a defect overrides, by name."""
    return {name: step for name, step in vars(one.attention).items() if not name.startswith("__")}


# In groups, the simplest first: what a group explains needs no later one.
GROUPS = (
    ignored_options,
    windows,
    chunks,
    lengths,
    caps,
    sinks,
    slopes,
    rotations,
    norms,
    scales,
    projections,
    heads,
    masks,
    causal,
    layouts,
    empty_rows,
    unclaimed,
    softmaxes,
    tiles,
    stale,
    precisions,
    products,
    outputs,
)
NAMED: tuple[tuple[Defect, ...], ...] = tuple(tuple(group()) for group in GROUPS)

# As a convention, it may be no defect, and so comes with any other.
CONVENTION = "unscaled"
# Defects that often come together.
COMMON = (
    CONVENTION,
    "scaled_by_model",
    "scaled_by_width",
    "no_b_q",
    "no_b_o",
    "no_biases",
    "no_w_o",
    "viewed_qkv",
    "merged_by_view",
    "interleaved_qkv",
    "unmasked",
    "upside_down",
    "transposed",
    "first_item",
    "not_causal",
    "causal_1",
    "empty_uniform",
    "empty_nan",
)
ALL = {each.name: each for group in NAMED for each in group}


@cache
def pairs() -> tuple[Defect, ...]:
    """Return each two defects that often come together, as one, made at the first failure."""
    others = [name for name in ALL if name not in COMMON]
    names = (*combinations(COMMON, 2), *product([CONVENTION], others))
    return tuple(_together((ALL[one], ALL[other]) for one, other in names))
