"""The log-sum-exp that a kernel may return beside its context: its base, layout and dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from mha.implementations.adapters.outputs import as_output
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.empty_rows import trials
from mha.implementations.inference.kernel_forms import results_of
from mha.implementations.inference.probes import Inputs, is_close
from mha.implementations.inference.score_options import BY_NAME_ALONE
from mha.implementations.inference.sinks import TRIED
from mha.implementations.inference.weights import NOT_RETURNED
from mha.spec import Lse, causal_mask
from mha.spec.scores import Base, EmptyLse, LseDtype, LseLayout

BASES = {"e": "the natural one", "2": "to base 2"}
HISTORIES = {True: "it can be differentiated", False: "without a gradient"}


def find_lse(candidate: Candidate) -> Candidate:
    """Claim a log-sum-exp in the form that a kernel returns beside its context, if it does."""
    inputs = candidate.probes[0].inputs
    results = results_of(candidate, inputs, return_lse=True)
    if all(as_output(returned).weights is None for returned in results):
        return _without_another_result(candidate)
    natural = _natural(candidate, inputs)
    for layout, base in product(get_args(LseLayout), get_args(Base)):
        declared = Lse(base=base, layout=layout)
        tried = candidate.claiming(lse=declared)
        lse = _lse_of(tried, inputs)
        if lse is None or not is_close(lse.to(natural.dtype), natural / declared.log_base):
            continue
        found = replace(
            declared,
            empty=_empty_lse(tried),
            dtype=_lse_dtype(tried),
            gradient=_is_differentiable(tried, inputs),
            sink=_has_sink(tried, inputs, natural),
        )
        return _claiming(candidate, found)
    return _with_another_result(candidate, inputs)


def _without_another_result(candidate: Candidate) -> Candidate:
    """Note that what asks for a log-sum-exp has no effect, unless that may ask for weights."""
    asked = candidate.names_of("return_lse")
    if not asked:
        return candidate
    return candidate.noting("lse", f"{asked[0]} has no effect: only the context is returned")


def _natural(candidate: Candidate, inputs: Inputs) -> Tensor:
    """Return the natural log-sum-exp (B, H, L) of a plain call."""
    query, key, _ = inputs
    scores = candidate.formula.scores(query, key, candidate.weights)
    if candidate.plainly_causal and candidate.formula.causal:
        allowed = causal_mask(scores.shape[2], scores.shape[3], candidate.formula.causal)
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores.logsumexp(-1)


def _claiming(candidate: Candidate, lse: Lse, evidence: str = "tested") -> Candidate:
    """Return the candidate with the claim of a log-sum-exp, and the row about it."""
    how, asked = "returned", candidate.names_of("return_lse")
    if asked:
        how = f"returned with {asked[0]}"
    shape = f"of shape ({lse.layout.replace(' ', ', ')})"
    found = f"{how}, {BASES[lse.base]}, {shape}; {HISTORIES[lse.gradient]}"
    if not lse.sink:
        found = f"{found}; sinks are not in its sum"
    return candidate.claiming(lse=lse).noting("lse", found, evidence)


def _with_another_result(candidate: Candidate, inputs: Inputs) -> Candidate:
    """Note a result of the shape of a log-sum-exp that is none.

    If a parameter asks for one, it is claimed.
    """
    for layout in get_args(LseLayout):
        declared = Lse(layout=layout)
        if _lse_of(candidate.claiming(lse=declared), inputs) is None:
            continue
        if candidate.names_of("return_lse"):
            return _claiming(candidate, declared, BY_NAME_ALONE)
        if candidate.rows["weights"].finding != NOT_RETURNED:
            return candidate
        shape = f"({layout.replace(' ', ', ')})"
        beside = f"(a second result of shape {shape} is no log-sum-exp: not judged)"
        return candidate.noting("weights", f"{NOT_RETURNED} {beside}")
    return candidate


def _lse_of(candidate: Candidate, inputs: Inputs) -> Tensor | None:
    """Return the log-sum-exp (B, H, L) of a call, if there is one of the claimed shape."""
    result = candidate.call_plainly(inputs, return_lse=True)
    if result is None or not isinstance(result.lse, Tensor):
        return None
    return result.lse


def _empty_lse(candidate: Candidate) -> EmptyLse:
    """Return the log-sum-exp of a row without a key: -infinity, unless trial runs show another one.

    Where such rows attend to all keys, as to masked ones with the lowest number, it is no matter of
    the contract.
    """
    for probe, emptied, options in trials(candidate):
        result = candidate.call(probe.inputs, return_lse=True, **options)
        if result is None or not isinstance(result.lse, Tensor):
            continue
        rows = result.lse.transpose(1, 2)[emptied]
        if rows.numel() and bool((rows == math.inf).all()):
            return "+inf"
    return "undefined" if candidate.claims.get("empty_row") == "uniform" else "-inf"


def _has_sink(candidate: Candidate, inputs: Inputs, without: Tensor) -> bool:
    """Return whether the log-sum-exp of a call with sinks has them as terms.

    without: that of a call without sinks.
    """
    if not (candidate.claimed("scores").sinks and candidate.explains("sinks")):
        return True
    result = candidate.call_plainly(inputs, return_lse=True, sinks=TRIED)
    if result is None or not isinstance(result.lse, Tensor):
        return True
    expected = without / candidate.claims["lse"].log_base
    return not is_close(result.lse.to(without.dtype), expected)


def _is_differentiable(candidate: Candidate, inputs: Inputs) -> bool:
    """Return whether the log-sum-exp of a call has a history."""
    for returned in results_of(candidate, inputs, return_lse=True):
        output = as_output(returned, lse=candidate.claims["lse"])
        # A kernel of one item returns it without the axis of the batch.
        lse = output.weights if output.lse is None else output.lse
        if isinstance(lse, Tensor) and lse.requires_grad:
            return True
    return False


def _lse_dtype(candidate: Candidate) -> LseDtype:
    """Return the dtype of a log-sum-exp, by inputs in the narrowest dtype that is claimed."""
    by_width = ("bfloat16", "float16", "float32", "float64")
    narrow = min(candidate.claimed("dtypes"), key=by_width.index)
    tried = candidate.trying(dtype=getattr(torch, narrow))
    lse = _lse_of(tried, candidate.probes[0].inputs)
    return "float32" if lse is not None and lse.dtype == torch.float32 else "input"
