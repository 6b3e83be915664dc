"""The slopes of ALiBi that a call may give: the form of their bias, and where it is counted from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import is_close
from mha.spec import Alibi, Claims, Scores, alibi_bias, causal_mask
from mha.spec.claims import Alignment
from mha.spec.scores import AlibiForm

# Of the heads of trial runs.
TRIED = (0.5, -0.75)


def find_alibi(candidate: Candidate) -> None:
    """Claim the slopes of ALiBi, if a parameter has their name, in the form that trial runs show.

    Slopes without an effect, or with another one, are claimed as signed ones, and fail then.
    """
    if not (
        candidate.explained and candidate.signature.alibi and candidate.config.n_heads == len(TRIED)
    ):
        return
    readings = list(_readings(candidate))
    found = next((scores for scores in readings if _follows(candidate, scores, TRIED)), None)
    if found:
        candidate.claims["scores"] = found
    elif _follows(candidate, readings[0], (0.0, 0.0)):
        candidate.claims["scores"] = readings[0]
        candidate.idle_options = (*candidate.idle_options, "alibi")
    elif _call(candidate, readings[0], candidate.probes[0].inputs) is not None:
        candidate.claims["scores"] = readings[0]
        candidate.assumed_options = (*candidate.assumed_options, "alibi")


def _readings(candidate: Candidate) -> Iterator[Scores]:
    """Yield the ways to read slopes; a signed bias gives the same from every place."""
    claimed = candidate.claims.get("scores", Scores())
    causal = candidate.claims.get("causal", Claims().causal)
    alignments: tuple[Alignment | None, ...] = ("top_left", "bottom_right")
    if causal or claimed.alignment:
        alignments = (claimed.alignment,)
    for form in get_args(AlibiForm):
        for alignment in alignments:
            yield replace(claimed, alibi=Alibi(form), alignment=alignment)


def _follows(candidate: Candidate, scores: Scores, slopes: tuple[float, ...]) -> bool:
    """Return whether calls with slopes give what the formula gives with the bias of these ones."""
    return all(_gives(candidate, scores, probe.inputs, slopes) for probe in candidate.probes)


def _gives(
    candidate: Candidate,
    scores: Scores,
    inputs: tuple[Tensor, Tensor, Tensor],
    slopes: tuple[float, ...],
) -> bool:
    """Return whether a call with slopes gives what the formula gives with the bias of these ones."""
    given = {name: candidate.claims[name] for name in ("causal",) if name in candidate.claims}
    alignment = Claims(scores=scores, **given).alignment or "top_left"
    lengths = inputs[0].shape[1], inputs[1].shape[1]
    assert scores.alibi is not None
    bias = alibi_bias(slopes, scores.alibi.form, *lengths, alignment)[None]
    if candidate.plainly_causal:
        bias = bias.masked_fill(~causal_mask(*lengths, alignment), -torch.inf)
    result = _call(candidate, scores, inputs)
    formula = replace(candidate.formula, causal=None)
    return result is not None and is_close(result, formula(inputs, candidate.weights, bias))


def _call(candidate: Candidate, scores: Scores, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Return the output of a call with slopes that are read in a way, if it has one."""
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    result = tried.call_plainly(inputs, alibi=TRIED)
    return None if result is None else result.output
