"""The cap of the scores that a call may give: before a float mask is added, or after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mha.implementations.inference.alibi import ALIBI
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.probes import Probe, is_close
from mha.implementations.inference.score_options import ScoreOption, formula_with
from mha.spec import Options, Scores, alibi_slopes
from mha.spec.scores import SoftcapPlace

# Well below most of the scores of trial runs.
CAP = 0.5
PLACES: dict[SoftcapPlace, str] = {
    "before_bias": "before any mask",
    "after_bias": "after a float mask is added",
}


class SoftcapOption(ScoreOption):
    """A cap c of the scores, which become c tanh(s / c)."""

    name = "softcap"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield a cap in each place."""
        for place in PLACES:
            yield replace(candidate.claimed("scores"), softcap=place)

    def values(self, scores: Scores) -> tuple[float]:
        """Return a cap."""
        del scores
        return (CAP,)

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        assert scores.softcap
        return f"scores s become c tanh(s / c), {PLACES[scores.softcap]}"

    def mask(self, candidate: Candidate, probe: Probe) -> Tensor | None:
        """Return a float mask, which tells the places apart, if one is claimed."""
        if not candidate.declared.mask or "float" not in candidate.claims.get("masks", ()):
            return None
        queries, keys = probe.lengths
        numbers = torch.linspace(-2, 2, queries * keys, dtype=torch.float64)
        return numbers.view(1, 1, queries, keys)

    def completed(self, candidate: Candidate) -> Candidate:
        """Return the candidate with masks of -infinity, if the lowest number would be capped.

        They leave NaN in rows without a key. A kernel that computes in float16, and is given a cap
        in each call, is not judged in it: no number of float16 stands for no cap.
        """
        if _rounds_all_scores_to_zero(candidate):
            candidate = candidate.claiming(dtypes=candidate.claimed("dtypes") - {"float16"})
        is_after = candidate.claimed("scores").softcap == "after_bias"
        if not is_after or candidate.declared.masked_number != "lowest":
            return candidate
        masked = candidate.declaring(masked_number="-inf").claiming(empty_row="nan")
        return replace(masked, empty_row="nan")

    def remark(self, candidate: Candidate) -> str:
        """Return why a kernel is not judged in float16, if that is so."""
        if not _is_capped_in_each_call(candidate) or "float16" in candidate.claimed("dtypes"):
            return ""
        return "; in float16, no number stands for none"


SOFTCAP = SoftcapOption()


def _is_capped_in_each_call(candidate: Candidate) -> bool:
    signature = candidate.signature
    return not {*candidate.names_of(SOFTCAP.name)}.isdisjoint(signature.others + signature.acting)


def _rounds_all_scores_to_zero(candidate: Candidate) -> bool:
    """Return whether float16 scores are 0 once they are divided by what stands for no cap."""
    if not _is_capped_in_each_call(candidate) or "float16" not in candidate.claimed("dtypes"):
        return False
    inputs = candidate.probes[0].inputs
    result = candidate.trying(dtype=torch.float16).call_plainly(inputs)
    expected = candidate.formula(inputs, candidate.weights, None)
    return result is None or not is_close(result.output, expected)


def find_place_beside_slopes(candidate: Candidate) -> Candidate:
    """Claim that a cap acts after the bias of slopes, where no float mask has shown its place."""
    claimed, are_read = candidate.claimed("scores"), candidate.explains(SOFTCAP.name, ALIBI.name)
    if not (claimed.softcap and claimed.alibi and are_read) or _follows_with_slopes(candidate):
        return candidate
    tried = candidate.claiming(scores=replace(claimed, softcap="after_bias"))
    if not _follows_with_slopes(tried):
        return SOFTCAP.noted(candidate, "assumed: with slopes, it gives something else")
    if "float" in candidate.claims.get("masks", ()):
        return SOFTCAP.noted(candidate, "assumed: it is after the bias of slopes")
    return SOFTCAP.noted(tried)


def _follows_with_slopes(tried: Candidate) -> bool:
    """Return whether calls with a cap and slopes give what the formula gives."""
    scores = tried.claimed("scores")
    (slopes,) = ALIBI.values(scores)
    if scores.alibi.built_in:
        slopes = alibi_slopes(len(slopes))
    is_causal = ALIBI.flags_taken(tried, scores)[0]
    for probe in tried.probes:
        given = ALIBI.value_for(scores, probe, slopes)
        options = Options(is_causal=is_causal, softcap=CAP, alibi=given)
        result = tried.call(probe.inputs, **options.arguments)
        expected = formula_with(tried, options)(probe.inputs, tried.weights, None)
        if result is None or not is_close(result.output, expected):
            return False
    return True
