"""Reading cases from text, as their repr writes them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import fields
from itertools import combinations
from math import prod
from typing import Any, get_args

from mha.conformance.cases.case import BUILT_IN, LENGTHS, OF_ITEMS, SHARING, SINKS, SLOPES, Case
from mha.conformance.cases.mask_kinds import EXTENTS
from mha.conformance.cases.memory_layouts import LAYOUTS
from mha.conformance.cases.modes import MODES
from mha.conformance.cases.values import VALUES
from mha.conformance.cases.variants import VARIANTS
from mha.spec.claims import BIASES, DEVICES, DTYPES, Alignment
from mha.spec.rotary import NormAxes

# The values of the fields that take names.
WORDS: dict[str, Collection[str]] = {
    "dtype": DTYPES,
    "device": DEVICES,
    "mask": ("none", *EXTENTS),
    "inputs": SHARING,
    "layout": (*LAYOUTS, "mixed"),
    "values": VALUES,
    "mode": MODES,
    "variant": ("plain", *VARIANTS),
    "sinks": ("none", *SINKS),
    "slopes": ("none", *SLOPES, BUILT_IN, OF_ITEMS),
    "norm_weights": ("", *get_args(NormAxes)),
    "lengths": LENGTHS,
    "alignment": get_args(Alignment),
    "mask_axes": ["".join(axes) for count in range(5) for axes in combinations("BHLS", count)],
}


def _is_window(value: Any) -> bool:
    """Return whether a value is a window: two numbers that are not negative, or None in place of
    one.
    """
    pair = value if isinstance(value, tuple) and len(value) == 2 else ("",)
    return all(each is None or (type(each) is int and each >= 0) for each in pair)


# The fields that take values of several types.
SPECIAL: dict[str, Callable[[Any], bool]] = {
    "bias": lambda value: type(value) is str and value in BIASES,
    "window": _is_window,
    "chunk": lambda value: type(value) is int and value > 0,
}
# The fields that may be None, each with another value.
OPTIONAL: dict[str, int | float] = {
    "n_kv_heads": 1,
    "d_model": 1,
    "d_value": 1,
    "kdim": 1,
    "vdim": 1,
    "scale": 1.0,
    "softcap": 1.0,
}
# In characters, of the text of a case. Of a seed and of the number of ranks. No tensor of a case
# has more numbers: in float64, that is half a GiB.
LONGEST, LARGEST_SEED, MOST_RANKS, MOST_NUMBERS = 1000, (1 << 63) - 1, 64, 1 << 26
# Names that fields have in reports of format 1.
OLD_NAMES = {"regime": "values", "path": "mode"}


def read_case(text: str) -> Case:
    """Read a case from its repr, without running it as code.

    Raises ValueError, in one line, for anything else.

    >>> read_case("Case(L=2, regime='large')")
    Case(L=2, values='large')
    """
    if len(text) > LONGEST:
        raise ValueError(
            f"{text[:80]!r} is not a case: it has {len(text):,} characters, more than {LONGEST}"
        )
    try:
        call = _call_of(text)
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.args[0] if error.args else "it is too long"
        raise ValueError(
            f"{text[:80]!r} is not a case, such as Case(L=2, mask='padding'): {reason}"
        ) from None
    known = {field.name: field.default for field in fields(Case)}
    given = {OLD_NAMES.get(name, name): value for name, value in words.items()}
    if call.args or not set(given) <= set(known):
        raise ValueError(
            f"a case takes only {', '.join(sorted(known))}, all by name, but this is {text[:80]!r}"
        )
    for name, value in given.items():
        _validate(name, value, known[name])
    case = Case(**given)
    _validate_sizes(case)
    return case


def _call_of(text: str) -> ast.Call:
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Case":
        return call
    raise ValueError("it is not a call of Case")


def _validate(name: str, value: Any, default: Any) -> None:
    if name in SPECIAL and SPECIAL[name](value):
        return
    if name in OPTIONAL and value is not None:
        default = OPTIONAL[name]
    if type(value) is not type(default) or (type(value) is int and value < 0):
        raise ValueError(
            f"the {name} of a case must be a value such as {default!r}, but is {value!r:.80}"
        )
    if name in WORDS and value not in WORDS[name]:
        raise ValueError(
            f"unknown {name} of a case: {value!r:.80}; known: {', '.join(WORDS[name])}"
        )


def is_size(name: str) -> bool:
    """Return whether a field of a case is a number.

    >>> is_size("L"), is_size("n_kv_heads"), is_size("causal")
    (True, True, False)
    """
    return type(OPTIONAL.get(name, getattr(Case, name))) is int


def _validate_sizes(case: Case) -> None:
    """Raise ValueError for a case whose tensors, or ranks, would take all of a machine."""
    if case.seed > LARGEST_SEED:
        raise ValueError("the seed of a case must be less than 2**63")
    if case.ranks > MOST_RANKS:
        raise ValueError(f"a case may have at most {MOST_RANKS} ranks")
    width = max(case.n_heads * case.head_dim, case.d_model or 0)
    key_width, value_width = case.kdim or width, case.vdim or width
    shapes = {"query": (case.L, width), "key": (case.S, key_width), "value": (case.S, value_width)}
    numbers = dict[str, int]()
    for name, shape in shapes.items():
        numbers[name] = _product(case.B, *shape)
    numbers["contexts"] = _product(case.B, case.L, case.n_heads, case.d_value or case.head_dim)
    numbers["weights"] = _product(case.B, case.n_heads, case.L, case.S)
    numbers["W_q"] = _product(width, max(width, key_width, value_width))
    numbers["heads"] = _product(case.n_heads, case.head_dim)
    for name, number in numbers.items():
        if number > MOST_NUMBERS:
            raise ValueError(
                f"the case is too large: {name} would have more than {MOST_NUMBERS:,} numbers"
            )


def _product(*sizes: int) -> int:
    """Return a product, in which a size of 0 counts as 1: other tensors do not have it."""
    return prod(max(size, 1) for size in sizes)
