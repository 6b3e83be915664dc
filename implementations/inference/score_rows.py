"""What was found about what a call may say about the scores, in words."""

from __future__ import annotations

from collections.abc import Iterator

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.windows import window_text
from mha.spec import Scores

SCALES = {"any": "any number", "positive": "positive numbers"}
PLACES = {"before_bias": "before any mask", "after_bias": "after a float mask is added"}
FORMS = {"signed": "m (t - p)", "symmetric": "-m |t - p|"}
SINKS = {"float32": "in float32", "input": "in the dtype of the inputs"}


def score_rows(candidate: Candidate) -> Iterator[tuple[str, str, str]]:
    """Yield a topic, what was found about it, and how."""
    for topic, found in _found(candidate):
        is_assumed = topic in candidate.assumed_options
        yield (
            topic,
            found,
            "assumed by its name: no reading gives what it does" if is_assumed else "tested",
        )


def _found(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield a topic and what was found about it."""
    scores, names = candidate.claims.get("scores", Scores()), candidate.signature
    if scores.scale:
        yield "scale", f"{names.scale} multiplies the scores; {SCALES[scores.scale]}"
    if scores.softcap:
        found = f": scores s become c tanh(s / c), {PLACES[scores.softcap]}"
        yield "softcap", f"{names.softcap}{_unless_idle(candidate, 'softcap', found)}"
    if scores.window:
        yield "window", window_text(candidate, scores.window)
    if scores.sinks:
        found = f": a number of each head, in its denominators, {SINKS[scores.sinks]}"
        yield "sinks", f"{names.sinks}{_unless_idle(candidate, 'sinks', found)}"
    if scores.alibi:
        aligned = f", aligned {scores.alignment.replace('_', '-')}" if scores.alignment else ""
        found = f": slopes m of each head add {FORMS[scores.alibi.form]}{aligned}"
        yield "alibi", f"{names.alibi}{_unless_idle(candidate, 'alibi', found)}"


def _unless_idle(candidate: Candidate, option: str, found: str) -> str:
    """Return what was found, or that an option has no effect."""
    return " has no effect" if option in candidate.idle_options else found
