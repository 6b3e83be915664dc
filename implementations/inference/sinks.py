"""The sinks that a call may give: the dtype in which they are taken, and that they take part in the
denominator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import is_close
from mha.spec import Claims, Scores
from mha.spec.scores import SinkDtype

# Of the heads of trial runs, above and below most of the scores.
TRIED = (1.5, -0.5)


def find_sinks(candidate: Candidate) -> None:
    """Claim sinks, if a parameter has the name of them, in the dtype that trial runs take.

    Those without an effect, or with another one, are claimed too, and fail then.
    """
    if not (
        candidate.explained and candidate.signature.sinks and candidate.config.n_heads == len(TRIED)
    ):
        return
    claimed = candidate.claims.get("scores", Scores())
    for dtype in get_args(SinkDtype):
        tried = replace(claimed, sinks=dtype)
        if _follows(candidate, tried, ignored=False):
            candidate.claims["scores"] = replace(tried, sinks=_narrow_dtype(candidate, dtype))
            return
    taken = [
        replace(claimed, sinks=dtype) for dtype in get_args(SinkDtype) if _takes(candidate, dtype)
    ]
    if not taken:
        return
    candidate.claims["scores"] = taken[0]
    if _follows(candidate, taken[0], ignored=True):
        candidate.idle_options = (*candidate.idle_options, "sinks")
    else:
        candidate.assumed_options = (*candidate.assumed_options, "sinks")


def _follows(candidate: Candidate, scores: Scores, *, ignored: bool) -> bool:
    """Return whether calls with sinks give what the formula gives with them, or, if ignored,
    without them.
    """
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    formula = replace(candidate.formula, sinks=None if ignored else TRIED)
    if candidate.plainly_causal and formula.causal is None:
        formula = replace(
            formula, causal=candidate.claims.get("causal", Claims().causal) or "top_left"
        )
    for probe in candidate.probes:
        result = tried.call_plainly(probe.inputs, sinks=TRIED)
        if result is None or not is_close(
            result.output, formula(probe.inputs, candidate.weights, None)
        ):
            return False
    return True


def _narrow_dtype(candidate: Candidate, found: SinkDtype) -> SinkDtype:
    """Return the dtype of sinks that calls in a narrow dtype take, which calls in float32 do not
    tell.
    """
    claimed = candidate.claims.get("dtypes", Claims().dtypes)
    narrow = next((name for name in ("bfloat16", "float16") if name in claimed), None)
    if narrow is None:
        return found
    tried = replace(candidate, dtype=getattr(torch, narrow), problem="")
    taken: list[SinkDtype] = [dtype for dtype in get_args(SinkDtype) if _takes(tried, dtype)]
    return taken[0] if taken else found


def _takes(candidate: Candidate, dtype: SinkDtype) -> bool:
    """Return whether a call with sinks in a dtype returns anything."""
    scores = replace(candidate.claims.get("scores", Scores()), sinks=dtype)
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    inputs = tuple(x.to(tried.dtype) for x in candidate.probes[0].inputs)
    return tried.call_plainly(inputs, sinks=TRIED) is not None
