"""The oracle: attention in float64, each value with the error that rounding may put on it.

An implementation is right where |result - value| <= bound, element by element. The bound is a theorem: it covers every
order of summation, split, tiled or fused, so a correct implementation cannot exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball, Units, affine, units_of
from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.problem import Problem

# Elements of the largest temporary, or those of one query if these are more: in the cache, it takes half of the time.
CHUNK = 1 << 18
# Of a number whose exponential is one: a bound of e^600 says nothing, but is no infinity.
LARGEST_LOG = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What a correct implementation returns, in float64, each with its bound, and the steps on the way there.

    output: (B, L, D); weights: (B, H, L, S); summed: makes `sums`; context: (B, L, D), the heads' contexts before W_o;
    query: (B, H, L, d_k), key and value: (B, H, S, d_k), as projected, each key/value head repeated for its query
    heads; empty: boolean (B, H, L), the rows without an allowed key; highest: (B, H, L), the largest magnitude that
    the largest score of each row may have, 0 where no key is allowed.
    """

    output: Ball
    weights: Ball
    summed: Callable[[], Ball]
    context: Ball
    query: Ball
    key: Ball
    value: Ball
    empty: Tensor
    highest: Tensor

    @property
    def sums(self) -> Ball:
        """The sums of the rows of weights, (B, H, L); made when asked for, which is seldom."""
        return self.summed()


def oracle(
    problem: Problem, claims: Claims, scale: float | None = None, autocast: torch.dtype | None = None
) -> Expected:
    """Solve a problem: equations 1 and 3 of Vaswani et al. 2017.

    claims: decide the causal alignment, the empty rows and the rounding. scale: 1/sqrt(d_k) unless given.
    autocast: the dtype to which each product may round its factors first, if it may.
    """
    config, given, low = problem.config, problem.weights, autocast is not None
    if low:  # its products are stored in that dtype, whatever is declared of the problem's own
        stored = replace(claims.rounding, scores_stored=True, softmax_stored=True, scaling_roundings=2)
        claims = replace(claims, rounding=stored)
    units = units_of(autocast or problem.query.dtype)
    tau = config.head_dim**-0.5 if scale is None else scale
    query = _heads(affine(Ball.exact(problem.query), given.w_q, given.b_q, units, low), config)
    key = _heads(affine(Ball.exact(problem.key), given.w_k, given.b_k, units, low), config)
    value = _heads(affine(Ball.exact(problem.value), given.w_v, given.b_v, units, low), config)
    allowed = problem.allowed(claims.causal)
    bias = None
    if problem.mask is not None and problem.mask.dtype != torch.bool:
        bias = problem.mask.detach().double().expand(problem.shape)
    if config.bias_kv or config.zero_key:
        key, value, allowed, bias = _extended(problem, key, value, allowed, bias)
    weights, summed, contexts, highest = _attend(query, key, value, allowed, bias, tau, claims, units)
    context = Ball(*(part.transpose(1, 2).flatten(2) for part in (contexts.mid, contexts.rad))).known()
    return Expected(
        output=affine(context, given.w_o, given.b_o, units, low).known(),
        weights=weights,
        summed=summed,
        context=context,
        query=query,
        key=key,
        value=value,
        empty=~allowed.any(-1),
        highest=highest,
    )


def _heads(projected: Ball, config: Config) -> Ball:
    """Cut (B, length, heads * d_k) into (B, H, length, d_k); head i owns the columns i*d_k to (i+1)*d_k."""

    def cut(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // config.head_dim, config.head_dim)).transpose(1, 2)
        repeats = config.n_heads // heads.shape[1]
        return heads if repeats == 1 else heads.repeat_interleave(repeats, 1)

    return Ball(cut(projected.mid), cut(projected.rad))


def _extended(
    problem: Problem, key: Ball, value: Ball, allowed: Tensor, bias: Tensor | None
) -> tuple[Ball, Ball, Tensor, Tensor | None]:
    """Put the extra keys and values after the others; every query may attend to them, and no mask adds to them."""
    config, given = problem.config, problem.weights
    extras: list[list[Tensor | None]] = [[given.extra_k, given.extra_v]] if config.bias_kv else []
    extras += [[given.w_k.new_zeros(len(given.w_k))] * 2] if config.zero_key else []
    for pair in extras:
        rows = [_heads(Ball.exact(row.expand(key.mid.shape[0], 1, -1)), config) for row in pair if row is not None]
        key, value = (
            Ball(torch.cat([old.mid, new.mid], 2), torch.cat([old.rad, new.rad], 2))
            for old, new in zip((key, value), rows, strict=True)
        )
    grown = (0, len(extras))
    allowed = torch.nn.functional.pad(allowed, grown, value=True)
    return key, value, allowed, None if bias is None else torch.nn.functional.pad(bias, grown)


def _attend(
    query: Ball,
    key: Ball,
    value: Ball,
    allowed: Tensor,
    bias: Tensor | None,
    tau: float,
    claims: Claims,
    units: Units,
) -> tuple[Ball, Callable[[], Ball], Ball, Tensor]:
    """Return weights (B, H, L, S), `Expected.summed`, contexts (B, H, L, d_k) and `Expected.highest`."""
    empty = ~allowed.any(-1, keepdim=True)
    if claims.empty_row == "uniform":
        allowed = allowed | empty
        query = Ball(query.mid.masked_fill(empty, 0.0), query.rad.masked_fill(empty, 0.0))
        bias = None if bias is None else bias.masked_fill(empty, 0.0)
        empty = ~allowed.any(-1, keepdim=True)
    barred, own, stored, flush = ~allowed, units.accumulate, units.store, units.flush
    if claims.rounding.softmax_in_float32:
        single = units_of(torch.float32)
        own, stored, flush = max(own, single.accumulate), max(stored, single.store), max(flush, single.flush)
    score, error = _scores(query, key, barred, bias, tau, claims, units)
    # A row without a key would be -inf - -inf; any finite score serves, its weights are set below.
    score = score.masked_fill(barred, float("-inf")).masked_fill(empty, 0.0)
    log_weight = torch.log_softmax(score, -1).masked_fill(barred, float("-inf"))
    top = _largest(score)
    gap = top.unsqueeze(-1) - score
    # Rescaling by a running or a split maximum adds nothing: its steps add up to the key's own gap.
    steps = 3 * own * gap + (claims.rounding.exp_error + 4) * own
    if claims.rounding.softmax_stored:
        steps += (gap + 2) * max(stored - own, 0.0)
    wobble = (error + steps).masked_fill(barred, 0.0)
    weight, upper, lower = log_weight.exp(), (log_weight + wobble).exp(), (log_weight - wobble).exp()
    # A numerator that underflows is lost before the row is divided by its sum, which is 1/max(upper) or more.
    lost = flush + (units.subnormal if claims.rounding.softmax_stored else 0.0)
    faint = (lost * _largest(upper).unsqueeze(-1)).masked_fill(barred, 0.0)
    upper, lower = upper + faint, (lower - faint).clamp(min=0.0)
    least = lower.sum(-1, keepdim=True).clamp(min=flush)
    count = allowed.sum(-1, keepdim=True).clamp(min=1).double()
    summing = count * own / (1 - count * own).clamp(min=0.0)
    highest = top.abs() + _largest(error)
    if claims.rounding.log_normaliser:
        summing = summing + log_drift(highest, key.mid.shape[2], own)
    cast = stored if claims.rounding.scores_stored else own
    spread = torch.maximum(upper / least - weight, weight - lower / upper.sum(-1, keepdim=True).clamp(min=flush))
    underflow = (units.subnormal + flush) * allowed.double()
    likely = weight + spread
    weight_rad = (spread + _together(summing, cast) * likely + underflow).masked_fill(barred, 0.0)
    most, context = weight + weight_rad, weight @ value.mid
    moved = _moved(upper - weight, value.mid, context) / least
    rounded = _together(summing, summing, 3 * own, cast) * likely + underflow
    rad = moved + rounded @ value.size + most @ value.rad
    result = Ball(context, (rad + count * units.flush).masked_fill(empty, 0.0))
    contexts = Ball(context, result.stored(units).rad.masked_fill(empty, 0.0))
    returned: Tensor | float = 0.0
    if not claims.rounding.scores_stored:  # but what is returned is
        returned = (stored * most + units.subnormal) * allowed
    if claims.empty_row == "nan":
        contexts = Ball(contexts.mid.masked_fill(empty, float("nan")), contexts.rad)
        weight = weight.masked_fill(empty, float("nan"))

    def summed() -> Ball:
        # A row sums to 1 whatever its scores are, as long as numerators and denominator come from the same ones.
        strayed = (2 * steps + 6 * own * (error + _largest(error).unsqueeze(-1))).masked_fill(barred, 0.0)
        apart = torch.minimum((most * strayed).sum(-1), _largest(strayed))
        apart = _together(apart, summing.squeeze(-1), cast) + (underflow + faint + returned).sum(-1)
        unknown = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
        return Ball(weight.sum(-1), unknown.masked_fill(empty.squeeze(-1), 0.0))

    return Ball(weight, weight_rad + returned), summed, contexts, highest


def _scores(
    query: Ball, key: Ball, barred: Tensor, bias: Tensor | None, tau: float, claims: Claims, units: Units
) -> tuple[Tensor, Tensor]:
    """Return the scores (B, H, L, S) and the error of each; what they hold where a key is barred is not used."""
    rounding, width = claims.rounding, query.mid.shape[-1]
    # Four roundings make the scale itself: a square root, a division, a second root, a cast.
    relative = units.gamma(width + 4) + rounding.scaling_roundings * units.store
    relative += units.store if rounding.scores_stored else 0.0
    scaled, size = tau * query.mid, tau * query.mid.abs()
    score = scaled @ key.mid.mT
    error = (tau * query.rad + relative * size) @ key.size.mT + size @ key.rad.mT + width * units.flush
    if bias is not None:
        bias = bias.masked_fill(barred, 0.0)
        score = score + bias
        stored = units.store if rounding.scores_stored else units.accumulate
        error += stored * (score.abs() + bias.abs()) * (bias != 0)
    if rounding.softmax_in_float32:
        error += units_of(torch.float32).store * score.abs()
    error = error.masked_fill(barred, 0.0)
    if units.largest < float("inf"):
        # One score that overflows takes its row with it.
        reach = query.size @ key.size.mT + score.abs() + error
        overflows = ~barred & (reach >= units.largest)
        error = error.masked_fill(overflows.any(-1, keepdim=True) & ~barred, float("inf"))
    return score, error


def _together(first: Tensor, *others: Tensor | float) -> Tensor:
    """Return the relative error that several make together: they multiply."""
    total = first
    for other in others:
        total = total + other + total * other
    return total


def log_drift(highest: Tensor, keys: int, roundoff: float) -> Tensor:
    """Return how far the rows of weights exp(s - z) may stray from 1 together, (B, H, L, 1), where z was stored.

    z = log sum exp(s) has a rounding of its own, a sum, two changes of base, and a logarithm of at most the number of
    keys within 2 ulp; where parts of a row are joined, each has its own. highest: (B, H, L), as in `Expected`.
    """
    steps = (3 * highest + 10 * math.log(max(2, keys))) * roundoff
    return steps.clamp(max=LARGEST_LOG).expm1().unsqueeze(-1)


def _largest(x: Tensor) -> Tensor:
    """The largest number of each row, 0 for a row of none."""
    return x.amax(-1) if x.shape[-1] else x.sum(-1)


def _moved(excess: Tensor, value: Tensor, context: Tensor) -> Tensor:
    """Return sum_j excess_j |v_j - o|, (B, H, L, d), for excess (B, H, L, S), value (B, H, S, d), context (B, H, L, d).

    Errors of the weights move the context only as far as the values differ from it, since sum_j p_j (v_j - o) = 0.
    """
    rows = max(1, CHUNK // max(1, value.numel()))
    parts = []
    for part, centre in zip(excess.split(rows, 2), context.split(rows, 2), strict=True):
        distance = (value.unsqueeze(2) - centre.unsqueeze(3)).abs_()
        parts.append((part.unsqueeze(3) @ distance).squeeze(3))
    return torch.cat(parts, 2)
