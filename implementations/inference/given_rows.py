"""The rows about what calls require beside inputs and options, and are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mha.implementations.adapters.names import NEUTRAL_MEANING, PAIRED
from mha.implementations.adapters.score_arguments import has_number_for_none
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.rows import Row
from mha.spec import Window

# What a call is given for a required parameter that is not judged, by its meaning.
ROTATIONS = {"cosines": "1", "sines": "0", "rotation": "cosines of 1 and sines of 0"}
GIVEN = {
    "scale": "1/sqrt(d_k)",
    "dropout": "0.0",
    "kv_heads": "n_kv_heads",
    "groups": "n_heads / n_kv_heads",
    "module": "an object in evaluation, without groups of heads",
    "start": "0",
    "positions": "None",
    "complex": "None",
    "places": "0 for each",
    "cache": "None",
    "batch": "B",
    "destination": "a tensor of NaN to write to",
    "window": "None",
    "rows": "L",
    "columns": "1",
    "tile": "16",
    **ROTATIONS,
}


# What stands for an option of the scores that a call does not have, where each call names it.
WITHOUT = {
    "softcap": "2.0**60",
    "sinks": "-inf of each head",
    "alibi": "0 of each head",
    "scale": "1/sqrt(d_k)",
}


def given_rows(declared: Declared) -> Iterator[Row]:
    """Yield the rows about what calls require beside inputs and options."""
    neutral = [*_neutral_inputs(declared)]
    neutral += [f"{name}={value}" for name, value in _without_options(declared)]
    lengths = [name for name in declared.signature.others if name in declared.signature.lengths]
    neutral += [f"{name} of all tokens" for name in lengths]
    if neutral:
        yield Row("given", ", ".join(neutral), "by name")
    if declared.unknown_inputs:
        yield Row("given None", ", ".join(declared.unknown_inputs), "of no known meaning")


def _neutral_inputs(declared: Declared) -> Iterator[str]:
    """Yield what is given for required parameters of `NEUTRAL_NAMES`, as code."""
    others = declared.signature.others
    if declared.claimed("rotary"):  # what says how heads are rotated is in a row of its own
        others = tuple(name for name in others if name not in declared.signature.tables)
    of_scores = dict(_without_options(declared))
    for name in others:
        if name in NEUTRAL_MEANING and name not in of_scores:
            yield _given(name, declared)


def _without_options(declared: Declared) -> Iterator[tuple[str, str]]:
    """Yield the options about the scores that each call gives, and what stands for none."""
    signature, window = declared.signature, declared.claimed("scores").window
    in_each_call = (*signature.others, *signature.acting)
    values = {}
    for option, value in WITHOUT.items():
        for name in signature.scores.get(option, ()):
            if option == "scale" or has_number_for_none(option, name):
                values[name] = value
    if window:
        values.update(_without_bounds(window, signature.scores.get("window", ())))
    for name, value in values.items():
        if name in in_each_call:
            yield name, value


def _without_bounds(window: Window, names: Sequence[str]) -> dict[str, str]:
    """Return what the arguments of a window are where it has no bounds, as code."""
    numbers = window.numbers((None, None))
    if len(names) == len(numbers):
        return dict(zip(names, map(str, numbers), strict=True))
    return dict.fromkeys(names, str(numbers))


def _given(name: str, declared: Declared) -> str:
    """Return what a required parameter of `NEUTRAL_NAMES` is given, as code."""
    meaning = NEUTRAL_MEANING[name]
    if declared.rotation_pairs and name in PAIRED:
        return f"{name}={'0' if meaning == 'sines' else '1'} of shape (l, d_k / 2)"
    if meaning in ROTATIONS and name not in declared.signature.rotations:
        return f"{name}=None"
    return f"{name}={GIVEN.get(meaning, meaning)}"
