"""The oracle: a loop over heads in float64 that gives each value with the error that rounding may put on it.

An implementation is right where |result - value| <= bound, element by element. The bound is a theorem: it covers every
order of summation, split, tiled or fused, so a correct implementation cannot exceed it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.bounds import Ball, Units, affine, units_of
from mha.spec.claims import Claims
from mha.spec.problem import Problem

# Elements of the largest temporary of the core, so that long rows need no more memory than short ones.
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a correct implementation returns, in float64, each with its bound.

    output: (B, L, D); weights: (B, H, L, S); context: (B, L, D), the heads' contexts before W_o;
    value: (B, S, H, d_k), the projected values; empty: boolean (B, H, L), the rows without an allowed key.
    """

    output: Ball
    weights: Ball
    context: Ball
    value: Ball
    empty: Tensor


def oracle(problem: Problem, claims: Claims, scale: float | None = None) -> Answer:
    """Solve a problem: equations 1 and 3 of Vaswani et al. 2017, head by head.

    claims: decide the causal alignment, the empty rows and the rounding. scale: 1/sqrt(d_k) unless given.
    """
    config, given = problem.config, problem.weights
    units, head_dim = units_of(problem.query.dtype), config.head_dim
    tau = head_dim**-0.5 if scale is None else scale
    query = affine(Ball.exact(problem.query), given.w_q, given.b_q, units)
    key = affine(Ball.exact(problem.key), given.w_k, given.b_k, units)
    value = affine(Ball.exact(problem.value), given.w_v, given.b_v, units)
    allowed = problem.allowed(claims.causal)
    bias = torch.zeros((), dtype=torch.float64, device=allowed.device)
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        bias = problem.mask.detach().double()
    bias = bias.expand(problem.shape)
    contexts, weights, values = [], [], []
    for head in range(config.n_heads):
        kv_head = head * config.kv_heads // config.n_heads
        own = slice(head * head_dim, (head + 1) * head_dim)
        kv_own = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
        q, k, v = query[..., own], key[..., kv_own], value[..., kv_own]
        context, weight = _head(q, k, v, allowed[:, head], bias[:, head], tau, claims, units)
        contexts.append(context)
        weights.append(weight)
        values.append(v)
    context = Ball.stack(contexts, 2).flatten(2)
    return Answer(
        output=affine(context, given.w_o, given.b_o, units),
        weights=Ball.stack(weights, 1),
        context=context,
        value=Ball.stack(values, 2),
        empty=~allowed.any(-1),
    )


def _head(
    query: Ball, key: Ball, value: Ball, allowed: Tensor, bias: Tensor, tau: float, claims: Claims, units: Units
) -> tuple[Ball, Ball]:
    """Attend with one head: query (B, L, d), key and value (B, S, d), allowed and bias (B, L, S)."""
    if claims.empty_row == "uniform":
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | empty
        query = Ball(query.mid.masked_fill(empty, 0.0), query.rad.masked_fill(empty, 0.0))
        bias = bias.masked_fill(empty, 0.0)
    score, error = _scores(query, key, allowed, bias, tau, claims, units)
    empty = ~allowed.any(-1, keepdim=True)
    # A row without a key would be -inf - -inf; any finite score serves, its weights are set below.
    score = score.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0.0)
    log_weight = torch.log_softmax(score, -1).masked_fill(~allowed, float("-inf"))
    gap = (score - score.amax(-1, keepdim=True)).abs().masked_fill(~allowed, 0.0)
    own = units.accumulate
    # Rescaling by a running or a split maximum adds nothing: its steps add up to the key's own gap.
    wobble = (error + (3 * gap + claims.rounding.exp_error + 4) * own).masked_fill(~allowed, 0.0)
    weight, upper, lower = log_weight.exp(), (log_weight + wobble).exp(), (log_weight - wobble).exp()
    count = allowed.sum(-1, keepdim=True).clamp(min=1)
    sums = count.double() * own / (1 - count.double() * own).clamp(min=0.0)
    cast = units.store if claims.rounding.scores_stored else own
    spread = torch.maximum(
        upper / lower.sum(-1, keepdim=True).clamp(min=units.flush) - weight,
        weight - lower / upper.sum(-1, keepdim=True).clamp(min=units.flush),
    )
    underflow = (units.subnormal + units.flush) * allowed.double()
    weight_rad = (spread + (sums + cast) * weight + underflow).masked_fill(~allowed, 0.0)
    context = weight @ value.mid
    moved = _moved(upper - weight, value.mid, context) / lower.sum(-1, keepdim=True).clamp(min=units.flush)
    magnitude = weight @ value.mid.abs()
    rad = (
        moved
        + (2 * sums + 3 * own + cast) * magnitude
        + underflow @ value.mid.abs()
        + upper @ value.rad
        + count * units.flush
    ).masked_fill(empty, 0.0)
    result = Ball(context, rad)
    stored = Ball(context, result.stored(units).rad.masked_fill(empty, 0.0))
    if claims.empty_row == "nan":
        stored = Ball(stored.mid.masked_fill(empty, float("nan")), stored.rad)
        weight = weight.masked_fill(empty, float("nan"))
    return stored, Ball(weight, weight_rad)


def _scores(
    query: Ball, key: Ball, allowed: Tensor, bias: Tensor, tau: float, claims: Claims, units: Units
) -> tuple[Tensor, Tensor]:
    """Return the scores (B, L, S) and the error of each; what they hold where no attention is allowed is not used."""
    rounding = claims.rounding
    key_t, key_rad = key.mid.transpose(-1, -2), key.rad.transpose(-1, -2)
    size = tau * (query.mid.abs() @ key_t.abs())
    # Four roundings make the scale itself: a square root, a division, a second root, a cast.
    relative = units.gamma(query.mid.shape[-1] + 4) + rounding.scaling_roundings * units.store
    relative += units.store if rounding.scores_stored else 0.0
    bias = bias.masked_fill(~allowed, 0.0)
    spread = tau * (query.rad @ key_t.abs() + query.mid.abs() @ key_rad + query.rad @ key_rad)
    score = tau * (query.mid @ key_t) + bias
    stored = units.store if rounding.scores_stored else units.accumulate
    biased = stored * (score.abs() + bias.abs()) * (bias != 0)
    error = relative * size + spread + biased + query.mid.shape[-1] * units.flush
    return score, error.masked_fill(~allowed, 0.0)


def _moved(excess: Tensor, value: Tensor, context: Tensor) -> Tensor:
    """Return sum_j excess_j |v_j - o|, (B, L, d), for excess (B, L, S), value (B, S, d), context (B, L, d).

    Errors of the weights move the context only as far as the values differ from it, since sum_j p_j (v_j - o) = 0.
    """
    rows = max(1, CHUNK // max(1, excess.shape[0] * excess.shape[2] * value.shape[2]))
    parts = []
    for part, centre in zip(excess.split(rows, 1), context.split(rows, 1), strict=True):
        distance = (value.unsqueeze(1) - centre.unsqueeze(2)).abs()
        parts.append(torch.einsum("bls,blsd->bld", part, distance))
    return torch.cat(parts, 1) if parts else torch.zeros_like(context)
