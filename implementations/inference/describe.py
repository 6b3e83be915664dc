"""What was inferred about a class, as a table."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from textwrap import TextWrapper
from typing import NamedTuple

from torch import nn

from mha.implementations.adapters.construction import (
    SIZES,
    assumed_arguments,
    fixed_dropout,
    parameters_of,
)
from mha.implementations.adapters.constructor_names import BIAS_ROLES, causal_flags
from mha.implementations.adapters.loading import ParameterPath
from mha.implementations.adapters.names import INPUT_NAMES, NEUTRAL_MEANING, PAIRED
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Formula
from mha.implementations.inference.projections import not_loaded, order_against_name
from mha.implementations.inference.score_rows import score_rows
from mha.implementations.inference.unused import unused_options
from mha.spec import Rounding
from mha.spec.claims import BIASES, COMPUTE_DTYPES, Claims

WIDTH = 110
CONTRACT = "softmax(q k^T / sqrt(d_k)) v W_o"
OF_KERNELS = CONTRACT.removesuffix(" W_o")
# Arguments that are the same in every configuration.
CONSTANTS = {"max_length": "longest input", "max_batch": "largest batch", "causal": "False"}
CONSTANTS |= {"layer_index": "0", "layer_number": "1"} | dict.fromkeys(BIAS_ROLES, "bias")
CONSTANTS |= {f"{role}_layer": f"Linear(w_{role})" for role in "qkvo"}
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


def table(rows: Sequence[Row], width: int = WIDTH) -> str:
    """Return rows as aligned text of at most `width` columns."""
    topic = max(len(row.topic) for row in rows)
    filler = TextWrapper(
        width, subsequent_indent=" " * (topic + 2), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(
        filler.fill(f"{row.topic:<{topic}}  {row.finding}  [{row.evidence}]") for row in rows
    )


def rows_of(candidate: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> list[Row]:
    """Return what was found.

    module: the module of the trial runs. arguments: what the parameters of its constructor are
    given.
    """
    tested, initial = candidate.evidence, not_loaded(module, candidate.parameters)
    # The value of a causal flag is the one that is judged, and not the one that trial runs began
    # with.
    arguments = {
        name: field
        for name, field in arguments.items()
        if field != "causal" or name not in candidate.keywords
    }
    kept = {name: x for name, x in candidate.keywords.items() if name not in arguments}
    assumed = ", ".join(assumed_arguments(candidate.constructor, arguments))
    kept |= {
        name: SIZES[field] for name, field in getattr(candidate.constructor, "widths", {}).items()
    }
    built = ", ".join(
        filter(
            None, (_assignments(arguments), *(f"{name}={value}" for name, value in kept.items()))
        )
    )
    return [
        Row(
            "built as",
            f"{candidate.label}({built})",
            f"assumed, not by name: {assumed}" if assumed else "by name",
        ),
        Row("projections", _projections(candidate.parameters), _against_name(candidate) or tested),
        Row("biases", _biases(candidate), "tested"),
        Row("inputs", _inputs(candidate), tested),
        *shared_rows(candidate, arguments),
        *_fixed_dropout(module),
        *([Row("not loaded", ", ".join(initial), "initial values are kept")] if initial else []),
    ]


def _fixed_dropout(module: nn.Module) -> list[Row]:
    """Return the row about dropout layers that the constructor does not set, if there are any."""
    set_to_0 = Row("dropout", "layers of a fixed probability, which is set to 0", "tested")
    return [set_to_0] if fixed_dropout(module) else []


def _against_name(candidate: Candidate) -> str:
    """Return that the outputs show another order of stacked projections than their name says, if
    they do.
    """
    name = order_against_name(candidate.parameters)
    return (
        f"assumed: the outputs show this order, though the layer is called {name}" if name else ""
    )


def shared_rows(candidate: Candidate, arguments: Mapping[str, str]) -> list[Row]:
    """Return what was found about what a module, or a kernel, computes and takes."""
    rows = _formulas(candidate) + _masks(candidate)
    rows.append(
        Row("causal", f"{_causal(candidate)}{_idle(candidate)}", _evidence_of_causal(candidate))
    )
    rows.append(Row("weights", _weights(candidate), "tested"))
    rows += [Row(*row) for row in score_rows(candidate)]
    rows += _options(candidate)
    rows.append(
        Row("dtypes", _dtypes(candidate), "tested without a mask" if candidate.mask else "tested")
    )
    if "rounding" in candidate.claims:
        rows.append(Row("rounding", _rounding(candidate.claims["rounding"]), "tested"))
    if unused := unused_options(candidate, arguments):
        rows.append(Row("not judged", ", ".join(unused), "unless declared"))
    neutral = [name for name in candidate.signature.others if name in NEUTRAL_MEANING]
    if neutral:
        rows.append(Row("given", ", ".join(_given(name, candidate) for name in neutral), "by name"))
    unknown = [name for name in candidate.signature.others if name not in NEUTRAL_MEANING]
    if unknown:
        rows.append(Row("given None", ", ".join(unknown), "of no known meaning"))
    return rows


def _formulas(candidate: Candidate) -> list[Row]:
    """Return the row about the formula, if one explains the outputs, with what to claim if that is
    meant.
    """
    if not candidate.explained:
        return []
    evidence = candidate.evidence
    if candidate.formula.scale == "none":
        evidence += "; if that is meant, claim scale=1.0"
    if not candidate.formula.projected:
        evidence += "; if W_o is elsewhere, declare it without w_o"
    is_kernel = not candidate.implementation().claims.projections
    contract = OF_KERNELS if is_kernel else CONTRACT
    return [Row("formula", _formula(candidate.formula, contract), evidence)]


def _masks(candidate: Candidate) -> list[Row]:
    """Return the rows about masks, and about queries without a key."""
    read = candidate.mask or candidate.hides_queries
    evidence = candidate.assumed or ("tested" if read else "by name")
    return [Row("mask", _mask(candidate), evidence), *_empty_rows(candidate)]


ROTATIONS = {"cosines": "1", "sines": "0", "rotation": "cosines of 1 and sines of 0"}


def _given(name: str, candidate: Candidate) -> str:
    """Return what a required parameter of `NEUTRAL_NAMES` is given, as code."""
    meaning = NEUTRAL_MEANING[name]
    if candidate.rotation_pairs and name in PAIRED:
        return f"{name}={'0' if meaning == 'sines' else '1'} of shape (l, d_k / 2)"
    if meaning in ROTATIONS and name not in candidate.signature.rotations:
        return f"{name}=None"
    given = {
        "scale": "1/sqrt(d_k)",
        "dropout": "0.0",
        "module": "an object in evaluation, without groups of heads",
        "start": "0",
        "positions": "None",
        "cache": "None",
        **ROTATIONS,
        "rows": "L",
        "columns": "1",
        "tile": "16",
    }
    return f"{name}={given.get(meaning, meaning)}"


def _empty_rows(candidate: Candidate) -> list[Row]:
    """Return the row about queries without a key, if masks and the formula are known."""
    evidence = "assumed, as the mask is" if candidate.assumed else "tested"
    if candidate.empty_row is None:
        evidence = "assumed: it gets something else"
    policy = candidate.empty_row or "zeros"
    judged = candidate.mask and candidate.explained and not candidate.hides_queries
    return [Row("empty rows", EMPTY_ROWS[policy], evidence)] if judged else []


SINGLE_SOFTMAX = "the softmax is in float32 for float64 inputs too, so NUM-2 is not judged"
PRODUCTS = {
    "tf32": "numbers of float32 are multiplied in TF32, and the bounds allow for it",
    "bf16": "numbers of float32 are multiplied in bfloat16, and the bounds allow for it",
    "bf16x3": "numbers of float32 are multiplied as pairs of bfloat16, and the bounds allow for it",
}


def _rounding(rounding: Rounding) -> str:
    """Return what is claimed about rounding."""
    parts = [SINGLE_SOFTMAX] if rounding.softmax_in_float32 else []
    if rounding.products in PRODUCTS:
        parts.append(PRODUCTS[rounding.products])
    return "; ".join(parts)


def _lse(candidate: Candidate) -> str:
    """Return what is claimed about the log-sum-exp, if it is."""
    declared, asked = candidate.claims.get("lse"), candidate.signature.return_lse
    if declared is None:
        return ""
    base = "the natural one" if declared.base == "e" else "to base 2"
    how = f"returned with {asked}" if asked else "returned"
    history = "it can be differentiated" if declared.gradient else "without a gradient"
    return f"{how}, {base}, of shape ({declared.layout.replace(' ', ', ')}); {history}"


DROPS_OTHERWISE = "not judged: in training it drops something other than whole weights or outputs"
DROPPED = {True: "the weights", "output": "the output", "both": "the weights and the output"}
DROPPED["each"] = "the weights and the output, each with a probability of its own"
WIDTHS = {
    "own_head_dim": "the width of a head",
    "grouped_query": "fewer key heads",
    "kv_widths": "kdim and vdim",
}
WIDTHS |= {
    "value_width": "values of a width of their own",
    "multi_query": "one key and value for all heads",
}


def _options(candidate: Candidate) -> list[Row]:
    """Return the rows about what the constructor takes beside the sizes."""
    found = {"lse": _lse(candidate)}
    if dropout := candidate.claims.get("dropout"):
        found["dropout"] = f"drops {DROPPED[dropout]} in training"
    elif candidate.drops_otherwise:
        found["dropout"] = DROPS_OTHERWISE
    widths = [text for name, text in WIDTHS.items() if name in candidate.claims]
    found["sizes"] = ", ".join(widths)
    found["lengths"] = _lengths(candidate)
    if "gradients" in candidate.claims:
        found["gradients"] = _no_gradients(candidate)
    if candidate.other_widths:
        found["head_dim"] = _head_dims(candidate)
    if candidate.one_head:
        found["heads"] = f"several: with one, {candidate.one_head}"
    if "devices" in candidate.claims:
        found["devices"] = "a GPU: on the CPU, calls raise"
    return [Row(topic, finding, "tested") for topic, finding in found.items() if finding]


def _no_gradients(candidate: Candidate) -> str:
    return (
        "none: its outputs have none, as if it were not for training"
        if candidate.detached
        else "none: with them, calls raise"
    )


def _head_dims(candidate: Candidate) -> str:
    sizes, limits = candidate.sizes, []
    limits += [_either(sizes.head_dims)] if sizes.head_dims else []
    limits += [f"a multiple of {sizes.head_dim_multiple}"] if sizes.head_dim_multiple > 1 else []
    limits += [f"at most {sizes.max_head_dim}"] if sizes.max_head_dim else []
    return f"{', '.join(limits)}: {candidate.other_widths}"


def _lengths(candidate: Candidate) -> str:
    limits = {
        "as many keys as queries": candidate.other_keys,
        f"multiples of {candidate.sizes.length_multiple}": candidate.other_lengths,
        f"at most {candidate.sizes.max_length}": candidate.too_long,
    }
    return "; ".join(
        f"{limit}: others raise {raised}" for limit, raised in limits.items() if raised
    )


def _dtypes(candidate: Candidate) -> str:
    claimed = candidate.claims.get("dtypes", Claims().dtypes)
    refused = [name for name in COMPUTE_DTYPES if name not in claimed]
    return ", ".join(name for name in COMPUTE_DTYPES if name in claimed) + (
        f"; not in {' and '.join(refused)}: calls raise, or empty rows differ" if refused else ""
    )


def _assignments(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={CONSTANTS.get(field, field)}" for name, field in arguments.items())


def _projections(parameters: Mapping[str, ParameterPath]) -> str:
    """Return which parameter is which projection."""

    def text(path: ParameterPath) -> str:
        return (
            "none" if path is None else path if isinstance(path, str) else f"{path[0]} as {path[1]}"
        )

    return ", ".join(f"{key}: {text(path)}" for key, path in parameters.items())


def _biases(candidate: Candidate) -> str:
    values = candidate.claims.get("bias", {True, False})
    if values == {True, False}:
        return "with or without"
    if values == set(BIASES):
        return "of each projection, with or without"
    names: dict[bool | str, str] = {True: "always", False: "none"}
    return " or ".join(
        names.get(value) or f"on {', '.join(str(value))}" for value in BIASES if value in values
    )


def _inputs(candidate: Candidate) -> str:
    axes = f"({', '.join(candidate.layout.split())})"
    if not candidate.cross_attention and not candidate.signature.inputs:
        return f"one, as self-attention, of shape {axes}"
    if candidate.cross_attention == "memory" and not candidate.signature.inputs:
        left_out = ", left out in self-attention" if candidate.memory_optional else ""
        query = f"{candidate.signature.query} as query" if candidate.signature.query else "query"
        return (
            f"{query}, and {candidate.signature.memory} as key and value{left_out}, of shape {axes}"
        )
    return f"{', '.join(candidate.signature.inputs or INPUT_NAMES)}, of shape {axes}"


def _formula(formula: Formula, contract: str = CONTRACT) -> str:
    differences = []
    if formula.scale != "1/sqrt(d_k)":
        differences.append(
            "scores are not scaled" if formula.scale == "none" else f"the scale is {formula.scale}"
        )
    if not formula.projected:
        differences.append("there is no output projection")
    return f"differs from the contract: {' and '.join(differences)}" if differences else contract


def _either(numbers: Collection[int]) -> str:
    """Return numbers as alternatives: "1, 2 or 4"."""
    *fewer, most = map(str, sorted(numbers))
    return f"{', '.join(fewer)} or {most}" if fewer else most


def _mask(candidate: Candidate) -> str:
    """Return what a mask means, and its shape."""
    if candidate.hides_queries:
        return (
            f"not judged: {candidate.signature.mask} hides the queries of padding too, whose"
            " outputs mean nothing"
        )
    if candidate.mask is None:
        return "none"
    meaning = (
        "how many of the first keys a query may attend to" if candidate.masks.counts_keys else ""
    )
    meaning = meaning or CONVENTIONS[candidate.mask]
    meaning = meaning.replace("True", "1") if candidate.mask_numbers else meaning
    meaning = (
        meaning.replace("True", "True or 1")
        if "int" in candidate.claims.get("masks", ())
        else meaning
    )
    ranks = candidate.claims.get("mask_ranks")
    broadcast = f"of {_either(ranks)} dimensions, " if ranks else ""
    shape = (
        f"of shape {candidate.mask_shape!r}"
        if candidate.mask_shape
        else f"{broadcast}broadcastable to (b, h, l, s)"
    )
    always = _mask_besides(candidate)
    names = " or ".join(
        dict.fromkeys(filter(None, (candidate.mask_alone, candidate.signature.mask)))
    )
    rows = [f"{names}: {meaning}, {shape}{always}"]
    if candidate.padding:  # which leaves nothing to a mask that does not differ between queries
        rows = [*(rows if "l" in candidate.masks.axes else []), _padding(candidate)]
    return "; ".join(rows)


def _mask_besides(candidate: Candidate) -> str:
    """Return what else is to be said of a mask."""
    said = ", required in each call" if candidate.mask_required else ""
    if candidate.masked_number == "lowest":
        said += ", where the lowest number of the dtype hides a key"
    return said


def _padding(candidate: Candidate) -> str:
    return (
        f"{candidate.signature.padding}: {CONVENTIONS[candidate.padding or 'keep']}, of shape 'b s'"
    )


def _idle(candidate: Candidate) -> str:
    """Return what is said of a causal flag of the constructor that has no effect."""
    return (
        f"; {candidate.idle_flag} of the constructor has no effect" if candidate.idle_flag else ""
    )


def _causal(candidate: Candidate) -> str:
    if candidate.flag_fault:
        return candidate.flag_fault
    if "always_causal" in candidate.claims:
        return "always, aligned bottom_right" if "causal" in candidate.claims else "always"
    if candidate.hint:
        return (
            f"not judged: without a mask, {candidate.signature.is_causal}=True raises"
            f" {candidate.hint}"
        )
    flag, alignment = candidate.signature.is_causal, candidate.claims.get("causal", "top_left")
    if flag:
        beside = "" if candidate.claims.get("causal_with_mask", True) else ", not beside a mask"
        return f"{flag}, aligned {alignment}{beside}"
    if candidate.causal_by_default:
        return f"unless there is a mask, or through the mask, aligned {alignment}"
    return f"through the mask, aligned {alignment}" if alignment else _never_causal(candidate)


def _evidence_of_causal(candidate: Candidate) -> str:
    through_mask = candidate.assumed and not candidate.signature.is_causal
    return "assumed, as the mask is" if through_mask else candidate.evidence


def _never_causal(candidate: Candidate) -> str:
    """Return that no call is causal, and how to judge a class that its constructor can make causal."""
    parameters = (
        parameters_of(candidate.constructor) if inspect.isclass(candidate.constructor) else {}
    )
    flags = causal_flags(parameters)
    return (
        f"no; to judge it causal too, check functools.partial({candidate.label}, {flags[0]}=True)"
        if flags
        else "no"
    )


def _weights(candidate: Candidate) -> str:
    if "returns_weights" not in candidate.claims:
        at = candidate.weights_at
        return f"per head, on the attribute {at}" if isinstance(at, str) else "returned per head"
    return f"not returned {candidate.beside}".rstrip()
