"""Classes that require several widths, each that of all heads or of one, or that have one head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from torch import nn

from mha.implementations.adapters.configs import attributes_read
from mha.implementations.adapters.construction import parameters_of, required_of
from mha.implementations.adapters.constructor_names import (
    CONSTRUCTOR_NAMES,
    VARIADIC,
    fields_of,
    missing_of,
    without_partial,
)
from mha.implementations.adapters.names import words_of
from mha.implementations.adapters.widened import OneHead, Widened
from mha.spec.option_names import listed

# With more of them, none is tried.
MOST_WIDTHS = 3
# The words of a width in names that are not known, and those of other numbers.
WIDTH_WORDS = {*listed("dim dims d size width features channels hidden in out k v")}
OTHER_WORDS = {
    *listed("len length seq sequence max min num n window block patch kernel vocab"),
    *listed("ff ffn feedforward mlp inner context batch image chunk bucket buckets group"),
}


def with_other_widths(label: str, cls: Callable[..., nn.Module]) -> Iterator[Widened]:
    """Yield a class with each choice of the widths that it requires beside the first one.

    The names of these widths are not known, or are those of inputs.
    """
    parameters = parameters_of(cls) if inspect.isclass(cls) else {}
    known = fields_of(parameters)
    names = _first_of_each(known, [*parameters])
    if missing_of(known) or "config" in names:
        return
    open_widths = [
        name
        for name in required_of(parameters)
        if name != names.get("d_model") and _is_width(name, known.get(name))
    ]
    if not 0 < len(open_widths) <= MOST_WIDTHS:
        return
    others = {
        name: parameter.replace(annotation=parameter.empty, kind=parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in open_widths and parameter.kind not in VARIADIC
    }
    for fields in product(("d_model", "head_dim"), repeat=len(open_widths)):
        widths = dict(zip(open_widths, fields, strict=True))
        yield Widened(label, cls, names["d_model"], names["n_heads"], widths, others)


def with_one_head(label: str, cls: Callable[..., nn.Module]) -> Iterator[OneHead]:
    """Yield a class that takes a width and no number of heads, with one head.

    Where it requires a number of no known name, that may be the number of heads.
    """
    if not inspect.isclass(without_partial(cls)):
        return
    parameters = parameters_of(cls)
    known = fields_of(parameters)
    if not known.keys() >= {*required_of(parameters)}:
        return
    if missing_of(known) == ["n_heads"] or reads_no_number_of_heads(cls):
        yield OneHead.of(label, cls, parameters)


def reads_no_number_of_heads(cls: Callable[..., nn.Module]) -> bool:
    """Return whether a class reads its width from a config, and no number of heads."""
    target = without_partial(cls)
    if not inspect.isclass(target):
        return False
    known = fields_of(parameters_of(cls))
    if "config" not in known.values() or "n_heads" in known.values():
        return False
    read = {*(attributes_read(target.__init__) or ())}
    reads_width = not read.isdisjoint(CONSTRUCTOR_NAMES["d_model"])
    return reads_width and read.isdisjoint(CONSTRUCTOR_NAMES["n_heads"])


def _first_of_each(known: Mapping[str, str], parameters: list[str]) -> dict[str, str]:
    """Return the first parameter of each meaning; known: what each of some parameters means."""
    names: dict[str, str] = {}
    for name in parameters:
        if name in known:
            names.setdefault(known[name], name)
    return names


def _is_width(name: str, field: str | None) -> bool:
    """Return whether a parameter may be a width, by its meaning, or the words of its name."""
    if field is not None:
        return field in ("d_model", "kdim", "vdim")
    words = {*words_of(name)}
    return bool(words & WIDTH_WORDS) and not words & OTHER_WORDS
