"""The window that a call may ask for: how its argument counts, and where the window lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import ClassVar, get_args

import torch

from mha.implementations.inference.candidate import NO_EFFECT, Candidate
from mha.implementations.inference.empty_rows import policy_shown
from mha.implementations.inference.probes import GENERAL
from mha.implementations.inference.score_options import (
    Acts,
    ScoreOption,
    aligned,
    possible_alignments,
)
from mha.spec import Claims, Scores, Window, window_mask
from mha.spec.scores import Bounds, WindowForm

WORDS = {
    "left_right": "keys before and after its own, both inclusive",
    "left": "keys before its own",
    "count": "keys, its own among them",
    "symmetric": "keys on either side of its own",
    "count_right": "keys before it, its own among them, and keys after it",
}
# What an argument of a name is read as first.
BY_NAME: dict[str, WindowForm] = {
    "sliding_window": "count",
    "sliding_window_size": "left",
    "window_left": "left",
    "left_bound": "count_right",
}
# The forms of two numbers; the others are of one.
OF_TWO = ("left_right", "count_right")
# No two readings of an argument give the same keys in all of these.
TRIED: tuple[Bounds, ...] = ((2, 1), (0, 0), (1, None), (None, 1), (None, None))


class WindowOption(ScoreOption):
    """The bounds of a window, in one of the forms of `Window`."""

    name = "window"
    without_effect: ClassVar[str] = f"{NO_EFFECT}: only a mask that a call is given may hold it"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield each form, from each end where nothing says it, and with each word for no bound."""
        has_one_name = len(self.names(candidate)) == 1
        forms = [form for form in get_args(WindowForm) if has_one_name or form in OF_TWO]
        usual = _usual_form(candidate)
        forms.sort(key=lambda form: form != usual)
        claimed: Scores = candidate.claimed("scores")
        words: tuple[int | None, ...] = (-1, None)
        if claimed.window:  # only what each call is given
            words = (claimed.window.unbounded,)
            claimed = replace(claimed, window=None, alignment=None)
        alignments = possible_alignments(candidate.claiming(scores=claimed))
        for form, alignment, unbounded in product(forms, alignments, words):
            yield replace(claimed, window=Window(form, unbounded), alignment=alignment)

    def values(self, scores: Scores) -> list[Bounds]:
        """Return the bounds that an argument of this form can say."""
        assert scores.window
        return list(dict.fromkeys(map(scores.window.nearest, TRIED)))

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.window
        found = f"{WORDS[scores.window.form]}; {scores.window.unbounded} for no bound"
        return found + aligned(scores)

    def usual(self, candidate: Candidate, readings: Sequence[Scores]) -> Sequence[Scores]:
        """Return the readings of the usual form; all of them where calls do not take that.

        In another form, an argument may raise in each call that looks into it, and seem to have no
        effect in the others.
        """
        form = _usual_form(candidate)
        own = [each for each in readings if each.window and each.window.form == form]
        if any(self.is_taken(candidate, each) for each in own):
            return own
        return readings

    def nearly(self, candidate: Candidate, scores: Scores) -> Iterator[Acts]:
        """Yield windows that are one key shorter or longer on a side too.

        Those are of the usual form, or of numbers where a pair is not taken.
        """
        assert scores.window
        form = scores.window.form
        if form in OF_TWO and form != _usual_form(candidate):
            return
        yield from super().nearly(candidate, scores)
        for side, (end, beyond) in enumerate((("first", "before"), ("last", "after"))):
            yield Acts(f"it leaves out the {end} key of a window", partial(_moved, side, -1))
            yield Acts(f"it takes in the key {beyond} a window", partial(_moved, side, 1))

    def remark(self, candidate: Candidate) -> str:
        """Return that a name is usually of another form; names of no form count keys too."""
        claimed, usual = candidate.claimed("scores").window.form, _usual_form(candidate)
        name = self.names(candidate)[0]
        if claimed == usual or (name not in BY_NAME and claimed != "count_right"):
            return ""
        return f" (elsewhere, {name} is {WORDS[usual]})"

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the policy for rows without a key, if only windows leave any.

        They do where there are fewer keys than queries.
        """
        if candidate.declared.mask or candidate.empty_row:
            return candidate
        scores, tried = candidate.claimed("scores"), candidate.trying(special=GENERAL)
        if tried.trial.dtype == torch.float64:
            tried = tried.trying(dtype=torch.float32)
        probe, bounds = tried.probes[1], scores.window.nearest((0, 0))
        alignment = Claims(causal=candidate.claimed("causal"), scores=scores).alignment
        seen = window_mask(*probe.lengths, bounds, alignment or "top_left")
        without_key = ~seen.any(-1).expand(probe.batch, -1)
        if not bool(without_key.any()):
            return candidate
        is_causal = self.flags(candidate, scores, ignored=False)[-1]
        policy = policy_shown(tried, probe, without_key, {"window": bounds, "is_causal": is_causal})
        if policy and policy != "zeros":
            candidate = candidate.claiming(empty_row=policy)
        return replace(candidate, empty_row=policy)

    def flags(self, candidate: Candidate, scores: Scores, *, ignored: bool) -> tuple[bool, ...]:
        """Return both flags, where there is one; a window that counts keys is of causal calls."""
        assert scores.window
        flags = self.flags_taken(candidate, scores)
        counts = scores.window.form == "count" and not ignored
        return (True,) if counts and True in flags else flags


def _moved(side: int, keys: int, bounds: Bounds) -> Bounds:
    """Return bounds of which one is so many keys further from the query."""
    moved = [*bounds]
    bound = moved[side]
    if bound is not None:
        moved[side] = bound + keys
    return moved[0], moved[1]


def _usual_form(candidate: Candidate) -> WindowForm:
    """Return what an argument of this name usually is."""
    return BY_NAME.get(candidate.names_of("window")[0], "left_right")


WINDOW = WindowOption()
