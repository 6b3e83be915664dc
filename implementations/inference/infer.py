"""`infer`: a plain module class as an implementation, and how that was understood."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import indent

import torch
from torch import Tensor, nn

from mha.implementations.adapters.calling import ARGUMENT_WORDS, input_names, takes_one_input
from mha.implementations.adapters.module import ModuleImplementation, construct, constructor_words
from mha.implementations.errors import ImplementationError
from mha.implementations.inference.candidate import Reading, word_of
from mha.implementations.inference.describe import code_of, declaring, rows_of, table
from mha.implementations.inference.masks import try_masks
from mha.implementations.inference.probes import CONFIG, formulas, near, probes
from mha.implementations.inference.projections import Unclear, maps
from mha.spec import Weights, causal_mask


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


def infer(constructor: Callable[..., nn.Module], label: str = "") -> Inference:
    """Infer how a class, or a `functools.partial` of one, is built and called, and what it can do.

    label: its name, by default that of the class.

    Raises ImplementationError, with what to declare, for what names, shapes and trials leave open.
    """
    label = label or str(getattr(constructor, "__name__", "module"))
    words = constructor_words(label, constructor)
    try:
        module = construct(constructor, words, CONFIG)
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "; derive a class whose constructor takes d_model and n_heads" if "config" in words.values() else ""
        raise ImplementationError(f"{label}(d_model=10, n_heads=2) raised {told}{hint}") from error
    try:
        reading = _understood(Reading(constructor, {}, label), module, words)
        try_masks(reading)
        _try_the_rest(reading)
    except Unclear as unclear:
        raise ImplementationError(f"{label} cannot be understood alone: {unclear}{declaring(label)}") from None
    rows = rows_of(reading, module, words)
    return Inference(reading.implementation(), tuple(rows), code_of(label, reading.options(), reading.claims))


def _understood(empty: Reading, module: nn.Module, words: dict[str, str]) -> Reading:
    """Return the one reading of projections and layout that explains what the module computes."""
    taken = empty.taken
    alone, names = takes_one_input(taken), input_names(taken)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    flags = {"self", *(word for known in ARGUMENT_WORDS.values() for word in known)}
    needed = [
        name for name, p in taken.items() if p.default is p.empty and name not in flags and p.kind not in variable
    ]
    if not alone and not names and len(needed) != 3:
        raise Unclear(f"forward({', '.join(taken)}) takes neither one input nor three; give call=... that calls it")
    found = [replace(empty, map=each, layout=layout) for each in maps(module, CONFIG) for layout in ("b l d", "l b d")]
    for candidate in found:
        candidate.claims = {"causal": None, **({"cross_attention": False} if alone else {})}
    biases, problem = _biases(found[0], words)
    if not biases:
        raise Unclear(problem)
    for candidate in found:
        candidate.claims |= {} if len(biases) == 2 else {"bias": biases}
    explaining = [candidate for candidate in found if _explains(candidate)]
    if not explaining and not alone and not names:
        told = f"forward({', '.join(taken)}) does not name its inputs"
        raise Unclear(f"{told}, and as query, key, value nothing explains it; give call=... that calls it")
    if all(candidate.problem for candidate in found):
        raise Unclear(f"each call raises; the first {found[0].problem}")
    if len(explaining) == 1:
        return explaining[0]
    first = found[0]
    seen = first.call(probes(alone=alone)[0].inputs)
    unlike = {str({key: place for key, place in each.map.items() if key != "w_o"}) for each in found}
    if explaining or len(unlike) > 1:
        what = "several readings of its projections explain" if explaining else "no reading of its projections explains"
        ways = sorted({str(each.map) for each in explaining or found})
        more = f"; and {len(ways) - 2} more" if len(ways) > 2 else ""
        raise Unclear(f"{what} what it computes ({'; '.join(ways[:2])}{more})")
    if seen is None or not isinstance(seen.output, Tensor):
        given = seen.output if seen else None
        several = f" of {len(given)}" if isinstance(given, tuple) else ""
        told = first.problem or f"it returns {type(given).__name__}{several}"
        raise Unclear(f"it gives no output that could be read ({told}); give call=... that returns the output")
    return first


def _explains(candidate: Reading) -> bool:
    """Whether one formula gives what the module gives, on both probes; then it is the candidate's."""
    for formula in formulas():
        if formula.projected != (candidate.map.get("w_o") is not None):
            continue
        for probe in probes(alone=candidate.alone):
            seen = candidate.call(probe.inputs)
            if seen is None or not near(seen.output, formula(probe.inputs, candidate.weights, None)):
                break
        else:
            candidate.formula, candidate.explained = formula, True
            return True
    return False


def _biases(reading: Reading, words: dict[str, str]) -> tuple[set[bool], str]:
    """Return which values of `Config.bias` can be built, and why none, if none; without all biases, there are none.

    A constructor that takes `bias` promises both; one that takes `qkv_bias` may keep that of the output.
    """
    adapter, found, problem = reading.implementation(), set(), ""
    for bias in (True, False):
        config = replace(CONFIG, bias=bias)
        try:
            adapter.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
            found.add(bias)
        except (Exception, SystemExit) as error:
            problem = f"its weights cannot be loaded: {error}"
    if found == {True, False} and not {"bias", "use_bias"} & set(words):
        built = [construct(reading.constructor, words, replace(CONFIG, bias=bias)) for bias in (True, False)]
        more, less = (sum(parameter.numel() for parameter in module.parameters()) for module in built)
        found = found if more - less == 4 * CONFIG.d_model else {True}
    return found, problem


def _try_the_rest(reading: Reading) -> None:
    """Find whether it is causal, whether it returns weights, and whether one head is built alike."""
    flag, (probe, _) = word_of("is_causal", reading.taken), probes(alone=reading.alone)
    reading.claims.pop("causal")
    if reading.formula.causal:
        reading.claims["always_causal"] = True
    elif flag:
        alignment = _alignment(reading)
        reading.claims |= {} if alignment == "top_left" else {"causal": alignment}
    elif reading.mask is None or "per_query_mask" in reading.claims:
        reading.claims["causal"] = None
    seen = reading.call(probe.inputs, need_weights=True, is_causal=reading.formula.causal)
    query, key, _ = probe.inputs
    wanted = (query.shape[0], CONFIG.n_heads, query.shape[1], key.shape[1])
    weights = seen.weights if seen else None
    if not isinstance(weights, Tensor) or tuple(weights.shape) != wanted:
        reading.claims["returns_weights"] = False
    reading.weights_shape = tuple(weights.shape) if isinstance(weights, Tensor) else None
    one = replace(reading.config, n_heads=1)
    try:
        reading.implementation().build(one, Weights.random(one, 0), dtype=torch.float64, device="cpu")
    except ImplementationError as error:
        raise Unclear(
            f"with one head it is built otherwise: {error}; give parameters=... as a function of Config"
        ) from None
    except (Exception, SystemExit):
        return  # a refusal, which is for the judge to see


def _alignment(reading: Reading) -> str:
    """Return how the causal flag aligns the diagonal; top-left where nothing tells."""
    probe = probes(alone=reading.alone)[0]
    tried = replace(reading, claims=reading.claims | {"causal": "top_left"}, problem="")
    seen = tried.call(probe.inputs, is_causal=True)
    if seen is None:
        word = word_of("is_causal", reading.taken)
        raise Unclear(f"{word}=True raises {tried.problem}; give call=... that gives what it needs")
    lengths = probe.inputs[0].shape[1], probe.inputs[1].shape[1]
    right = reading.formula(probe.inputs, reading.weights, causal_mask(*lengths, "bottom_right"))
    return "bottom_right" if not reading.alone and near(seen.output, right) else "top_left"
