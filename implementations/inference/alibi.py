"""The slopes of ALiBi that a call may give: the form of their bias, and where it begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.score_options import (
    ScoreOption,
    aligned,
    possible_alignments,
)
from mha.spec import Alibi, Scores
from mha.spec.scores import AlibiForm

# Of the heads of trial runs.
TRIED = (0.5, -0.75)
WORDS = {"signed": "m (t - p)", "symmetric": "-m |t - p|"}


class AlibiOption(ScoreOption):
    """A slope of each head, of a bias that grows with the distance of a key."""

    name = "alibi"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield each form, from each end where nothing says it; a signed bias is the same from all.

        There are none if there are not as many heads as slopes.
        """
        if candidate.config.n_heads != len(TRIED):
            return
        claimed = candidate.claimed("scores")
        for form in get_args(AlibiForm):
            for alignment in possible_alignments(candidate):
                yield replace(claimed, alibi=Alibi(form), alignment=alignment)

    def values(self, scores: Scores) -> tuple[tuple[float, ...]]:
        """Return the slopes."""
        del scores
        return (TRIED,)

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.alibi
        return f"slopes m of each head add {WORDS[scores.alibi.form]}{aligned(scores)}"


ALIBI = AlibiOption()
