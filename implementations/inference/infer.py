"""`infer`: a plain module class as an implementation, with a report on how it was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from textwrap import indent
from typing import Any, Literal

import torch
from torch import nn

from mha.implementations.adapters.construction import (
    assumed_arguments,
    constructor_arguments,
)
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import TO_LAYOUT, ModuleImplementation
from mha.implementations.adapters.names import PAIRED
from mha.implementations.adapters.signature import Signature, possible_orders, required_inputs
from mha.implementations.adapters.widths import with_other_widths
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.building import built, kernel_advice, require_forward
from mha.implementations.inference.candidate import (
    Candidate,
    may_need_a_gpu,
    on_a_gpu,
    without_gradients,
)
from mha.implementations.inference.causal import find_causal
from mha.implementations.inference.causal_flags import not_causal, with_idle_constructor_flag
from mha.implementations.inference.declaration import declaration_of
from mha.implementations.inference.describe import WIDTH, Row, rows_of, table
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.mask_search import with_masks, with_required_mask
from mha.implementations.inference.nearest_projections import (
    EachCallRaises,
    explained_cases,
    find_formula,
    nearest,
    returns_outputs,
    shows_inputs,
)
from mha.implementations.inference.options import find_options, find_weights, possible_biases
from mha.implementations.inference.probes import CONFIG, FEW_DTYPES, QUICK_CASES, SPECIAL_CASES
from mha.implementations.inference.projections import (
    FEWER_KEY_HEADS,
    ParameterMap,
    Unclear,
    Undeclarable,
    interleaved,
    parameter_maps,
    reordered,
)
from mha.implementations.inference.refusals import refusal
from mha.implementations.inference.scope import require_plain, without_window
from mha.implementations.inference.self_attention import find_self_attention
from mha.implementations.inference.sizes import (
    claim_more_lengths,
    find_longest,
    find_widths,
    in_whole_tiles,
)
from mha.implementations.inference.unused import unused_options
from mha.implementations.process.pristine import as_found, pristine
from mha.implementations.process.torch_state import threads
from mha.spec import Weights

SEVERAL_HEADS = frozenset(range(2, 9))


@dataclass(frozen=True)
class Inference:
    """A class, or a function, as it was understood.

    implementation: what to judge. rows: what was found, and how. declaration: the code that
    declares the same. kind: which of the two it is. not_covered: options that are not judged.
    """

    implementation: ModuleImplementation | KernelImplementation
    rows: tuple[Row, ...]
    declaration: str
    kind: Literal["class", "function"] = "class"
    not_covered: tuple[str, ...] = ()

    def report(self, width: int = WIDTH) -> str:
        """Return what was found, as a table of at most `width` columns, and the declaration."""
        return (
            f"{table(self.rows, width)}\n\nThe same as a"
            f" declaration:\n\n{indent(self.declaration, '    ')}"
        )


@pristine()
@threads(1)
def infer(constructor: Callable[..., nn.Module], label: str = "") -> Inference:
    """Infer how a module is built and called, and what it supports.

    constructor: a class, a function that makes a module, or a `functools.partial` of one.
    label: its name in reports; by default its own.

    Raises ImplementationError, with what to declare, for what names, shapes and trial runs leave
    open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    made = constructor.func if isinstance(constructor, partial) else constructor
    if getattr(made, "__init__", None) is nn.Module.__init__:  # whose parameters would mislead
        require_forward(label, made)
    arguments, module, candidate = _built_and_read(label, constructor)
    rows = rows_of(candidate, module, arguments)
    written, name = _written(label, constructor, candidate.constructor)
    declaration = declaration_of(written, candidate.options() | name, candidate.claims)
    kind: Literal["class", "function"] = "class" if inspect.isclass(made) else "function"
    options = tuple(unused_options(candidate, arguments))
    return Inference(candidate.implementation(), tuple(rows), declaration, kind, options)


def _written(
    label: str, given: Callable[..., nn.Module], found: Callable[..., nn.Module]
) -> tuple[str, dict[str, Any]]:
    """Return the code of the constructor that was found for a given one, and what names it where
    that does not.
    """
    options = getattr(found, "keywords", {}) if found is not given else {}
    code = getattr(getattr(found, "func", found) if options else found, "code", label)
    set_to = "".join(f", {name}={value}" for name, value in options.items())
    return f"partial({code}{set_to})" if options else code, {"name": label} if code != label else {}


def _built_and_read(
    label: str, constructor: Callable[..., nn.Module]
) -> tuple[Mapping[str, str], nn.Module, Candidate]:
    """Return the arguments of a constructor, a module that is built with them, and how it was
    understood.

    Raises ImplementationError for what is left open, or cannot be built.
    """
    try:
        arguments = _arguments(label, constructor)
        if not assumed_arguments(constructor, arguments):
            return arguments, *_read(label, constructor, arguments)
        read, problem = _explained(label, constructor, arguments)
        if read:
            return arguments, *read
        remark = problem and f". If {_sizes(arguments)}, {problem}"
        arguments = _arguments(label, constructor, assume=False, remark=remark)
        return arguments, *_read(label, constructor, arguments)
    except ImplementationError:
        for build in with_other_widths(label, constructor):
            arguments = _arguments(label, build)
            read, _ = _explained(label, build, arguments)
            if read:
                return arguments, *read
        raise


def _sizes(arguments: Mapping[str, str]) -> str:
    return " and ".join(
        f"{name} is {field}" for name, field in arguments.items() if field in ("d_model", "n_heads")
    )


def _arguments(
    label: str, constructor: Callable[..., nn.Module], *, assume: bool = True, remark: str = ""
) -> Mapping[str, str]:
    """Return the arguments of a constructor; raises ImplementationError, with advice for a kernel,
    and a remark.
    """
    try:
        return constructor_arguments(label, constructor, assume=assume)
    except ImplementationError as error:
        made = constructor.func if isinstance(constructor, partial) else constructor
        raise ImplementationError(f"{error}{kernel_advice(label, made)}{remark}") from None


def _explained(
    label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]
) -> tuple[tuple[nn.Module, Candidate] | None, str]:
    """Return a module built with these arguments, as it was understood, if a formula gives its
    outputs.

    Beside it, what reading a module raised that could be built.
    """
    with suppress(ImplementationError):
        module = built(label, constructor, arguments)
        try:
            candidate = _first_found(_unread(label, constructor, module), module, arguments)
        except ImplementationError as error:
            return None, str(error)
        return ((module, candidate) if candidate.explained else None), ""
    return None, ""


def _read(
    label: str, constructor: Callable[..., nn.Module], arguments: Mapping[str, str]
) -> tuple[nn.Module, Candidate]:
    """Return a module built with these arguments, as it was understood; raises ImplementationError."""
    module = built(label, constructor, arguments)
    return module, _first_found(_unread(label, constructor, module), module, arguments)


def _unread(label: str, constructor: Callable[..., nn.Module], module: nn.Module) -> Candidate:
    return Candidate(constructor, {}, label, claims=_key_heads(module))


def _first_found(empty: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> Candidate:
    """Return the candidate for a module, if need be for one that takes few dtypes or lengths, no
    gradients, or a GPU.

    Raises ImplementationError, with what to declare, for what is left open in each of these.
    """
    problems = list[Unclear]()
    for tried in (empty, replace(empty, dtype=torch.float32), without_gradients(empty)):
        try:
            return _found(tried, module, arguments)
        except Undeclarable as error:
            raise ImplementationError(f"{empty.label} cannot be judged as it is: {error}") from None
        except Unclear as unclear:
            problems.append(unclear)
    for tried in _others(empty) if isinstance(problems[0], EachCallRaises) else ():
        try:
            return _found(tried, module, arguments)
        except Unclear as unclear:
            problems.append(unclear)
    if isinstance(problems[0], EachCallRaises) and may_need_a_gpu(empty):
        return _first_found(on_a_gpu(empty), module, arguments)
    raise refusal(empty, module, arguments, problems)


def _others(empty: Candidate) -> Iterator[Candidate]:
    """Yield what else a module may be whose calls raise: for rotations of pairs, half precision, or
    few lengths.
    """
    if {*PAIRED}.intersection(empty.signature.others):
        yield replace(empty, rotation_pairs=True)
    yield from (replace(empty, dtype=dtype) for dtype in FEW_DTYPES[1:])
    square = replace(empty, claims=empty.claims | {"cross_attention": False})
    yield from (square, *map(in_whole_tiles, (empty, square)))


def _found(empty: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> Candidate:
    """Return the candidate for a module, with its claims; raises Unclear for what is left open."""
    candidate = _understand(empty, module)
    claim_more_lengths(candidate)
    _find_own_head_dim(candidate, arguments)
    candidate = with_masks(
        next(not_causal(candidate), candidate) if candidate.signature.is_causal else candidate
    )
    find_causal(candidate)
    candidate = with_idle_constructor_flag(candidate)
    find_empty_row(candidate)
    find_weights(candidate)
    find_options(candidate, arguments)
    _find_numbers_of_heads(candidate)
    find_widths(candidate)
    find_longest(candidate)
    find_self_attention(candidate)
    return candidate


def _key_heads(module: nn.Module) -> dict[str, Any]:
    """Return the claim that all heads share one key and value, if the shapes of the projections say
    so.
    """
    with suppress(Unclear):
        parameter_maps(module, CONFIG)
        return {}
    with suppress(Unclear):
        parameter_maps(module, replace(CONFIG, n_kv_heads=1))
        return {"multi_query": True}
    return {}


def _understand(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate whose projections and layout give what the module computes, or else the
    nearest one.
    """
    _require_inputs(empty)
    choices = _choices(empty, module)
    for change in (None, reordered, interleaved):
        orders = (
            [_with_other_maps(candidates, change) for candidates in choices] if change else choices
        )
        for number, candidates in enumerate(orders):
            matching = [candidate for candidate in candidates if find_formula(candidate)]
            if matching:
                _require_one_map(matching)
                return _more_general(orders[:number]) or without_window(matching[0])
    for candidates in choices:
        if matching := with_required_mask(candidates):
            _require_one_map(matching)
            return matching[0]
    named = choices[: len(_possible_inputs(empty.signature))]  # others are not assumed
    candidates = [*chain.from_iterable(named)]
    require_plain(candidates, module)
    return nearest(candidates)


def _choices(empty: Candidate, module: nn.Module) -> list[list[Candidate]]:
    """Return the candidates for each choice of what the inputs may be, the most general and usual
    first.
    """
    choices = [
        _candidates(empty, module, cross_attention)
        for cross_attention in _possible_inputs(empty.signature)
    ]
    orders = possible_orders(empty.forward_parameters)
    return choices + [
        _candidates(replace(empty, query_last=order), module, "memory") for order in orders
    ]


def _more_general(choices: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """Return the candidate with more general inputs that explains a special case, where one with
    fewer explains all.
    """
    candidates = [each for candidates in choices for each in candidates if not each.problem]
    partial = [
        each
        for each in candidates
        if shows_inputs(explained_cases(each, (*SPECIAL_CASES, *QUICK_CASES)))
    ]
    return nearest(partial) if partial else None


def _candidates(
    empty: Candidate, module: nn.Module, cross_attention: bool | Literal["memory"]
) -> list[Candidate]:
    """Return a candidate for each choice of projections and layouts."""
    claims = (
        empty.claims
        | {"causal": None}
        | ({} if cross_attention is True else {"cross_attention": cross_attention})
    )
    maps = parameter_maps(module, empty.config)
    biases = possible_biases(replace(empty, parameters=maps[0], claims=claims))
    claims |= {} if biases == {True, False} else {"bias": biases}
    first = replace(empty, parameters=maps[0], claims=claims)
    raises = first.call_plainly(first.probes[0].inputs) is None
    return [
        replace(empty, parameters=parameters, layout=layout, claims=dict(claims))
        for parameters in maps
        for layout in (TO_LAYOUT if raises else ("b l d", "l b d"))
    ]


def _with_other_maps(
    candidates: Sequence[Candidate], change: Callable[[ParameterMap], Iterator[ParameterMap]]
) -> list[Candidate]:
    """Return the candidates with each map that a change makes of theirs."""
    return [
        replace(candidate, parameters=parameters, claims=dict(candidate.claims))
        for candidate in candidates
        for parameters in change(candidate.parameters)
    ]


def _possible_inputs(signature: Signature) -> tuple[bool | Literal["memory"], ...]:
    """Return what the inputs may be, as in `Claims.cross_attention`, the most general first."""
    if signature.memory:
        return ("memory", False) if signature.one_input else ("memory",)
    return (not signature.one_input,)


def _require_inputs(candidate: Candidate) -> None:
    """Raise Unclear unless the module takes one input, two (the second one being key and value) or
    three.
    """
    signature, parameters = candidate.signature, candidate.forward_parameters
    required = [
        p for p in required_inputs(parameters) if p.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    if not (signature.one_input or signature.memory or signature.inputs) and len(required) != 3:
        raise Unclear(
            f"forward({', '.join(parameters)}) takes neither one input nor three; pass call=..."
        )


def _require_one_map(matching: Sequence[Candidate]) -> None:
    """Raise Unclear if several choices of projections explain the outputs."""
    maps = sorted({str(each.parameters) for each in matching})
    if len(maps) > 1:
        more = f"; and {len(maps) - 2} more" if len(maps) > 2 else ""
        raise Unclear(
            "more than one choice of projections gives what it computes"
            f" ({'; '.join(maps[:2])}{more})"
        )


def _find_own_head_dim(candidate: Candidate, arguments: Mapping[str, str]) -> None:
    """Set whether the width of a head may be given, if the constructor, or perhaps its config,
    takes one.
    """
    if not {"head_dim", "config"}.isdisjoint(arguments.values()):
        tried = replace(
            candidate, claims=candidate.claims | {"own_head_dim": True}, explained=False
        )
        same = find_formula(tried) and tried.formula == candidate.formula
        returned = (
            "head_dim" in arguments.values()
            and candidate.evidence != "tested"
            and returns_outputs(tried)
        )
        if same or returned:
            candidate.claims = tried.claims


def _find_numbers_of_heads(candidate: Candidate) -> None:
    """Claim no single head if the weights of a module with one are found elsewhere, as without an
    output projection.

    Raises Unclear if those of other numbers of heads are, too.
    """
    # One key head for every two heads, or for every 16, has one for a single group.
    if "multi_query" in candidate.claims and any(
        _not_loaded_with(candidate, n_heads) for n_heads in (4, 8, 16, 32)
    ):
        raise Undeclarable(FEWER_KEY_HEADS)
    problem = _not_loaded_with(candidate, 1)
    if problem and _not_loaded_with(candidate, 3):
        raise Unclear(
            f"with one head, its parameters differ: {problem}; pass parameters=... as a function of"
            " Config"
        )
    if problem:
        candidate.claims["sizes"] = replace(candidate.sizes, n_heads=SEVERAL_HEADS)
        candidate.one_head = problem


def _not_loaded_with(candidate: Candidate, n_heads: int) -> str:
    """Return why weights cannot be loaded into a module with this many heads; "" if they can, or if
    it is rejected.

    Where heads may have a width of their own, they also have the usual one.
    """
    for d_head in dict.fromkeys((candidate.config.d_head, None)):
        config = replace(candidate.config, n_heads=n_heads, d_model=12 * n_heads, d_head=d_head)
        # What the constructor rejects, the clauses about construction report.
        with suppress(Exception, SystemExit):
            try:
                with as_found():
                    weights = Weights.random(config, 0)
                    candidate.for_trials().build(
                        config, weights, dtype=torch.float64, device=candidate.device
                    )
            except ImplementationError as error:
                return str(error)
    return ""
