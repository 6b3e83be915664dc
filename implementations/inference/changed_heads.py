"""Whether queries and keys are normed or rotated after their projections, by trial runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from torch import Tensor, nn

from mha.implementations.adapters.loading import ParameterPath
from mha.implementations.adapters.names import words_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.functions import (
    NORMALISING,
    ROOTS,
    TURNING,
    functions_of,
)
from mha.implementations.inference.nearest_projections import outputs_of
from mha.implementations.inference.probes import (
    CONFIG,
    SCALES,
    Formula,
    Probe,
    SpecialCase,
    is_close,
    scaled_weights,
)
from mha.implementations.inference.rotations import (
    frequencies_of,
    rotations_of,
    words_of_rotary,
)
from mha.spec import Config, QkNorm, Rotary

# What is added to a mean of squares, beside those that a module's own numbers tell.
EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, None)
EPS_WORDS = {"eps", "epsilon"}
# As in `torch.nn.functional.normalize`, which does not divide by less than 1e-12.
LEAST_SQUARES = 1e-24
LENGTHS_OF_ONE = tuple(
    QkNorm("l2", "head", before, LEAST_SQUARES, None) for before in (True, False)
)
LARGEST_EXPONENT = 20.0
# The words for queries and keys in names of norms.
ROLE_WORDS = {"q": {"q", "query"}, "k": {"k", "key"}}
# Makes queries and keys so small that an eps shows.
SMALL_HEADS = tuple(
    SpecialCase("", scaled_weights("w_q b_q w_k b_k", factor)) for factor in (1e-3, 3e-5)
)


@dataclass(frozen=True)
class Change:
    """What may become of queries and keys."""

    rotary: Rotary | None = None
    norm: QkNorm | None = None


def with_changed_heads(candidates: Sequence[Candidate], module: nn.Module) -> list[Candidate]:
    """Return those of several candidates that a norm or a rotation explains, with these.

    module: that of the trial runs.
    """
    if not candidates:
        return []
    functions = _functions_of_any(candidates)
    turns = bool(functions & TURNING)
    norms = bool(functions & (NORMALISING | ROOTS))
    rotaries: list[Rotary | None] = [None]
    if turns:
        rotaries += rotations_of(frequencies_of(candidates[0], module))
    found = list[Candidate]()
    for paths, over in _weights_of_norms(module, candidates[0].config):
        kinds: list[QkNorm | None] = [None, *_norms(paths, over)] if norms else [None]
        changes = [Change(*both) for both in product(rotaries, kinds) if any(both)]
        for each in candidates:
            explained = explained_by(_with_norms(each, paths, kinds), changes)
            if explained:
                found.append(_with_eps(explained, module))
        if found:
            break
    if norms and not found:
        found = _with_lengths_of_one(candidates, rotaries, module)
    return found


def _with_lengths_of_one(
    candidates: Sequence[Candidate], rotaries: Sequence[Rotary | None], module: nn.Module
) -> list[Candidate]:
    """Return the candidates whose scores are cosines of queries and keys, times some scale."""
    changes = []
    for rotary, norm in product(rotaries, LENGTHS_OF_ONE):
        if rotary or norm.before_rotary:  # without a rotation, both are the same
            changes.append(Change(rotary, norm))
    found = list[Candidate]()
    for each in candidates:
        formulas = _plain_formulas(each, (*SCALES, *learned_scales(module)))
        explained = explained_by(each, changes, formulas)
        if explained:
            found.append(_with_scale(_with_eps(explained, module)))
    return found


def learned_scales(module: nn.Module) -> list[float]:
    """Return what a parameter with one number, or with one for each head, may multiply scores by.

    That is the number, as it is initially, its inverse, or its exponential.
    """
    found = dict[float, None]()
    for parameter in module.parameters():
        if parameter.numel() not in (1, CONFIG.n_heads):
            continue
        first = float(parameter.detach().flatten()[0])
        if first and bool((parameter == first).all()):
            found |= dict.fromkeys((first, 1 / first, math.exp(min(first, LARGEST_EXPONENT))))
    return list(found)


def _with_scale(candidate: Candidate) -> Candidate:
    """Return a candidate that claims the scale of its cosines, for which there is no usual one."""
    scale = candidate.formula.scale
    if scale == "none":
        return candidate.claiming(scale=1.0)
    return candidate if isinstance(scale, str) else candidate.claiming(scale=scale)


def _functions_of_any(candidates: Sequence[Candidate]) -> frozenset[str]:
    """Return what the first candidate calls whose calls return, and those before it.

    With inputs in another layout, a call may raise before it comes to a norm.
    """
    functions = frozenset[str]()
    for each in candidates:
        functions |= functions_of(each)
        if outputs_of(each):
            break
    return functions


def _norms(paths: Mapping[str, ParameterPath], over: str) -> list[QkNorm]:
    """Return the norms to try, with weights or without."""
    weights = ("scale", "offset") if paths else (None,)
    axes = (over,) if over else ("head", "width")
    found = list[QkNorm]()
    for before, kind, each, weight in product((True, False), ("rms", "layer"), axes, weights):
        found.append(QkNorm(kind, each, before_rotary=before, weight=weight))  # type: ignore[arg-type]  # words of it
    return found


def _with_norms(
    candidate: Candidate, paths: Mapping[str, ParameterPath], kinds: Sequence[QkNorm | None]
) -> Candidate:
    """Return the candidate with the weights of norms, where there are any."""
    if not paths:
        return candidate
    norm = next(kind for kind in kinds if kind) if any(kinds) else QkNorm()
    parameters = {**candidate.declared.parameters, **paths}
    return candidate.declaring(parameters=parameters).claiming(qk_norm=norm)


def _weights_of_norms(
    module: nn.Module, config: Config
) -> Iterator[tuple[dict[str, ParameterPath], str]]:
    """Yield where the weights of norms of queries and keys may be, and what these are over."""
    named = dict(module.named_parameters())
    widths = {config.head_dim: "head", config.inner_width: "width"}
    paths, over = dict[str, ParameterPath](), ""
    for role, words in ROLE_WORDS.items():
        for name, parameter in named.items():
            owner, _, last = name.rpartition(".")
            if parameter.ndim != 1 or last == "bias" or not _is_norm_of(name, words):
                continue
            if parameter.shape[0] in widths:
                over = widths[parameter.shape[0]]
                paths[f"{role}_norm"] = owner if last == "weight" and owner else name
    if len(paths) == 2:
        yield paths, over
    yield {}, ""


def _is_norm_of(name: str, words: set[str]) -> bool:
    """Return whether a name is of a norm, and has one of some words: q_norm, qnorm, ln_q."""
    said = words_of(name)
    is_norm = "norm" in name.lower() or "ln" in said
    return is_norm and bool(words & {word.removesuffix("norm") for word in said})


@lru_cache(8)
def _expected(
    changes: tuple[Change, ...],
    formulas: tuple[Formula, ...],
    probe: Probe,
    config: Config,
    special: SpecialCase,
) -> list[tuple[Formula, Tensor]]:
    """Return each formula with each change, and the output that it gives on a probe."""
    weights, found = special.weights_of(config), list[tuple[Formula, Tensor]]()
    for change, formula in product(changes, formulas):
        changed = replace(formula, rotary=change.rotary, norm=change.norm)
        found.append((changed, changed(probe.inputs, weights, None)))
    return found


def explained_by(
    candidate: Candidate, changes: Sequence[Change], formulas: Sequence[Formula] = ()
) -> Candidate | None:
    """Return the candidate with the change that gives its outputs, if one does."""
    formulas = formulas or _plain_formulas(candidate, SCALES)
    outputs, probes = outputs_of(candidate), candidate.probes
    if len(outputs) < len(probes):
        return None
    config, special = candidate.config, candidate.trial.special
    first = _expected(tuple(changes), tuple(formulas), probes[0], config, special)
    for formula, expected in first:
        if not is_close(outputs[0], expected):
            continue
        weights = special.weights_of(config)
        others = zip(outputs[1:], probes[1:], strict=True)
        if all(is_close(output, formula(probe.inputs, weights, None)) for output, probe in others):
            return _with_formula(candidate, formula)
    return None


def _plain_formulas(candidate: Candidate, scales: Iterable[str | float]) -> list[Formula]:
    """Return the formula with each of several scales, without and with a causal mask."""
    projected = candidate.declared.parameters.get("w_o") is not None
    n_heads = candidate.config.n_heads
    plain = [Formula(scale, None, projected, n_heads) for scale in scales]
    return [*plain, *(replace(each, causal="top_left") for each in plain)]


def _with_formula(candidate: Candidate, formula: Formula) -> Candidate:
    """Return the candidate as it is explained, with its claims and rows."""
    claims: dict[str, Any] = {}
    if formula.rotary:
        claims["rotary"] = formula.rotary
        if formula.rotary.multiple > 1:
            sizes = candidate.sizes
            claims["sizes"] = replace(sizes, head_dim_multiple=formula.rotary.multiple)
        candidate = candidate.noting("positions", words_of_rotary(formula.rotary))
    if formula.norm:
        claims["qk_norm"] = formula.norm
        candidate = candidate.noting("norm", words_of_norm(formula.norm))
    return replace(candidate.claiming(**claims).trying(formula=formula), explained=True)


def words_of_norm(norm: QkNorm) -> str:
    """Return a norm of queries and keys in words.

    >>> words_of_norm(QkNorm(weight=None))
    'queries and keys, root mean square of each head, eps 1e-06'
    """
    kinds = {"rms": "root mean square", "layer": "layer norm", "l2": "length", "unit_rms": "length"}
    kind = kinds[norm.kind]
    whose = "of each head" if norm.over == "head" else "of all heads"
    said = ["queries and keys", f"{kind} {whose}"]
    if norm.kind == "unit_rms":
        said.append("times the root of the width")
    if not norm.before_rotary:
        said.append("after the rotation")
    if norm.weight == "offset":
        said.append("times 1 + weight")
    said.append("eps that of the dtype" if norm.eps is None else f"eps {norm.eps:g}")
    return ", ".join(said)


def _with_eps(candidate: Candidate, module: nn.Module) -> Candidate:
    """Return the candidate with the eps of its norm that explains small queries and keys best."""
    norm = candidate.formula.norm
    if norm is None:
        return candidate
    tried = [replace(norm, eps=eps) for eps in (norm.eps, *_epsilons(module))]
    if norm.kind == "rms":
        tried.append(replace(norm, kind="unit_rms", eps=LEAST_SQUARES))
    errors = dict[QkNorm, float]()
    for each in tried:
        formula = replace(candidate.formula, norm=each)
        errors[each] = max(_error(candidate.trying(special=case), formula) for case in SMALL_HEADS)
    best = min(errors, key=lambda each: errors[each])
    return _with_formula(candidate, replace(candidate.formula, norm=best))


def _epsilons(module: nn.Module) -> list[float | None]:
    found = dict[float | None, None]()
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and EPS_WORDS & {*words_of(name)} and value > 0:
                found[value] = None
    return [*found, *(eps for eps in EPSILONS if eps not in found)]


def _error(candidate: Candidate, formula: Formula) -> float:
    """Return how far the outputs of a candidate are from a formula's."""
    errors, weights = list[float](), candidate.weights
    for output, probe in zip(outputs_of(candidate), candidate.probes, strict=False):
        expected = formula(probe.inputs, weights, None)
        errors.append(float((output.double() - expected).abs().max() / expected.abs().max()))
    return max(errors, default=math.inf)
