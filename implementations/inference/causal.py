"""How a module is causal, found by which keys its outputs depend on."""

from __future__ import annotations

import inspect
from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha.implementations.adapters.construction import parameters_of
from mha.implementations.adapters.constructor_names import causal_flags
from mha.implementations.adapters.kernel_axes import ONE_QUERY, ONE_QUERY_EACH
from mha.implementations.inference.candidate import OF_FORMULA, Candidate
from mha.implementations.inference.causal_flags import (
    IDLE,
    fault_of_flag,
    not_causal,
    with_idle_constructor_flag,
)
from mha.implementations.inference.nearest_projections import influence
from mha.implementations.inference.probes import (
    EQUAL_LENGTHS,
    GENERAL,
    Probe,
    additive,
    is_close,
)
from mha.implementations.inference.projections import Unclear
from mha.spec import causal_mask
from mha.spec.claims import Alignment

# In their interfaces, a mask takes the place of the causal flag.
MASKS_ALONE = ("custom_mask",)
ALONE = "; beside a mask, the flag has no effect"
MEANT = f'{ALONE}: if that is meant, claim causal_with_mask="mask_alone"'
# What MLX takes in the place of a mask.
CAUSAL_WORD = "causal"
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")


def built_not_causal(candidate: Candidate) -> Candidate:
    """Return a module whose calls have a causal flag, built so that others are not causal."""
    if not candidate.signature.is_causal:
        return candidate
    return next(not_causal(candidate), candidate)


def find_causal(candidate: Candidate) -> Candidate:
    """Claim how it is causal: by a flag, always, without a mask, through masks, or never.

    Trial runs before were without such a claim. Raises Unclear if the causal flag raises, other
    than as a hint.
    """
    claiming = candidate.without_claims("causal")
    hint = _hint(claiming)
    if hint:
        finding = f"not judged: without a mask, {candidate.signature.is_causal}=True raises {hint}"
        return _noted(claiming.claiming(causal=None), finding)
    fault = ""
    if candidate.declared.causal_by_default:
        claiming = claiming.claiming(causal=candidate.declared.causal_by_default)
    elif candidate.formula.causal or candidate.signature.is_causal:
        fault = fault_of_flag(candidate)
        claiming = _with_alignment(claiming)
        if fault:
            claiming = claiming.trying(is_causal=False)
    elif not _differ_between_queries(candidate):
        claiming = claiming.claiming(causal=None)
    else:
        claiming, fault = _with_causal_word(claiming)
    if not fault:
        claiming, fault = with_idle_constructor_flag(claiming)
    return _noted(claiming, fault or _words(claiming))


def _differ_between_queries(candidate: Candidate) -> bool:
    """Return whether there are masks, and they may differ between queries."""
    return candidate.declared.mask is not None and "l" in candidate.declared.masks.axes


def _noted(candidate: Candidate, finding: str) -> Candidate:
    """Return the candidate with the row about causal calls."""
    if candidate.idle_flag:
        finding = f"{finding}; {candidate.idle_flag} {IDLE}"
    if candidate.assumed and not candidate.signature.is_causal:
        return candidate.noting("causal", finding, "assumed, as the mask is")
    return candidate.noting("causal", finding, OF_FORMULA)


def _words(candidate: Candidate) -> str:
    """Return how it is causal, in words."""
    flag, alignment = candidate.signature.is_causal, candidate.claimed("causal")
    if "always_causal" in candidate.claims:
        return "always, aligned bottom_right" if "causal" in candidate.claims else "always"
    if candidate.declared.layout in (ONE_QUERY, *ONE_QUERY_EACH):
        flag = "each query is given the keys up to its place"
    if flag:
        return f"{flag}, aligned {alignment}{_beside_mask(candidate)}"
    if candidate.declared.causal_by_default:
        return f"unless there is a mask, or through the mask, aligned {alignment}"
    if candidate.declared.causal_word:
        return f'{candidate.signature.mask}="{CAUSAL_WORD}", aligned {alignment}'
    if alignment:
        return f"through the mask, aligned {alignment}"
    return _never_causal(candidate)


def _beside_mask(candidate: Candidate) -> str:
    """Return what the causal flag does beside a mask, unless both apply."""
    claimed = candidate.claimed("causal_with_mask")
    if claimed == "mask_alone":
        return ALONE
    if not claimed:
        return ", not beside a mask"
    return MEANT if _mask_counts_alone(candidate) else ""


def _never_causal(candidate: Candidate) -> str:
    """Return that no call is causal, and how to judge a class that can be built causal."""
    constructor = candidate.declared.constructor
    if not inspect.isclass(constructor):
        return "no"
    flags = causal_flags(parameters_of(constructor))
    if not flags:
        return "no"
    built = f"functools.partial({candidate.label}, {flags[0]}=True)"
    return f"no; to judge it causal too, check {built}"


def _with_alignment(candidate: Candidate) -> Candidate:
    """Claim that it is causal, always or by a flag; raises Unclear if the flag raises."""
    claiming = candidate
    if not candidate.signature.is_causal:
        claiming = candidate.claiming(always_causal=True)
    alignment = _alignment(claiming)
    if alignment != "top_left":
        claiming = claiming.claiming(causal=alignment)
    if not candidate.declared.mask or candidate.formula.causal:
        return claiming
    if _flag_raises(claiming):
        return claiming.claiming(causal_with_mask=False)
    if _mask_is_meant_alone(claiming):
        return claiming.claiming(causal_with_mask="mask_alone")
    return _with_forms_that_combine(claiming)


def _with_causal_word(candidate: Candidate) -> tuple[Candidate, str]:
    """Claim that a word in the place of a mask makes a call causal, if one does, and its fault."""
    if not (candidate.is_kernel and candidate.explained) or candidate.declared.mask_required:
        return candidate, ""  # a mask in each call would hide whether a word is understood
    worded = candidate.declaring(causal_word=CAUSAL_WORD)
    for alignment in ALIGNMENTS:
        if worded.passes(partial(_is_aligned, alignment=alignment)):
            return worded.claiming(causal=alignment), ""
    square = worded.trying(special=EQUAL_LENGTHS)
    if square.passes(partial(_is_aligned, alignment="top_left")):
        word = f'{candidate.signature.mask}="{CAUSAL_WORD}"'
        return worded.claiming(causal="top_left"), f"{word}, with as many keys as queries only"
    return candidate, ""


def _with_forms_that_combine(candidate: Candidate) -> Candidate:
    """Claim only the forms of masks that do not raise in causal calls, as boolean ones do not.

    `mask & causal` is of booleans, though a fused kernel may add other masks in other calls.
    """
    probe, mask = _masked_probe(candidate)
    forms = {*candidate.claimed("masks")}
    for form, given in (("float", additive(mask)), ("int", mask.long())):
        if not {"bool", form} <= forms:
            continue
        with sdpa_kernel(SDPBackend.MATH):
            if candidate.call(probe.inputs, mask=given, is_causal=True) is None:
                forms.remove(form)
    if forms == {"bool"}:
        return candidate.without_claims("masks")
    return candidate.claiming(masks=forms)


def _hint(candidate: Candidate) -> str:
    """Return what the causal flag raises if it only says what the mask is; "" otherwise.

    That of `torch.nn.MultiheadAttention` is such a flag.
    """
    if not candidate.signature.is_causal or not _differ_between_queries(candidate):
        return ""
    probe = candidate.probes[0]
    if candidate.call(probe.inputs, is_causal=True) is not None:
        return ""
    problem, mask = candidate.problem, causal_mask(*probe.lengths, "top_left")[None, None]
    result = candidate.call(probe.inputs, mask=mask, is_causal=True)
    expected = candidate.formula(probe.inputs, candidate.weights, mask)
    if result is None or not is_close(result.output, expected):
        return ""
    return problem


def _flag_raises(candidate: Candidate) -> bool:
    """Return whether a causal call with a mask raises."""
    probe, mask = _masked_probe(candidate)
    # This backend raises where others do not, and is chosen for some calls.
    with sdpa_kernel(SDPBackend.MATH):
        return candidate.call(probe.inputs, mask=mask, is_causal=True) is None


def _mask_is_meant_alone(candidate: Candidate) -> bool:
    """Return whether a mask takes the place of the causal flag, as some interfaces say."""
    signature = candidate.signature
    # Functions of transformers take a module, and ask for the flag only where there is no mask.
    asks_without = "module" in signature.others and signature.is_causal in signature.none_by_default
    is_published = signature.mask in MASKS_ALONE or asks_without
    return is_published and _mask_counts_alone(candidate)


def _masked_probe(candidate: Candidate) -> tuple[Probe, Tensor]:
    """Return a probe with a mask (B, 1, 1, S), of which causal calls leave no row empty."""
    probe = candidate.probes[0]
    axes = "bs" if candidate.claimed("per_item_mask") else "s"
    return probe, candidate.mask_of(probe, axes, causal=True)[:, :1, :1]


def _mask_counts_alone(candidate: Candidate) -> bool:
    """Return whether a causal call with a mask gives what one without the flag does."""
    if not (candidate.declared.mask and candidate.explained) or candidate.formula.causal:
        return False
    probe, mask = _masked_probe(candidate)
    result = candidate.call(probe.inputs, mask=mask, is_causal=True)
    expected = candidate.formula(probe.inputs, candidate.weights, mask)
    return result is not None and is_close(result.output, expected)


def _alignment(candidate: Candidate) -> Alignment:
    """Return how the diagonal of the causal mask is aligned, by the keys that are read."""
    probe = candidate.probes[0]
    tried = candidate.claiming(causal=candidate.claimed("causal"))
    if tried.call(probe.inputs, is_causal=True) is None:
        _require_taken_flag(tried)
        return "top_left"
    if not candidate.cross_attention:
        return "top_left"
    if candidate.explained and not candidate.trial.special.name:
        if candidate.formula.causal:
            return candidate.formula.causal
        for alignment in ALIGNMENTS:
            if tried.passes(partial(_is_aligned, alignment=alignment)):
                return alignment
    return min(ALIGNMENTS, key=lambda alignment: _misaligned(tried, alignment))


def _require_taken_flag(tried: Candidate) -> None:
    """Raise Unclear for a causal flag that raises, other than for L != S, or in its own code.

    Where L != S, it may be refused (CAU-3). What its own code raises is judged, and reported.
    """
    square = tried.trying(special=EQUAL_LENGTHS).probes[0]
    if tried.cross_attention and tried.call(square.inputs, is_causal=True) is not None:
        return
    raised = tried.calls.raised
    if not (raised and raised.is_of_code):
        raise Unclear(f"{tried.signature.is_causal}=True raises {raised}; pass call=...")


def _is_aligned(candidate: Candidate, probe: Probe, alignment: Alignment) -> bool:
    """Return whether the formula gives the output of a causal call with this alignment."""
    result = candidate.call(probe.inputs, is_causal=True)
    mask = causal_mask(*probe.lengths, alignment)
    expected = candidate.formula(probe.inputs, candidate.weights, mask)
    return result is not None and is_close(result.output, expected)


def _misaligned(candidate: Candidate, alignment: Alignment) -> int:
    """Return how many keys are read that an alignment hides, or the other way round."""
    count = 0
    for probe in candidate.trying(special=GENERAL).probes:
        read = influence(candidate, probe.inputs, is_causal=True)
        if read is not None:
            allowed = causal_mask(probe.queries, probe.keys, alignment)
            count += int(((read > 0) != allowed).sum())
    return count
