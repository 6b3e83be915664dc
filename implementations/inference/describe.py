"""What was inferred about a class, as a table and as a declaration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from torch import nn

from mha.implementations.adapters.calling import INPUT_NAMES
from mha.implementations.adapters.loading import ParameterPath
from mha.implementations.adapters.module import BIAS_ROLES, MAX_LENGTH
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Formula
from mha.implementations.inference.projections import not_loaded
from mha.spec.claims import BIASES

WIDTH = 110
# Options of constructors that no trial run tests: see the fields of `Claims`.
NOT_TESTED = ("dropout", "n_kv_heads", "kdim", "vdim", "bias_kv", "zero_key")
CONTRACT = "softmax(q k^T / sqrt(d_k)) v W_o"
# Arguments that are the same in every configuration.
CONSTANTS = {"output_dropout": "0.0", "max_length": str(MAX_LENGTH)} | dict.fromkeys(BIAS_ROLES, "bias")
CONVENTIONS = {
    "keep": "True = may attend",
    "drop": "True = may not attend",
    "additive": "added to the scores",
}


EMPTY_ROWS = {
    "zeros": "a query without an allowed key gets a context of zeros",
    "nan": "a query without an allowed key gets NaN",
    "uniform": "a query without an allowed key gets the mean of all values",
    "error": "a query without an allowed key raises",
}


class Row(NamedTuple):
    """One row of the table: a topic, what was found, and how."""

    topic: str
    finding: str
    evidence: str


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned text."""
    width = max(len(row.topic) for row in rows)
    return "\n".join(
        fill(
            f"{row.topic:<{width}}  {row.finding}  [{row.evidence}]",
            WIDTH,
            subsequent_indent=" " * (width + 2),
            break_long_words=False,
        )
        for row in rows
    )


def rows_of(candidate: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> list[Row]:
    """Return what was found.

    module: the module of the trial runs. arguments: what the parameters of its constructor are given.
    """
    tested = candidate.evidence
    formula = [Row("formula", _formula(candidate.formula), tested)] if candidate.explained else []
    unused, initial = _unused_options(candidate, arguments), not_loaded(module, candidate.parameters)
    return [
        Row("built as", f"{candidate.label}({_assignments(arguments)})", "by name"),
        Row("projections", _projections(candidate.parameters), tested),
        Row("biases", _biases(candidate), "tested"),
        Row("inputs", _inputs(candidate), tested),
        *formula,
        Row("mask", _mask(candidate), candidate.assumed or ("tested" if candidate.mask else "by name")),
        *_empty_rows(candidate),
        Row("causal", _causal(candidate), tested),
        Row("weights", _weights(candidate), "tested"),
        *([Row("not judged", ", ".join(unused), "unless declared")] if unused else []),
        *([Row("not loaded", ", ".join(initial), "initial values are kept")] if initial else []),
    ]


def _empty_rows(candidate: Candidate) -> list[Row]:
    """Return the row about queries without a key, if masks and the formula are known."""
    policy = candidate.claims.get("empty_row", "zeros")
    return [Row("empty rows", EMPTY_ROWS[policy], "tested")] if candidate.mask and candidate.explained else []


def _assignments(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={CONSTANTS.get(field, field)}" for name, field in arguments.items())


def _projections(parameters: Mapping[str, ParameterPath]) -> str:
    """Return which parameter is which projection."""

    def text(path: ParameterPath) -> str:
        return "none" if path is None else path if isinstance(path, str) else f"{path[0]} as {path[1]}"

    return ", ".join(f"{key}: {text(path)}" for key, path in parameters.items())


def _biases(candidate: Candidate) -> str:
    values = candidate.claims.get("bias", {True, False})
    if values == {True, False}:
        return "with or without"
    names: dict[bool | str, str] = {True: "always", False: "none"}
    return " or ".join(names.get(value) or f"on {', '.join(str(value))}" for value in BIASES if value in values)


def _inputs(candidate: Candidate) -> str:
    axes = f"({', '.join(candidate.layout.split())})"
    if not candidate.cross_attention:
        return f"one, as self-attention, of shape {axes}"
    if candidate.cross_attention == "memory" and not candidate.signature.inputs:
        return f"query, and {candidate.signature.memory} as key and value, of shape {axes}"
    return f"{', '.join(candidate.signature.inputs or INPUT_NAMES)}, of shape {axes}"


def _formula(formula: Formula) -> str:
    differences = []
    if formula.scale != "1/sqrt(d_k)":
        differences.append("scores are not scaled" if formula.scale == "none" else f"the scale is {formula.scale}")
    if not formula.projected:
        differences.append("there is no output projection")
    return f"differs from the contract: {' and '.join(differences)}" if differences else CONTRACT


def _mask(candidate: Candidate) -> str:
    """Return what a mask means, and its shape."""
    if candidate.mask is None:
        return "none"
    meaning = CONVENTIONS[candidate.mask]
    meaning = meaning.replace("True", "1") if candidate.mask_numbers else meaning
    ranks = candidate.claims.get("mask_ranks")
    broadcast = f"of {' or '.join(map(str, sorted(ranks)))} dimensions, " if ranks else ""
    shape = (
        f"of shape {candidate.mask_shape!r}" if candidate.mask_shape else f"{broadcast}broadcastable to (b, h, l, s)"
    )
    padding = ""
    if candidate.padding:
        padding = f"; {candidate.signature.padding}: {CONVENTIONS[candidate.padding]}, of shape 'b s'"
    return f"{candidate.signature.mask}: {meaning}, {shape}{padding}"


def _causal(candidate: Candidate) -> str:
    if "always_causal" in candidate.claims:
        return "always"
    flag, alignment = candidate.signature.is_causal, candidate.claims.get("causal", "top_left")
    if flag:
        beside = "" if candidate.claims.get("causal_with_mask", True) else ", not beside a mask"
        return f"{flag}, aligned {alignment}{beside}"
    return f"through the mask, aligned {alignment}" if alignment else "no"


def _weights(candidate: Candidate) -> str:
    if "returns_weights" not in candidate.claims:
        return "returned per head"
    shape = candidate.weights_shape
    return f"not returned per head, but of shape {shape}" if shape else "not returned"


def _unused_options(candidate: Candidate, arguments: Mapping[str, str]) -> list[str]:
    """Return the options of `forward` and of the constructor that no call uses."""
    signature, parameters = candidate.signature, candidate.forward_parameters
    used = {*signature.inputs, signature.mask, signature.padding, signature.is_causal, signature.need_weights}
    used |= {signature.memory} if candidate.cross_attention else set()
    unused = [name for name, p in parameters.items() if p.default is not p.empty and name not in used]
    unused += [name for name, field in arguments.items() if field in NOT_TESTED]
    known = {*arguments, *getattr(candidate.constructor, "keywords", ())}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    options = inspect.signature(candidate.constructor).parameters.items()
    return unused + [f"{name}={p.default!r}" for name, p in options if name not in known and p.kind in kinds]


def declaration_of(label: str, options: Mapping[str, Any], claims: Mapping[str, Any]) -> str:
    """Return the code that declares what was inferred, ready to paste below the class.

    options: for `from_module`. claims: those that differ from `Claims()`.
    """
    lines = [f"    {name}={_literal(value)}," for name, value in options.items() if (name, value) != ("mask", "keep")]
    imports = ["from mha.implementations import from_module"]
    if claims:
        arguments = ", ".join(f"{name}={_literal(value)}" for name, value in claims.items())
        lines.append(f"    claims=Claims({arguments}),")
        imports.append("from mha.spec import Claims")
    return "\n".join([*imports, "", f"implementation = from_module(\n    {label},", *lines, ")"])


def declaration_advice(label: str) -> str:
    """Return how to declare by hand what could not be inferred."""
    return (
        f". Declare it below the class, and judge that: implementation = from_module({label}, "
        'parameters={"w_q": ..., "w_k": ..., "w_v": ..., "w_o": ...}, mask=...)'
    )


def _literal(value: Any) -> str:
    """Return the code of a value, with double quotes and sets in a fixed order."""
    if isinstance(value, set):
        return f"{{{', '.join(_literal(each) for each in sorted(value, key=str))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})" if value else "()"
    return f'"{value}"' if isinstance(value, str) else repr(value)
