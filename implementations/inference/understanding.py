"""The projections, inputs and layout with which a formula gives what a module computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from typing import Any, Literal

from torch import nn

from mha.implementations.adapters.axes_of_inputs import TO_LAYOUT
from mha.implementations.adapters.constructor_names import CONSTRUCTOR_NAMES
from mha.implementations.adapters.names import PAIRED, names_used, words_of
from mha.implementations.adapters.signature import Signature, possible_orders, required_inputs
from mha.implementations.adapters.tables import OF_REAL_PAIRS, ROTATION_LAYOUTS
from mha.implementations.inference.building import built
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.changed_heads import with_changed_heads
from mha.implementations.inference.dropout import require_repeatable
from mha.implementations.inference.faulty_rotations import with_faulty_rotation
from mha.implementations.inference.given_rotation import with_given_rotation
from mha.implementations.inference.mask_search import given_a_mask, with_required_mask
from mha.implementations.inference.nearest_projections import (
    all_with_formula,
    code_of_each_raises,
    explained_cases,
    nearest,
    shows_inputs,
)
from mha.implementations.inference.options import possible_biases
from mha.implementations.inference.plainer import plainer
from mha.implementations.inference.probes import CONFIG, QUICK_CASES, SPECIAL_CASES
from mha.implementations.inference.projections import (
    ParameterMap,
    Unclear,
    alike_with_one_head,
    interleaved,
    parameter_maps,
    reordered,
)
from mha.implementations.inference.rotations import PARTS
from mha.implementations.inference.scope import require_plain, without_window
from mha.spec import Sizes
from mha.spec.option_names import SINK_NAMES, listed

# Without these, no projection is split into heads.
RESHAPING = frozenset(listed("view reshape unflatten rearrange unfold as_strided"))
Maps = Callable[[ParameterMap], Iterator[ParameterMap]]
# The maps that names and shapes allow come before those in other orders.
CHANGES: tuple[Maps | None, ...] = (None, reordered, interleaved)
# Of inputs, where the first call of a module returns.
LAYOUTS = ("b l d", "l b d")


def understand(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate that gives what the module computes, or else the nearest one.

    empty: without projections.

    Raises Unclear where several do, and ImplementationError for what is more than attention.
    """
    _require_inputs(empty)
    choices = _choices(empty, module)
    for change in CHANGES:
        tried: list[Candidate] = []
        for usual in choices:
            candidates = _with_other_maps(usual, change) if change else usual
            matching = all_with_formula(candidates)
            if matching:
                _require_one_map(matching)
                found = _more_general(tried) or without_window(matching[0])
                return with_given_rotation(found, module)
            tried += candidates
        if code_of_each_raises(tried):
            break
    changed = _with_more(choices, module) or _without_options(choices)
    if changed:
        return changed
    named = choices[: len(_possible_inputs(empty.signature))]  # others are not assumed
    likely = [*chain.from_iterable(named)]
    require_repeatable(likely)
    faulty = with_faulty_rotation(likely, module)
    if faulty:
        return faulty
    require_plain(likely, module)
    return nearest(likely)


def _with_more(choices: Sequence[Sequence[Candidate]], module: nn.Module) -> Candidate | None:
    """Return the first candidate that needs a mask, has sinks, or changes its heads."""
    for matching in _matching_more(choices, module):
        if matching:
            _require_one_map(matching)
            return with_given_rotation(matching[0], module)
    return None


def _without_options(choices: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """Return the first candidate that a formula explains without options that count by default."""
    plain_choices = []
    for candidates in choices:
        plain = list(filter(None, map(plainer, candidates)))
        if not plain:
            return None
        plain_choices.append(plain)
    first = plain_choices[0][0]
    module = built(first.label, first.declared.constructor, first.arguments)
    for plain in plain_choices:
        matching = all_with_formula(plain)
        if matching:
            _require_one_map(matching)
            return with_given_rotation(matching[0], module)
    return _with_more(plain_choices, module)


def _matching_more(
    choices: Sequence[Sequence[Candidate]], module: nn.Module
) -> Iterator[list[Candidate]]:
    """Yield the candidates that a mask in each call explains, then sinks, then changed heads."""
    yield from map(with_required_mask, choices)
    for candidates in choices:
        yield all_with_formula(_with_sinks(candidates, module))
    for change in CHANGES:
        all_tried = list[Candidate]()
        for candidates in choices:
            others = _with_other_maps(candidates, change) if change else candidates
            others = _with_sinks(others, module) or others
            for tried in chain([others], given_a_mask(others)):
                yield with_changed_heads(tried, module)
                all_tried += tried
        if code_of_each_raises(all_tried):
            break


def _choices(empty: Candidate, module: nn.Module) -> list[list[Candidate]]:
    """Return the candidates for each choice of the inputs, the most general and usual first."""
    choices = []
    for cross_attention in _possible_inputs(empty.signature):
        choices.append(_candidates(empty, module, cross_attention))
    for order in possible_orders(empty.declared.forward_parameters):
        choices.append(_candidates(empty.declaring(query_last=order), module, "memory"))
    return choices


def _more_general(tried: Sequence[Candidate]) -> Candidate | None:
    """Return the one of the candidates with more general inputs that explains a special case.

    Another one with fewer inputs explains all.
    """
    partial = []
    for each in tried:
        if not each.problem:
            cases = explained_cases(each, (*SPECIAL_CASES, *QUICK_CASES))
            if shows_inputs(cases):
                partial.append(each)
    if not partial:
        return None
    return nearest(partial)


def _candidates(
    empty: Candidate, module: nn.Module, cross_attention: bool | Literal["memory"]
) -> list[Candidate]:
    """Return a candidate for each choice of projections and layouts."""
    unclaimed = empty.claiming(causal=None)
    if cross_attention is not True:
        unclaimed = unclaimed.claiming(cross_attention=cross_attention)
    maps = parameter_maps(module, empty.config)
    if empty.config.n_heads == 1:
        maps = alike_with_one_head(maps)
    first = unclaimed.declaring(parameters=maps[0])
    biases = possible_biases(first)
    if biases != {True, False}:
        first = first.claiming(bias=biases)
    first = _with_tables(first)
    layouts = TO_LAYOUT if first.problem else LAYOUTS
    return [
        first.declaring(parameters=parameters, layout=layout)
        for parameters in maps
        for layout in layouts
    ]


def _with_tables(candidate: Candidate) -> Candidate:
    """Return the candidate after a call, with tables of a rotation in a shape in which it returns.

    These are tried only if it raises without. What raises would be tried in every other way first,
    which takes long.
    """
    inputs, names = candidate.probes[0].inputs, candidate.signature
    if candidate.call_plainly(inputs):
        return candidate
    with_tables = list[Candidate]()
    if not PAIRED.isdisjoint(names.others):
        paired = candidate.declaring(rotation_pairs=True)
        with_tables += [paired, paired.declaring(rotation_layout=OF_REAL_PAIRS)]
    if names.rotations:
        with_tables += [candidate.declaring(rotation_layout=layout) for layout in ROTATION_LAYOUTS]
    # A table for each position does not fit inputs of another layout either.
    for layout, part, each in product(LAYOUTS, PARTS, with_tables):
        tried = each.trying(part=part).declaring(layout=layout)
        if tried.call_plainly(inputs):
            return tried
    return candidate


def _with_sinks(candidates: Sequence[Candidate], module: nn.Module) -> list[Candidate]:
    """Return the candidates with a parameter of the name of sinks as these; none without one."""
    if not candidates:
        return []
    n_heads = candidates[0].config.n_heads
    for name, parameter in module.named_parameters():
        is_of_heads = parameter.numel() == n_heads
        if is_of_heads and name.rpartition(".")[2] in SINK_NAMES:
            return [candidate.declaring(sinks=name) for candidate in candidates]
    return []


def _with_other_maps(candidates: Sequence[Candidate], change: Maps) -> list[Candidate]:
    """Return the candidates with each map that a change makes of theirs."""
    return [
        candidate.declaring(parameters=parameters)
        for candidate in candidates
        for parameters in change(candidate.declared.parameters)
    ]


def _possible_inputs(signature: Signature) -> tuple[bool | Literal["memory"], ...]:
    """Return what the inputs may be, as in `Claims.cross_attention`, the most general first."""
    if signature.memory:
        return ("memory", False) if signature.one_input else ("memory",)
    return (not signature.one_input,)


def _require_inputs(candidate: Candidate) -> None:
    """Raise Unclear unless the module takes one input, query and memory, or three inputs."""
    signature, parameters = candidate.signature, candidate.declared.forward_parameters
    if signature.one_input or signature.memory or signature.inputs:
        return
    required = required_inputs(parameters)
    kinds = [each.kind for each in required]
    if len(kinds) - kinds.count(inspect.Parameter.VAR_POSITIONAL) != 3:
        raise Unclear(
            f"forward({', '.join(parameters)}) takes neither one input nor three; pass call=..."
        )


def _require_one_map(matching: Sequence[Candidate]) -> None:
    """Raise Unclear if several choices of projections explain the outputs."""
    maps = sorted({str(each.declared.parameters) for each in matching})
    if len(maps) > 1:
        shown = "; ".join(maps[:2])
        if len(maps) > 2:
            shown = f"{shown}; and {len(maps) - 2} more"
        raise Unclear(f"more than one choice of projections gives what it computes ({shown})")


def has_one_head(module: nn.Module) -> bool:
    """Return whether nothing that the author of a module wrote reshapes a tensor, or says heads."""
    used = set[str]()
    for part in module.modules():
        if not type(part).__module__.startswith("torch."):
            used |= names_used(type(part), bases=False)
    says_heads = not used.isdisjoint(CONSTRUCTOR_NAMES["n_heads"])
    for name in used:
        says_heads = says_heads or "heads" in words_of(name)
    return used.isdisjoint(RESHAPING) and not says_heads


def claims_of_heads(module: nn.Module, n_heads: int) -> dict[str, Any]:
    """Return the claim that there is one head, or one key head if shapes of projections say so.

    n_heads: of the module.
    """
    if n_heads == 1:
        return {"sizes": Sizes(n_heads={1})}
    with suppress(Unclear):
        parameter_maps(module, CONFIG)
        return {}
    with suppress(Unclear):
        parameter_maps(module, replace(CONFIG, n_kv_heads=1))
        return {"multi_query": True}
    return {}
