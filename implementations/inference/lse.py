"""The log-sum-exp that a kernel may return beside its context: to which base, of which layout and
dtype.
"""

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
from mha.implementations.inference.probes import is_close
from mha.implementations.inference.sinks import TRIED
from mha.spec import Claims, Lse, Scores, causal_mask
from mha.spec.scores import Base, EmptyLse, LseDtype, LseLayout


def find_lse(candidate: Candidate) -> None:
    """Claim a log-sum-exp, if a kernel returns that of the scores beside its context, in the form
    that it has.
    """
    query, key, _ = inputs = candidate.probes[0].inputs
    if all(
        as_output(returned).weights is None
        for returned in results_of(candidate, inputs, return_lse=True)
    ):
        return  # it returns nothing beside the context
    natural = candidate.formula.scores(query, key, candidate.weights)
    if candidate.plainly_causal and candidate.formula.causal:
        allowed = causal_mask(natural.shape[2], natural.shape[3], candidate.formula.causal)
        natural = natural.masked_fill(~allowed, -math.inf)
    natural_lse = natural.logsumexp(-1)
    for layout, base in product(get_args(LseLayout), get_args(Base)):
        declared = Lse(base=base, layout=layout)
        tried = replace(candidate, claims=candidate.claims | {"lse": declared})
        lse = _lse_of(tried, inputs)
        if lse is not None and is_close(lse.to(natural.dtype), natural_lse / declared.log_base):
            candidate.claims["lse"] = replace(
                declared,
                empty=_empty_lse(tried),
                dtype=_lse_dtype(tried),
                gradient=_is_differentiable(tried, inputs),
                sink=_has_sink(tried, inputs, natural_lse),
            )
            return
    _note_another_result(candidate, inputs)


def _note_another_result(candidate: Candidate, inputs: tuple[Tensor, ...]) -> None:
    """Note a result of the shape of a log-sum-exp that is none; if a parameter asks for one, it is
    claimed.
    """
    for layout in get_args(LseLayout):
        declared = Lse(layout=layout)
        if _lse_of(replace(candidate, claims=candidate.claims | {"lse": declared}), inputs) is None:
            continue
        if candidate.signature.return_lse:
            candidate.claims["lse"] = declared
        else:
            axes = layout.replace(" ", ", ")
            candidate.beside = (
                candidate.beside
                or f"(a second result of shape ({axes}) is no log-sum-exp: not judged)"
            )
        return


def _lse_of(candidate: Candidate, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Return the log-sum-exp (B, H, L) of a call, if there is one of the claimed shape."""
    result = candidate.call_plainly(inputs, return_lse=True)
    return result.lse if result is not None and isinstance(result.lse, Tensor) else None


def _empty_lse(candidate: Candidate) -> EmptyLse:
    """Return the log-sum-exp of a row without a key that is claimed: -infinity, unless trial runs
    show another policy.

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


def _has_sink(candidate: Candidate, inputs: tuple[Tensor, ...], without: Tensor) -> bool:
    """Return whether the log-sum-exp of a call with sinks has them as terms; without: that of a
    call without sinks.
    """
    if not candidate.claims.get("scores", Scores()).sinks:
        return True
    result = candidate.call_plainly(inputs, return_lse=True, sinks=TRIED)
    lse = None if result is None else result.lse
    return not (
        isinstance(lse, Tensor)
        and is_close(lse.to(without.dtype), without / candidate.claims["lse"].log_base)
    )


def _is_differentiable(candidate: Candidate, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the log-sum-exp of a call has a history."""
    results = results_of(candidate, inputs, return_lse=True)
    found = [as_output(returned, lse=candidate.claims["lse"]).lse for returned in results]
    return any(lse is not None and lse.requires_grad for lse in found)


def _lse_dtype(candidate: Candidate) -> LseDtype:
    """Return the dtype of a log-sum-exp, by that for inputs in the narrowest dtype that is claimed."""
    claimed = candidate.claims.get("dtypes", Claims().dtypes)
    narrow = next(
        (name for name in ("bfloat16", "float16", "float32") if name in claimed), "float64"
    )
    tried = replace(candidate, dtype=getattr(torch, narrow))
    lse = _lse_of(tried, tuple(x.to(tried.dtype) for x in candidate.probes[0].inputs))
    return "float32" if lse is not None and lse.dtype == torch.float32 else "input"
