"""Which options of a class or function no call uses, and what no call shows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from mha.implementations.adapters.names import NEUTRAL_MEANING
from mha.implementations.adapters.signature import required_inputs
from mha.implementations.inference.candidate import Candidate
from mha.spec import Scores
from mha.spec.claims import DROPS_OUTPUT

# What constructors take beside sizes, each with the claim that trial runs may have added for it.
NOT_TESTED = {
    "bias_kv": "bias_kv",
    "zero_key": "zero_key",
    "dropout": "dropout",
    "output_dropout": "dropout",
}
NOT_TESTED |= {"n_kv_heads": "grouped_query", "kdim": "kv_widths", "vdim": "kv_widths"}


def unused_options(candidate: Candidate, arguments: Mapping[str, str]) -> list[str]:
    """Return the calls that are not made, and the options of `forward` and of the constructor that
    no call uses.
    """
    signature, parameters, used = (
        candidate.signature,
        candidate.forward_parameters,
        _used_options(candidate),
    )
    used |= {*signature.others, *(parameter.name for parameter in required_inputs(parameters))}
    unused = [
        name for name, p in parameters.items() if p.default is not p.empty and name not in used
    ]
    unused += [f"{name}=None" for name in signature.others if name not in NEUTRAL_MEANING]
    unused += [
        name for name, field in arguments.items() if not _tested(candidate, field, arguments)
    ]
    unused = [name for name in unused if name != candidate.idle_flag]
    return _never_called(candidate) + unused + _defaults(candidate, {*arguments, *parameters})


def _never_called(candidate: Candidate) -> list[str]:
    """Return what a causal flag, or a mask or memory that is left out, might mean, and no call
    shows.
    """
    always = candidate.may_leave_out_memory and not candidate.memory_optional
    never = [f"calls without {candidate.signature.memory}"] if always else []
    never += [f"{candidate.idle_flag} (has no effect)"] if candidate.idle_flag else []
    if candidate.causal_by_default and candidate.cross_attention:
        never.append("calls without a mask that are not causal")
    never += [candidate.left_out] if candidate.left_out else []
    return never


def _used_options(candidate: Candidate) -> set[str | None]:
    signature = candidate.signature
    used = {
        *signature.inputs,
        signature.padding,
        signature.is_causal,
        signature.need_weights,
        signature.average,
    }
    scores = candidate.claims.get("scores", Scores())
    if scores.scale:
        used.add(signature.scale)
    used |= {
        getattr(signature, name) for name in ("softcap", "sinks", "alibi") if getattr(scores, name)
    }
    if scores.window:
        used |= {*signature.window}
    if "lse" in candidate.claims:
        used.add(signature.return_lse)
    if candidate.mask:
        used |= {signature.mask, candidate.mask_alone}
    if candidate.hides_queries:
        used.add(signature.mask)
    if candidate.cross_attention:
        used.add(signature.memory)
    return used


def _defaults(candidate: Candidate, known: set[str]) -> list[str]:
    """Return the options of the constructor that keep their defaults, except these; a switch with
    its other value.
    """
    known |= {*candidate.keywords}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    options = candidate.constructor_parameters.items()
    kept = [
        (name, p.default)
        for name, p in options
        if name not in known and p.kind in kinds and name[0] != "_"
    ]
    values = [
        (name, not default if isinstance(default, bool) else default) for name, default in kept
    ]
    return [f"{name}={value!r}" for name, value in values if value is not inspect.Parameter.empty]


def _tested(candidate: Candidate, field: str, arguments: Mapping[str, str]) -> bool:
    dropout = candidate.claims.get("dropout", False)
    of_output = dropout in DROPS_OUTPUT
    of_either = (
        bool(dropout)
        if "output_dropout" not in arguments.values()
        else dropout not in (False, "output")
    )
    claimed = {"dropout": of_either, "output_dropout": of_output}
    return field not in NOT_TESTED or claimed.get(field, NOT_TESTED[field] in candidate.claims)
