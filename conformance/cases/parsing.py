"""Reading cases from text, as their repr writes them."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import fields
from itertools import combinations
from typing import Any, get_args

from mha.conformance.cases.case import SHARING, Case
from mha.conformance.cases.layouts import LAYOUTS
from mha.conformance.cases.masks import EXTENTS
from mha.conformance.cases.modes import MODES
from mha.conformance.cases.values import VALUES
from mha.spec.claims import BIASES, DEVICES, DTYPES, Alignment

# The values of the fields that take names.
WORDS: dict[str, Collection[str]] = {
    "dtype": DTYPES,
    "device": DEVICES,
    "mask": ("none", *EXTENTS),
    "inputs": SHARING,
    "layout": (*LAYOUTS, "mixed"),
    "values": VALUES,
    "mode": MODES,
    "alignment": get_args(Alignment),
    "mask_axes": ["".join(axes) for count in range(5) for axes in combinations("BHLS", count)],
}
# Names that fields have in reports of format 1.
OLD_NAMES = {"regime": "values", "path": "mode"}


def read_case(text: str) -> Case:
    """Read a case from its repr, without running it as code; raises ValueError, in one line, for anything else.

    >>> read_case("Case(L=2, regime='large')")
    Case(L=2, values='large')
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Case"):
            raise ValueError("it is not a call of Case")
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.args[0] if error.args else "it is too long"
        raise ValueError(f"{text[:80]!r} is not a case, such as Case(L=2, mask='padding'): {reason}") from None
    known = {field.name: field.default for field in fields(Case)}
    given = {OLD_NAMES.get(name, name): value for name, value in words.items()}
    if call.args or not set(given) <= set(known):
        raise ValueError(f"a case takes only {', '.join(sorted(known))}, all by name, but this is {text[:80]!r}")
    for name, value in given.items():
        _validate(name, value, known[name])
    return Case(**given)


def _validate(name: str, value: Any, default: Any) -> None:
    if name == "bias" and value in BIASES:
        return
    if type(value) is not type(default) or (type(value) is int and value < 0):
        raise ValueError(f"the {name} of a case must be a value such as {default!r}, but is {value!r:.80}")
    if name in WORDS and value not in WORDS[name]:
        raise ValueError(f"unknown {name} of a case: {value!r}; known: {', '.join(WORDS[name])}")
