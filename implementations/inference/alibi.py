"""The slopes of ALiBi that a call may give: the form of their bias, and where it begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Formula, Probe, is_close
from mha.implementations.inference.score_options import (
    Acts,
    ScoreOption,
    aligned,
    possible_alignments,
)
from mha.spec import Alibi, Options, Scores, alibi_slopes
from mha.spec.claims import Alignment
from mha.spec.scores import AlibiForm, Slopes

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
        whose = "each item and head" if scores.alibi.per_item else "each head"
        return f"slopes m of {whose} add {WORDS[scores.alibi.form]}{aligned(scores)}"

    def value_for(self, scores: Scores, probe: Probe, value: tuple[float, ...]) -> Slopes:
        """Return the slopes, or others for each item."""
        assert scores.alibi
        if not scores.alibi.per_item:
            return value
        return tuple(_times(value, 1 + item) for item in range(probe.batch))

    def nearly(self, candidate: Candidate, scores: Scores) -> Iterator[Acts]:
        """Yield slopes of the other sign too."""
        yield from super().nearly(candidate, scores)
        yield Acts("its bias has the other sign", lambda slopes: _times(slopes, -1.0))

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with slopes for each item, if these are taken too."""
        scores = candidate.claimed("scores")
        of_items = replace(scores, alibi=replace(scores.alibi, per_item=True))
        return (
            candidate.claiming(scores=of_items) if self.follows(candidate, of_items) else candidate
        )


class BuiltInAlibi(AlibiOption):
    """A switch of slopes that are those of the number of heads."""

    def names(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the name of the switch, where no slopes are given."""
        return () if candidate.names_of("alibi") else candidate.names_of("alibi_switch")

    def is_of_calls(self, candidate: Candidate) -> bool:
        """Return whether the switch is an argument of a call."""
        return candidate.declared.takes_in_calls("alibi_switch")

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield each form, from each end where nothing says it."""
        for scores in super().readings(candidate):
            assert scores.alibi
            yield replace(scores, alibi=replace(scores.alibi, built_in=True))

    def values(self, scores: Scores) -> tuple[tuple[float, ...]]:
        """Return the slopes of as many heads as trial runs have."""
        del scores
        return (alibi_slopes(len(TRIED)),)

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.alibi
        return f"the usual slopes m of heads add {WORDS[scores.alibi.form]}{aligned(scores)}"

    def flags(self, candidate: Candidate, scores: Scores, *, ignored: bool) -> tuple[bool, ...]:
        """Return both flags, where there is one, and the bias is added without it."""
        del ignored
        return self.flags_taken(candidate, scores)

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate: slopes that are not given are the same for all items."""
        return candidate


def slopes_of_all_calls(candidate: Candidate) -> str:
    """Return that a kernel adds the usual slopes in every call, in words; "" if it does not."""
    slopes = alibi_slopes(candidate.formula.n_heads)
    alignments: tuple[Alignment, ...] = get_args(Alignment)
    for form, alignment, is_causal in product(get_args(AlibiForm), alignments, (False, True)):
        formula = replace(
            candidate.formula,
            causal=alignment if is_causal else None,
            options=Options(alibi=slopes),
            claimed=Scores(alibi=Alibi(form), alignment=alignment),
        )
        if candidate.passes(partial(_is_given_by, formula)):
            return (
                f"it adds the usual slopes m of ALiBi in each call, as {WORDS[form]}, which no"
                " claim says; judge a function with a flag for them, use_alibi=False by default"
            )
    return ""


def _is_given_by(formula: Formula, candidate: Candidate, probe: Probe) -> bool:
    """Return whether a formula gives the output of a plain call."""
    result = candidate.call_plainly(probe.inputs)
    expected = formula(probe.inputs, candidate.weights, None)
    return result is not None and is_close(result.output, expected)


def _times(slopes: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * slope for slope in slopes)


ALIBI = AlibiOption()
BUILT_IN_ALIBI = BuiltInAlibi()
