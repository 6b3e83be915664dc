"""The rows of a report: those that were found, and what is declared, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mha.implementations.adapters.construction import SIZES, assumed_arguments, fixed_dropout
from mha.implementations.adapters.constructor_names import BIAS_ROLES, without_partial
from mha.implementations.adapters.kernel_axes import ONE_QUERY, ONE_QUERY_EACH
from mha.implementations.adapters.loading import ParameterPath, projects
from mha.implementations.adapters.names import INPUT_NAMES, OF_BITS
from mha.implementations.adapters.widened import OneHead
from mha.implementations.inference.candidate import OF_FORMULA, Candidate
from mha.implementations.inference.declared import Declared, DeclaredKernel
from mha.implementations.inference.given_rows import given_rows
from mha.implementations.inference.kernel_forms import PACKED_INPUTS, required_names
from mha.implementations.inference.probes import Formula
from mha.implementations.inference.projections import not_loaded, order_against_name
from mha.implementations.inference.rows import Row
from mha.implementations.inference.sizes import either
from mha.implementations.inference.unused import (
    options_without_effect,
    switches_of_bits,
    unclaimable_options,
    unused_options,
)
from mha.spec import Rounding
from mha.spec.claims import BIASES, COMPUTE_DTYPES

CONTRACT = "softmax(q k^T / sqrt(d_k)) v W_o"
OF_KERNELS = CONTRACT.removesuffix(" W_o")
# Arguments that are the same in every configuration.
CONSTANTS = {
    "max_length": "longest input",
    "max_batch": "largest batch",
    "causal": "False",
    "eps": "1e-5",
    "layer_index": "0",
    "layer_number": "1",
    **dict.fromkeys(BIAS_ROLES, "bias"),
    **{f"{role}_layer": f"Linear(w_{role})" for role in "qkvo"},
}
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
WIDTHS = {
    "own_head_dim": "the width of a head",
    "grouped_query": "fewer key heads",
    "kv_widths": "kdim and vdim",
    "value_width": "values of a width of their own",
    "multi_query": "one key and value for all heads",
}
# What is found by trial runs, in the order of the report.
BEFORE_SIZES = (
    "set",
    "positions",
    "norm",
    "causal",
    "weights",
    "scale",
    "softcap",
    "window",
    "chunk",
    "sinks",
    "alibi",
    "items",
    "packed",
    "lse",
    "dropout",
)
AFTER_SIZES = ("lengths", "cache", "gradients", "head width", "head_dim", "heads", "devices")
SINGLE_SOFTMAX = "the softmax is in float32 for float64 inputs too, so NUM-2 is not judged"
PRODUCTS = {
    "tf32": "numbers of float32 are multiplied in TF32, and the bounds allow for it",
    "bf16": "numbers of float32 are multiplied in bfloat16, and the bounds allow for it",
    "bf16x3": "numbers of float32 are multiplied as pairs of bfloat16, and the bounds allow for it",
}


def rows_of_module(candidate: Candidate, module: nn.Module) -> Iterator[Row]:
    """Yield what was found of a module; module: that of the trial runs."""
    parameters = candidate.declared.parameters
    yield _built_as(candidate)
    yield Row("projections", _projections(parameters), _evidence_of_order(candidate))
    yield Row("biases", _biases(candidate.claims.get("bias", {True, False})))
    yield Row("inputs", _inputs(candidate.declared), candidate.evidence)
    yield from _shared_rows(candidate)
    if fixed_dropout(module):
        yield Row("dropout", "layers of a fixed probability, which is set to 0")
    initial = not_loaded(module, parameters)
    initial = [name for name in initial if name != candidate.declared.sinks]
    if initial:
        yield Row("not loaded", ", ".join(initial), "initial values are kept")


def rows_of_kernel(candidate: Candidate) -> Iterator[Row]:
    """Yield what was found of a kernel."""
    declared = candidate.declared
    assert isinstance(declared, DeclaredKernel)
    inputs = required_names(declared.constructor)
    if inputs not in PACKED_INPUTS:
        inputs = tuple(declared.signature.inputs or list(declared.forward_parameters)[:3])
    shape = f"of shape {shape_words(declared.layout)}"
    if declared.contiguous:
        shape = f"{shape}, contiguous ones alone"
    yield Row("kernel", "judged on query, key and value themselves", "by its parameters")
    yield Row("inputs", f"{', '.join(inputs)}, {shape}")
    yield from _shared_rows(candidate)


def shape_words(layout: str) -> str:
    """Return a layout as the shape of the inputs, and of the context where that has another one."""
    if layout == ONE_QUERY:
        return "(h, d) and (l, h, d), one query in a call"
    if layout in ONE_QUERY_EACH:
        keys = ONE_QUERY_EACH[layout].replace(" ", ", ").replace("l", "s")
        return f"(b, h, d) and ({keys}), one query of each item in a call"
    inputs, _, context = layout.replace("(b h)", "b*h").replace("(h d)", "h*d").partition(" -> ")
    shape = f"({inputs.replace(' ', ', ')})"
    if not context:
        return shape
    return f"{shape}, the context ({context.replace(' ', ', ')})"


def _shared_rows(candidate: Candidate) -> Iterator[Row]:
    """Yield what was found about what a module, or a kernel, computes and takes."""
    if candidate.explained:
        yield _formula_row(candidate)
    yield Row("mask", _mask(candidate), _evidence_of_masks(candidate))
    if candidate.declared.mask and candidate.explained and not candidate.more_by_mask:
        yield _empty_rows(candidate)
    yield from _found(candidate, BEFORE_SIZES)
    widths = ", ".join(text for name, text in WIDTHS.items() if name in candidate.claims)
    if widths:
        yield Row("sizes", widths)
    yield from _found(candidate, AFTER_SIZES)
    evidence = "tested without a mask" if candidate.declared.mask else "tested"
    yield Row("dtypes", _dtypes(candidate.claimed("dtypes")), evidence)
    if "rounding" in candidate.claims:
        yield Row("rounding", _rounding(candidate.claims["rounding"]))
    yield from _not_judged(candidate)
    yield from given_rows(candidate.declared)


def _not_judged(candidate: Candidate) -> Iterator[Row]:
    """Yield the rows about what no call shows: what may be declared, and what no claim is about."""
    unclaimable, of_bits = unclaimable_options(candidate), switches_of_bits(candidate)
    elsewhere, idle = {*unclaimable, *of_bits}, options_without_effect(candidate)
    declarable = []
    for option in unused_options(candidate):
        if option not in elsewhere and option.partition("=")[0] not in idle:
            declarable.append(option)
    if declarable:
        yield Row("not judged", ", ".join(declarable), "unless declared")
    if unclaimable:
        yield Row("not covered here", ", ".join(unclaimable), "no claim says what it does")
    if of_bits:
        claims = [OF_BITS[name].format(kernel=candidate.label) for name in of_bits]
        found = f"{', '.join(of_bits)}: equal bits, judged where they are claimed: "
        yield Row("bits", found + ", ".join(claims), "unless declared")


def _found(candidate: Candidate, topics: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of several topics that trial runs have found."""
    for topic in topics:
        row = candidate.rows.get(topic)
        if row and row.finding:
            if row.evidence == OF_FORMULA:
                row = row._replace(evidence=candidate.evidence)
            yield row


def _built_as(candidate: Candidate) -> Row:
    """Return the row about the arguments of the constructor."""
    constructor, keywords = candidate.declared.constructor, candidate.declared.keywords
    arguments = dict(candidate.arguments)
    for name, field in candidate.arguments.items():
        # The value of a causal flag is the one that is judged, and not the one that trial runs
        # began with.
        if field == "causal" and name in keywords:
            del arguments[name]
    values: dict[str, object] = {}
    for name, field in arguments.items():
        values[name] = CONSTANTS.get(field, field)
    for name, value in keywords.items():
        values.setdefault(name, value)
    for name, field in getattr(constructor, "widths", {}).items():
        values[name] = SIZES[field]
    if isinstance(without_partial(constructor), OneHead):
        del values["n_heads"]
    built = ", ".join(f"{name}={value}" for name, value in values.items())
    assumed = ", ".join(assumed_arguments(constructor, arguments))
    evidence = f"assumed, not by name: {assumed}" if assumed else "by name"
    return Row("built as", f"{candidate.label}({built})", evidence)


def _projections(parameters: Mapping[str, ParameterPath]) -> str:
    """Return which parameter is which projection."""
    found = []
    for key, path in parameters.items():
        if isinstance(path, tuple):
            found.append(f"{key}: {path[0]} as {path[1]}")
        else:
            found.append(f"{key}: {path or 'none'}")
    if not projects(parameters):
        found.append("w_o: none, and added to its output")
    return ", ".join(found)


def _evidence_of_order(candidate: Candidate) -> str:
    """Return how the projections were found; the outputs may show another order than their name."""
    name = order_against_name(candidate.declared.parameters)
    if not name:
        return candidate.evidence
    return f"assumed: the outputs show this order, though the layer is called {name}"


def _biases(values: set[bool | str]) -> str:
    if values == {True, False}:
        return "with or without"
    if values == set(BIASES):
        return "of each projection, with or without"
    words: dict[bool | str, str] = {True: "always", False: "none"}
    found = []
    for value in BIASES:
        if value in values:
            found.append(words.get(value) or f"on {', '.join(str(value))}")
    return " or ".join(found)


def _inputs(declared: Declared) -> str:
    signature, shape = declared.signature, f"of shape ({', '.join(declared.layout.split())})"
    if signature.inputs:
        return f"{', '.join(signature.inputs)}, {shape}"
    if not declared.cross_attention:
        return f"one, as self-attention, {shape}"
    if declared.cross_attention is True:
        return f"{', '.join(INPUT_NAMES)}, {shape}"
    query = f"{signature.query} as query" if signature.query else "query"
    memory = f"{signature.memory} as key and value"
    if declared.memory_optional:
        memory = f"{memory}, left out in self-attention"
    return f"{query}, and {memory}, {shape}"


def _formula_row(candidate: Candidate) -> Row:
    """Return the row about the formula, with what to claim, or declare, if that is meant."""
    formula, evidence = candidate.formula, candidate.evidence
    if formula.scale == "none" and candidate.claimed("scale") is None:
        evidence += "; if that is meant, claim scale=1.0"
    if not formula.projected:
        evidence += "; if W_o is elsewhere, declare it without w_o"
    return Row("formula", _formula(formula, is_kernel=candidate.is_kernel), evidence)


def _formula(formula: Formula, *, is_kernel: bool) -> str:
    differences = list[str]()
    contract = OF_KERNELS if is_kernel else CONTRACT
    if _scales_cosines(formula):
        contract = contract.replace("q k^T / sqrt(d_k)", f"{formula.scale_for(1):.6g} q k^T")
    elif formula.scale == "none":
        differences.append("scores are not scaled")
    elif formula.scale != "1/sqrt(d_k)":
        differences.append(f"the scale is {formula.scale}")
    if not formula.projected:
        differences.append("there is no output projection")
    if differences:
        return f"differs from the contract: {' and '.join(differences)}"
    return contract


def _scales_cosines(formula: Formula) -> bool:
    """Return whether scores are cosines times a scale of their own, which is claimed."""
    of_length_one = formula.norm is not None and formula.norm.kind == "l2"
    return of_length_one and formula.scale != "1/sqrt(d_k)"


def _evidence_of_masks(candidate: Candidate) -> str:
    if candidate.assumed:
        return candidate.assumed
    return "tested" if candidate.declared.mask or candidate.more_by_mask else "by name"


def _mask(candidate: Candidate) -> str:
    """Return what a mask means, and its shape."""
    declared, signature = candidate.declared, candidate.signature
    if candidate.more_by_mask:
        return f"not judged: {signature.mask} {candidate.more_by_mask}"
    if declared.mask is None:
        return "none"
    found = []
    # A mask of padding leaves nothing to a mask that does not differ between queries.
    if not declared.padding or "l" in declared.masks.axes:
        names = dict.fromkeys((declared.mask_without_memory, signature.mask))
        named = " or ".join(filter(None, names))
        besides = _besides(declared)
        found.append(f"{named}: {_meaning(candidate)}, {_mask_shape(candidate)}{besides}")
    if declared.padding:
        found.append(f"{signature.padding}: {CONVENTIONS[declared.padding]}, of shape 'b s'")
    return "; ".join(found)


def _meaning(candidate: Candidate) -> str:
    """Return what the values of a mask mean."""
    declared = candidate.declared
    assert declared.mask
    meaning = CONVENTIONS[declared.mask]
    if declared.masks.counts_keys:
        meaning = "how many of the first keys a query may attend to"
    if declared.mask_numbers:
        meaning = meaning.replace("True", "1")
    if "int" in candidate.claims.get("masks", ()):
        meaning = meaning.replace("True", "True or 1")
    return meaning


def _mask_shape(candidate: Candidate) -> str:
    if candidate.declared.mask_shape:
        return f"of shape {candidate.declared.mask_shape!r}"
    broadcast = "broadcastable to (b, h, l, s)"
    if "mask_ranks" not in candidate.claims:
        return broadcast
    return f"of {either(candidate.claims['mask_ranks'])} dimensions, {broadcast}"


def _besides(declared: Declared) -> str:
    """Return what else is to be said of a mask."""
    said = ""
    if declared.mask_attribute:
        said += f", as the attribute {declared.mask_attribute} of an object"
    for name, shape in declared.beside.items():
        said += f", given with {name} of shape {shape!r} that allows everything"
    if declared.mask_required:
        said += ", required in each call"
    if declared.masked_number == "lowest":
        said += ", where the lowest number of the dtype hides a key"
    return said


def _empty_rows(candidate: Candidate) -> Row:
    """Return the row about queries without a key."""
    if candidate.empty_row is None:
        return Row("empty rows", EMPTY_ROWS["zeros"], "assumed: it gets something else")
    evidence = "assumed, as the mask is" if candidate.assumed else "tested"
    return Row("empty rows", EMPTY_ROWS[candidate.empty_row], evidence)


def _dtypes(claimed: set[str]) -> str:
    taken = [name for name in COMPUTE_DTYPES if name in claimed]
    if len(taken) == len(COMPUTE_DTYPES):
        return ", ".join(taken)
    refused = " and ".join(name for name in COMPUTE_DTYPES if name not in claimed)
    return f"{', '.join(taken)}; not in {refused}: calls raise, or results differ"


def _rounding(rounding: Rounding) -> str:
    """Return what is claimed about rounding."""
    parts = []
    if rounding.softmax_in_float32:
        parts.append(SINGLE_SOFTMAX)
    if rounding.products in PRODUCTS:
        parts.append(PRODUCTS[rounding.products])
    return "; ".join(parts)
