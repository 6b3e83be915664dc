"""`infer`: a plain module class as an implementation, with a report on how it was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import indent
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import Signature, required_inputs
from mha.implementations.adapters.construction import CONSTRUCTOR_NAMES, construct, constructor_arguments
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.errors import ImplementationError, one_line
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.describe import Row, declaration_advice, declaration_of, rows_of, table
from mha.implementations.inference.empty_rows import find_empty_row
from mha.implementations.inference.kernels import kernel_candidates, rows_of_kernel
from mha.implementations.inference.masks import find_mask
from mha.implementations.inference.options import find_options, weights_on_an_attribute
from mha.implementations.inference.probes import CONFIG, formulas, is_close
from mha.implementations.inference.projections import Unclear, parameter_maps
from mha.implementations.pristine import as_found, pristine
from mha.spec import Sizes, Weights, causal_mask
from mha.spec.claims import BIASES

SEVERAL_HEADS = frozenset(range(2, 9))


@dataclass(frozen=True)
class InferredClass:
    """A class as it was understood.

    implementation: what to judge. rows: what was found, and how. declaration: the code that declares the same.
    """

    implementation: ModuleImplementation | KernelImplementation
    rows: tuple[Row, ...]
    declaration: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The report to print."""
        return table(self.rows), "", "The same as a declaration:", "", indent(self.declaration, "    ")


@pristine()
def infer(constructor: Callable[..., nn.Module], label: str = "") -> InferredClass:
    """Infer how a module is built and called, and what it supports.

    constructor: a class, a function that makes a module, or a `functools.partial` of one.
    label: its name in reports; by default its own.

    Raises ImplementationError, with what to declare, for what names, shapes and trial runs leave open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    arguments = constructor_arguments(label, constructor)
    try:
        with as_found():
            module = construct(constructor, arguments, CONFIG)
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {one_line(error)}"
        hint = f"; name a function that builds it: def attention(d_model, n_heads): return {label}(...)"
        raise ImplementationError(f"{label}(d_model=10, n_heads=2) raised {message}{hint}") from error
    empty = Candidate(constructor, {}, label)
    try:
        candidate = _found(empty, module, arguments)
    except Unclear as unclear:
        try:  # a module may compute in float32 alone
            candidate = _found(replace(empty, dtype=torch.float32), module, arguments)
        except Unclear:
            raise ImplementationError(
                f"{label} needs a declaration: {unclear}{_unknown_inputs(empty)}{_advice(label, module)}"
            ) from None
    rows = rows_of(candidate, module, arguments)
    given = candidate.constructor.keywords if candidate.constructor is not constructor else {}  # type: ignore[attr-defined]
    written = f"partial({label}, {', '.join(f'{name}={value}' for name, value in given.items())})" if given else label
    declaration = declaration_of(written, candidate.options(), candidate.claims)
    return InferredClass(candidate.implementation(), tuple(rows), declaration)


def _found(empty: Candidate, module: nn.Module, arguments: Mapping[str, str]) -> Candidate:
    """Return the candidate for a module, with its claims; raises Unclear for what is left open."""
    candidate = _understand(empty, module)
    _find_own_head_dim(candidate, arguments)
    candidate = _with_masks(candidate)
    _find_causal(candidate)
    find_empty_row(candidate)
    _find_weights(candidate)
    find_options(candidate, arguments)
    _find_numbers_of_heads(candidate)
    return candidate


@pristine()
def infer_kernel(kernel: Callable[..., Any], label: str = "") -> InferredClass:
    """Infer the layout and the masks of a function of query, key and value.

    Raises ImplementationError where no layout gives the formula of attention.
    """
    label = label or str(getattr(kernel, "__name__", "kernel"))
    candidates = kernel_candidates(kernel, label)
    try:
        candidate = next((each for each in candidates if _find_formula(each)), None)
        if candidate is None:
            problem = candidates[0].problem or "its output matches no formula of attention"
            raise Unclear(
                f"called with query, key and value of shape (b, h, l, d), {problem}; a function that makes a module "
                "needs parameters d_model and n_heads"
            )
        find_mask(candidate)
        _find_causal(candidate)
        find_empty_row(candidate)
        _find_weights(candidate)
        find_options(candidate, {})
    except Unclear as unclear:
        raise ImplementationError(
            f"{label} needs a declaration: {unclear}. Declare it below the function, and judge that: "
            f"implementation = from_kernel({label}, layout=..., mask=...)"
        ) from None
    declaration = declaration_of(label, candidate.options(), candidate.claims, "from_kernel")
    return InferredClass(candidate.implementation(), tuple(rows_of_kernel(candidate)), declaration)


def _with_masks(candidate: Candidate) -> Candidate:
    """Return a candidate whose masks are known; one that is causal by default is built without that, if it helps."""
    try:
        find_mask(candidate)
    except Unclear:
        parameters = inspect.signature(candidate.constructor).parameters
        by_default = [name for name in CONSTRUCTOR_NAMES["causal"] if name in parameters and parameters[name].default]
        if not (candidate.formula.causal and by_default):
            raise
        constructor = partial(candidate.constructor, **{by_default[0]: False})
        candidate = replace(candidate, constructor=constructor, claims=dict(candidate.claims), explained=False)
        if not _find_formula(candidate):
            raise
        find_mask(candidate)
    return candidate


def _unknown_inputs(empty: Candidate) -> str:
    """Return a remark on what `forward` requires that has no known name."""
    others = empty.signature.others
    return f"; forward also requires {', '.join(others)}, of no known meaning, and was given None" if others else ""


def _advice(label: str, module: nn.Module) -> str:
    try:
        return declaration_advice(label, parameter_maps(module, CONFIG)[0])
    except Unclear:
        return declaration_advice(label, {})


def _understand(empty: Candidate, module: nn.Module) -> Candidate:
    """Return the one candidate whose projections and layout give what the module computes."""
    _require_inputs(empty)
    choices = [_candidates(empty, module, cross_attention) for cross_attention in _possible_inputs(empty.signature)]
    for candidates in choices:
        matching = [candidate for candidate in candidates if _find_formula(candidate)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            return _only_choice(candidates, matching)
    can_be_called = (each for each in choices if not all(candidate.problem for candidate in each))
    return _only_choice(next(can_be_called, choices[0]), ())


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


def _only_choice(candidates: Sequence[Candidate], matching: Sequence[Candidate]) -> Candidate:
    """Return the candidate of a module that no formula describes, if there is one choice; otherwise raise Unclear."""
    first = candidates[0]
    if not matching and first.cross_attention is True and not first.signature.inputs:
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
    result = candidate.call(candidate.probes[0].inputs)
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
        for probe in candidate.probes:
            result = candidate.call(probe.inputs)
            if result is None or not is_close(result.output, formula(probe.inputs, candidate.weights, None)):
                break
        else:
            candidate.formula, candidate.explained = formula, True
            return True
    return False


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
    if "head_dim" in arguments.values() and candidate.explained:
        tried = replace(candidate, claims=candidate.claims | {"own_head_dim": True}, explained=False)
        if _find_formula(tried) and tried.formula == candidate.formula:
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


def _alignment(candidate: Candidate) -> str:
    """Return how the causal flag aligns the diagonal; "top_left" where trial runs do not show it."""
    probe = candidate.probes[0]
    tried = replace(candidate, claims=candidate.claims | {"causal": "top_left"}, problem="")
    result = tried.call(probe.inputs, is_causal=True)
    if result is None:
        raise Unclear(f"{candidate.signature.is_causal}=True raises {tried.problem}; pass call=...")
    lengths = probe.inputs[0].shape[1], probe.inputs[1].shape[1]
    expected = candidate.formula(probe.inputs, candidate.weights, causal_mask(*lengths, "bottom_right"))
    return "bottom_right" if candidate.cross_attention and is_close(result.output, expected) else "top_left"


def _find_weights(candidate: Candidate) -> None:
    """Set whether it returns weights (B, H, L, S), and the shape of what it returns."""
    probe = candidate.probes[0]
    result = candidate.call(probe.inputs, need_weights=True, is_causal=candidate.formula.causal)
    query, key, _ = probe.inputs
    expected = (query.shape[0], CONFIG.n_heads, query.shape[1], key.shape[1])
    weights = result.weights if result else None
    if not isinstance(weights, Tensor) or tuple(weights.shape) != expected:
        candidate.claims["returns_weights"] = False
        candidate.weights_path = weights_on_an_attribute(candidate, expected)
    if candidate.weights_path:
        candidate.claims.pop("returns_weights")
    candidate.weights_shape = tuple(weights.shape) if isinstance(weights, Tensor) else None


def _find_numbers_of_heads(candidate: Candidate) -> None:
    """Claim no single head if the weights of a module with one are found elsewhere, as without an output projection.

    Raises Unclear if those of other numbers of heads are, too.
    """
    problem = _not_loaded_with(candidate, 1)
    if problem and _not_loaded_with(candidate, 3):
        raise Unclear(f"with one head, its parameters differ: {problem}; pass parameters=... as a function of Config")
    if problem:
        candidate.claims["sizes"] = Sizes(n_heads=SEVERAL_HEADS)
        candidate.one_head = problem


def _not_loaded_with(candidate: Candidate, n_heads: int) -> str:
    """Return why weights cannot be loaded into a module with this many heads; "" if they can, or if it is rejected."""
    config = replace(candidate.config, n_heads=n_heads, d_model=12)
    try:
        with as_found():
            candidate.implementation().build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
    except ImplementationError as error:
        return str(error)
    except (Exception, SystemExit):
        return ""  # the constructor rejects it: the clauses about construction report that
    return ""
