"""The attention core, softmax(tau q k^T + b) v, in float64, and a bound on its rounding error.

Symbols, for one query of one head:

    tau             the scale
    q, k_j, v_j     query, and key and value number j
    A, n            the allowed keys, and how many there are
    b_j             entry of a float mask
    s_j, m          score tau q.k_j + b_j, and the largest one of A
    p_j, o          weight exp(s_j) / sum_l exp(s_l), and context sum_j p_j v_j
    d               width of q and k_j
    N_j, p~_j       numerator and weight as they are computed
    dx, B_o         error of x: |computed - exact| <= dx; that of o
    u_a, u_s        unit roundoff of the accumulator, and of the storage dtype, that of the inputs
    u, u_p          u_s where scores and weights are stored, or weights alone, else u_a
    eta_s           half the smallest subnormal of the storage dtype
    eta_a           smallest normal number of the accumulator: less may become 0
    gamma(n)        n u_a / (1 - n u_a): relative error of a sum of n terms, in any order
    e_p             relative error of a product whose factors are rounded first, else 0
    a (+) b         (1 + a)(1 + b) - 1: relative error of a number with two relative errors
    E_j, w_j        error of s_j, and of log p_j
    k'_j, E', m'    k_j without its bias b_k, and E and m for such keys

The bound, step by step; `mha.spec.score_errors` has 1, `mha.spec.softmax` 2 and 3, this module 4:

1. Scores. q.k_j is a sum of d products, each with a relative error r of at most gamma(d + 4), and
   the stores on the way: four roundings make tau. q and k_j themselves are off by dq and dk_j, and
   what is stored below the smallest normal number by eta_s. This gives E_j.
2. Numerators. The softmax computes exp(s_j - m) with a relative error of at most e^w_j - 1, where
   w_j = E_j + w_own_j, and w_own_j is what its own steps add: the difference, the exponential,
   and rescaling. In units of the exact denominator a numerator is between p^-_j = p_j exp(-w_j)
   and p^+_j = p_j exp(w_j).
3. Weights. Their quotient p~_j = N_j / sum_l N_l is between p^-_j / sum_l p^+_l and
   p^+_j / sum_l p^-_l, so that |p~_j - p_j| <= spread_j. The sum is off by gamma(n), the quotient
   by u_p where it is cast:  dp_j = spread_j + (gamma(n) (+) u_p)(p_j + spread_j) + eta_s + eta_a.
4. Contexts. Since sum_j p~_j = 1 and sum_j p_j (v_j - o) = 0,

       sum_j p~_j v_j - o = sum_j p~_j (v_j - o) = sum_j (N_j - p_j)(v_j - o) / sum_l N_l
                          = sum_j (p~_j - p_j)(v_j - o).

   T1 is the smaller one of the bounds on these two forms; it is 0 where all values are equal:
       T1 = sum_j (p^+_j - p_j) |v_j - o| / sum_l p^-_l,  or  sum_j moved_j |v_j - o|.
   T2 and T3 are what does not cancel: the roundings of the denominator, the products, their sum
   and the division (T2), and of the cast to the storage dtype (T3):
       T2 + T3 = sum_j (gamma(n) (+) gamma(n) (+) e_p (+) 3 u_a (+) u_p)(p_j + spread_j) |v_j|
                 + (eta_s + eta_a) sum_j |v_j|.
   The values are off by dv_j, and o is stored:
       B_o = T1 + T2 + T3 + sum_j (p_j + dp_j) dv_j + n eta_a,  then + u_s (|o| + B_o) + eta_s.

Assumptions: operations round to nearest with relative errors of at most u_a or u_s. Sums run in any
order, whole, in tiles, or split and joined by a running or split maximum. The largest score of a
row's allowed keys, or of the keys read so far, is subtracted before the exponential; keys are read
from either end, and a running maximum grows where the exact one does. What is stored, how accurate
products and exponentials are, and how often a part of a row is rescaled after the first time
(`merges`, `rescales`), `Rounding` declares. The bound is then a theorem. No constant in it is
tuned.

What is equal on paper may round differently. Keys may have their bias or not: it adds tau q.b_k to
every score of a row, so that k'_j gives the same weights, and the bound of each step is the larger
one of both. (Extra keys have no bias; beside them it changes the weights.) These forms are assumed
not to occur:

- Projections that are multiplied by one another, such as W_q^T W_k or W_o W_v, or by the scale.
- A value bias that is left out of the values, and added to the contexts or, times W_o, to b_o.
- Weights that are masked after the softmax and normalised again.
- Outputs of single heads that are stored before they are added up.

Sources: Vaswani et al. 2017, equation 1; Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., 2002, chapters 2 and 3; midpoint-radius arithmetic as in Arb (Johansson 2017). The
derivation of E, w, T1, T2 and T3 is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball, weighted_distance
from mha.spec.claims import EmptyRow
from mha.spec.heads import Heads, Precision
from mha.spec.softmax import Softmax, log_sum_exp, made_twice, softmax_of
from mha.spec.units import compound

# The most elements of a temporary, unless one query has more. It then stays in the cache, which
# halves the time.
CHUNK = 1 << 18
# The dimension of the queries in (B, H, L, S) and (B, H, L, d_k).
QUERIES = 2


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The results of the core.

    weights: p, (B, H, L, S).
    context: o, (B, H, L, d_k).
    make_row_sums: returns the sums of the rows of weights, (B, H, L).
    make_lse: returns log sum_j exp(s_j), (B, H, L), of rows with a key.
    max_score: (B, H, L), the largest magnitude that m may have.
    slope: the derivative of capped scores, (B, H, L, S), or None.

    >>> from mha.spec.rounding import Rounding
    >>> ones = Ball.exact(torch.ones(1, 1, 3, 2))
    >>> heads = Heads(ones[:, :, :1], ones, ones, torch.tensor([[[[True, True, False]]]]))
    >>> attended = attend(heads, 0.5, Precision.of(torch.float32, Rounding()), "zeros")
    >>> attended.weights.mid
    tensor([[[[0.5000, 0.5000, 0.0000]]]], dtype=torch.float64)
    >>> bool(attended.make_row_sums().rad < 1e-4)
    True
    """

    weights: Ball
    context: Ball
    make_row_sums: Callable[[], Ball]
    make_lse: Callable[[], Ball]
    max_score: Tensor
    slope: Ball | None = None

    @staticmethod
    def joined(parts: Sequence[Attended]) -> Attended:
        """Join the results for blocks of queries."""
        slopes = [part.slope for part in parts if part.slope is not None]

        def join(result_of: Callable[[Attended], Ball]) -> Ball:
            return Ball.joined([result_of(part) for part in parts], QUERIES)

        return Attended(
            weights=join(lambda part: part.weights),
            context=join(lambda part: part.context),
            make_row_sums=lambda: join(lambda part: part.make_row_sums()),
            make_lse=lambda: join(lambda part: part.make_lse()),
            max_score=torch.cat([part.max_score for part in parts], QUERIES),
            slope=Ball.joined(slopes, QUERIES) if slopes else None,
        )


def attend(heads: Heads, tau: float, precision: Precision, empty_row: EmptyRow) -> Attended:
    """Return weights and contexts as they are stored.

    empty_row: what rows without an allowed key get.

    >>> from mha.spec.rounding import Rounding
    >>> one = Ball.exact(torch.ones(1, 1, 1, 1))
    >>> heads = Heads(one, one, one, allowed=torch.zeros(1, 1, 1, 1, dtype=torch.bool))
    >>> attend(heads, 1.0, Precision.of(torch.float32, Rounding()), "nan").context.mid
    tensor([[[[nan]]]], dtype=torch.float64)
    """
    if empty_row == "uniform":
        heads = _with_uniform_rows(heads)
    softmax = softmax_of(heads, tau, precision)
    dp = _weight_errors(heads, softmax)
    context = _context(heads, softmax, dp, precision)
    storing = _error_of_storing(heads, softmax, dp, precision)
    p, o = softmax.p, context.mid
    if empty_row == "nan":
        p = p.masked_fill(heads.empty, float("nan"))
        o = o.masked_fill(heads.empty, float("nan"))
    return Attended(
        weights=Ball(p, dp + storing),
        context=Ball(o, context.rad),
        make_row_sums=lambda: _row_sums(heads, softmax, Ball(p, dp), storing, precision),
        make_lse=lambda: log_sum_exp(heads, softmax, precision, with_sink=heads.sink_in_lse),
        max_score=softmax.max_score,
        slope=softmax.slope,
    )


def blocks_of_queries(shape: torch.Size) -> list[slice]:
    """Return slices of the queries, each with temporaries of at most `CHUNK` elements.

    shape: that of the scores, (B, H, L, S).

    >>> blocks_of_queries(torch.Size([2, 1, 3, 1 << 16]))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    batch, heads, queries, keys = shape
    size = max(1, CHUNK // max(1, batch * heads * keys))
    return [slice(start, start + size) for start in range(0, queries, size)]


def _with_uniform_rows(heads: Heads) -> Heads:
    """Let an empty row attend to every key, with equal scores."""
    empty = heads.empty

    def emptied(x: Ball) -> Ball:
        return x.rearranged(lambda part: part.masked_fill(empty, 0.0))

    bias = None if heads.bias is None else emptied(heads.bias)
    allowed = heads.allowed | empty
    return replace(heads, query=emptied(heads.query), bias=bias, allowed=allowed)


def _weight_errors(heads: Heads, softmax: Softmax) -> Tensor:
    """Return dp, the errors of weights before they are returned, (B, H, L, S); 0 outside A."""
    # dp_j = spread_j + (gamma(n) (+) u_p) (p_j + spread_j) + eta_s + eta_a
    largest = softmax.p + softmax.spread
    relative = compound(softmax.gamma, softmax.cast)
    dp = softmax.spread + relative * largest + softmax.underflow
    return dp.masked_fill(heads.forbidden, 0.0)


def _error_of_storing(
    heads: Heads, softmax: Softmax, dp: Tensor, precision: Precision
) -> Tensor | float:
    """Return the error of storing weights to return them, (B, H, L, S); 0 outside A."""
    if precision.rounding.weights_stored:
        return 0.0  # They are stored before the product already: u_p has it.
    # u_s (p_j + dp_j) + eta_s
    largest = softmax.p + dp
    return (precision.softmax.store * largest + precision.units.subnormal) * heads.allowed


def _context(heads: Heads, softmax: Softmax, dp: Tensor, precision: Precision) -> Ball:
    """Return o = sum_j p_j v_j with B_o, (B, H, L, d_k).

    dp: the errors of the weights.
    """
    v, units, empty = heads.value, precision.units, heads.empty
    o = softmax.p @ v.mid
    t1 = weighted_distance(_excess(softmax), v.mid, o)
    # T2 + T3 = sum_j (|v_j| + dv_j) ((gamma(n) (+) gamma(n) (+) e_p (+) 3 u_a (+) u_p (+) of_sum)
    #           (p_j + spread_j) + eta_s + eta_a)
    divided = 3 * precision.softmax.accumulate
    relative = compound(softmax.gamma, softmax.products, divided, softmax.cast, softmax.of_sum)
    # Contexts of parts of a row that are stored, and after all merges but the last: (+) (1 + u_s -
    # u_a)^t - 1, for t other parts; each is lost up to eta_s.
    others = precision.rounding.others
    relative = compound(relative, units.stores(others))
    rounded = relative * (softmax.p + softmax.spread) + softmax.underflow
    # B_o = T1 + T2 + T3 + sum_j (p_j + dp_j) dv_j + n eta_a, then stored: + u_s (|o| + B_o) + eta_s
    radius = t1 + rounded @ v.size + (softmax.p + dp) @ v.rad
    radius = radius + heads.counts * units.flush + 2 * others * units.subnormal
    exact = Ball(o, radius.masked_fill(empty, 0.0))
    return Ball(o, exact.stored(units).rad.masked_fill(empty, 0.0))


def _excess(softmax: Softmax) -> Tensor:
    """Return what multiplies |v_j - o| in T1, (B, H, L, S): of two forms, the smaller for a row."""
    # (p^+_j - p_j) / sum_l p^-_l
    excess = softmax.excess / softmax.least
    if softmax.moved is None:
        return excess
    of_excess = excess.sum(-1, keepdim=True).nan_to_num(nan=float("inf"))
    moves_less = softmax.moved.sum(-1, keepdim=True) <= of_excess
    return torch.where(moves_less, softmax.moved, excess)


def _row_sums(
    heads: Heads, softmax: Softmax, weights: Ball, storing: Tensor | float, precision: Precision
) -> Ball:
    """Return the sums of the rows of weights, (B, H, L), closer than the sums of their radii.

    A row sums to 1 whatever its scores are, as long as numerators and denominator come from the
    same ones.

    storing: the error of storing the weights that are returned, (B, H, L, S).
    """
    largest = softmax.p + weights.rad
    apart = made_twice(largest, softmax.gap, softmax.exponentials, precision).squeeze(-1)
    # |sum - 1| <= apart (+) gamma(n) (+) u_p + underflow
    radius = compound(apart, softmax.gamma.squeeze(-1), softmax.cast)
    radius = radius + (softmax.underflow + softmax.lost + storing).sum(-1)
    unknown = radius.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return Ball(weights.mid.sum(-1), unknown.masked_fill(heads.empty.squeeze(-1), 0.0))
