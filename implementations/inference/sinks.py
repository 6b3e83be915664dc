"""The sinks that a call may give, which take part in the denominator, and their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import torch

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.score_options import ScoreOption
from mha.spec import Scores
from mha.spec.scores import SinkDtype

# Of the heads of trial runs, above and below most of the scores.
TRIED = (1.5, -0.5)
WORDS = {"float32": "in float32", "input": "in the dtype of the inputs"}


class SinkOption(ScoreOption):
    """A sink of each head, in float32 or in the dtype of the inputs."""

    name = "sinks"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield sinks of each dtype, if there are as many heads as sinks."""
        dtypes = get_args(SinkDtype)
        if candidate.declared.sinks is not None:  # a parameter
            dtypes = ("input",)
        if candidate.config.n_heads == len(TRIED):
            for dtype in dtypes:
                yield replace(candidate.claimed("scores"), sinks=dtype)

    def values(self, scores: Scores) -> tuple[tuple[float, ...]]:
        """Return the sinks."""
        del scores
        return (TRIED,)

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.sinks
        return f"a number of each head, in its denominators, {WORDS[scores.sinks]}"

    def usual(self, candidate: Candidate, readings: Sequence[Scores]) -> list[Scores]:
        """Return the first reading whose dtype is taken."""
        return [scores for scores in readings if self.is_taken(candidate, scores)][:1]

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the dtype that narrow inputs show, and float32 does not."""
        claimed = candidate.claimed("dtypes")
        for name in ("bfloat16", "float16"):
            if name in claimed:
                narrow = candidate.trying(dtype=getattr(torch, name))
                taken = self.usual(narrow, list(self.readings(narrow)))
                return candidate.claiming(scores=taken[0]) if taken else candidate
        return candidate


SINKS = SinkOption()
