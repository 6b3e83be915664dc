"""What was inferred, in words and as code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from torch import nn

from mha.implementations.adapters.calling import INPUT_WORDS, input_names
from mha.implementations.adapters.loading import Place
from mha.implementations.inference.candidate import Reading, word_of
from mha.implementations.inference.probes import Formula
from mha.implementations.inference.projections import unloaded

WIDTH = 110
# What a constructor may be given besides, and no trial tells: see the fields of `Claims`.
NOT_TRIED = ("dropout", "n_kv_heads", "kdim", "vdim", "bias_kv", "zero_key")
CONVENTIONS = {
    "keep": "True = may attend",
    "drop": "True = masked",
    "additive": "added to the scores",
}


def row_of_projections(places: Mapping[str, Place]) -> str:
    """Return which parameter is which projection."""

    def told(place: Place) -> str:
        return "none" if place is None else place if isinstance(place, str) else f"{place[0]} as {place[1]}"

    return ", ".join(f"{key}: {told(place)}" for key, place in places.items())


def row_of_mask(reading: Reading) -> str:
    """Return what a mask means, and its shape."""
    meant = CONVENTIONS[reading.mask]
    meant = meant.replace("True", "1") if reading.mask_numbers else meant
    return f"{meant}, of shape {reading.mask_shape or '(b, h, l, s) or broadcast to it'}"


def code_of(label: str, options: Mapping[str, Any], claims: Mapping[str, Any]) -> str:
    """Return the declaration that says what was inferred, ready to paste below the class."""
    lines = [f"    {name}={_literal(value)}," for name, value in options.items() if (name, value) != ("mask", "keep")]
    imports = ["from mha.implementations import from_module"]
    if claims:
        told = ", ".join(f"{name}={_literal(value)}" for name, value in claims.items())
        lines.append(f"    claims=Claims({told}),")
        imports.append("from mha.spec import Claims")
    return "\n".join([*imports, "", f"implementation = from_module(\n    {label},", *lines, ")"])


def _literal(value: Any) -> str:
    """Return a value as it is written, with double quotes."""
    if isinstance(value, set):
        return f"{{{', '.join(_literal(each) for each in sorted(value, key=str))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})" if value else "()"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return rows of three cells as aligned text."""
    first = max(len(row[0]) for row in rows)
    return "\n".join(
        fill(f"{what:<{first}}  {told}  [{sure}]", WIDTH, subsequent_indent=" " * (first + 2), break_long_words=False)
        for what, told, sure in rows
    )


def declaring(label: str) -> str:
    """Return how to declare by hand what could not be inferred."""
    return (
        f". Declare it below the class, and judge that: implementation = from_module({label}, "
        'parameters={"w_q": ..., "w_k": ..., "w_v": ..., "w_o": ...}, mask=...)'
    )


def rows_of(reading: Reading, module: nn.Module, words: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return what was understood, and how sure that is.

    module: as it was tried. words: what its constructor is given.
    """
    tried = "tried" if reading.explained else "assumed: nothing explains the outputs"
    names, taken = input_names(reading.taken), reading.taken
    built = ", ".join(f"{word}={meant}" for word, meant in words.items())
    inputs = "one, self-attention" if reading.alone else ", ".join(names or INPUT_WORDS)
    first = ", attends along the first axis" if reading.layout == "l b d" else ""
    biases = {None: "with and without", True: "always", False: "not of all projections"}
    only = reading.claims.get("bias")
    rows = [
        ("built as", f"{reading.label}({built})", "by name"),
        ("projections", row_of_projections(reading.map), tried),
        ("biases", biases[None if only is None else max(only)], "tried"),
        ("inputs", f"{inputs}; {reading.layout}{first}", tried),
    ]
    if reading.explained:
        rows.append(("formula", _told(reading.formula), "tried"))
    word = word_of("mask", taken)
    told = f"{word}: {row_of_mask(reading)}" if reading.mask else "none"
    rows.append(("mask", told, "tried" if reading.mask else "by name"))
    flag, causal = word_of("is_causal", taken), reading.claims.get("causal", "top_left")
    asked = f"{flag}, {causal}" if flag else f"by the mask, {causal}" if causal else "no"
    rows.append(("causal", "always" if "always_causal" in reading.claims else asked, tried))
    weights = "per head" if "returns_weights" not in reading.claims else "not returned per head"
    weights += f" but {reading.weights_shape}" if reading.weights_shape and weights != "per head" else ""
    rows.append(("weights", weights, "tried"))
    used = {*names, word, flag, word_of("need_weights", taken)}
    unused = [name for name, p in taken.items() if p.default is not p.empty and name not in used]
    unused += [word for word, meant in words.items() if meant in NOT_TRIED]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    built_by = inspect.signature(reading.constructor).parameters.items()
    known = {*words, *getattr(reading.constructor, "keywords", ())}
    unused += [f"{name}={p.default!r}" for name, p in built_by if name not in known and p.kind in kinds]
    rows += [("left out", ", ".join(unused), "not judged: claim it")] if unused else []
    left = unloaded(module, reading.map)
    return rows + ([("not loaded", ", ".join(left), "they stay as they are initialised")] if left else [])


def _told(formula: Formula) -> str:
    departs = [] if formula.scale == "1/sqrt(d_k)" else [f"the scale is {formula.scale}"]
    departs += [] if formula.projected else ["there is no output projection"]
    return f"departs from the contract: {' and '.join(departs)}" if departs else "softmax(q k^T / sqrt(d_k)) v W_o"
