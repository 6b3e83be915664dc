"""`infer`: a plain module class as an implementation, with a report on how it was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import required_inputs
from mha.implementations.adapters.module import ModuleImplementation, construct, constructor_arguments
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.describe import Row, declaration_advice, declaration_of, rows_of, table
from mha.implementations.inference.masks import find_mask
from mha.implementations.inference.probes import CONFIG, formulas, is_close, probes
from mha.implementations.inference.projections import Unclear, parameter_maps
from mha.spec import Weights, causal_mask


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


def infer(constructor: Callable[..., nn.Module], label: str = "") -> InferredClass:
    """Infer how a class, or a `functools.partial` of one, is built and called, and what it supports.

    label: its name in reports; by default that of the class.

    Raises ImplementationError, with what to declare, for what names, shapes and trial runs leave open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    arguments = constructor_arguments(label, constructor)
    try:
        module = construct(constructor, arguments, CONFIG)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "; derive a class whose constructor takes d_model and n_heads" if "config" in arguments.values() else ""
        raise ImplementationError(f"{label}(d_model=10, n_heads=2) raised {message}{hint}") from error
    try:
        candidate = _understand(Candidate(constructor, {}, label), module, arguments)
        find_mask(candidate)
        _find_causal(candidate)
        _find_weights(candidate)
        _require_one_head(candidate)
    except Unclear as unclear:
        raise ImplementationError(f"{label} needs a declaration: {unclear}{declaration_advice(label)}") from None
    rows = rows_of(candidate, module, arguments)
    declaration = declaration_of(label, candidate.options(), candidate.claims)
    return InferredClass(candidate.implementation(), tuple(rows), declaration)


def _understand(empty: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> Candidate:
    """Return the one candidate whose projections and layout give what the module computes."""
    _require_inputs(empty)
    claims: dict[str, Any] = {"causal": None} | ({"cross_attention": False} if empty.signature.one_input else {})
    candidates = [
        replace(empty, parameters=parameters, layout=layout, claims=dict(claims))
        for parameters in parameter_maps(module, CONFIG)
        for layout in ("b l d", "l b d")
    ]
    biases = _possible_biases(candidates[0], arguments)
    for candidate in candidates:
        candidate.claims |= {} if len(biases) == 2 else {"bias": biases}
    matching = [candidate for candidate in candidates if _find_formula(candidate)]
    return matching[0] if len(matching) == 1 else _only_choice(candidates, matching)


def _require_inputs(candidate: Candidate) -> None:
    """Raise Unclear unless the module takes one input or three."""
    signature, parameters = candidate.signature, candidate.forward_parameters
    required = [p for p in required_inputs(parameters) if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    if not signature.one_input and not signature.inputs and len(required) != 3:
        raise Unclear(f"forward({', '.join(parameters)}) takes neither one input nor three; pass call=...")


def _only_choice(candidates: Sequence[Candidate], matching: Sequence[Candidate]) -> Candidate:
    """Return the candidate of a module that no formula describes, if there is one choice; otherwise raise Unclear."""
    first = candidates[0]
    if not matching and not first.self_attention and not first.signature.inputs:
        raise Unclear(
            f"forward({', '.join(first.forward_parameters)}) does not name its inputs, and its output matches no "
            "formula if they are query, key and value; pass call=..."
        )
    if all(candidate.problem for candidate in candidates):
        raise Unclear(f"each call raises, the first one {first.problem}")
    _require_one_map(candidates, matching)
    _require_output(first)
    return first


def _require_one_map(candidates: Sequence[Candidate], matching: Sequence[Candidate]) -> None:
    """Raise Unclear if there are several choices of projections, except for the name of W_o where none matches."""
    inputs = [{key: path for key, path in each.parameters.items() if key != "w_o"} for each in candidates]
    if matching or any(each != inputs[0] for each in inputs):
        maps = sorted({str(each.parameters) for each in matching or candidates})
        more = f"; and {len(maps) - 2} more" if len(maps) > 2 else ""
        problem = "more than one choice" if matching else "no choice"
        raise Unclear(f"{problem} of projections gives what it computes ({'; '.join(maps[:2])}{more})")


def _require_output(candidate: Candidate) -> None:
    """Raise Unclear unless the module returns a tensor, alone or first in a tuple."""
    result = candidate.call(probes(self_attention=candidate.self_attention)[0].inputs)
    if result is None or not isinstance(result.output, Tensor):
        returned = result.output if result else None
        length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        reason = candidate.problem or f"it returns {type(returned).__name__}{length}"
        raise Unclear(f"its output was not found ({reason}); pass call=... that returns the output")


def _find_formula(candidate: Candidate) -> bool:
    """Set the formula that gives the module's outputs on both probes, and return whether there is one."""
    for formula in formulas():
        if formula.projected != (candidate.parameters.get("w_o") is not None):
            continue
        for probe in probes(self_attention=candidate.self_attention):
            result = candidate.call(probe.inputs)
            if result is None or not is_close(result.output, formula(probe.inputs, candidate.weights, None)):
                break
        else:
            candidate.formula, candidate.explained = formula, True
            return True
    return False


def _possible_biases(candidate: Candidate, arguments: Mapping[str, str]) -> set[bool]:
    """Return the values of `Config.bias` that can be built; bias=False must build no bias at all.

    Raises Unclear if the weights can be loaded with neither. A constructor that takes `bias` or `use_bias` is trusted;
    one that takes `qkv_bias` may keep the bias of the output.
    """
    adapter, biases, problem = candidate.implementation(), set(), ""
    for bias in (True, False):
        config = replace(CONFIG, bias=bias)
        try:
            adapter.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
            biases.add(bias)
        except (Exception, SystemExit) as error:
            problem = f"its weights cannot be loaded: {error}"
    if not biases:
        raise Unclear(problem)
    if biases == {True, False} and not {"bias", "use_bias"} & set(arguments):
        built = [construct(candidate.constructor, arguments, replace(CONFIG, bias=bias)) for bias in (True, False)]
        more, less = (sum(parameter.numel() for parameter in module.parameters()) for module in built)
        biases = biases if more - less == 4 * CONFIG.d_model else {True}
    return biases


def _find_causal(candidate: Candidate) -> None:
    """Set the claims about causal attention."""
    candidate.claims.pop("causal")
    if candidate.formula.causal:
        candidate.claims["always_causal"] = True
    elif candidate.signature.is_causal:
        alignment = _alignment(candidate)
        candidate.claims |= {} if alignment == "top_left" else {"causal": alignment}
    elif candidate.mask is None or "per_query_mask" in candidate.claims:
        candidate.claims["causal"] = None


def _alignment(candidate: Candidate) -> str:
    """Return how the causal flag aligns the diagonal; "top_left" where trial runs do not show it."""
    probe = probes(self_attention=candidate.self_attention)[0]
    tried = replace(candidate, claims=candidate.claims | {"causal": "top_left"}, problem="")
    result = tried.call(probe.inputs, is_causal=True)
    if result is None:
        raise Unclear(f"{candidate.signature.is_causal}=True raises {tried.problem}; pass call=...")
    lengths = probe.inputs[0].shape[1], probe.inputs[1].shape[1]
    expected = candidate.formula(probe.inputs, candidate.weights, causal_mask(*lengths, "bottom_right"))
    return "bottom_right" if not candidate.self_attention and is_close(result.output, expected) else "top_left"


def _find_weights(candidate: Candidate) -> None:
    """Set whether it returns weights (B, H, L, S), and the shape of what it returns."""
    probe = probes(self_attention=candidate.self_attention)[0]
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
        candidate.implementation().build(one, Weights.random(one, 0), dtype=torch.float64, device="cpu")
    except ImplementationError as error:
        raise Unclear(
            f"with one head, its parameters differ: {error}; pass parameters=... as a function of Config"
        ) from None
    except (Exception, SystemExit):
        return  # the constructor rejects one head: the clauses about construction report it
