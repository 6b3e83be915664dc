"""A declaration that leaves out what a module computes beside attention, as it was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product

from torch import Tensor, nn

from mha.implementations.adapters.names import names_used, words_of
from mha.implementations.adapters.neutral import function_named
from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import with_formula
from mha.implementations.inference.probes import CONFIG
from mha.implementations.inference.projections import Unclear, not_loaded
from mha.implementations.inference.questions import has_relative_positions
from mha.implementations.inference.search import with_claims

# In the names of functions that normalise.
NORM_WORDS = frozenset({"norm", "rmsnorm", "layernorm", "normalize"})


def declared_around(
    candidates: Sequence[Candidate], module: nn.Module, norms: Sequence[str], called: Sequence[str]
) -> str:
    """Return the code of a declaration whose neutral parts leave attention, which a formula gives.

    It is "" if there is none.

    candidates: the ways to understand the module.
    module: that of the trial runs.
    norms: its submodules that normalise.
    called: the functions of torch that it calls and that normalise.
    """
    gates = _gates(candidates, module)
    for residual, names, gate in product((False, True), _parts(module, norms, called), gates):
        neutral = {**dict.fromkeys(names, nn.Identity), **gate}
        for each in candidates:
            tried = with_formula(each.declaring(neutral=neutral, residual=residual))
            if tried and _may_be_declared(tried):
                with suppress(Unclear, ImplementationError):
                    return _line(with_claims(tried))
    return ""


def _may_be_declared(tried: Candidate) -> bool:
    """Return whether scores are scaled as usual, or not at all in a class after T5."""
    scale = tried.formula.scale
    return scale == "1/sqrt(d_k)" or (scale == "none" and has_relative_positions(tried))


def _line(found: Candidate) -> str:
    """Return the code of a declaration; scores that are not scaled, it claims to be meant so."""
    if found.formula.scale != "none":
        return found.declared.line(found.label)
    line = found.claiming(scale=1.0).declared.line(found.label)
    return (
        f"{line} (it does not scale its scores; if that is not meant, as it is in T5, leave out"
        " scale=1.0: it fails until they are multiplied by d_k ** -0.5)"
    )


def _gates(candidates: Sequence[Candidate], module: nn.Module) -> list[dict[str, float]]:
    """Return the numbers that may stand for gates and scales: none first.

    A gate is open where the input of its sigmoid is infinity, and a scale is none where it is 1. A
    bias of the scores by distance is none where its table, or its slopes, are 0.
    """
    layers = dict[str, float]()
    for name, parameter in _unloaded(candidates, module).items():
        owner, _, last = name.rpartition(".")
        if parameter.ndim > 1 and last == "weight" and owner:
            layers[owner] = math.inf
    scales = dict.fromkeys(scales_of(candidates, module), 1.0)
    offsets = dict.fromkeys(_of_each_head(candidates, module), 0.0)
    return [{}, *filter(None, (layers, scales, offsets))]


def _of_each_head(candidates: Sequence[Candidate], module: nn.Module) -> list[str]:
    """Return the tables and slopes with a number for each head: not loaded, or buffers."""
    tensors = _unloaded(candidates, module) | dict(module.named_buffers())
    found = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and CONFIG.n_heads in tensor.shape:
            found.append(name)
    return found


def scales_of(candidates: Sequence[Candidate], module: nn.Module) -> list[str]:
    """Return the parameters that may be factors: no candidate loads them, and no layer has them."""
    unloaded = _unloaded(candidates, module)
    return [name for name in unloaded if name.rpartition(".")[2] not in ("weight", "bias")]


def _unloaded(candidates: Sequence[Candidate], module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that no candidate loads."""
    unloaded: dict[str, Tensor] = dict(module.named_parameters())
    for each in candidates:
        kept = set(not_loaded(module, each.declared.parameters))
        unloaded = {name: unloaded[name] for name in unloaded if name in kept}
    return unloaded


def _parts(
    module: nn.Module, norms: Sequence[str], called: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the names of what may be left out: nothing, submodules, then functions beside these."""
    functions = norm_functions(module)
    yield from dict.fromkeys([(), tuple(norms), (*norms, *functions), (*norms, *called)])


def norm_functions(module: nn.Module) -> list[str]:
    """Return the functions of its file, and its methods, that normalise by their names."""
    functions = []
    for name in sorted(names_used(type(module))):
        if not NORM_WORDS.isdisjoint(words_of(name)) and function_named(module, name):
            functions.append(name)
    return functions
