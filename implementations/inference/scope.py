"""What a module computes beside attention, found where no formula gives its outputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from mha.implementations.adapters.construction import MAX_LENGTH, parameters_of
from mha.implementations.adapters.names import names_used, words_of
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.around import declared_around, norm_functions, scales_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.functions import (
    NORMALISING,
    TURNING,
    CalledFunctions,
    functions_of,
)
from mha.implementations.inference.mask_search import given_a_mask
from mha.implementations.inference.nearest_projections import (
    Bias,
    formula_of,
    outputs_of,
    with_formula,
)
from mha.implementations.inference.probes import CONFIG, changed, each_once
from mha.implementations.inference.projections import not_loaded

NORM_WORDS = ("norm", "ln", "layernorm", "rmsnorm")
# Words in the names of functions that add positions, and of parameters and buffers that do.
ROTARY_WORDS = ("rotary", "rope", "rotate", "alibi")
POSITION_WORDS = (
    *ROTARY_WORDS,
    "freq",
    "freqs",
    "pos",
    "position",
    "positions",
    "positional",
    "rel",
    "relative",
)
SINK_WORDS = ("sink", "sinks")
# In the names of arguments of a constructor.
WINDOW_WORDS = ("window", "sliding")
RESIDUAL = "it adds its input to its output (a residual connection)"
LEAVE_OUT = "leave that out to judge the rest"
# That of scores, c tanh(s / c).
CAPPING = frozenset({"tanh", "tanh_"})


def require_plain(candidates: Sequence[Candidate], module: nn.Module) -> None:
    """Raise ImplementationError for a module that computes more than attention, with what that is.

    candidates: the ways to understand it, none of which explains its outputs.
    module: that of the trial runs.
    """
    working = _working(candidates)
    if not working:
        return
    first = working[0]
    norms = [name for name in _norms(module) if _differs(first, _left_out([name]))]
    found = _found(working, module, norms)
    functions, scales = norm_functions(module), scales_of(working, module)
    if not (found or functions or scales):
        return
    called = sorted(NORMALISING & functions_of(first))
    declaration = declared_around(working, module, norms, called)
    if declaration and not found:
        does = "normalises" if functions else "scales"
        found = [f"it {does} what it computes ({_quoted(functions or scales)})"]
    if found:
        advice = _advice(first, norms, declaration, is_residual=RESIDUAL in found)
        raise ImplementationError(f"{first.label} is out of scope: {'; '.join([*found, advice])}")


def _found(candidates: Sequence[Candidate], module: nn.Module, norms: Sequence[str]) -> list[str]:
    """Return what a module computes beside attention, in words.

    norms: its submodules that normalise and that count.
    """
    first = candidates[0]
    found = [
        _normalises(first, norms),
        _positions(first, module) or _more_projections(candidates, module, norms),
        _sinks(first, module),
    ]
    if _is_residual(candidates, norms):
        found.insert(0, RESIDUAL)
    if not any(found):
        found = [_biased_by_distance(candidates) or _does_more(first)]
    return list(filter(None, found))


def _working(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return copies, whose calls are their own, of the candidates that can be called.

    If none can, they are called with a mask each time, in the first format that can be.
    """
    for tried in chain([candidates], given_a_mask(candidates)):
        working = []
        for each in tried:
            if len(outputs_of(each)) == len(each.probes):
                working.append(replace(each))
        if working:
            return working
    return []


def _advice(
    candidate: Candidate, norms: Sequence[str], declaration: str, *, is_residual: bool
) -> str:
    """Return how to judge attention without what is in the way: declared, or in a derived class."""
    if declaration:
        return (
            "to judge its attention without that, declare it below the class, and judge that:"
            f" {declaration}"
        )
    parts = []
    if is_residual:
        names = _named_parameters(candidate)
        parts.append(f"whose forward returns super().forward({', '.join(names)}) - {names[0]}")
    if norms:
        settings = " and ".join(f"self.{_code_of(name)} = torch.nn.Identity()" for name in norms)
        parts.append(f"whose constructor sets {settings}")
    if not parts:
        return LEAVE_OUT
    return f"to judge its attention, derive a class {', and '.join(parts)}"


def without_window(candidate: Candidate) -> Candidate:
    """Return a candidate whose window, found by its argument, is as wide as the longest input."""
    constructor = candidate.declared.constructor
    for name, parameter in parameters_of(constructor).items():
        is_size = type(parameter.default) is int and 0 < parameter.default < MAX_LENGTH
        if not is_size or name in candidate.declared.keywords:
            continue
        if _has_word(name, WINDOW_WORDS):
            wide = partial(constructor, **{name: MAX_LENGTH})
            explained = with_formula(candidate.declaring(constructor=wide))
            if explained:
                return explained
    return candidate


def _norms(module: nn.Module) -> list[str]:
    """Return the submodules that normalise, by their names or those of their classes."""
    norms = []
    for name, part in module.named_modules():
        words = words_of(f"{name.rpartition('.')[2]}_{type(part).__name__}")
        if name and not {*NORM_WORDS}.isdisjoint(words):
            norms.append(name)
    return norms


def _is_residual(candidates: Sequence[Candidate], norms: Sequence[str]) -> bool:
    """Return whether a formula gives the output less the input, of one of several candidates."""
    for candidate in candidates:
        for left_out in {(), tuple(norms)}:
            if _adds_its_input(candidate, left_out):
                return True
    return False


def _named_parameters(candidate: Candidate) -> list[str]:
    """Return the parameters of `forward` that have a name of their own."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = candidate.declared.forward_parameters.values()
    return [each.name for each in parameters if each.kind not in variadic]


def _adds_its_input(candidate: Candidate, left_out: Sequence[str]) -> bool:
    """Return whether a formula gives the output less the input, without some submodules."""
    outputs = outputs_of(candidate, change=_left_out(left_out))
    differences = []
    for output, probe in zip(outputs, candidate.probes, strict=False):
        if output.shape != probe.inputs[0].shape:
            return False
        differences.append(output - probe.inputs[0])
    return with_formula(candidate, differences) is not None


def _normalises(candidate: Candidate, norms: Sequence[str]) -> str:
    """Return which norms change the output, and what they normalise."""
    if not norms:
        return ""
    query, seen = candidate.probes[0].inputs[0], list[Tensor]()
    candidate.call(candidate.probes[0].inputs, change=lambda module: _watch(module, norms, seen))
    numbers = sorted(query.flatten().tolist())  # in any layout
    what = "what it computes"
    if numbers in [sorted(x.flatten().tolist()) for x in seen]:
        what = "its input"
    return f"it normalises {what} ({_quoted(norms)})"


def _code_of(name: str) -> str:
    """Return the code of a dotted name: layers[0].norm for layers.0.norm."""
    return re.sub(r"\.(\d+)", r"[\1]", name)


def _quoted(names: Iterable[str], prefix: str = "") -> str:
    """Return names as code, in one line."""
    return ", ".join(f"`{prefix}{name}`" for name in names)


def _watch(module: nn.Module, names: Sequence[str], seen: list[Tensor]) -> None:
    """Collect the inputs of submodules."""
    for name in names:
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].detach())
        )


def _positions(candidate: Candidate, module: nn.Module) -> str:
    """Return what adds positions, by a name, if the output depends on it."""
    tensors = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    used = _used(candidate, _with_words(tensors, POSITION_WORDS))
    if not used:
        functions = sorted(names_used(type(module), bases=False))
        used = _with_words(functions, ROTARY_WORDS)
        if not used or not _depends_on_order(candidate):
            return ""
    return f"it depends on positions ({_quoted(used)})"


def _sinks(candidate: Candidate, module: nn.Module) -> str:
    """Return what takes weight from the keys, by a name, if the output depends on it."""
    used = _used(candidate, _with_words(dict(module.named_parameters()), SINK_WORDS))
    return f"it adds scores without a key ({_quoted(used)})" if used else ""


def _used(candidate: Candidate, names: Iterable[str]) -> list[str]:
    """Return the parameters and buffers on which the output depends."""
    return [name for name in names if _differs(candidate, _shifted(name))]


def _biased_by_distance(candidates: Sequence[Candidate]) -> str:
    """Return which scores depend on the distance of query and key, if that explains the outputs."""
    for candidate in candidates:
        if candidate.config.n_heads != CONFIG.n_heads:  # for whose slopes the biases are
            continue
        outputs = outputs_of(candidate)
        for bias, what in BIASES.items():
            if formula_of(candidate, outputs, bias):
                return what
    return ""


def _alibi(queries: int, keys: int) -> Tensor:
    """Return ALiBi (H, L, S) that grows towards later keys, as where these are hidden."""
    slopes = 2.0 ** (-8 * torch.arange(1, CONFIG.n_heads + 1, dtype=torch.float64) / CONFIG.n_heads)
    return slopes[:, None, None] * _distance(queries, keys)


def _symmetric_alibi(queries: int, keys: int) -> Tensor:
    return -_alibi(queries, keys).abs()


def _distance(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) - torch.arange(queries)[:, None]


def _window(size: int, queries: int, keys: int) -> Tensor:
    return _distance(queries, keys).abs() <= size


ALIBI = "it adds a bias that grows with the distance of query and key (ALiBi)"
# What is done by distance, by the mask (L, S) or (H, L, S) that does it.
BIASES: dict[Bias, str] = {_symmetric_alibi: ALIBI, _alibi: ALIBI}
for _size in range(1, 6):
    BIASES[partial(_window, _size)] = f"it attends to at most {_size} positions on a side"


def _does_more(candidate: Candidate) -> str:
    """Return what the functions of torch that it calls do beside attention."""
    with CalledFunctions() as functions:  # called to build it and to call it
        outputs = outputs_of(candidate)
    turning = sorted(TURNING & functions.names)
    if turning and _depends_on_order(candidate):
        return f"it depends on positions ({_quoted(turning, 'torch.')})"
    normalising = sorted(NORMALISING & functions.names)
    if normalising:
        with CalledFunctions(left_out=NORMALISING):
            unnormalised = outputs_of(candidate)
        if _differ(outputs, unnormalised):
            return f"it normalises what it computes (`{normalising[0]}`)"
    if CAPPING & functions.names:
        with CalledFunctions(left_out=CAPPING):
            uncapped = outputs_of(candidate)
        if with_formula(candidate, uncapped):
            return "it caps its scores (`tanh`)"
    return ""


def _more_projections(
    candidates: Sequence[Candidate], module: nn.Module, norms: Sequence[str]
) -> str:
    """Return the matrices on which the output depends, and that no candidate loads.

    Those of norms are left out.
    """
    unloaded = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    for each in candidates:
        unloaded &= set(not_loaded(module, each.declared.parameters))
    layers = dict[str, None]()  # a set in order
    for name in _used(candidates[0], sorted(unloaded)):
        if not name.startswith(tuple(norms)):
            layers[name.rpartition(".")[0] or name] = None
    return f"it computes with more than four projections ({_quoted(layers)})" if layers else ""


def _has_word(name: str, words: Collection[str]) -> bool:
    return not {*words}.isdisjoint(words_of(name))


def _with_words(names: Iterable[str], words: Collection[str]) -> list[str]:
    """Return the names that have one of several words."""
    return [name for name in names if _has_word(name, words)]


def _depends_on_order(candidate: Candidate) -> bool:
    """Return whether more than the order of outputs changes when all positions are reversed."""
    inputs = candidate.probes[0].inputs
    flipped = each_once(lambda x: x.flip(1), inputs)
    before, after = candidate.call(inputs), candidate.call(flipped)
    if before is None or after is None or before.output.shape != after.output.shape:
        return False
    return bool(changed(before.output, after.output.flip(1)).any())


def _left_out(names: Sequence[str]) -> Callable[[nn.Module], None]:
    """Return the change that replaces submodules by the identity."""

    def change(module: nn.Module) -> None:
        for name in names:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Identity())

    return change


def _shifted(name: str) -> Callable[[nn.Module], None]:
    """Return the change that adds random numbers to a parameter or buffer."""

    def change(module: nn.Module) -> None:
        tensor = dict([*module.named_parameters(), *module.named_buffers()])[name]
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            tensor.data += torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)

    return change


def _differs(candidate: Candidate, change: Callable[[nn.Module], None]) -> bool:
    """Return whether the output differs after a change of the module."""
    return _differ(outputs_of(candidate), outputs_of(candidate, change=change))


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(
        x.shape != y.shape or bool(changed(x, y).any()) for x, y in zip(before, after, strict=False)
    )
