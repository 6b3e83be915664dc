"""Causal flags that do not do what they say, found by calls with each value."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mha.implementations.adapters.constructor_names import causal_flags
from mha.implementations.adapters.names import names_used
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import agree, with_formula
from mha.implementations.inference.probes import EQUAL_LENGTHS, Probe

# What a module of transformers reads from its config to choose how it attends.
CHOICE = "_attn_implementation"
IDLE = "of the constructor has no effect"


def fault_of_flag(candidate: Candidate) -> str:
    """Return what is wrong with the causal flag of a call: it has no effect, or the opposite one.

    Where that is so for calls that are not to be causal, the formula is a causal one.
    """
    flag, is_causal = candidate.signature.is_causal, candidate.formula.causal is not None
    if flag is None:
        return ""
    for masked in _masked(candidate):
        plain, causal = masked | {"is_causal": False}, masked | {"is_causal": True}
        if _differ(candidate, candidate, plain, causal):
            return f"calls are causal with {flag}=False" if is_causal else ""
    return f"{flag} has no effect: {_all_calls(is_causal)}"


def not_causal(candidate: Candidate) -> Iterator[Candidate]:
    """Yield what is causal by default, as explained without a mask, built without that."""
    if not (candidate.explained and candidate.formula.causal):
        return
    parameters = candidate.declared.constructor_parameters
    for flag in causal_flags(parameters):
        if parameters[flag].default is True:
            built = _built_with(candidate, flag, value=False)
            tried = with_formula(replace(built, explained=False, left_out=f"{flag}=True"))
            if tried and not tried.formula.causal:
                yield tried


def _built_with(candidate: Candidate, flag: str, *, value: bool) -> Candidate:
    """Return the candidate with a flag of its constructor set."""
    return replace(candidate, declared=candidate.declared.built_with(flag, value))


def with_idle_constructor_flag(candidate: Candidate) -> tuple[Candidate, str]:
    """Return the candidate built with the value of a causal flag that its constructor ignores.

    It claims what that value says, and what is wrong with the flag is beside it; "" for nothing. A
    flag that is set by a `functools.partial` is left alone: its other value is not to be judged.
    Nor is it where calls are not causal, as its default says: such a flag is often for another
    class that reads it. It is noted.
    """
    parameters = candidate.declared.constructor_parameters
    for flag in causal_flags(parameters):
        default = value = parameters[flag].default
        if default is inspect.Parameter.empty:
            value = False
        is_set = flag in candidate.declared.keywords
        if is_set or not isinstance(value, bool) or _may_count_elsewhere(candidate, flag):
            continue
        fault = _fault_of_constructor(candidate, flag, value=value)
        if not fault:
            continue
        is_causal = candidate.formula.causal is not None
        if default is False and not is_causal and IDLE in fault:
            return replace(candidate, idle_flag=flag), ""
        wrong = not is_causal  # the value that says something else than it does
        judged = _claiming(_built_with(candidate, flag, value=wrong), always=wrong)
        return judged, f"{fault}; judged with {flag}={wrong}"
    return candidate, ""


def _may_count_elsewhere(candidate: Candidate, flag: str) -> bool:
    """Return whether a flag that makes no call causal may have its effect where no trial run comes.

    It may say that masks count, which are given by an option that is not understood; or it may be
    for another way of attending than the config chooses: modules of transformers have one, "eager",
    whose masks are made by the model.
    """
    if candidate.formula.causal:
        return False
    declared = candidate.declared
    if flag == "masked" and declared.mask is None:
        parameters = declared.forward_parameters.values()
        if any(each.default is not each.empty for each in parameters):
            return True
    return CHOICE in names_used(declared.built_class)


def _claiming(candidate: Candidate, *, always: bool) -> Candidate:
    """Return what is not causal with the claim that it always is, or the other way round."""
    declared = candidate.declared
    through_mask = declared.mask is not None and "l" in declared.masks.axes
    claiming = candidate.trying(is_causal=always).without_claims("always_causal")
    if always:
        alignment = claiming.claims.get("causal") or "top_left"
        return claiming.claiming(always_causal=True, causal=alignment)
    if through_mask or candidate.signature.is_causal:
        return claiming
    return claiming.claiming(causal=None)


def _fault_of_constructor(candidate: Candidate, flag: str, *, value: bool) -> str:
    """Return what is wrong with a causal flag of the constructor, whose value was this one."""
    is_causal = candidate.formula.causal is not None
    # Without claims about it, no causal mask is joined to a mask.
    plain = candidate.without_claims("always_causal", "causal").claiming(causal=None)
    one = _built_with(plain, flag, value=value)
    other = _built_with(plain, flag, value=not value)
    if not _flag_counts(one, other):
        if plain.signature.is_causal:
            return f"{flag} {IDLE}"
        return f"{flag} {IDLE}: {_all_calls(is_causal)}"
    if is_causal == value or not candidate.explained:
        return ""
    opposite = with_formula(other)
    is_opposite = opposite is not None and bool(opposite.formula.causal) == value
    # Such a flag may be True for something else than causal calls, unless False makes them causal.
    if value and not is_opposite:
        return ""
    makes = "not causal" if value else "causal"
    fault = f"{flag}={value} of the constructor makes calls {makes}"
    if is_opposite:
        fault = f"{fault}, and {flag}={not value} the other way round"
    return fault


def _flag_counts(one: Candidate, other: Candidate) -> bool:
    """Return whether calls differ between two candidates with other values of a flag.

    The calls are those in which it may have its effect.
    """
    for options in ({"training": True}, *_masked(one)):
        if _differ(one, other, options, options):
            return True
    # It may be causal in self-attention only, as where a memory is left out.
    if one.cross_attention and _differ(_of_self(one), _of_self(other), {}, {}):
        return True
    if not one.signature.is_causal:
        return False
    causal = {"is_causal": True}
    if _differ(one, other, causal, causal):
        return True
    return _differ(one.trying(flag_left_out=True), other.trying(flag_left_out=True), {}, {})


def _of_self(candidate: Candidate) -> Candidate:
    return candidate.claiming(cross_attention=False)


def _masked(candidate: Candidate) -> list[dict[str, Any]]:
    """Return the options of a call without a mask, and of one with a mask if it takes any.

    The axes of the mask stand for it.
    """
    if candidate.declared.mask is None:
        return [{}]
    return [{}, {"mask": "bs" if candidate.claimed("per_item_mask") else "s"}]


def _differ(
    one: Candidate, other: Candidate, options: Mapping[str, Any], others: Mapping[str, Any]
) -> bool:
    """Return whether a call gives another output with other options, or raises with one of them.

    Without a call that raises with neither of them, this is unknown, and so true.
    """
    called = False
    for probe in (*one.probes, one.trying(special=EQUAL_LENGTHS).probes[0]):
        result = one.call(probe.inputs, **_with_mask(one, probe, options))
        other_result = other.call(probe.inputs, **_with_mask(other, probe, others))
        if result is None and other_result is None:
            continue
        called = True
        if not agree(result, other_result):
            return True
    return not called


def _with_mask(candidate: Candidate, probe: Probe, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call with a mask that hides some keys, where they name its axes."""
    if "mask" not in options:
        return dict(options)
    mask = candidate.mask_of(probe, options["mask"], causal=True)[:, :1, :1]
    return {**options, "mask": mask}


def _all_calls(is_causal: bool) -> str:
    return f"{'each' if is_causal else 'no'} call is causal"
