"""The window that a call may ask for: how its argument counts, what stands for no bound, and where
it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe, is_close
from mha.spec import Claims, Scores, Window, causal_mask, window_mask
from mha.spec.claims import Alignment
from mha.spec.scores import Bounds, WindowForm

WINDOWS = {
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
# Of these, no two readings of an argument give the same keys in all.
TRIED: tuple[Bounds, ...] = ((2, 1), (0, 0), (1, None), (None, 1), (None, None))


def find_window(candidate: Candidate) -> None:
    """Claim a window, if a parameter has the name of one, in the form that trial runs show.

    One without an effect, or with another one, is claimed in the form that its name says, and fails
    then.
    """
    if not (candidate.explained and candidate.signature.window):
        return
    readings = list(_readings(candidate))
    found = next((scores for scores in readings if _follows(candidate, scores)), None)
    if found:
        candidate.claims["scores"] = found
        return
    # Read in another way, an argument that is not looked into raises nothing.
    form = _usual_form(candidate)
    _assume(
        candidate, [scores for scores in readings if scores.window and scores.window.form == form]
    )


def _assume(candidate: Candidate, usual: Sequence[Scores]) -> None:
    """Claim a window that no reading explains in a usual one, if it has no effect, or calls with it
    return anything.
    """
    ignoring = next((scores for scores in usual if _follows(candidate, scores, ignored=True)), None)
    taken = next((scores for scores in usual if _takes(candidate, scores)), None)
    if ignoring:
        candidate.claims["scores"] = ignoring
        candidate.idle_options = (*candidate.idle_options, "window")
    elif taken:
        candidate.claims["scores"] = taken
        candidate.assumed_options = (*candidate.assumed_options, "window")


def _usual_form(candidate: Candidate) -> WindowForm:
    """Return what an argument of this name usually is."""
    return BY_NAME.get(candidate.signature.window[0], "left_right")


def _readings(candidate: Candidate) -> Iterator[Scores]:
    """Yield the ways to read the argument, first the usual ones of its name."""
    names, claimed = candidate.signature.window, candidate.claims.get("scores", Scores())
    forms = [form for form in get_args(WindowForm) if len(names) == 1 or form in OF_TWO]
    usual = _usual_form(candidate)
    forms.sort(key=lambda form: form != usual)
    causal = candidate.claims.get("causal", Claims().causal)
    alignments: tuple[Alignment | None, ...] = (None,) if causal else ("top_left", "bottom_right")
    for form, alignment in product(forms, alignments):
        for window in (Window(form), Window(form, unbounded=None)):
            yield replace(claimed, window=window, alignment=alignment)


def _follows(candidate: Candidate, scores: Scores, *, ignored: bool = False) -> bool:
    """Return whether calls with windows give what the formula gives with them, or, if ignored,
    without them.
    """
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    assert scores.window is not None
    windows = dict.fromkeys(scores.window.nearest(bounds) for bounds in TRIED)
    flags = _causal_flags(candidate, None if ignored else scores.window)
    if True in flags and not any(_returned(tried, windows, is_causal=False)):
        flags = (True,)  # a window may be refused without the causal flag
    calls = product(candidate.probes, windows, flags)
    return all(
        _gives(tried, probe, None if ignored else window, window, flag)
        for probe, window, flag in calls
    )


def _takes(candidate: Candidate, scores: Scores) -> bool:
    """Return whether calls with windows that are read in a way return anything."""
    tried = replace(candidate, claims=candidate.claims | {"scores": scores})
    assert scores.window is not None
    windows = dict.fromkeys(scores.window.nearest(bounds) for bounds in TRIED)
    return all(_returned(tried, windows, is_causal=_causal_flags(candidate, scores.window)[-1]))


def _returned(
    candidate: Candidate, windows: Iterable[Bounds], *, is_causal: bool
) -> Iterator[bool]:
    """Yield whether a call with each window returns anything."""
    inputs = candidate.probes[0].inputs
    for window in windows:
        yield candidate.call(inputs, is_causal=is_causal, window=window) is not None


def _causal_flags(candidate: Candidate, window: Window | None) -> tuple[bool, ...]:
    """Return the causal flags to try with a form of window, if there is one.

    A window that counts keys is one of causal calls, where there is a flag.
    """
    if candidate.plainly_causal:
        return (True,)
    has_flag = bool(
        candidate.signature.is_causal and candidate.claims.get("causal", Claims().causal)
    )
    if window and window.form == "count" and has_flag:
        return (True,)
    return (False, True) if has_flag else (False,)


def _gives(
    candidate: Candidate, probe: Probe, expected: Bounds | None, window: Bounds, is_causal: bool
) -> bool:
    """Return whether a call with a window gives the formula with an expected one; expected: None
    for none.
    """
    claims = Claims(**_alignments(candidate))
    lengths = probe.inputs[0].shape[1], probe.inputs[1].shape[1]
    alignment = claims.alignment or "top_left"
    mask = torch.ones(lengths, dtype=torch.bool)
    if is_causal:
        mask = mask & causal_mask(*lengths, alignment)
    if expected is not None:
        mask = mask & window_mask(*lengths, expected, alignment)
    formula = replace(candidate.formula, causal=None)
    result = candidate.call(probe.inputs, is_causal=is_causal, window=window)
    return result is not None and is_close(
        result.output, formula(probe.inputs, candidate.weights, mask)
    )


def _alignments(candidate: Candidate) -> dict[str, Any]:
    """Return the claims about alignments."""
    names = [name for name in ("causal", "scores") if name in candidate.claims]
    return {name: candidate.claims[name] for name in names}


def window_text(candidate: Candidate, declared: Window) -> str:
    """Return how the argument for a window is read, in words."""
    names, alignment = ", ".join(candidate.signature.window), candidate.claims["scores"].alignment
    if "window" in candidate.idle_options:
        return f"{names} has no effect"
    aligned = f", aligned {alignment.replace('_', '-')}" if alignment else ""
    return f"{names}: {WINDOWS[declared.form]}; {declared.unbounded} for no bound{aligned}"
