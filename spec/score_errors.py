"""The scores of the attention core in float64, and E, the error of each.

The symbols and the assumptions are those of `mha.spec.core`; this is step 1 of its bound. Scores
are a `Ball` (B, H, L, S): s_j with the radius E_j, -infinity with the radius 0 outside A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mha.spec.bounds import Ball, row_max
from mha.spec.heads import Heads, Precision
from mha.spec.units import compounded, units_of

# Roundings that make tau: a root, a division, a second root, a cast.
OF_SCALE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The scores that the softmax gets.

    scores: s and E, (B, H, L, S).
    max_score: (B, H, L), the largest magnitude that m may have.
    slope: the derivative of capped scores, (B, H, L, S), or None without a cap.
    """

    scores: Ball
    max_score: Tensor
    slope: Ball | None


def scores_of(heads: Heads, tau: float, precision: Precision) -> Scores:
    """Return the scores, whose errors cover keys with and without their bias."""
    # E_j = max(E_j, E'_j), and |m| = max(|m|, |m'|) + max_j E_j
    scores, slope = _of_form(heads, heads.key, tau, precision)
    error, m = scores.rad, row_max(scores.mid).abs()
    if heads.bare_key is not None:
        other, _ = _of_form(heads, heads.bare_key, tau, precision)
        error, m = torch.maximum(error, other.rad), torch.maximum(m, row_max(other.mid).abs())
    return Scores(Ball(scores.mid, error), m + row_max(error), slope)


def _of_form(heads: Heads, k: Ball, tau: float, precision: Precision) -> tuple[Ball, Ball | None]:
    """Return the scores of one form of the keys, and the slope of a cap, or None."""
    units, rounding = precision.units, precision.rounding
    u = units.store if rounding.scores_stored else units.accumulate
    product = _scaled_product(heads.query, k, tau, precision)
    scores, slope = _capped_and_biased(heads, product, u, precision)
    s, error = scores.mid, scores.rad
    if heads.sinks is not None:
        # The score of a sink is given, and may be rounded to another base.
        s[..., -1:] = heads.sinks.masked_fill(heads.sinks.isinf(), 0.0)
        error[..., -1:] = 3 * units.accumulate * s[..., -1:].abs()
    if rounding.softmax_in_float32:
        # E_j += 2^-24 (|s_j| + E_j)
        error = error + units_of(torch.float32).store * (s.abs() + error)
    error = error.masked_fill(heads.forbidden, 0.0)
    if units.largest < float("inf"):
        # Nothing is known of a row in which a score, or a number on the way to it, may overflow.
        largest = _largest_on_the_way(heads.query, k, tau) + s.abs() + error
        overflows = heads.allowed & (largest >= units.largest)
        error = error.masked_fill(overflows.any(-1, keepdim=True) & heads.allowed, float("inf"))
    # In an empty row, any finite score serves: the policy sets its weights afterwards.
    s = s.masked_fill(heads.forbidden, float("-inf")).masked_fill(heads.empty, 0.0)
    return Ball(s, error), slope


def _scaled_product(q: Ball, k: Ball, tau: float, precision: Precision) -> Ball:
    """Return tau q.k_j with its error, (B, H, L, S)."""
    units, rounding, width = precision.units, precision.rounding, q.mid.shape[-1]
    # pre, how many of q and k are rounded once scaled, and mat: 1 if scores are stored, 2 if they
    # are scaled after that, as q.k_j is then stored too. (1 + u / (1 + u))^3 <= 1 + 3 u.
    stores = rounding.scaling_roundings
    if rounding.scores_stored:
        stores = max(stores, 1) + 1
    # r = gamma(d + 4) (+) e_p (+) (pre + mat) u_s
    r = compounded(units.products(width + OF_SCALE), stores * units.store)
    # E_j = |tau| ((dq + r (|q| + dq)).(|k_j| + dk_j) + |q|.dk_j) + d eta_a, and where something is
    # stored, + max(1, |tau|) eta_s (sum |q| + sum |k_j| + 2): 1 and tau are the most that the
    # other side is scaled by
    of_query, of_key = abs(tau) * (q.rad + r * q.size), abs(tau) * q.mid.abs()
    error = of_query @ k.size.mT + of_key @ k.rad.mT + width * units.flush
    if stores:
        error = error + max(1.0, abs(tau)) * units.subnormal * _stored_parts(q, k)
    return Ball(tau * q.mid @ k.mid.mT, error)


def _stored_parts(q: Ball, k: Ball) -> Tensor:
    """Return what the eta_s of stored numbers is multiplied by, (B, H, L, S).

    Each number of q and k may be off by eta_s once it is scaled, and is multiplied by one of the
    other side; the product and the score may be, too. Zeros are stored as they are.
    """
    of_q, of_k = q.size.sum(-1).unsqueeze(-1), k.size.sum(-1).unsqueeze(-2)
    return torch.where((of_q != 0) & (of_k != 0), of_q + of_k + 2, 0.0)


def _capped_and_biased(
    heads: Heads, product: Ball, u: float, precision: Precision
) -> tuple[Ball, Ball | None]:
    """Return the scores with the float mask and the cap, and the slope of the cap, or None.

    u: the roundoff of scores.
    """
    if heads.cap is None:
        return _biased(heads, product, u), None
    if heads.caps_bias:
        return _capped(heads.cap, _biased(heads, product, u), u, precision)
    capped, slope = _capped(heads.cap, product, u, precision)
    return _biased(heads, capped, u), slope


def _biased(heads: Heads, scores: Ball, u: float) -> Ball:
    """Return s_j + b_j with its error."""
    if heads.bias is None:
        return scores
    # E_j += db_j + u |b_j|, then E_j += u (|s_j| + E_j), unless b_j = 0
    bias = heads.bias.rearranged(lambda part: part.masked_fill(heads.forbidden, 0.0))
    s, known = scores.mid + bias.mid, scores.rad + bias.rad
    added = known + u * (s.abs() + known + (1 + u) * bias.size)
    return Ball(s, torch.where(bias.size != 0, added, scores.rad))


def _capped(cap: float, scores: Ball, u: float, precision: Precision) -> tuple[Ball, Ball]:
    """Return c tanh(s / c) with its error, and its derivative 1 - tanh^2.

    A hyperbolic tangent may be made of two exponentials, (e^x - e^-x) / (e^x + e^-x), which errs by
    as much near 0.
    """
    x, of_score = scores.mid / cap, scores.rad / cap
    t = x.tanh()
    # dx = E_j / c + u (|x| + E_j / c);  |t'| <= 1 - tanh^2 where |x| is least, and |t''| <= 2 |t'|
    dx = of_score + u * (x.abs() + of_score)
    steepest = 1 - (x.abs() - dx).clamp(min=0.0).tanh().square()
    of_tanh = (2 * precision.exponential + 3) * precision.units.accumulate
    dt = (steepest * dx).clamp(max=2.0) + of_tanh
    capped = cap * t
    # The product with c is rounded, and t before it, where scores are stored.
    error = cap * dt + 2 * u * (capped.abs() + cap * dt)
    slope = Ball(1 - t.square(), (2 * steepest * dx).clamp(max=1.0) + 2 * of_tanh + 4 * u)
    return Ball(capped, error), slope


def _largest_on_the_way(q: Ball, k: Ball, tau: float) -> Tensor:
    """Return the largest magnitude on the way to each score, (B, H, L, S)."""
    # (|q| + dq).(|k_j| + dk_j), or a query or key that is scaled: |tau| max_c (|q_c| + dq_c)
    largest = q.size @ k.size.mT
    if abs(tau) > 1:
        scaled = torch.maximum(row_max(q.size).unsqueeze(-1), row_max(k.size).unsqueeze(-2))
        largest = torch.maximum(largest, abs(tau) * scaled)
    return largest
