"""`infer`: a plain module class as an implementation, with a report on how it was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import Signature, required_inputs
from mha.implementations.adapters.module import ModuleImplementation, construct, constructor_arguments
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.describe import Row, declaration_advice, declaration_of, rows_of, table
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.masks import find_mask
from mha.implementations.inference.nearest import (
    CHANGED,
    explained_cases,
    find_formula,
    influence,
    nearest,
    returns_outputs,
    shows_inputs,
)
from mha.implementations.inference.probes import CONFIG, GENERAL, QUICK_CASES, SPECIAL_CASES
from mha.implementations.inference.projections import Unclear, parameter_maps
from mha.implementations.inference.scope import require_plain
from mha.implementations.pristine import as_found, pristine
from mha.spec import Weights, causal_mask
from mha.spec.claims import BIASES, Alignment


@dataclass(frozen=True)
class InferredClass:
    """A class as it was understood.

    implementation: what to judge. rows: what was found, and how. declaration: the code that declares the same.
    """

    implementation: ModuleImplementation
    rows: tuple[Row, ...]
    declaration: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The report to print."""
        return table(self.rows), "", "The same as a declaration:", "", indent(self.declaration, "    ")


@pristine()
def infer(constructor: Callable[..., nn.Module], label: str = "") -> InferredClass:
    """Infer how a class, or a `functools.partial` of one, is built and called, and what it supports.

    label: its name in reports; by default that of the class.

    Raises ImplementationError, with what to declare, for what names, shapes and trial runs leave open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    arguments = constructor_arguments(label, constructor)
    try:
        with as_found():
            module = construct(constructor, arguments, CONFIG)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "; derive a class whose constructor takes d_model and n_heads" if "config" in arguments.values() else ""
        raise ImplementationError(f"{label}(d_model=10, n_heads=2) raised {message}{hint}") from error
    try:
        candidate = _understand(Candidate(constructor, {}, label), module)
        _find_own_head_dim(candidate, arguments)
        find_mask(candidate)
        _find_causal(candidate)
        find_empty_row(candidate)
        _find_weights(candidate)
        _require_one_head(candidate)
    except Unclear as unclear:
        raise ImplementationError(f"{label} needs a declaration: {unclear}{declaration_advice(label)}") from None
    rows = rows_of(candidate, module, arguments)
    declaration = declaration_of(label, candidate.options(), candidate.claims)
    return InferredClass(candidate.implementation(), tuple(rows), declaration)


def _understand(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate whose projections and layout give what the module computes, or else the nearest one."""
    _require_inputs(empty)
    choices = [_candidates(empty, module, cross_attention) for cross_attention in _possible_inputs(empty.signature)]
    for number, candidates in enumerate(choices):
        matching = [candidate for candidate in candidates if find_formula(candidate)]
        if matching:
            _require_one_map(matching)
            return _more_general(choices[:number]) or matching[0]
    candidates = [candidate for candidates in choices for candidate in candidates]
    require_plain(candidates, module)
    return nearest(candidates)


def _more_general(choices: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """Return the candidate with more general inputs that explains a special case, where one with fewer explains all."""
    candidates = [each for candidates in choices for each in candidates if not each.problem]
    partial = [each for each in candidates if shows_inputs(explained_cases(each, (*SPECIAL_CASES, *QUICK_CASES)))]
    return nearest(partial) if partial else None


def _candidates(empty: Candidate, module: nn.Module, cross_attention: bool | Literal["memory"]) -> list[Candidate]:
    """Return a candidate for each choice of projections and layouts."""
    claims = {"causal": None} | ({} if cross_attention is True else {"cross_attention": cross_attention})
    candidates = [
        replace(empty, parameters=parameters, layout=layout, claims=dict(claims))
        for parameters in parameter_maps(module, CONFIG)
        for layout in ("b l d", "l b d")
    ]
    biases = _possible_biases(candidates[0])
    for candidate in candidates:
        candidate.claims |= {} if biases == {True, False} else {"bias": biases}
    return candidates


def _possible_inputs(signature: Signature) -> tuple[bool | Literal["memory"], ...]:
    """Return what the inputs may be, as in `Claims.cross_attention`, the most general first."""
    if signature.memory:
        return ("memory", False) if signature.one_input else ("memory",)
    return (not signature.one_input,)


def _require_inputs(candidate: Candidate) -> None:
    """Raise Unclear unless the module takes one input, two (the second one being key and value) or three."""
    signature, parameters = candidate.signature, candidate.forward_parameters
    required = [p for p in required_inputs(parameters) if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    if not (signature.one_input or signature.memory or signature.inputs) and len(required) != 3:
        raise Unclear(f"forward({', '.join(parameters)}) takes neither one input nor three; pass call=...")


def _require_one_map(matching: Sequence[Candidate]) -> None:
    """Raise Unclear if several choices of projections explain the outputs."""
    if len(matching) > 1:
        maps = sorted({str(each.parameters) for each in matching})
        more = f"; and {len(maps) - 2} more" if len(maps) > 2 else ""
        raise Unclear(f"more than one choice of projections gives what it computes ({'; '.join(maps[:2])}{more})")


def _possible_biases(candidate: Candidate) -> set[bool | str]:
    """Return the values of `Config.bias` that can be built: of each module that is built, the most that has a place.

    Raises Unclear if the weights can be loaded with none.
    """
    adapter, problem = candidate.implementation(), ""
    absent = {role for key, path in candidate.parameters.items() if path is None for role in key[2:]}
    most_first = sorted(BIASES, key=lambda bias: -len(_biased_roles(bias)))
    built: dict[tuple[Any, ...], bool | str] = {}
    for bias in (each for each in most_first if absent.isdisjoint(_biased_roles(each))):
        config = replace(CONFIG, bias=bias)
        weights = Weights.random(config, 0)
        try:
            with as_found():
                attention = adapter.build(config, weights, dtype=torch.float64, device="cpu")
        except (Exception, SystemExit) as error:
            problem = f"its weights cannot be loaded: {error}"
            continue
        held = tuple((name, parameter.shape) for name, parameter in attention.named_parameters())
        built.setdefault(held, bias)
    if not built:
        raise Unclear(problem)
    return set(built.values())


def _biased_roles(bias: bool | str) -> str:
    config = replace(CONFIG, bias=bias)
    return "".join(role for role in "qkvo" if config.has_bias(role))


def _find_own_head_dim(candidate: Candidate, arguments: Mapping[str, str]) -> None:
    """Set whether the width of a head may be given, if the constructor takes one."""
    if "head_dim" in arguments.values():
        tried = replace(candidate, claims=candidate.claims | {"own_head_dim": True}, explained=False)
        same = find_formula(tried) and tried.formula == candidate.formula
        if same or (candidate.evidence != "tested" and returns_outputs(tried)):
            candidate.claims = tried.claims


def _find_causal(candidate: Candidate) -> None:
    """Set the claims about causal attention."""
    candidate.claims.pop("causal")
    if candidate.formula.causal:
        candidate.claims["always_causal"] = True
    elif candidate.signature.is_causal:
        alignment = _alignment(candidate)
        candidate.claims |= {} if alignment == "top_left" else {"causal": alignment}
        if candidate.mask and not _combines(candidate):
            candidate.claims["causal_with_mask"] = False
    elif candidate.mask is None or "l" not in candidate.masks.axes:
        candidate.claims["causal"] = None


def _combines(candidate: Candidate) -> bool:
    """Return whether the causal flag may be given beside a mask, rather than raise."""
    probe = candidate.probes[0]
    mask = probe.mask("bs" if candidate.claims.get("per_item_mask", True) else "s", causal=True)[:, :1, :1]
    return candidate.call(probe.inputs, mask=mask, is_causal=True) is not None


def _alignment(candidate: Candidate) -> Alignment:
    """Return how the causal flag aligns the diagonal, as far as the keys that are read show it."""
    probe = candidate.probes[0]
    tried = replace(candidate, claims=candidate.claims | {"causal": "top_left"}, problem="")
    result = tried.call(probe.inputs, is_causal=True)
    if result is None:
        raise Unclear(f"{candidate.signature.is_causal}=True raises {tried.problem}; pass call=...")
    if not candidate.cross_attention:
        return "top_left"
    return min(("top_left", "bottom_right"), key=lambda alignment: _misaligned(tried, alignment))


def _misaligned(candidate: Candidate, alignment: Alignment) -> int:
    """Return how many keys are read that this alignment of the causal mask hides, and the other way round."""
    count = 0
    for probe in GENERAL.probes(candidate.cross_attention):
        read = influence(candidate, probe.inputs, is_causal=True)
        allowed = causal_mask(probe.queries, probe.keys, alignment)
        count += 0 if read is None else int(((read > CHANGED) != allowed).sum())
    return count


def _find_weights(candidate: Candidate) -> None:
    """Set whether it returns weights (B, H, L, S), and the shape of what it returns."""
    probe = candidate.probes[0]
    result = candidate.call(probe.inputs, need_weights=True, is_causal=candidate.formula.causal)
    query, key, _ = probe.inputs
    expected = (query.shape[0], CONFIG.n_heads, query.shape[1], key.shape[1])
    weights = result.weights if result else None
    if not isinstance(weights, Tensor) or tuple(weights.shape) != expected:
        candidate.claims["returns_weights"] = False
    candidate.weights_shape = tuple(weights.shape) if isinstance(weights, Tensor) else None


def _require_one_head(candidate: Candidate) -> None:
    """Raise Unclear if the weights of a module with one head are found elsewhere."""
    one = replace(candidate.config, n_heads=1)
    try:
        with as_found():
            candidate.implementation().build(one, Weights.random(one, 0), dtype=torch.float64, device="cpu")
    except ImplementationError as error:
        raise Unclear(
            f"with one head, its parameters differ: {error}; pass parameters=... as a function of Config"
        ) from None
    except (Exception, SystemExit):
        return  # the constructor rejects one head: the clauses about construction report it
