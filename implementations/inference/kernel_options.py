"""What trial runs show of a kernel only: its key heads, how heads may lie, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha.implementations.adapters.outputs import as_output
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.kernel_forms import results_of
from mha.implementations.inference.probes import Inputs, each_once, is_close
from mha.implementations.inference.projections import Unclear
from mha.spec import Weights


def require_one_key_head(candidate: Candidate) -> Candidate:
    """Raise Unclear for a kernel of one key head that takes more, and ignores them."""
    if "multi_query" in candidate.claims:
        several = candidate.without_claims("multi_query")
        if several.call_plainly(candidate.probes[0].inputs) is not None:
            raise Unclear(
                "it uses one key head and ignores the others; if all heads share it, claim"
                " multi_query=True"
            )
    return candidate


def find_contiguous(candidate: Candidate) -> Candidate:
    """Give a kernel contiguous heads, if it raises for others only."""
    copied = candidate.declaring(contiguous=True)
    given = each_once(lambda x: x.mT.contiguous().mT, candidate.probes[0].inputs)
    if candidate.call_plainly(given) is None and copied.call_plainly(given) is not None:
        return copied
    return candidate


def find_forward_only(candidate: Candidate) -> Candidate:
    """Claim no gradients for a kernel of a GPU whose outputs have none."""
    returned = list[Tensor]()
    for result in results_of(candidate, candidate.probes[0].inputs):
        returned += [x for x in as_output(result) if isinstance(x, Tensor)]
    if not returned or any(x.requires_grad for x in returned):
        return candidate
    finding = "none: its outputs have none, as if it were not for training"
    return candidate.claiming(gradients=False).noting("gradients", finding)


def find_unrecorded(candidate: Candidate) -> Candidate:
    """Claim no gradients for a function whose decorator says that no graph is recorded."""
    if not candidate.claimed("gradients"):
        return candidate
    for held in _held_in_closures(candidate.declared.constructor):
        mode = getattr(held, "__self__", None)
        if isinstance(mode, torch.no_grad | torch.inference_mode):
            finding = f"none: it is decorated with torch.{type(mode).__name__}()"
            unrecorded = candidate.claiming(gradients=False)
            return unrecorded.noting("gradients", finding, "by its decorator")
    return candidate


def _held_in_closures(function: Any) -> Iterator[Any]:
    """Yield what a function, and those that it wraps, hold."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            held = None
            with suppress(ValueError):  # a name that has no value yet
                held = cell.cell_contents
            yield held
        function = getattr(function, "__wrapped__", None)


def find_key_heads(candidate: Candidate) -> Candidate:
    """Claim fewer key heads if a kernel with four heads and two key heads computes the formula.

    One whose heads find another key head fails then.
    """
    claiming, n_heads, d_model = candidate.claiming(grouped_query=True), 4, 48
    changes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": 2}
    tried = claiming.trying(
        changes={**candidate.trial.changes, **changes},
        formula=replace(candidate.formula, n_heads=n_heads),
    )
    generator = torch.Generator().manual_seed(5)

    def draw(x: Tensor) -> Tensor:
        return torch.randn(*x.shape[:2], d_model, generator=generator, dtype=x.dtype)

    inputs = each_once(draw, candidate.probes[0].inputs)
    if _computes_formula(tried, inputs):
        return claiming
    if _computes_formula(tried, inputs, _in_turn(tried.weights)):
        found = "head h has the key head h % H_kv, and elsewhere h // (H / H_kv)"
        return claiming.noting("heads", found, "tested: not the contract's")
    return candidate


def _in_turn(weights: Weights) -> Weights:
    """Return the weights of four heads of which the key heads of the second and third are swapped.

    Heads that take key heads in turn then compute the formula.
    """
    of_columns = torch.arange(len(weights.w_q)).unflatten(0, (4, -1))
    order = of_columns[[0, 2, 1, 3]].flatten()
    b_q = None if weights.b_q is None else weights.b_q[order]
    return replace(weights, w_q=weights.w_q[order], b_q=b_q, w_o=weights.w_o[:, order])


def find_value_width(candidate: Candidate) -> Candidate:
    """Claim values of their own width, if the formula gives the output with them."""
    if candidate.sizes.head_dims or candidate.sizes.head_dim_multiple > 1:
        return candidate
    claiming = candidate.claiming(value_width=True)
    changes = {**candidate.trial.changes, "d_value": candidate.config.head_dim + 1}
    tried = claiming.trying(changes=changes)
    return claiming if _computes_formula(tried, candidate.probes[0].inputs) else candidate


def _computes_formula(tried: Candidate, inputs: Inputs, weights: Weights | None = None) -> bool:
    """Return whether a plain call gives the formula, with other weights if these are given."""
    result = tried.call_plainly(inputs)
    if result is None:
        return False
    return is_close(result.output, tried.formula(inputs, weights or tried.weights, None))
