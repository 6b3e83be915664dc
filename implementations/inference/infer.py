"""`infer`: a plain module class as an implementation, and how that was understood."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from itertools import product
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calls import ARGUMENT_WORDS, takes_one_input
from mha.implementations.adapters.module import ModuleImplementation, constructor_words
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.probing import (
    CONFIG,
    KEYS,
    QUERIES,
    formulas,
    near,
    probe_inputs,
    probe_mask,
    with_numbers,
)
from mha.implementations.inference.projections import Unclear, maps
from mha.implementations.inference.reading import Reading, word_of
from mha.implementations.inference.telling import code_of, declaring, rows_of, table
from mha.spec import Claims, Output, Weights, causal_mask

# Shapes of mask that are tried, with the axes along which such a mask may differ: the most general first.
SHAPES: dict[str | None, str] = {
    None: "bhls",
    "b h l s": "bhls",
    "(b h) l s": "bhls",
    "b 1 l s": "bls",
    "b l s": "bls",
    "l s b": "bls",
    "b 1 1 s": "bs",
    "b 1 s": "bs",
    "b s": "bs",
    "s b": "bs",
    "l s": "ls",
}


@dataclass(frozen=True)
class Inference:
    """What was inferred of a class.

    implementation: to be judged. rows: what, how it was understood, and how sure that is. code: the declaration that
    says the same.
    """

    implementation: ModuleImplementation
    rows: tuple[tuple[str, str, str], ...]
    code: str

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it as text."""
        return table(self.rows), "", "The same as a declaration:", "", indent(self.code, "    ")


def infer(cls: type[nn.Module]) -> Inference:
    """Infer how a class is built and called, and what it can do.

    Raises ImplementationError, with what to declare, for what names, shapes and trials leave open.
    """
    label = cls.__name__
    words = constructor_words(label, cls)
    try:
        module = ModuleImplementation(label, Claims(), cls, {}, words, as_is).construct(CONFIG)
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ImplementationError(f"{label}(d_model=10, n_heads=2) raised {told}") from error
    try:
        reading = _understood(cls, module)
        _try_masks(reading)
        _try_the_rest(reading)
    except Unclear as unclear:
        raise ImplementationError(f"{label} cannot be understood alone: {unclear}{declaring(label)}") from None
    built = ", ".join(f"{word}={meant}" for word, meant in words.items())
    rows = [("built as", f"{label}({built})", "by name"), *rows_of(reading)]
    return Inference(reading.implementation(), tuple(rows), code_of(cls, reading.options(), reading.claims))


def as_is(target: Any, /, *_: Any, **__: Any) -> Output:
    """Stand for a call where nothing is called."""
    raise NotImplementedError


def _understood(cls: type[nn.Module], module: nn.Module) -> Reading:
    """Return the one reading of projections and layout that explains what the module computes."""
    taken = inspect.signature(cls.forward).parameters
    alone = takes_one_input(taken)
    needed = [name for name, p in taken.items() if p.default is p.empty and name not in _flags() and name != "self"]
    if not alone and len(needed) != 3:
        raise Unclear(f"forward({', '.join(taken)}) takes neither one input nor three; give call=... that calls it")
    candidates = [Reading(cls, each, layout) for each in maps(module, CONFIG) for layout in ("b l d", "l b d")]
    for candidate in candidates:
        candidate.claims = {"causal": None, **({"cross_attention": False} if alone else {})}
    biases, problem = _biases(candidates[0])
    if not biases:
        raise Unclear(problem)
    inputs = probe_inputs(alone=alone)
    config = replace(CONFIG, bias=max(biases))
    weights, found = Weights.random(config, 0), []
    for candidate in candidates:
        candidate.claims |= {} if len(biases) == 2 else {"bias": biases}
        seen = candidate.call(inputs, max(biases))
        for formula in formulas():
            there = candidate.map.get("w_o") is not None
            if seen and formula.projected == there and near(seen.output, formula(inputs, weights, None)):
                candidate.formula = formula
                found.append(candidate)
    if all(candidate.problem for candidate in candidates):
        raise Unclear(f"each call raises; the first {candidates[0].problem}")
    if len(found) == 1:
        found[0].explained = True
        return found[0]
    if found or len(candidates) > 2:
        what = "several readings of its projections explain" if found else "no reading of its projections explains"
        ways = "; ".join(sorted({str(each.map) for each in found or candidates}))
        raise Unclear(f"{what} what it computes ({ways})")
    return candidates[0]


def _flags() -> set[str]:
    return {word for words in ARGUMENT_WORDS.values() for word in words}


def _biases(reading: Reading) -> tuple[set[bool], str]:
    """Return which values of `Config.bias` can be built, and why none, if none; without all biases, there are none."""
    adapter, found, problem = reading.implementation(), set(), ""
    for bias in (True, False):
        config = replace(CONFIG, bias=bias)
        try:
            adapter.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
            found.add(bias)
        except Exception as error:
            problem = f"its weights cannot be loaded: {error}"
    if found == {True, False}:
        numbers = [
            sum(p.numel() for p in adapter.construct(replace(CONFIG, bias=b)).parameters()) for b in (True, False)
        ]
        found = found if numbers[0] - numbers[1] == 4 * CONFIG.d_model else {True}
    return found, problem


def _try_masks(reading: Reading) -> None:
    """Find the convention and the shape of the mask by what masks do."""
    word = word_of("mask", reading.taken)
    if word is None:
        reading.claims["masks"] = ()
        return
    alone, bias = "cross_attention" in reading.claims, max(reading.claims.get("bias", {True}))
    inputs, keys = probe_inputs(alone=alone), QUERIES if alone else KEYS
    weights = Weights.random(replace(CONFIG, bias=bias), 0)
    for numbers, (shape, axes) in product((False, True), SHAPES.items()):
        fitting = set()
        for convention in ("keep", "drop") if numbers else ("keep", "drop", "additive"):
            tried = replace(reading, mask=convention, mask_shape=shape, mask_numbers=numbers)
            masks = [probe_mask(axes, keys)]
            masks += [probe_mask("bs", keys)[:, :1, :1], probe_mask("ls", keys)[:1, :1]] if shape is None else []
            masks += [with_numbers(masks[0])] if convention == "additive" else []
            seen = [tried.call(inputs, bias, mask=mask) for mask in masks]
            right = [reading.formula(inputs, weights, mask) for mask in masks]
            if all(one and near(one.output, other) for one, other in zip(seen, right, strict=True)):
                fitting.add(convention)
        if fitting:
            reading.mask = next(each for each in ("keep", "drop", "additive") if each in fitting)
            reading.mask_shape, reading.mask_numbers = shape, numbers
            forms = {"bool", "float"} if "additive" in fitting else {"bool"}
            reading.claims |= {"masks": forms} if forms != {"bool"} else {}
            kinds = {"b": "per_item_mask", "h": "per_head_mask", "l": "per_query_mask"}
            reading.claims |= {claim: False for axis, claim in kinds.items() if axis not in axes}
            return
    raise Unclear(
        f"no convention of {word!r} explains what it does with a mask of the usual shapes; give mask='keep', 'drop' or "
        "'additive', and mask_shape=..., or mask=None to judge it without masks"
    )


def _try_the_rest(reading: Reading) -> None:
    """Find whether it is causal, and whether it returns weights."""
    taken, alone = reading.taken, "cross_attention" in reading.claims
    bias, inputs = max(reading.claims.get("bias", {True})), probe_inputs(alone=alone)
    flag = word_of("is_causal", taken)
    reading.claims.pop("causal")
    if reading.formula.causal:
        reading.claims["always_causal"] = True
    elif flag:
        reading.claims["causal"] = _alignment(reading, inputs, bias)
    elif reading.mask is None or "per_query_mask" in reading.claims:
        reading.claims["causal"] = None
    if reading.claims.get("causal") == "top_left":
        reading.claims.pop("causal")
    seen = reading.call(inputs, bias, need_weights=True, is_causal=reading.formula.causal)
    shape = None if seen is None or not isinstance(seen.weights, Tensor) else tuple(seen.weights.shape)
    if shape != (inputs[0].shape[0], CONFIG.n_heads, inputs[0].shape[1], inputs[1].shape[1]):
        reading.claims["returns_weights"] = False


def _alignment(reading: Reading, inputs: tuple[Tensor, Tensor, Tensor], bias: bool) -> str:
    """Return how the causal flag aligns the diagonal; top-left where nothing tells."""
    weights = Weights.random(replace(CONFIG, bias=bias), 0)
    tried = replace(reading, claims=reading.claims | {"causal": "top_left"})
    seen = tried.call(inputs, bias, is_causal=True)
    lengths = inputs[0].shape[1], inputs[1].shape[1]
    right = reading.formula(inputs, weights, causal_mask(*lengths, "bottom_right"))
    apart = lengths[0] != lengths[1]
    return "bottom_right" if apart and seen and near(seen.output, right) else "top_left"
