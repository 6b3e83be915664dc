"""Which options of a class or function no call uses, and what no call shows."""

from __future__ import annotations

import inspect

from mha.implementations.adapters.built_options import built_names
from mha.implementations.adapters.kept_caches import cache_of
from mha.implementations.adapters.names import (
    MEMORY_NAMES,
    NEUTRAL_MEANING,
    NO_TENSOR_MASKS,
    OF_BITS,
    OTHER_MASKS,
    is_option,
)
from mha.implementations.adapters.signature import required_inputs
from mha.implementations.adapters.tables import OF_TABLES
from mha.implementations.inference.candidate import Candidate
from mha.spec.claims import DROPS_OUTPUT

OPTIONS_OF_SCORES = ("scale", "window", "chunk", "softcap", "sinks", "alibi")
# What constructors take beside sizes, each with the claim that trial runs may have added for it.
NOT_TESTED = {
    "bias_kv": "bias_kv",
    "zero_key": "zero_key",
    "dropout": "dropout",
    "output_dropout": "dropout",
    "n_kv_heads": "grouped_query",
    "kdim": "kv_widths",
    "vdim": "kv_widths",
}


def unused_options(candidate: Candidate) -> list[str]:
    """Return what is not judged: calls that are not made, and options that no call uses.

    The options are those of `forward` and of the constructor.
    """
    signature, parameters = candidate.signature, candidate.declared.forward_parameters
    used = _used_options(candidate) | {*signature.others}
    used |= {parameter.name for parameter in required_inputs(parameters)}
    unused = []
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty and name not in used:
            unused.append(name)
    unused += [f"{name}=None" for name in candidate.declared.unknown_inputs]
    unused += [name for name, field in candidate.arguments.items() if not _tested(candidate, field)]
    unused = [name for name in unused if name != candidate.idle_flag]
    return _never_called(candidate) + unused + _defaults(candidate) + _in_config(candidate)


def unclaimable_options(candidate: Candidate) -> list[str]:
    """Return those of the options that no call uses which no declaration can claim either."""
    parameters = candidate.declared.forward_parameters
    never = {*map(_hiding, candidate.declared.beside)}
    never.update(map(_other_than_zero, _positions(candidate)))
    of_bits = switches_of_bits(candidate)
    unclaimable = []
    for option in unused_options(candidate):
        is_unknown = option in parameters and not _may_be_claimed(candidate, option)
        if option not in of_bits and (is_unknown or option in never):
            unclaimable.append(option)
    return unclaimable


def options_without_effect(candidate: Candidate) -> set[str]:
    """Return the options of the constructor about scores that trial runs show to change no call."""
    found = set[str]()
    scores = candidate.claimed("scores")
    for option in OPTIONS_OF_SCORES:
        if option in candidate.rows and not getattr(scores, option):
            found.update(candidate.names_of(option))
    return found


def switches_of_bits(candidate: Candidate) -> list[str]:
    """Return the parameters of a kernel by which its results keep their bits."""
    parameters = candidate.declared.forward_parameters
    return [name for name in OF_BITS if candidate.is_kernel and name in parameters]


def _may_be_claimed(candidate: Candidate, name: str) -> bool:
    """Return whether a claim may be about a parameter: it has a meaning, of a kernel for scores."""
    if not candidate.is_kernel:
        return _has_meaning(name)
    meaning = NEUTRAL_MEANING.get(name)
    return meaning == "dropout" or (
        is_option(name) and name not in (*NO_TENSOR_MASKS, *OTHER_MASKS)
    )


def _has_meaning(name: str) -> bool:
    """Return whether the name of a parameter says what it is, so that a claim may be about it."""
    is_known = is_option(name) or name in NEUTRAL_MEANING or name in MEMORY_NAMES
    return is_known and name not in OTHER_MASKS


def _positions(candidate: Candidate) -> list[str]:
    """Return the required parameters that calls give zeros for, as positions that turn nothing."""
    if candidate.claimed("rotary"):
        return []
    others = candidate.signature.others
    return [name for name in others if NEUTRAL_MEANING.get(name) == "places"]


def _other_than_zero(name: str) -> str:
    return f"{name} other than 0"


def _rotations(candidate: Candidate) -> list[str]:
    """Return in words the rotation of required tables that turn nothing in any call."""
    if candidate.claimed("rotary"):
        return []
    others = candidate.signature.others
    names = [name for name in others if NEUTRAL_MEANING.get(name) in (*OF_TABLES, "complex")]
    return [f"a rotation by {' and '.join(names)}"] if names else []


def _other_settings(candidate: Candidate) -> list[str]:
    """Return the options that are set so that they add nothing, and that no call gives."""
    if "set" not in candidate.rows:
        return []
    used = _used_options(candidate)
    settings = candidate.declared.keywords.items()
    return [f"{name} other than {value!r}" for name, value in settings if name not in used]


def _hiding(name: str) -> str:
    """Return what is not judged of a mask that is given beside another one, in words."""
    return f"{name} that hides something"


def _never_called(candidate: Candidate) -> list[str]:
    """Return what a causal flag, or a mask or memory left out, might mean, and no call shows."""
    declared, never = candidate.declared, []
    if declared.may_leave_out_memory and not declared.memory_optional:
        never.append(f"calls without {candidate.signature.memory}")
    if candidate.idle_flag:
        never.append(f"{candidate.idle_flag} (has no effect)")
    if declared.causal_by_default and candidate.cross_attention:
        never.append("calls without a mask that are not causal")
    if candidate.left_out:
        never.append(candidate.left_out)
    never += _other_settings(candidate)
    never += map(_hiding, declared.beside)
    never += map(_other_than_zero, _positions(candidate))
    never += _rotations(candidate)
    return never


def _used_options(candidate: Candidate) -> set[str | None]:
    """Return the names of the parameters of `forward` that calls use."""
    signature, scores = candidate.signature, candidate.claimed("scores")
    used = {
        *signature.inputs,
        signature.padding,
        signature.is_causal,
        signature.need_weights,
        signature.average,
    }
    if candidate.claimed("grouped_query"):
        used.add(signature.grouped)
    for option in OPTIONS_OF_SCORES:
        if getattr(scores, option):
            used.update(candidate.names_of(option))
    if scores.alibi and scores.alibi.built_in:
        used.update(candidate.names_of("alibi_switch"))
    if "lengths" in candidate.claims:
        used.update(candidate.names_of("key_lengths"))
    if candidate.claimed("lengths") == "both":
        used.update(candidate.names_of("query_lengths"))
    if "lse" in candidate.claims:
        used.update(candidate.names_of("return_lse"))
    if candidate.declared.mask:
        used |= {signature.mask, candidate.declared.mask_without_memory}
        used |= {*candidate.declared.beside}
    if candidate.more_by_mask:
        used.add(signature.mask)
    if candidate.cross_attention:
        used.add(signature.memory)
    return used | _used_for_positions(candidate)


def _used_for_positions(candidate: Candidate) -> set[str]:
    """Return the names of what calls are given for a rotation, and for decoding."""
    used, declared = set[str](), candidate.declared
    rotary = candidate.claimed("rotary")
    if rotary is not None and rotary.tables == "given":
        used.update(candidate.signature.tables)
    form = cache_of(declared.built_class, declared.cache)
    if form is not None:
        used |= form.parameters
    return used


def _defaults(candidate: Candidate) -> list[str]:
    """Return the options of the constructor that keep their defaults, with the values not judged.

    Those that calls, or a `functools.partial`, set are left out.
    """
    declared, unused = candidate.declared, []
    known: set[str | None] = {*candidate.arguments, *declared.forward_parameters}
    known |= {*declared.keywords, *_used_options(candidate)}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    for name, parameter in declared.constructor_parameters.items():
        if name in known or parameter.kind not in kinds or name.startswith("_"):
            continue
        if parameter.default is not parameter.empty:
            unused.append(_other_value(name, parameter.default))
    return unused


def _other_value(name: str, default: object) -> str:
    """Return in words what is not judged of an option that keeps its default."""
    if default is None:
        return name
    if isinstance(default, bool):
        return f"{name}={not default}"
    return f"{name} other than {default!r}"


def _in_config(candidate: Candidate) -> list[str]:
    """Return the options about scores that the class reads from its config, and no call uses."""
    if candidate.is_kernel:
        return []
    declared, used = candidate.declared, _used_options(candidate)
    unused = []
    for names in built_names(declared.constructor, declared.signature).values():
        unused += [name for name in names if "." in name and name not in used]
    return unused


def _tested(candidate: Candidate, field: str) -> bool:
    """Return whether trial runs have tested what the constructor takes as a field."""
    if field not in NOT_TESTED:
        return True
    dropout = candidate.claimed("dropout")
    if field == "output_dropout":
        return dropout in DROPS_OUTPUT
    if field == "dropout" and "output_dropout" in candidate.arguments.values():
        return dropout not in (False, "output")
    if field == "dropout":
        return bool(dropout)
    return NOT_TESTED[field] in candidate.claims
