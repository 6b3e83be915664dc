"""Options of a constructor that trial runs test: widths, dropout, dtypes, and biases in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.inference.alibi import find_alibi
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import policy_of
from mha.implementations.inference.nearest_projections import agree
from mha.implementations.inference.probes import (
    CONFIG,
    SCALES,
    Probe,
    heads_of,
    is_close,
    tolerance_of,
)
from mha.implementations.inference.products import find_products
from mha.implementations.inference.projections import Unclear, Undeclarable
from mha.implementations.inference.sinks import find_sinks
from mha.implementations.inference.softcap import find_softcap
from mha.implementations.inference.windows import find_window
from mha.implementations.process.pristine import as_found
from mha.spec import Rounding, Scores, Weights, causal_mask
from mha.spec.claims import BIASES, COMPUTE_DTYPES, Claims

# Kinds of dropout, the most general first.
KINDS = ("both", True, "output")
PROBABILITY = 0.5
# What the rest is multiplied by: the right factor, and two that clause DRP-2 rejects.
FACTORS = (1 / (1 - PROBABILITY), 1.0, 1 - PROBABILITY)
# How many results of a call are looked at for weights.
MOST_RESULTS = 5
# Of the largest output: far more than rounding in float64, and far less than in float32.
SMALL = 1e-11


def find_options(candidate: Candidate, arguments: Mapping[str, str]) -> None:
    """Claim the options of the constructor that have their effect in trial runs, and how it
    computes in each dtype.
    """
    if "own_head_dim" in candidate.claims and not _takes_any_width(candidate):
        del candidate.claims["own_head_dim"]
    _claim_if_explained(
        candidate, arguments, {"n_kv_heads"}, {"grouped_query": True}, {"n_kv_heads": 1}
    )
    if candidate.cross_attention:
        of_one = candidate.cross_attention == "memory"
        fields, widths = (
            ({"kdim"}, {"kdim": 7, "vdim": 7})
            if of_one
            else ({"kdim", "vdim"}, {"kdim": 7, "vdim": 9})
        )
        _claim_if_explained(candidate, arguments, fields, {"kv_widths": True}, widths)
    _keep_biases_that_can_be_called(candidate)
    named = {"dropout", "output_dropout"} & set(arguments.values())
    if (named or "config" in arguments.values()) and candidate.explained:
        _find_dropout(candidate, has_both=len(named) > 1)
    if not named and "dropout" not in candidate.claims and _is_random_in_training(candidate):
        raise Undeclarable(
            "in training its outputs are random, as if it dropped with a fixed probability; let the"
            " constructor take that as dropout"
        )
    _find_dtypes(candidate)
    _find_scale(candidate)
    find_window(candidate)
    find_softcap(candidate)
    find_sinks(candidate)
    find_alibi(candidate)
    _find_rounding(candidate)
    find_products(candidate)


def _takes_any_width(candidate: Candidate) -> bool:
    """Return whether a module can be built where the number of heads does not divide d_model."""
    config = replace(candidate.config, d_model=CONFIG.d_model + 1)
    try:
        with as_found():
            weights = Weights.random(config, 0)
            candidate.for_trials().build(
                config, weights, dtype=torch.float64, device=candidate.device
            )
    except (Exception, SystemExit):
        return False
    return True


def _claim_if_explained(
    candidate: Candidate,
    arguments: Mapping[str, str],
    fields: set[str],
    claims: dict[str, bool],
    changes: dict[str, int],
) -> None:
    """Add claims if a module that is built with a changed configuration computes the same formula.

    arguments: of the constructor; fields: those that it must take, of `CONSTRUCTOR_NAMES`.
    """
    takes = fields <= set(arguments.values()) or "config" in arguments.values()
    if not (takes and candidate.explained):
        return
    tried = replace(
        candidate, claims=candidate.claims | claims, changes=candidate.changes | changes
    )
    if all(_computes_formula(tried, probe) for probe in tried.probes):
        candidate.claims = tried.claims


def _computes_formula(tried: Candidate, probe: Probe) -> bool:
    """Return whether a module computes its formula on a probe, whose key and value have the
    configured widths.
    """
    query, key, value = probe.inputs
    widths = tried.config.key_width, tried.config.value_width
    if widths != (CONFIG.d_model, CONFIG.d_model):
        generator = torch.Generator().manual_seed(3)
        key, value = (
            torch.randn(*key.shape[:2], width, generator=generator, dtype=key.dtype)
            for width in widths
        )
        value = key if tried.cross_attention == "memory" else value
    result = tried.call_plainly((query, key, value))
    return result is not None and is_close(
        result.output, tried.formula((query, key, value), tried.weights, None)
    )


def possible_biases(candidate: Candidate) -> set[bool | str]:
    """Return the values of `Config.bias` that can be built: of each module that is built, the most
    that has a place.

    Raises Unclear if the weights can be loaded with none.
    """
    adapter, problem = candidate.for_trials(), ""
    absent = {
        role for key, path in candidate.parameters.items() if path is None for role in key[2:]
    }
    most_first = sorted(BIASES, key=lambda bias: -len(_biased_roles(bias)))
    built: dict[tuple[Any, ...], bool | str] = {}
    for bias in (each for each in most_first if absent.isdisjoint(_biased_roles(each))):
        config = replace(candidate.config, bias=bias)
        weights = Weights.random(config, 0)
        try:
            with as_found():
                attention = adapter.build(
                    config, weights, dtype=torch.float64, device=candidate.device
                )
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


def _keep_biases_that_can_be_called(candidate: Candidate) -> None:
    """Claim no bias with which the module can be built, but not called."""
    biases = candidate.claims.get("bias", {True, False})
    called = {
        bias
        for bias in biases
        if replace(candidate, claims=candidate.claims | {"bias": {bias}}).call_plainly(
            candidate.probes[0].inputs
        )
        is not None
    }
    if called and called != set(biases):
        candidate.claims["bias"] = called


def _find_dtypes(candidate: Candidate) -> None:
    """Claim the dtypes in which the module can be called, and float64 only if it is understood as
    in float32.
    """
    dtypes = {
        name
        for name in COMPUTE_DTYPES
        if replace(candidate, dtype=getattr(torch, name)).call_plainly(candidate.probes[0].inputs)
        is not None
    }
    if candidate.dtype != torch.float64 or candidate.empty_row != policy_of(candidate):
        dtypes.discard("float64")
    if dtypes and dtypes != Claims().dtypes:
        candidate.claims["dtypes"] = dtypes


def _find_scale(candidate: Candidate) -> None:
    """Claim an explicit scale, if the module or kernel has a parameter for one that multiplies the
    scores.
    """
    if not (candidate.explained and candidate.signature.scale):
        return
    usual = SCALES[candidate.formula.scale](candidate.config.head_dim, candidate.config.d_model)
    claimed = candidate.claims.get("scores", Scores())
    tried = replace(candidate, claims=candidate.claims | {"scores": replace(claimed, scale="any")})
    inputs, weights = candidate.probes[0].inputs, candidate.weights

    alignment = (
        candidate.claims.get("causal", Claims().causal) if candidate.signature.is_causal else None
    )
    forms = [(tried.formula, tried.plainly_causal)]
    if alignment and not tried.plainly_causal:
        forms.append((replace(tried.formula, causal=alignment), True))

    def follows(factor: float) -> bool:
        """Return whether calls with the usual scale times a factor give what queries times that
        give, causal too.
        """
        queries = {name: factor * x for name, x in weights.named() if name in ("w_q", "b_q")}
        for formula, is_causal in forms:
            result = tried.call(inputs, is_causal=is_causal, scale=factor * usual)
            expected = formula(inputs, replace(weights, **queries), None)
            if result is None or not is_close(result.output, expected):
                return False
        return True

    if follows(2.0):
        candidate.claims["scores"] = replace(
            claimed, scale="any" if follows(0.0) and follows(-1.0) else "positive"
        )


def _find_rounding(candidate: Candidate) -> None:
    """Claim that float64 scores are cast to float32 for the softmax, if only that gives its outputs
    to the last digits.

    Of what else is in float32, nothing is claimed: clause NUM-2 is about it.
    """
    if not candidate.explained or "float64" not in candidate.claims.get("dtypes", Claims().dtypes):
        return
    inputs = candidate.probes[0].inputs
    result = candidate.call_plainly(inputs)
    formulas = candidate.formula, replace(candidate.formula, softmax=torch.float32)
    outputs = [formula(inputs, candidate.weights, None) for formula in formulas]
    if result is not None and [is_close(result.output, each, SMALL) for each in outputs] == [
        False,
        True,
    ]:
        candidate.claims["rounding"] = Rounding(softmax_in_float32=True)


def _find_dropout(candidate: Candidate, *, has_both: bool) -> None:
    """Claim the kind of dropout that the outputs in training show; some kind, if it drops in
    evaluation too.

    has_both: whether the constructor takes a probability for the weights and one for the output.
    """
    changes = candidate.changes | {"dropout": PROBABILITY}
    tried = [
        replace(candidate, claims=candidate.claims | {"dropout": kind}, changes=changes)
        for kind in KINDS
    ]
    shown = [each for each in tried if dropped(each) == each.claims["dropout"]]
    for each in shown[:1] or filter(_drops_in_evaluation, tried[:1]):
        candidate.claims["dropout"] = each.claims["dropout"]
    if has_both and candidate.claims.get("dropout") == "both":
        candidate.claims["dropout"] = "each"
    if "dropout" not in candidate.claims:
        x = candidate.probes[0].inputs[0][:, :1]
        takes_one_key = tried[0].call_plainly((x, x, x), training=True) is not None
        candidate.drops_otherwise = takes_one_key and _is_random_in_training(tried[0])


def _drops_in_evaluation(tried: Candidate) -> bool:
    probe = tried.probes[0]
    result = tried.call_plainly(probe.inputs)
    return result is not None and not is_close(
        result.output, tried.formula(probe.inputs, tried.weights, None)
    )


def _is_random_in_training(candidate: Candidate) -> bool:
    """Return whether two calls in training give different outputs, though one in evaluation is
    explained.
    """
    results = []
    for seed in range(2) if candidate.explained else ():
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            results.append(candidate.call_plainly(candidate.probes[0].inputs, training=True))
    return len(results) == 2 and None not in results and not agree(*results)


def dropped(tried: Candidate) -> bool | str | None:
    """Return what is dropped in training: True for weights, "output" or "both", None for anything
    else.

    With one key, a head's context is its value, or zero where the weight is dropped: an output is
    one of the sums over subsets of the heads, and zero where the output is dropped.
    """
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 1, CONFIG.d_model, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        result = tried.call_plainly((x, x, x), training=True)
    if result is None or not isinstance(result.output, Tensor) or result.output.shape != x.shape:
        return None
    output = result.output.detach().double()[:, 0]
    found = (_dropped_with(factor, output, tried, x) for factor in FACTORS)
    return next((kind for kind in found if kind), None)


def _dropped_with(factor: float, output: Tensor, tried: Candidate, x: Tensor) -> bool | str | None:
    """Return what is dropped, if what is kept is multiplied by a factor; output: (N, D), of inputs
    x (N, 1, D).
    """
    every = _outputs(tried, x, torch.ones(1, CONFIG.n_heads, dtype=torch.float64))[0]
    sums = _outputs(
        tried,
        x,
        factor * torch.tensor([*product((0.0, 1.0), repeat=CONFIG.n_heads)], dtype=torch.float64),
    )
    distance, zero = tolerance_of(tried.dtype) * float(output.abs().max()), output == 0
    if bool(_near(output, sums, distance).all(-1).any(0).all()):
        return None if bool(_near(output, sums[-1], distance).all()) else True
    if not bool(zero.any()):
        return None
    if bool((zero | _near(output, every * factor, distance)).all()):
        return "output"
    return (
        "both"
        if bool((zero | _near(output, sums * factor, distance)).all(-1).any(0).all())
        else None
    )


def _outputs(tried: Candidate, x: Tensor, factors: Tensor) -> Tensor:
    """Return the outputs (N, B, D) for inputs (B, 1, D) if the weights of the heads are factors (N,
    H).
    """
    weights = tried.weights
    values = heads_of(x, weights, "v")[:, :, 0]
    contexts = (values * factors[:, None, :, None]).flatten(2)
    return F.linear(contexts, weights.w_o, weights.b_o) if tried.formula.projected else contexts


def _near(output: Tensor, expected: Tensor, distance: float) -> Tensor:
    return (output - expected).abs() <= distance


def _only_place(
    candidate: Candidate, places: Iterable[str | int], shape: tuple[int, ...]
) -> str | int | None:
    """Return the one of several places at which a call has tensors of the shape of weights, with
    rows of sum 1.
    """
    found = [
        place for place in places if holds_weights(replace(candidate, weights_at=place), shape)
    ]
    return found[0] if len(found) == 1 else None


def holds_weights(tried: Candidate, shape: tuple[int, ...]) -> bool:
    """Return whether a call returns weights of a shape, with rows of sum 1."""
    result = tried.call_plainly(tried.probes[0].inputs, need_weights=True)
    return _are_weights(result.weights if result else None, shape)


def _are_weights(returned: object, shape: tuple[int, ...]) -> bool:
    if not isinstance(returned, Tensor) or tuple(returned.shape) != shape:
        return False
    sums = returned.double().sum(-1)
    return bool(_near(sums, torch.ones_like(sums), tolerance_of(returned.dtype)).all())


def find_weights(candidate: Candidate) -> None:
    """Set whether it returns weights (B, H, L, S), where they are, and the shape of what it
    returns.
    """
    probe = candidate.probes[0]
    result = candidate.call(probe.inputs, need_weights=True, is_causal=candidate.plainly_causal)
    query, key, _ = probe.inputs
    expected = (query.shape[0], CONFIG.n_heads, query.shape[1], key.shape[1])
    returned = result.weights if result else None
    weights = returned if isinstance(returned, Tensor) else query.new_empty(0)
    if tuple(weights.shape) == expected and bool(((weights >= 0) & (weights <= 1)).all()):
        return  # to be judged
    candidate.weights_at = _only_place(candidate, range(MOST_RESULTS), expected)
    if candidate.weights_at is None and tuple(weights.shape) != expected:
        candidate.weights_at = _only_place(candidate, candidate.left_behind(), expected)
        candidate.claims |= {"returns_weights": False} if candidate.weights_at is None else {}
        candidate.beside = _shape_of(weights, expected)
    elif candidate.weights_at is None and _are_scores(candidate, weights):
        candidate.claims["returns_weights"] = False
        candidate.beside = "per head, but the scores before the softmax"


def _shape_of(returned: Tensor, expected: tuple[int, ...]) -> str:
    """Return what is returned beside the output, in words, if its rows may be weights; "" for
    anything else.
    """
    if tuple(returned.shape) == (expected[0], *expected[2:]):
        return "per head, but of shape (b, l, s)"
    return (
        f"per head, but of shape {tuple(returned.shape)}"
        if tuple(returned.shape[-2:]) == expected[2:]
        else ""
    )


def _are_scores(candidate: Candidate, returned: Tensor | None) -> bool:
    """Return whether a tensor (B, H, L, S) that nobody asked for holds the scores, rather than
    incorrect weights.
    """
    if (
        candidate.signature.need_weights
        or not candidate.explained
        or not isinstance(returned, Tensor)
    ):
        return False
    query, key, _ = candidate.probes[0].inputs
    scores, alignment = (
        candidate.formula.scores(query, key, candidate.weights),
        candidate.formula.causal,
    )
    if alignment and returned.shape == scores.shape:  # what is hidden may have been filled
        hidden = ~causal_mask(scores.shape[2], scores.shape[3], alignment, scores.device)
        returned, scores = returned.masked_fill(hidden, 0.0), scores.masked_fill(hidden, 0.0)
    return is_close(returned, scores)
