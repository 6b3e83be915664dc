"""The cap of the scores that a call may give: before a float mask is added, or after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Formula, Probe, is_close
from mha.spec import Scores
from mha.spec.scores import SoftcapPlace

# Well below most of the scores of trial runs.
CAP = 0.5
PLACES: tuple[SoftcapPlace, ...] = ("before_bias", "after_bias")


def find_softcap(candidate: Candidate) -> None:
    """Claim a cap, if a parameter has the name of one, in the place that trial runs show.

    One without an effect, or with another one, is claimed as one before the mask, and fails then.
    """
    if not (candidate.explained and candidate.signature.softcap):
        return
    claimed = candidate.claims.get("scores", Scores())
    capped = [place for place in PLACES if _follows(candidate, place, CAP)]
    if capped:
        candidate.claims["scores"] = replace(claimed, softcap=capped[0])
        if capped[0] == "after_bias" and candidate.masked_number == "lowest":
            # A cap would make a number of it; -infinity leaves rows without a key NaN.
            candidate.masked_number, candidate.empty_row = "-inf", "nan"
            candidate.claims["empty_row"] = "nan"
    elif _follows(candidate, PLACES[0], None):
        candidate.claims["scores"] = replace(claimed, softcap=PLACES[0])
        candidate.idle_options = (*candidate.idle_options, "softcap")
    elif _takes(candidate):
        candidate.claims["scores"] = replace(claimed, softcap=PLACES[0])
        candidate.assumed_options = (*candidate.assumed_options, "softcap")


def _follows(candidate: Candidate, place: SoftcapPlace, expected: float | None) -> bool:
    """Return whether calls with a cap give the formula with an expected one, beside a float mask if
    one is claimed.
    """
    scores = replace(candidate.claims.get("scores", Scores()), softcap=place)
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    formula = replace(candidate.formula, softcap=expected, caps_bias=place == "after_bias")
    return all(_gives(tried, probe, formula) for probe in candidate.probes)


def _takes(candidate: Candidate) -> bool:
    """Return whether a call with a cap returns anything."""
    scores = replace(candidate.claims.get("scores", Scores()), softcap=PLACES[0])
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    return tried.call_plainly(candidate.probes[0].inputs, softcap=CAP) is not None


def _gives(candidate: Candidate, probe: Probe, formula: Formula) -> bool:
    """Return whether a call with a cap gives a formula."""
    bias = None
    if candidate.mask and "float" in candidate.claims.get("masks", ()):
        lengths = probe.inputs[0].shape[1], probe.inputs[1].shape[1]
        bias = torch.linspace(-2, 2, lengths[0] * lengths[1], dtype=torch.float64).view(
            1, 1, *lengths
        )
    result = candidate.call(
        probe.inputs, mask=bias, is_causal=candidate.plainly_causal, softcap=CAP
    )
    return result is not None and is_close(
        result.output, formula(probe.inputs, candidate.weights, bias)
    )
