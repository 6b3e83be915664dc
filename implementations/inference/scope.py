"""What a module computes beside attention, found where no formula gives its outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mha.implementations.adapters.construction import MAX_LENGTH, parameters_of
from mha.implementations.adapters.names import names_used, words_of
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import (
    Bias,
    find_formula,
    formula_of,
    outputs_of,
)
from mha.implementations.inference.probes import CONFIG, changed
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
LEAVE_OUT = "leave that out to judge the rest"
# What functions of torch do in a layer of attention, where its outputs are not those of attention
# alone.
TURNING = frozenset({"cos", "sin", "polar", "view_as_complex"})
NORMALISING = frozenset({"normalize", "rms_norm", "layer_norm"})
# That of scores, c tanh(s / c).
CAPPING = frozenset({"tanh", "tanh_"})


def require_plain(candidates: Sequence[Candidate], module: nn.Module) -> None:
    """Raise ImplementationError for a module that computes more than attention, with what that is.

    candidates: the ways to understand it, none of which explains its outputs. module: that of the
    trial runs.
    """
    working = [replace(each) for each in candidates if len(outputs_of(each)) == len(each.probes)]
    if not working:
        return
    first = working[0]
    norms = [name for name in _norms(module) if _differs(first, _left_out([name]))]
    residual = next(filter(None, (_residual(each, norms) for each in working)), "")
    positions = _positions(first, module)
    found = [
        residual,
        _normalises(first, norms),
        positions or _others(working, module, norms),
        _sinks(first, module),
    ]
    if not any(found):
        found = [_biased_by_distance(working) or _does_more(first)]
    if any(found):
        raise ImplementationError(
            f"{first.label} is out of scope: {'; '.join(filter(None, found))}"
        )


def without_window(candidate: Candidate) -> Candidate:
    """Return a candidate whose window, found by its argument, is as wide as the longest input, if
    it is narrower.
    """
    given = getattr(candidate.constructor, "keywords", {})
    for name, parameter in parameters_of(candidate.constructor).items():
        narrow = (
            type(parameter.default) is int
            and 0 < parameter.default < MAX_LENGTH
            and name not in given
        )
        if narrow and _has_word(name, WINDOW_WORDS):
            wide = replace(
                candidate, constructor=partial(candidate.constructor, **{name: MAX_LENGTH})
            )
            if find_formula(wide):
                return wide
    return candidate


def _norms(module: nn.Module) -> list[str]:
    """Return the submodules that normalise, by their names or those of their classes."""
    kinds = {
        name: words_of(f"{name.rpartition('.')[2]}_{type(x).__name__}")
        for name, x in module.named_modules()
    }
    return [name for name, words in kinds.items() if name and not {*NORM_WORDS}.isdisjoint(words)]


def _residual(candidate: Candidate, norms: Sequence[str]) -> str:
    """Return what to do about a residual connection, if a formula gives the output less the input."""
    parameters = candidate.forward_parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for left_out in {(), tuple(norms)}:
        outputs = outputs_of(candidate, change=_left_out(left_out))
        pairs = list(zip(outputs, candidate.probes, strict=False))
        if any(output.shape != probe.inputs[0].shape for output, probe in pairs):
            continue
        if find_formula(replace(candidate), [output - probe.inputs[0] for output, probe in pairs]):
            return (
                "it adds its input to its output (a residual connection); to judge its attention,"
                f" derive a class whose forward returns super().forward({', '.join(names)}) -"
                f" {names[0]}"
            )
    return ""


def _normalises(candidate: Candidate, norms: Sequence[str]) -> str:
    """Return which norms change the output, what they normalise, and what to do about it."""
    if not norms:
        return ""
    query, seen = candidate.probes[0].inputs[0], list[Tensor]()
    candidate.call(candidate.probes[0].inputs, change=lambda module: _watch(module, norms, seen))
    of_input = any(
        sorted(x.flatten().tolist()) == sorted(query.flatten().tolist()) for x in seen
    )  # in any layout
    named = ", ".join(f"`{name}`" for name in norms)
    paths = [re.sub(r"\.(\d+)", r"[\1]", name) for name in norms]
    settings = " and ".join(f"self.{path} = torch.nn.Identity()" for path in paths)
    return (
        f"it normalises {'its input' if of_input else 'what it computes'} ({named}); to judge its"
        f" attention, derive a class whose constructor sets {settings}"
    )


def _watch(module: nn.Module, names: Sequence[str], seen: list[Tensor]) -> None:
    for name in names:
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].detach())
        )


def _positions(candidate: Candidate, module: nn.Module) -> str:
    """Return what adds positions, by a name, if the output depends on it."""
    tensors = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    used = [
        name
        for name in tensors
        if _has_word(name, POSITION_WORDS) and _differs(candidate, _shifted(name))
    ]
    functions = {
        name for name in names_used(type(module), bases=False) if _has_word(name, ROTARY_WORDS)
    }
    if not used and functions and _depends_on_order(candidate):
        used = sorted(functions)
    return (
        f"it depends on positions ({', '.join(f'`{name}`' for name in used)}); {LEAVE_OUT}"
        if used
        else ""
    )


def _sinks(candidate: Candidate, module: nn.Module) -> str:
    """Return what takes weight from the keys, by a name, if the output depends on it."""
    names = [name for name, _ in module.named_parameters() if _has_word(name, SINK_WORDS)]
    used = [name for name in names if _differs(candidate, _shifted(name))]
    return (
        f"it adds scores without a key ({', '.join(f'`{name}`' for name in used)}); {LEAVE_OUT}"
        if used
        else ""
    )


def _biased_by_distance(candidates: Sequence[Candidate]) -> str:
    """Return which scores depend on the distance of query and key, if a formula with that gives the
    outputs.
    """
    for candidate in candidates:
        outputs = outputs_of(candidate)
        for bias, what in BIASES.items():
            if formula_of(candidate, outputs, bias):
                return f"{what}; {LEAVE_OUT}"
    return ""


def _alibi(queries: int, keys: int) -> Tensor:
    """Return ALiBi (H, L, S) that grows towards later keys, as it does where later ones are hidden."""
    slopes = 2.0 ** (-8 * torch.arange(1, CONFIG.n_heads + 1, dtype=torch.float64) / CONFIG.n_heads)
    return slopes[:, None, None] * _distance(queries, keys)


def _distance(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) - torch.arange(queries)[:, None]


def _window(size: int, queries: int, keys: int) -> Tensor:
    return _distance(queries, keys).abs() <= size


ALIBI = "it adds a bias that grows with the distance of query and key (ALiBi)"
# What is done by distance, by the mask (L, S) or (H, L, S) that does it.
BIASES: dict[Bias, str] = {
    lambda queries, keys: -_alibi(queries, keys).abs(): ALIBI,
    _alibi: ALIBI,
    **{
        partial(_window, size): f"it attends to at most {size} positions on a side"
        for size in range(1, 6)
    },
}


def _does_more(candidate: Candidate) -> str:
    """Return what the functions of torch that it calls do beside attention."""
    with _Functions() as functions:  # called to build it and to call it
        outputs = outputs_of(candidate)
    turning = sorted(TURNING & functions.names)
    if turning and _depends_on_order(candidate):
        return (
            f"it depends on positions ({', '.join(f'`torch.{name}`' for name in turning)});"
            f" {LEAVE_OUT}"
        )
    if normalising := sorted(NORMALISING & functions.names):
        with _Functions(left_out=NORMALISING):
            unnormalised = outputs_of(candidate)
        if _differ(outputs, unnormalised):
            return f"it normalises what it computes (`{normalising[0]}`); {LEAVE_OUT}"
    if CAPPING & functions.names:
        with _Functions(left_out=CAPPING):
            uncapped = outputs_of(candidate)
        if find_formula(replace(candidate), uncapped):
            return f"it caps its scores (`tanh`); {LEAVE_OUT}"
    return ""


class _Functions(TorchFunctionMode):
    """Records the names of the functions of torch that are called; those left out return their
    first argument.
    """

    def __init__(self, left_out: Collection[str] = ()) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.left_out = left_out

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.names.add(name)
        return args[0] if name in self.left_out else function(*args, **(kwargs or {}))


def _others(candidates: Sequence[Candidate], module: nn.Module, norms: Sequence[str]) -> str:
    """Return the matrices on which the output depends, and that no candidate loads, except those of
    norms.
    """
    unloaded = set.intersection(*(set(not_loaded(module, each.parameters)) for each in candidates))
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    names = sorted(name for name in unloaded & matrices if not name.startswith(tuple(norms)))
    used = [name for name in names if _differs(candidates[0], _shifted(name))]
    layers = dict.fromkeys(name.rpartition(".")[0] or name for name in used)
    return (
        f"it computes with more than four projections ({', '.join(f'`{name}`' for name in layers)})"
        if used
        else ""
    )


def _has_word(name: str, words: Sequence[str]) -> bool:
    return any(word in words for word in words_of(name))


def _depends_on_order(candidate: Candidate) -> bool:
    """Return whether the output of an item changes, but for its order, when its positions are
    reversed.
    """
    inputs = candidate.probes[0].inputs
    flipped = {id(x): x.flip(1) for x in inputs}  # one tensor stays one tensor
    before, after = candidate.call(inputs), candidate.call(tuple(flipped[id(x)] for x in inputs))
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
            tensor.data += torch.randn(
                tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype
            )

    return change


def _differs(candidate: Candidate, change: Callable[[nn.Module], None]) -> bool:
    """Return whether the output differs after a change of the module."""
    return _differ(outputs_of(candidate), outputs_of(candidate, change=change))


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(
        x.shape != y.shape or bool(changed(x, y).any()) for x, y in zip(before, after, strict=False)
    )
