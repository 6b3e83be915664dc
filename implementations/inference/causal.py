"""How a module is causal, found by which keys its outputs depend on."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.attention import SDPBackend, sdpa_kernel

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.causal_flags import fault_of_flag
from mha.implementations.inference.nearest_projections import influence
from mha.implementations.inference.probes import EQUAL_LENGTHS, GENERAL, Probe, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import causal_mask
from mha.spec.claims import Alignment

ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")


def find_causal(candidate: Candidate) -> None:
    """Set the claims about causal attention; raises Unclear if the causal flag raises, other than
    as a hint.
    """
    candidate.claims.pop("causal")
    candidate.hint = _hint(candidate)
    if candidate.hint:
        candidate.claims["causal"] = None
    elif candidate.causal_by_default:
        candidate.claims["causal"] = candidate.causal_by_default
    elif candidate.formula.causal or candidate.signature.is_causal:
        candidate.flag_fault = fault_of_flag(
            replace(candidate, claims=candidate.claims | {"causal": None})
        )
        _claim_causal(candidate)
    elif candidate.mask is None or "l" not in candidate.masks.axes:
        candidate.claims["causal"] = None


def _claim_causal(candidate: Candidate) -> None:
    """Claim that it is causal, always or by a flag; raises Unclear if the flag raises."""
    if not candidate.signature.is_causal:
        candidate.claims["always_causal"] = True
    alignment = _alignment(candidate)
    candidate.claims |= {} if alignment == "top_left" else {"causal": alignment}
    if candidate.mask and not candidate.formula.causal and not _combines(candidate):
        candidate.claims["causal_with_mask"] = False


def _hint(candidate: Candidate) -> str:
    """Return what the causal flag raises if it only says what the mask is, as in
    `torch.nn.MultiheadAttention`.
    """
    if (
        not candidate.signature.is_causal
        or candidate.mask is None
        or "l" not in candidate.masks.axes
    ):
        return ""
    probe = candidate.probes[0]
    if candidate.call(probe.inputs, is_causal=True) is not None:
        return ""
    problem, mask = (
        candidate.problem,
        causal_mask(probe.queries, probe.inputs[1].shape[1], "top_left")[None, None],
    )
    result = candidate.call(probe.inputs, mask=mask, is_causal=True)
    expected = candidate.formula(probe.inputs, candidate.weights, mask)
    return problem if result is not None and is_close(result.output, expected) else ""


def _combines(candidate: Candidate) -> bool:
    """Return whether the causal flag may be given beside a mask, rather than raise."""
    probe = candidate.probes[0]
    per_item = candidate.claims.get("per_item_mask", True)
    mask = candidate.mask_of(probe, "bs" if per_item else "s", causal=True)[:, :1, :1]
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # which raises where others do not, and is chosen for some calls
        return candidate.call(probe.inputs, mask=mask, is_causal=True) is not None


def _alignment(candidate: Candidate) -> Alignment:
    """Return how the diagonal of the causal mask is aligned, by the keys that are read."""
    probe = candidate.probes[0]
    tried = replace(candidate, claims={"causal": "top_left"} | candidate.claims, problem="")
    if tried.call(probe.inputs, is_causal=True) is None:
        # Where L != S, the flag may be refused (CAU-3).
        square = replace(tried, special=EQUAL_LENGTHS).probes[0]
        if candidate.cross_attention and tried.call(square.inputs, is_causal=True) is not None:
            return "top_left"
        if tried.raised and tried.raised.is_of_code:
            return "top_left"  # judged, and reported where it raises
        raise Unclear(f"{candidate.signature.is_causal}=True raises {tried.raised}; pass call=...")
    if not candidate.cross_attention:
        return "top_left"
    if candidate.explained and candidate.formula.causal and not candidate.special.name:
        return candidate.formula.causal
    if explained := _explained(tried):
        return explained
    return min(ALIGNMENTS, key=lambda alignment: _misaligned(tried, alignment))


def _explained(candidate: Candidate) -> Alignment | None:
    """Return the alignment with which the formula gives the outputs of causal calls, if there is
    one.
    """
    for alignment in ALIGNMENTS if candidate.explained and not candidate.special.name else ():
        if all(_is_aligned(candidate, probe, alignment) for probe in candidate.probes):
            return alignment
    return None


def _is_aligned(candidate: Candidate, probe: Probe, alignment: Alignment) -> bool:
    """Return whether the formula gives the output of a causal call with this alignment."""
    result = candidate.call(probe.inputs, is_causal=True)
    mask = causal_mask(probe.queries, probe.inputs[1].shape[1], alignment)
    return result is not None and is_close(
        result.output, candidate.formula(probe.inputs, candidate.weights, mask)
    )


def _misaligned(candidate: Candidate, alignment: Alignment) -> int:
    """Return how many keys are read that this alignment of the causal mask hides, and the other way
    round.
    """
    count = 0
    for probe in replace(candidate, special=GENERAL).probes:
        read = influence(candidate, probe.inputs, is_causal=True)
        allowed = causal_mask(probe.queries, probe.keys, alignment)
        count += 0 if read is None else int(((read > 0) != allowed).sum())
    return count
