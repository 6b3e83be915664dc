"""The gradients: what a correct backward pass gives, each value with the error that rounding may put on it.

The formulas are written out, not taken from autograd: they share no code with what they judge. The bound is a theorem
for any order of summation: unfused steps under autograd, tiles, weights stored or recomputed from the row's
log-sum-exp, the row sum of P dP taken as such or as dC.o, a projection per head, a pass per item. It assumes one set
of weights in one backward pass, that the softmax takes a row's maximum as a constant or differentiates it once, and
that keys have their bias: the softmax cancels it, but the error of dS is multiplied by the key. Projections are applied
one after the other: of two that were multiplied into one, such as W_o W_v, the gradients may round otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mha.spec.bounds import Ball, Units, units_of
from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.core import normaliser_error as log_drift
from mha.spec.forward import Expected, oracle
from mha.spec.problem import INPUTS, Problem

# Roundings of dP and of its row sum on their way to dS: at most four operations (the backward pass of exp, sum and
# division), and two exponentials of 2 u each where exp and log_softmax take their own.
SOFTMAX_STEPS = 8


def gradients(problem: Problem, claims: Claims, upstream: Tensor, answer: Expected | None = None) -> dict[str, Ball]:
    """Differentiate sum(output * upstream) with respect to the inputs, the weights and a mask of numbers, by name.

    upstream: (B, L, D), exact; 0 for queries with an empty row in some head, unless `claims.empty_row` is "zeros".
    answer: what `oracle` gives for the problem and the claims, if it is at hand.
    Inputs that are one tensor have a gradient each here: see `sum_shared`.
    Source: equation 1 of Vaswani et al. 2017, differentiated; Dao et al. 2022, appendix B.
    """
    answer = oracle(problem, claims) if answer is None else answer
    config, given, units = problem.config, problem.weights, units_of(problem.query.dtype)
    batch, _, queries, keys = problem.shape
    arriving, found = Ball.exact(upstream), {}
    context = Ball(answer.context.mid.nan_to_num(nan=0.0), answer.context.rad)
    found["w_o"], found["b_o"] = _of_weights(arriving, arriving.mid.abs(), context, units, batch)
    terms = config.d_model + config.n_heads
    changed = _of_input(arriving, arriving.mid.abs(), given.w_o, terms, units, config.n_heads)
    changed, context = _cut(changed, config), _cut(context, config)
    allowed = problem.allowed(claims.causal)
    allowed = torch.nn.functional.pad(allowed, (0, answer.key.mid.shape[2] - keys), value=True)
    softmax = units.coarser(units_of(torch.float32)) if claims.rounding.softmax_in_float32 else units
    weights, drift = answer.weights, log_drift(answer.max_score, answer.key.mid.shape[2], softmax.accumulate)
    if claims.empty_row != "zeros":
        weights = Ball(weights.mid.masked_fill(~allowed, 0.0), weights.rad.masked_fill(~allowed, 0.0))
    weights = Ball(weights.mid, weights.rad + drift * weights.size)
    scores = _of_scores(weights, answer.value, changed, context, allowed, drift, claims, units, softmax)
    if problem.mask is not None and problem.mask.is_floating_point():
        found["mask"] = _of_mask(scores[..., :keys], problem.mask, allowed[..., :keys], units)
    repeats = config.n_heads // config.kv_heads
    per_query, per_key = (allowed.sum(dim).unsqueeze(-1).double() for dim in (3, 2))
    if repeats > 1:
        per_key = per_key.unflatten(1, (-1, repeats)).sum(2).repeat_interleave(repeats, 1) + repeats
    # Four roundings make the scale, one multiplies; an operand that was scaled before was rounded for that.
    scaling = max(1, claims.rounding.scaling_roundings) * units.store
    tau = config.head_dim**-0.5
    parts = {
        "query": _product(scores, answer.key, units.gammas(per_query + 5) + scaling, tau, units),
        "key": _product(scores.mT, answer.query, units.gammas(per_key + 5) + scaling, tau, units),
        "value": _product(weights.mT, changed, units.gammas(per_key + 1), 1.0, units),
    }
    reached = allowed.any(1)
    for name, part in parts.items():
        role, source, each = name[0], getattr(problem, name), 1 if name == "query" else repeats
        ball, bulk = _join(part, each, units)
        if ball.mid.shape[1] > source.shape[1]:
            if config.bias_kv:
                extra = ball[:, keys : keys + 1].flatten(0, 1), bulk[:, keys : keys + 1].flatten(0, 1)
                found[f"extra_{role}"] = _of_bias(*extra, units, batch * queries, batch * each)
            ball, bulk = ball[:, :keys], bulk[:, :keys]
        w_name, b_name = f"w_{role}", f"b_{role}"
        found[w_name], found[b_name] = _of_weights(ball, bulk, Ball.exact(source), units, batch * each)
        # One product may hold all projections of one tensor, and autograd may add them up head by head.
        sharing = sum(getattr(problem, other) is source for other in INPUTS)
        gradient = _of_input(ball, bulk, getattr(given, w_name), sharing * terms, units, sharing * config.n_heads)
        idle = ~reached.any(2 if name == "query" else 1)[:, : source.shape[1], None]
        found[name] = Ball(gradient.mid, gradient.rad.masked_fill(idle, 0.0))
    names = (*INPUTS, *(name for name, _ in given.named()), "mask")
    return {name: found[name] for name in names if name in found}


def sum_shared(problem: Problem, found: dict[str, Ball]) -> dict[str, Ball]:
    """Add up the gradients of inputs that are one tensor, under the first of their names, as autograd does.

    found: what `gradients` gives for the problem. The roundings of these sums are part of its radii.
    """
    summed = dict(found)
    for place, name in enumerate(INPUTS):
        for other in INPUTS[place + 1 :]:
            if name in summed and other in summed and getattr(problem, name) is getattr(problem, other):
                first, second = summed[name], summed.pop(other)
                summed[name] = Ball(first.mid + second.mid, first.rad + second.rad)
    return summed


def _cut(joined: Ball, config: Config) -> Ball:
    """Cut (B, L, D) into (B, H, L, d_k)."""
    heads = config.n_heads, config.head_dim
    return Ball(*(part.unflatten(-1, heads).transpose(1, 2) for part in (joined.mid, joined.rad)))


def _join(heads: Ball, repeats: int, units: Units) -> tuple[Ball, Tensor]:
    """Add up each key/value head's repeats and join the heads, (B, H, length, d_k) to (B, length, heads * d_k).

    Also returns the sum of the repeats' sizes: what rounding is relative to where they are added up later.
    """
    bulk = heads.size
    if repeats > 1:
        bulk = bulk.unflatten(1, (-1, repeats)).sum(2)
        heads = Ball(*(part.unflatten(1, (-1, repeats)).sum(2) for part in (heads.mid, heads.rad)))
        heads = Ball(heads.mid, heads.rad + repeats * units.store * bulk + units.subnormal)
    parts = [part.transpose(1, 2).flatten(2) for part in (heads.mid, heads.rad, bulk)]
    return Ball(parts[0], parts[1]), parts[2]


def _product(a: Ball, b: Ball, relative: Tensor, tau: float, units: Units) -> Ball:
    """Return tau a @ b, stored."""
    result = a.times(b, relative)
    return Ball(tau * result.mid, tau * result.rad + (a.mid.shape[-1] + 1) * units.flush).stored(units)


def _of_input(ball: Ball, bulk: Tensor, weight: Tensor, terms: int, units: Units, pieces: int) -> Ball:
    """Return the gradient (..., n) of a projection's input, from that of its result, (..., m), and `weight`, (m, n).

    bulk: what its rounding is relative to. terms: how many are added up. pieces: how many parts of the sum are stored.
    """
    matrix = weight.detach().double()
    relative = units.gamma(terms) + pieces * (units.store - units.accumulate)
    rad = (ball.rad + relative * bulk) @ matrix.abs() + terms * units.flush + pieces * units.subnormal
    return Ball(ball.mid @ matrix, rad).stored(units)


def _of_weights(ball: Ball, bulk: Tensor, x: Ball, units: Units, pieces: int) -> tuple[Ball, Ball]:
    """Return the gradients of a projection's matrix (m, n) and bias (m,), from that of its result, (B, length, m).

    x: (B, length, n), the projection's input. bulk, pieces: as in `_of_input`; the sums run over B * length.
    """
    flat, sizes, x = ball.flatten(0, 1), bulk.flatten(0, 1), x.flatten(0, 1)
    terms = flat.mid.shape[0] + pieces
    relative = units.gamma(terms) + pieces * (units.store - units.accumulate)
    spread, lost = (flat.rad + relative * sizes).mT, terms * units.flush + pieces * units.subnormal
    matrix = Ball(flat.mid.mT @ x.mid, flat.mid.mT.abs() @ x.rad + spread @ x.size + lost)
    return matrix.stored(units), Ball(flat.mid.sum(0), spread.sum(-1) + lost).stored(units)


def _of_bias(ball: Ball, bulk: Tensor, units: Units, terms: int, pieces: int) -> Ball:
    """Return the sum over the rows of (n, m)."""
    relative = units.gamma(terms + pieces) + pieces * (units.store - units.accumulate)
    lost = (terms + pieces) * units.flush + pieces * units.subnormal
    return Ball(ball.mid.sum(0), (ball.rad + relative * bulk).sum(0) + lost).stored(units)


def _of_mask(scores: Ball, mask: Tensor, allowed: Tensor, units: Units) -> Ball:
    """Sum the gradients of the scores over the dimensions that the mask is broadcast over."""
    terms = scores.mid.numel() // max(1, mask.numel()) + 1
    relative = units.gamma(terms) + terms * (units.store - units.accumulate)
    rad = (scores.rad + relative * scores.size).sum_to_size(mask.shape) + terms * units.flush
    ball = Ball(scores.mid.sum_to_size(mask.shape), rad).stored(units)
    return Ball(ball.mid, ball.rad.masked_fill(allowed.double().sum_to_size(mask.shape) == 0, 0.0))


def _of_scores(
    weights: Ball,
    value: Ball,
    changed: Ball,
    context: Ball,
    allowed: Tensor,
    drift: Tensor,
    claims: Claims,
    units: Units,
    softmax: Units,
) -> Ball:
    """Return dS = P (dP - D), (B, H, L, S), where dP = dC V^T and D = rowsum(P dP) = dC.o.

    changed: dC, (B, H, L, d_k). The error of dP - D is small where values are near the context, as far as it comes
    from the weights: sum_l P_l dP_l errs by dC.(sum_l P_l v_l - o), and that the context's own radius bounds.
    """
    width, terms = value.mid.shape[-1], allowed.sum(-1, keepdim=True).double() + 1
    own = softmax.store if claims.rounding.scores_stored else softmax.accumulate
    summing = softmax.gammas(terms)
    relative = units.gamma(width + 1) + own
    # What underflows: products, dS as it is stored, and dS as it is stored again once scaled by 1/sqrt(d_k).
    lost = (width + value.mid.shape[2] + 4) * softmax.flush + (1 + width**0.5) * softmax.subnormal
    p, p_size = weights.mid, weights.size
    slope = changed.times(value.mT, relative)
    error = slope.rad + lost
    size = slope.mid.abs() + error
    # The row sum, either way: dC and o err, products round, sums round, the result is stored.
    level = (changed.mid * context.mid).sum(-1, keepdim=True)
    reach = (1 + relative) * context.rad + relative * (p_size @ value.size)
    apart = (changed.rad * context.mid.abs() + changed.size * reach).sum(-1, keepdim=True)
    apart = apart + summing * (p_size * size).sum(-1, keepdim=True) + (own + drift) * (level.abs() + apart) + lost
    size = size + (level.abs() + apart)
    error = error + apart + SOFTMAX_STEPS * own * size
    difference = slope.mid - level
    rad = weights.rad * (difference.abs() + error) + p * error + lost
    if p.shape[-1]:
        # Differentiated, the row's maximum gets the row's sum, which is 0 but for rounding.
        strayed = (3 * summing + SOFTMAX_STEPS * own) * (p_size * size).sum(-1, keepdim=True)
        rad = rad + strayed * (p_size >= (p - weights.rad).amax(-1, keepdim=True))
    return Ball(p * difference, rad.masked_fill(~allowed, 0.0))
