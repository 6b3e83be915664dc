"""Causal flags that do not do what they say: found by calls with each value, and judged where they
are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mha.implementations.adapters.constructor_names import causal_flags
from mha.implementations.adapters.names import names_used
from mha.implementations.inference.candidate import Candidate, Kind
from mha.implementations.inference.nearest_projections import agree, find_formula
from mha.implementations.inference.probes import EQUAL_LENGTHS

# What a module of transformers reads from its config to choose how it attends.
CHOICE = "_attn_implementation"
IDLE = "of the constructor has no effect"


def fault_of_flag(candidate: Candidate) -> str:
    """Return what is wrong with the causal flag of a call, if it has no effect, or the opposite
    one.

    Where that is so for calls that are not to be causal, the formula is a causal one.
    """
    flag, is_causal = candidate.signature.is_causal, bool(candidate.formula.causal)
    if flag is None:
        return ""
    given = [{"is_causal": False}, {"is_causal": True}]
    if not any(
        _differ(candidate, candidate, *(masked | each for each in given))
        for masked in _masked(candidate)
    ):
        return f"{flag} has no effect: {_all_calls(is_causal)}"
    return f"calls are causal with {flag}=False" if is_causal else ""


def not_causal(candidate: Kind) -> Iterator[Kind]:
    """Yield what is causal by default, as explained without a mask, built without that."""
    parameters = candidate.constructor_parameters
    flags = [name for name in causal_flags(parameters) if parameters[name].default is True]
    for flag in flags if candidate.explained and candidate.formula.causal else ():
        built = candidate.built_with(flag, value=False)
        tried = replace(built, explained=False, left_out=f"{flag}=True")
        if find_formula(tried) and not tried.formula.causal:
            yield tried


def with_idle_constructor_flag(candidate: Kind) -> Kind:
    """Build a module with the value of a causal flag that its constructor ignores, and claim what
    that value says.

    A flag that is set by a `functools.partial` is left alone: its other value is not to be judged.
    Nor is it where calls are not causal, as its default says: such a flag is often for another
    class that reads it. It is noted.
    """
    parameters = candidate.constructor_parameters
    for flag in () if candidate.flag_fault or candidate.hint else causal_flags(parameters):
        default = parameters[flag].default
        value = False if default is parameters[flag].empty else default
        if (
            flag in candidate.keywords
            or not isinstance(value, bool)
            or _may_count_elsewhere(candidate, flag)
        ):
            continue
        if fault := _fault_of_constructor(candidate, flag, value=value):
            if default is False and not candidate.formula.causal and IDLE in fault:
                return replace(candidate, idle_flag=flag)
            wrong = (
                not candidate.formula.causal
            )  # the value that says something else than what it does
            tried = replace(
                candidate.built_with(flag, value=wrong),
                flag_fault=f"{fault}; judged with {flag}={wrong}",
            )
            _claim_causal(tried, always=wrong)
            return tried
    return candidate


def _may_count_elsewhere(candidate: Candidate, flag: str) -> bool:
    """Return whether a flag that makes no call causal may have its effect where no trial run comes.

    It may say that masks count, which are given by an option that is not understood; or it may be
    for another way of attending than the config chooses: modules of transformers have one, "eager",
    whose masks are made by the model.
    """
    if candidate.formula.causal:
        return False
    options = [p for p in candidate.forward_parameters.values() if p.default is not p.empty]
    of_masks = flag == "masked" and candidate.mask is None and bool(options)
    module = getattr(
        candidate.last, "module", candidate.constructor
    )  # a kernel is the module that was constructed
    return of_masks or CHOICE in names_used(type(module))


def _claim_causal(candidate: Candidate, *, always: bool) -> None:
    """Claim that what is not causal always is, or the other way round."""
    candidate.claims = {
        name: claim for name, claim in candidate.claims.items() if name != "always_causal"
    }
    through_mask = candidate.mask is not None and "l" in candidate.masks.axes
    if always:
        candidate.claims["always_causal"] = True
        candidate.claims["causal"] = candidate.claims.get("causal") or "top_left"
    elif not (through_mask or candidate.signature.is_causal):
        candidate.claims["causal"] = None


def _fault_of_constructor(candidate: Candidate, flag: str, *, value: bool) -> str:
    """Return what is wrong with a causal flag of the constructor, whose value was this one."""
    is_causal = bool(candidate.formula.causal)
    plain = replace(candidate, claims=_without_causal(candidate), flag_fault="")
    one, other = (plain.built_with(flag, value=each) for each in (value, not value))
    if not any(_differ(*pair, options, options) for pair, options in _pairs(one, other)):
        beside = "" if plain.signature.is_causal else f": {_all_calls(is_causal)}"
        return f"{flag} {IDLE}{beside}"
    if is_causal == value or not candidate.explained:
        return ""
    is_opposite = find_formula(other) and bool(other.formula.causal) == value
    # Such a flag may be True for something else than causal calls, unless False makes them causal.
    if value and not is_opposite:
        return ""
    beside = f", and {flag}={not value} the other way round" if is_opposite else ""
    return f"{flag}={value} of the constructor makes calls {'not ' if value else ''}causal{beside}"


def _pairs(
    one: Candidate, other: Candidate
) -> Iterator[tuple[tuple[Candidate, Candidate], dict[str, Any]]]:
    """Yield two candidates and the options of calls in which a flag of the constructor may have its
    effect.
    """
    pair = one, other
    for options in ({"training": True}, *_masked(one)):
        yield pair, options
    if (
        one.cross_attention
    ):  # it may be causal in self-attention alone, as where a memory is left out
        yield (_of_self(one), _of_self(other)), {}
    if one.signature.is_causal:
        yield pair, {"is_causal": True}
        yield (replace(one, flag_left_out=True), replace(other, flag_left_out=True)), {}


def _of_self(candidate: Candidate) -> Candidate:
    return replace(candidate, claims=candidate.claims | {"cross_attention": False})


def _masked(candidate: Candidate) -> list[dict[str, Any]]:
    """Return the options of a call without a mask, and of one with a mask, given by its axes, if it
    takes any.
    """
    per_item = candidate.claims.get("per_item_mask", True)
    return [{}, *([] if candidate.mask is None else [{"mask": "bs" if per_item else "s"}])]


def _without_causal(candidate: Candidate) -> dict[str, Any]:
    """Return the claims with no causal attention, so that no causal mask is joined to a mask."""
    return {name: claim for name, claim in candidate.claims.items() if name != "always_causal"} | {
        "causal": None
    }


def _differ(
    one: Candidate, other: Candidate, options: dict[str, Any], others: dict[str, Any]
) -> bool:
    """Return whether one of several calls gives another output with other options, or raises with
    one of them alone.

    Without a call that raises with neither of them, this is unknown, and so true.
    """
    called = False
    for probe in (*one.probes, *replace(one, special=EQUAL_LENGTHS).probes[:1]):
        results = [
            each.call(probe.inputs, **_with_mask(each, probe, given))
            for each, given in ((one, options), (other, others))
        ]
        if all(each is None for each in results):
            continue
        called = True
        if not agree(*results):
            return True
    return not called


def _with_mask(candidate: Candidate, probe: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call, in which the axes of a mask stand for one that hides some keys."""
    if "mask" not in options:
        return options
    return options | {"mask": candidate.mask_of(probe, options["mask"], causal=True)[:, :1, :1]}


def _all_calls(is_causal: bool) -> str:
    return f"{'each' if is_causal else 'no'} call is causal"
