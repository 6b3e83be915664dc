"""Classes that require several widths: each may be that of all heads, or of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from torch import nn

from mha.implementations.adapters.construction import parameters_of, required_of
from mha.implementations.adapters.constructor_names import VARIADIC, fields_of, missing_of
from mha.implementations.adapters.names import words_of
from mha.implementations.discovery.errors import UnsupportedCallError

# With more of them, none is tried.
MOST_WIDTHS = 3
# The words of a width in names that are not known, and those of other numbers.
WIDTH_WORDS = {
    "dim",
    "dims",
    "d",
    "size",
    "width",
    "features",
    "channels",
    "hidden",
    "in",
    "out",
    "k",
    "v",
}
OTHER_WORDS = {
    *(
        "len",
        "length",
        "seq",
        "sequence",
        "max",
        "min",
        "num",
        "n",
        "window",
        "block",
        "patch",
        "kernel",
        "vocab",
    ),
    *(
        "ff",
        "ffn",
        "feedforward",
        "mlp",
        "inner",
        "context",
        "batch",
        "image",
        "chunk",
        "bucket",
        "buckets",
        "group",
    ),
}


def with_other_widths(
    label: str, cls: Callable[..., nn.Module]
) -> Iterator[Callable[..., nn.Module]]:
    """Yield functions that build a class with each choice of the widths that it requires beside the
    first one.

    Their names are not known, or are those of inputs. A function has the attributes `widths`, by
    the name of each "d_model" or "head_dim", `cls`, the class, and `code`, which defines it.
    """
    parameters = parameters_of(cls) if inspect.isclass(cls) else {}
    known = fields_of(parameters)
    names = {
        known[name]: name for name in reversed(parameters) if name in known
    }  # the first one of each
    open_widths = [
        name
        for name in required_of(parameters)
        if name != names.get("d_model") and _is_width(name, known.get(name))
    ]
    if not missing_of(known) and "config" not in names and 0 < len(open_widths) <= MOST_WIDTHS:
        for fields in product(("d_model", "head_dim"), repeat=len(open_widths)):
            yield _with_widths(label, cls, names, dict(zip(open_widths, fields, strict=True)))


def _is_width(name: str, field: str | None) -> bool:
    words = {*words_of(name)}
    is_called_so = bool(words & WIDTH_WORDS) and not words & OTHER_WORDS
    return is_called_so if field is None else field in ("d_model", "kdim", "vdim")


def _with_widths(
    label: str, cls: Callable[..., nn.Module], names: Mapping[str, str], widths: Mapping[str, str]
) -> Callable[..., nn.Module]:
    """Return a function that builds a class with these widths; names: of its parameters, by what
    they are given.
    """
    d_model, n_heads = names["d_model"], names["n_heads"]

    def build(**given: Any) -> nn.Module:
        width, heads = given[d_model], given[n_heads]
        if "head_dim" in widths.values() and heads > 0 and width % heads:
            raise UnsupportedCallError(
                f"its constructor takes the width of a head, not d_model ({width})"
            )
        values = {"d_model": width, "head_dim": width // heads if heads else width}
        return cls(**given, **{name: values[field] for name, field in widths.items()})

    kept = [
        p for name, p in parameters_of(cls).items() if name not in widths and p.kind not in VARIADIC
    ]
    code = {"d_model": d_model, "head_dim": f"{d_model} // {n_heads}"}
    passed = [
        *(f"{p.name}={p.name}" for p in kept),
        *(f"{name}={code[field]}" for name, field in widths.items()),
    ]
    signature = inspect.Signature(
        [p.replace(annotation=p.empty, kind=p.KEYWORD_ONLY) for p in kept]
    )
    taken = str(signature).strip("()").removeprefix("*, ")
    attributes = {"__name__": label, "__signature__": signature, "widths": widths, "cls": cls}
    for name, value in {
        **attributes,
        "code": f"lambda {taken}: {label}({', '.join(passed)})",
    }.items():
        setattr(build, name, value)
    return build
