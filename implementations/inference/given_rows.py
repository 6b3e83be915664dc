"""The rows about what calls require beside inputs and options, and are given."""

from __future__ import annotations

from collections.abc import Iterator

from mha.implementations.adapters.names import NEUTRAL_MEANING, PAIRED
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.rows import Row

# What a call is given for a required parameter that is not judged, by its meaning.
ROTATIONS = {"cosines": "1", "sines": "0", "rotation": "cosines of 1 and sines of 0"}
GIVEN = {
    "scale": "1/sqrt(d_k)",
    "dropout": "0.0",
    "kv_heads": "n_kv_heads",
    "module": "an object in evaluation, without groups of heads",
    "start": "0",
    "positions": "None",
    "complex": "None",
    "places": "0 for each",
    "cache": "None",
    "batch": "B",
    "window": "None",
    "rows": "L",
    "columns": "1",
    "tile": "16",
    **ROTATIONS,
}


def given_rows(declared: Declared) -> Iterator[Row]:
    """Yield the rows about what calls require beside inputs and options."""
    others = declared.signature.others
    if declared.claimed("rotary"):  # what says how heads are rotated is in a row of its own
        others = tuple(name for name in others if name not in declared.signature.tables)
    neutral = [_given(name, declared) for name in others if name in NEUTRAL_MEANING]
    lengths = [name for name in others if name in declared.signature.lengths]
    neutral += [f"{name} of all tokens" for name in lengths]
    if neutral:
        yield Row("given", ", ".join(neutral), "by name")
    if declared.unknown_inputs:
        yield Row("given None", ", ".join(declared.unknown_inputs), "of no known meaning")


def _given(name: str, declared: Declared) -> str:
    """Return what a required parameter of `NEUTRAL_NAMES` is given, as code."""
    meaning = NEUTRAL_MEANING[name]
    if declared.rotation_pairs and name in PAIRED:
        return f"{name}={'0' if meaning == 'sines' else '1'} of shape (l, d_k / 2)"
    if meaning in ROTATIONS and name not in declared.signature.rotations:
        return f"{name}=None"
    return f"{name}={GIVEN.get(meaning, meaning)}"
