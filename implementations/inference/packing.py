"""What a kernel of packed sequences makes of tokens that are in none of them."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

from mha.implementations.adapters.kernel_axes import function_of
from mha.implementations.adapters.packing import packing_names
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import is_close
from mha.spec import Options, Packed
from mha.spec.scores import Packing, TailPolicy

WORDS: dict[TailPolicy, str] = {
    "refused": "are refused",
    "zero": "get rows of zeros",
    "undefined": "get any rows",
}


def find_packing(candidate: Candidate) -> Candidate:
    """Claim what becomes of tokens after the last offset, and gaps between the sequences."""
    declared = candidate.declared
    if not (candidate.explained and declared.layout.startswith("t ")):
        return candidate
    packed = Packed(tail=_tail(candidate))
    names = packing_names(signature(function_of(declared.constructor)).parameters)
    if not names.keys().isdisjoint(("starts_q", "used_q")) and _follows(candidate, "gaps"):
        packed = replace(packed, gaps=True)
    offsets = [name for meaning, name in names.items() if meaning.startswith("offsets")]
    found = f"{', '.join(offsets)}: tokens after the last sequence {WORDS[packed.tail]}"
    if packed.gaps:
        found = f"{found}; there may be gaps"
    return candidate.claiming(packed=packed).noting("packed", found)


def _tail(candidate: Candidate) -> TailPolicy:
    """Return what becomes of tokens after the last offset."""
    inputs = candidate.probes[0].inputs
    for policy in ("zero", "undefined"):
        tried = candidate.claiming(packed=Packed(tail=policy))
        if tried.call_plainly(inputs, packing="tail") is not None:
            return policy
    return "refused"


def _follows(candidate: Candidate, packing: Packing) -> bool:
    """Return whether a call gives the formula beside what is in no sequence."""
    inputs = candidate.probes[0].inputs
    options = Options(packing=packing)
    result = candidate.call_plainly(inputs, **options.of_scores)
    if result is None:
        return False
    return is_close(result.output, candidate.formula(inputs, candidate.weights, None))
