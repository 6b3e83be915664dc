"""The attention core, softmax(tau q k^T + b) v, in float64, and a bound on what rounding may do to
it.

Symbols, for one query of one head:

    tau         the scale                          u_a    unit roundoff of the accumulator q, k_j,
    v_j query, and key and value number j  u_s    unit roundoff of the dtype of the inputs, the
    storage dtype A, n        the allowed keys, and how many     u      u_s where scores and weights
    are stored, else u_a b_j         entry of a float mask              eta_s  half the smallest
    subnormal of the storage dtype s_j, m      score, and the largest one         eta_a  smallest
    normal of the accumulator: less may become 0 p_j, o      weight, and context sum_j p_j v_j
    gamma(n) = n u_a / (1 - n u_a) k'_j        k_j without its bias b_k           dx     error of x:
    |computed - exact| <= dx e_p         error of a product, if its factors are rounded first, else
    0 E_j         error of s_j                       a (+) b = (1 + a)(1 + b) - 1 w_j         error
    of log p_j                   E', m' E and m where keys are k'

Assumptions: operations round to nearest with relative errors of at most u_a or u_s. Sums run in any
order, whole, in tiles, or split and joined by a running or split maximum. The largest score of a
row's allowed keys, or of those that have been read, is subtracted before the exponential; keys are
read from either end, and a running maximum grows where the exact one does. What is stored, how
accurate products and exponentials are, and how often a part of a row is rescaled after the first
time (`merges`, `rescales`), `Rounding` declares. The bound is then a theorem. No constant in it is
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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball, compound, weighted_distance
from mha.spec.claims import EmptyRow
from mha.spec.heads import Heads, Precision
from mha.spec.softmax import Softmax, log_sum_exp, made_twice, softmax_of

# Elements of the largest temporary, unless one query has more: within the cache, it takes half of
# the time.
CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The results of the core.

    weights: p, (B, H, L, S). context: o, (B, H, L, d_k). make_row_sums: returns the sums of the
    rows of weights, (B, H, L). make_lse: returns log sum_j exp(s_j), (B, H, L), of rows with a key.
    max_score: (B, H, L), the largest magnitude that m may have. slope: the derivative of capped
    scores, (B, H, L, S), or None.

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


def attend(heads: Heads, tau: float, precision: Precision, empty_row: EmptyRow) -> Attended:
    """Return weights and contexts, as they are stored; rows without an allowed key get what
    `empty_row` says.

    >>> from mha.spec.rounding import Rounding
    >>> heads = Heads(*(Ball.exact(torch.ones(1, 1, 1, 1)),) * 3, torch.zeros(1, 1, 1, 1, dtype=torch.bool))
    >>> attend(heads, 1.0, Precision.of(torch.float32, Rounding()), "nan").context.mid
    tensor([[[[nan]]]], dtype=torch.float64)
    """
    if empty_row == "uniform":
        heads = _with_uniform_rows(heads)
    empty, units, stores = heads.empty, precision.units, precision.rounding.weights_stored
    softmax = softmax_of(heads, tau, precision)
    # |p^_j - p_j| <= spread_j + (gamma(n) (+) u_p) (p_j + spread_j) + eta_s + eta_a, and exactly 0 outside A
    likely = softmax.p + softmax.spread
    dp = softmax.spread + compound(softmax.gamma, softmax.cast) * likely + softmax.underflow
    dp = dp.masked_fill(heads.forbidden, 0.0)
    context = _context(heads, softmax, dp, precision)
    # Weights that are not stored before the product are stored when they are returned.
    returned = (
        0.0
        if stores
        else (precision.softmax.store * (softmax.p + dp) + units.subnormal) * heads.allowed
    )
    p, o = softmax.p, context.mid
    if empty_row == "nan":
        p, o = p.masked_fill(empty, float("nan")), o.masked_fill(empty, float("nan"))
    return Attended(
        weights=Ball(p, dp + returned),
        context=Ball(o, context.rad),
        make_row_sums=lambda: _row_sums(heads, softmax, Ball(p, dp), returned, precision),
        make_lse=lambda: log_sum_exp(heads, softmax, precision, with_sink=heads.sink_in_lse),
        max_score=softmax.max_score,
        slope=softmax.slope,
    )


def blocks_of_queries(shape: torch.Size) -> list[slice]:
    """Return slices of the queries of a tensor of the shape (B, H, L, S), whose temporaries stay in
    the cache.

    >>> blocks_of_queries(torch.Size([2, 1, 3, 1 << 16]))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    size = max(1, CHUNK // max(1, shape[0] * shape[1] * shape[3]))
    return [slice(start, start + size) for start in range(0, shape[2], size)]


def _with_uniform_rows(heads: Heads) -> Heads:
    """Let an empty row attend to every key, with equal scores."""
    empty = heads.empty
    query = Ball(heads.query.mid.masked_fill(empty, 0.0), heads.query.rad.masked_fill(empty, 0.0))
    bias = None if heads.bias is None else heads.bias.masked_fill(empty, 0.0)
    return replace(heads, query=query, bias=bias, allowed=heads.allowed | empty)


def _context(heads: Heads, softmax: Softmax, dp: Tensor, precision: Precision) -> Ball:
    """Return o = sum_j p_j v_j with B_o, (B, H, L, d_k); dp are the errors of the weights."""
    v, units, empty = heads.value, precision.units, heads.empty
    u_a = precision.softmax.accumulate
    o = softmax.p @ v.mid
    # T1 = sum_j (p^+_j - p_j) |v_j - o| / sum_j p^-_j, or sum_j moved_j |v_j - o|, the one with the
    # smaller sum
    excess = softmax.excess / softmax.least
    if softmax.moved is not None:
        is_less = softmax.moved.sum(-1, keepdim=True) <= excess.sum(-1, keepdim=True).nan_to_num(
            nan=float("inf")
        )
        excess = torch.where(is_less, softmax.moved, excess)
    t1 = weighted_distance(excess, v.mid, o)
    # T2 + T3 = sum_j ((gamma(n) (+) gamma(n) (+) e_p (+) 3 u_a (+) u_p (+) of_sum) (p_j + spread_j) + eta_s + eta_a)
    #           (|v_j| + dv_j)
    relative = compound(softmax.gamma, softmax.products, 3 * u_a, softmax.cast, softmax.of_sum)
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


def _row_sums(
    heads: Heads, softmax: Softmax, weights: Ball, returned: Tensor | float, precision: Precision
) -> Ball:
    """Return the sums of the rows of weights, (B, H, L), with smaller radii than those of the
    weights together.

    A row sums to 1 whatever its scores are, as long as numerators and denominator come from the
        same ones.
    returned: the error of storing the weights that are returned, (B, H, L, S).
    """
    apart = made_twice(
        softmax.p + weights.rad, softmax.gap, softmax.exponentials, precision
    ).squeeze(-1)
    # |sum - 1| <= apart (+) gamma(n) (+) u_p + underflow
    radius = compound(apart, softmax.gamma.squeeze(-1), softmax.cast)
    radius = radius + (softmax.underflow + softmax.lost + returned).sum(-1)
    unknown = radius.nan_to_num(nan=float("inf"), posinf=float("inf"))
    return Ball(weights.mid.sum(-1), unknown.masked_fill(heads.empty.squeeze(-1), 0.0))
