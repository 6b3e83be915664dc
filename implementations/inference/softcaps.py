"""The cap of the scores that a call may give: before a float mask is added, or after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe
from mha.implementations.inference.score_options import ScoreOption
from mha.spec import Scores
from mha.spec.scores import SoftcapPlace

# Well below most of the scores of trial runs.
CAP = 0.5
PLACES: dict[SoftcapPlace, str] = {
    "before_bias": "before any mask",
    "after_bias": "after a float mask is added",
}


class SoftcapOption(ScoreOption):
    """A cap c of the scores, which become c tanh(s / c)."""

    name = "softcap"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield a cap in each place."""
        for place in PLACES:
            yield replace(candidate.claimed("scores"), softcap=place)

    def values(self, scores: Scores) -> tuple[float]:
        """Return a cap."""
        del scores
        return (CAP,)

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.softcap
        return f"scores s become c tanh(s / c), {PLACES[scores.softcap]}"

    def mask(self, candidate: Candidate, probe: Probe) -> Tensor | None:
        """Return a float mask, which tells the places apart, if one is claimed."""
        if not candidate.declared.mask or "float" not in candidate.claims.get("masks", ()):
            return None
        queries, keys = probe.lengths
        numbers = torch.linspace(-2, 2, queries * keys, dtype=torch.float64)
        return numbers.view(1, 1, queries, keys)

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with masks of -infinity, if the lowest number would be capped.

        They leave NaN in rows without a key.
        """
        is_after = candidate.claimed("scores").softcap == "after_bias"
        if not is_after or candidate.declared.masked_number != "lowest":
            return candidate
        masked = candidate.declaring(masked_number="-inf").claiming(empty_row="nan")
        return replace(masked, empty_row="nan")


SOFTCAP = SoftcapOption()
