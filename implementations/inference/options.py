"""Options of a constructor that trial runs test: widths, heads, biases, dtypes, and rounding."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from mha.implementations.discovery.errors import ImplementationError
from mha.implementations.inference.biases import biased_roles
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import policy_of
from mha.implementations.inference.nearest_projections import (
    outputs_of,
    returns_outputs,
    with_formula,
)
from mha.implementations.inference.probes import CONFIG, Probe, is_close
from mha.implementations.inference.projections import FEWER_KEY_HEADS, Unclear, Undeclarable
from mha.implementations.process.pristine import as_found
from mha.spec import Config, Implementation, Rounding, Weights
from mha.spec.claims import BIASES, COMPUTE_DTYPES, Claims

# Of the largest output: far more than rounding in float64, and far less than in float32.
SMALL = 1e-11
# Of heads, beside that of trial runs.
OTHER_WIDTHS = (4, 8, 24, 32)
SEVERAL_HEADS = frozenset(range(2, 9))


def build(adapter: Implementation, config: Config, device: str) -> Any:
    """Return what an adapter builds for a configuration, with weights; raises what that raises."""
    with as_found():
        weights = Weights.random(config, 0)
        return adapter.build(config, weights, dtype=torch.float64, device=device)


def find_own_head_dim(candidate: Candidate) -> Candidate:
    """Claim that the width of a head may be given, if the constructor, or its config, takes one."""
    fields = candidate.arguments.values()
    if {"head_dim", "config"}.isdisjoint(fields):
        return candidate
    claiming = candidate.claiming(own_head_dim=True)
    if candidate.explained and _gives_formula(claiming):
        return claiming
    tried = replace(claiming, explained=False)
    explained = with_formula(tried)
    if explained and explained.formula == candidate.formula:
        return candidate.claiming(own_head_dim=True)
    is_assumed = "head_dim" in fields and candidate.evidence != "tested"
    if is_assumed and returns_outputs(tried):
        return candidate.claiming(own_head_dim=True)
    return _noting_one_width(candidate)


def _gives_formula(tried: Candidate) -> bool:
    """Return whether plain calls give the formula, before it is known how they are causal."""
    outputs = outputs_of(tried)
    for output, probe in zip(outputs, tried.probes, strict=False):
        if not is_close(output, tried.formula(probe.inputs, tried.weights, None)):
            return False
    return len(outputs) == len(tried.probes)


def _noting_one_width(candidate: Candidate) -> Candidate:
    """Return the candidate with a row about a width of heads that may be given, and never works."""
    named = [name for name, field in candidate.arguments.items() if field == "head_dim"]
    if not named or "n_heads" not in candidate.arguments.values():
        return candidate
    for width in OTHER_WIDTHS:
        tried = candidate.claiming(own_head_dim=True).trying(changes={"d_head": width})
        if _can_be_called(tried) or not (tried.calls.raised and tried.calls.raised.place):
            return candidate
    found = f"{named[0]} raises for every other width than d_model // n_heads: {tried.problem}"
    return candidate.noting("head width", found)


def keep_own_head_dim(candidate: Candidate) -> Candidate:
    """Claim no width of a head where the number of heads has to divide d_model all the same."""
    if "own_head_dim" not in candidate.claims:
        return candidate
    with suppress(Exception, SystemExit):
        config = replace(candidate.config, d_model=CONFIG.d_model + 1)
        build(candidate.implementation(), config, candidate.device)
        return candidate
    return candidate.without_claims("own_head_dim")


def find_grouped_query(candidate: Candidate) -> Candidate:
    """Claim fewer key heads, if the constructor takes their number."""
    if candidate.config.n_heads == 1:
        return candidate
    return _claim_if_explained(candidate, {"n_kv_heads"}, "grouped_query", {"n_kv_heads": 1})


def find_kv_widths(candidate: Candidate) -> Candidate:
    """Claim other widths of key and value, if the constructor takes them."""
    if not candidate.cross_attention:
        return candidate
    if candidate.cross_attention == "memory":  # which is key and value
        return _claim_if_explained(candidate, {"kdim"}, "kv_widths", {"kdim": 7, "vdim": 7})
    return _claim_if_explained(candidate, {"kdim", "vdim"}, "kv_widths", {"kdim": 7, "vdim": 9})


def _claim_if_explained(
    candidate: Candidate, fields: set[str], claim: str, changes: dict[str, int]
) -> Candidate:
    """Claim what a module does that is built with a changed configuration, if the formula stays.

    fields: of `CONSTRUCTOR_NAMES`, those that the constructor must take.
    """
    taken = set(candidate.arguments.values())
    if not candidate.explained or not (fields <= taken or "config" in taken):
        return candidate
    claiming = candidate.claiming(**{claim: True})
    tried = claiming.trying(changes={**candidate.trial.changes, **changes})
    return claiming if tried.passes(_computes_formula) else candidate


def _computes_formula(tried: Candidate, probe: Probe) -> bool:
    """Return whether a module computes its formula on a probe of the configured widths."""
    query, key, value = probe.inputs
    widths = tried.config.key_width, tried.config.value_width
    if widths != (CONFIG.d_model, CONFIG.d_model):
        generator = torch.Generator().manual_seed(3)
        key, value = (
            torch.randn(*key.shape[:2], width, generator=generator, dtype=key.dtype)
            for width in widths
        )
        if tried.cross_attention == "memory":
            value = key
    result = tried.call_plainly((query, key, value))
    if result is None:
        return False
    return is_close(result.output, tried.formula((query, key, value), tried.weights, None))


def possible_biases(candidate: Candidate) -> set[bool | str]:
    """Return the values of `Config.bias` that can be built.

    Of several that build the same module, it is the one with most biases.

    Raises Unclear if the weights can be loaded with none.
    """
    absent = set[str]()
    for key, path in candidate.declared.parameters.items():
        if path is None:
            absent.update(key[2:])
    of_module = dict[tuple[Any, ...], bool | str]()
    adapter, problem = candidate.implementation(), ""
    for bias in sorted(BIASES, key=lambda bias: -len(biased_roles(bias))):
        if not absent.isdisjoint(biased_roles(bias)):
            continue
        try:
            attention = build(adapter, replace(candidate.config, bias=bias), candidate.device)
        except (Exception, SystemExit) as error:
            problem = f"its weights cannot be loaded: {error}"
            continue
        held = tuple((name, parameter.shape) for name, parameter in attention.named_parameters())
        of_module.setdefault(held, bias)
    if not of_module:
        raise Unclear(problem)
    return set(of_module.values())


def keep_biases_that_can_be_called(candidate: Candidate) -> Candidate:
    """Claim no bias with which the module can be built, but not called."""
    biases, called = candidate.claimed("bias"), set[bool | str]()
    for bias in biases:
        if _can_be_called(candidate.claiming(bias={bias})):
            called.add(bias)
    if not called or called == set(biases):
        return candidate
    return candidate.claiming(bias=called)


def _can_be_called(candidate: Candidate) -> bool:
    return candidate.call_plainly(candidate.probes[0].inputs) is not None


def find_dtypes(candidate: Candidate) -> Candidate:
    """Claim the dtypes in which it can be called, and float64 only if it is as in float32."""
    dtypes = set[str]()
    for name in COMPUTE_DTYPES:
        if _can_be_called(candidate.trying(dtype=getattr(torch, name))):
            dtypes.add(name)
    is_tried_in_double = candidate.trial.dtype == torch.float64
    if not is_tried_in_double or candidate.empty_row != policy_of(candidate):
        dtypes.discard("float64")
    if not dtypes or dtypes == Claims().dtypes:
        return candidate
    return candidate.claiming(dtypes=dtypes)


def find_rounding(candidate: Candidate) -> Candidate:
    """Claim that float64 scores are cast to float32 for the softmax, if only that is exact.

    Of what else is in float32, nothing is claimed: clause NUM-2 is about it.
    """
    if not candidate.explained or "float64" not in candidate.claimed("dtypes"):
        return candidate
    inputs, weights = candidate.probes[0].inputs, candidate.weights
    result = candidate.call_plainly(inputs)
    if result is None:
        return candidate
    in_double = candidate.formula(inputs, weights, None)
    in_single = replace(candidate.formula, softmax=torch.float32)(inputs, weights, None)
    if is_close(result.output, in_double, SMALL) or not is_close(result.output, in_single, SMALL):
        return candidate
    return candidate.claiming(rounding=Rounding(softmax_in_float32=True))


def find_numbers_of_heads(candidate: Candidate) -> Candidate:
    """Claim no single head if the weights of a module with one are found elsewhere.

    They are, for instance, without an output projection. Raises Unclear if those of other numbers
    of heads are, too.
    """
    # One key head for every two heads, or for every 16, has one for a single group.
    if "multi_query" in candidate.claims:
        for n_heads in (4, 8, 16, 32):
            if _not_loaded_with(candidate, n_heads):
                raise Undeclarable(FEWER_KEY_HEADS)
    problem = _not_loaded_with(candidate, 1)
    if not problem:
        return candidate
    if _not_loaded_with(candidate, 3):
        raise Unclear(
            f"with one head, its parameters differ: {problem}; pass parameters=... as a function of"
            " Config"
        )
    claiming = candidate.claiming(sizes=replace(candidate.sizes, n_heads=SEVERAL_HEADS))
    return claiming.noting("heads", f"several: with one, {problem}")


def _not_loaded_with(candidate: Candidate, n_heads: int) -> str:
    """Return why weights cannot be loaded into a module with this many heads; "" if they can.

    What the constructor rejects, the clauses about construction report. Where heads may have a
    width of their own, they also have the usual one.
    """
    for d_head in dict.fromkeys((candidate.config.d_head, None)):
        config = replace(candidate.config, n_heads=n_heads, d_model=12 * n_heads, d_head=d_head)
        with suppress(Exception, SystemExit):
            try:
                build(candidate.implementation(), config, candidate.device)
            except ImplementationError as error:
                return str(error)
    return ""
