"""Pure edits of a problem: other weights, other keys, another mask, one item."""

from __future__ import annotations

import torch
from torch import Tensor

from mha.spec import Claims, MaskConvention, Problem, join_causal, to_convention
from mha.spec.claims import Alignment
from mha.spec.dtypes import computable


def passing_heads(problem: Problem) -> Problem:
    """Make W_o the identity and b_o zero, so that the output is the heads' contexts side by side."""
    eye = torch.eye(problem.config.d_model, dtype=problem.query.dtype, device=problem.query.device)
    b_o = problem.weights.b_o
    return problem.change(w_o=eye, b_o=None if b_o is None else torch.zeros_like(b_o))


def zeroed(problem: Problem, *names: str) -> Problem:
    """Make the weights of these names zero, as far as there are any."""
    return problem.change(
        **{name: (computable(tensor) * 0).to(tensor.dtype) for name, tensor in problem.weights.named() if name in names}
    )


def select_keys(problem: Problem, keys: Tensor) -> Problem:
    """Keep some keys and values, in the order given; a query that is the key goes with it. The mask stays."""
    whole = {id(problem.key), id(problem.value)}
    return problem.map_inputs(lambda x: x[:, keys] if id(x) in whole else x)


def select_queries(problem: Problem, rows: Tensor, alignment: Alignment | None) -> Problem:
    """Keep some queries, with their rows of the masks: memory is then linear in the number of keys."""
    queries, keys = problem.query.shape[1], problem.key.shape[1]
    mask = problem.mask if problem.mask is None or problem.mask.shape[2] == 1 else problem.mask[:, :, rows]
    if problem.is_causal:
        offset = keys - queries if alignment == "bottom_right" else 0
        places = (rows + offset).to(problem.query.device).unsqueeze(1)
        mask = join_causal(mask, torch.arange(keys, device=problem.query.device) <= places)
    return problem.change(query=problem.query[:, rows], mask=mask, is_causal=False)


def as_claimed(claims: Claims, problem: Problem, allowed: Tensor) -> Problem:
    """Return the problem with this boolean mask, in a form that is claimed."""
    form: MaskConvention = "keep" if "bool" in claims.masks else "additive"
    return problem.change(mask=to_convention(allowed, form, problem.query.dtype))


def as_wide_as_claimed(mask: Tensor, problem: Problem, claims: Claims) -> Tensor:
    """Expand a mask (B or 1, H or 1, L or 1, S) along the axes on which masks are claimed to differ."""
    differ = claims.per_item_mask, claims.per_head_mask, claims.per_query_mask, True
    return mask.expand(*(size if free else -1 for size, free in zip(problem.shape, differ, strict=True)))


def item(problem: Problem, index: int) -> Problem:
    """Take one item of the batch, as a batch of one."""
    own = slice(index, index + 1)
    mask = problem.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[own]
    return problem.map_inputs(lambda x: x[own]).change(mask=mask)
