"""The softmax of the attention core: weights in float64, and their rounding errors.

The symbols and the assumptions are those of `mha.spec.core`; this is steps 2 and 3 of its bound:
the error of a log-weight, w_j = E_j + w_own_j, and how far the weights move with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball, row_max
from mha.spec.heads import Heads, Precision
from mha.spec.rounding import Rounding
from mha.spec.score_errors import scores_of
from mha.spec.units import LARGEST_LOG, Units, compound

# An error of a log-weight above which it is worth its time that a weight is at most 1.
LARGE_ERROR = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The weights, and the terms of their errors, (B, H, L, S) unless another shape is given.

    scores: s, -infinity outside A, with E, 0 outside A.
    p: the weights.
    w_own: the part of w that the steps of the softmax itself make, w_j - E_j.
    gap, exponentials: as in `_own_error`.
    excess: p^+_j - p_j, without the error of the sum: that moves all weights of a row together,
        so that it does not cancel in a context.
    of_sum: that error, where the sum is stored.
    least: sum_j p^-_j, (B, H, L, 1).
    spread: the error that w makes in a weight.
    moved: the same, where all weights of a row have exactly the sum 1, or None where it would be
        hardly less.
    lost: the error of a numerator that underflows.
    underflow: that of a weight.
    gamma: relative error of a row's sum, (B, H, L, 1).
    products: that of its products with the values.
    cast: u_p, that of a weight that is cast.
    max_score: as in `Attended`.
    slope: the derivative of capped scores, or None.
    """

    scores: Ball
    p: Tensor
    w_own: Tensor
    gap: Tensor
    exponentials: Tensor
    excess: Tensor
    of_sum: float
    least: Tensor
    spread: Tensor
    moved: Tensor | None
    lost: Tensor
    underflow: Tensor
    gamma: Tensor
    products: Tensor
    cast: float
    max_score: Tensor
    slope: Ball | None


def softmax_of(heads: Heads, tau: float, precision: Precision) -> Softmax:
    """Return p = softmax(s) over A, with all that bounds its error."""
    own, rounding, forbidden = precision.softmax, precision.rounding, heads.forbidden
    found = scores_of(heads, tau, precision)
    s, score_error = found.scores.mid, found.scores.rad
    # The gap as computed: m - s_j + E_j + max_l E_l
    gap = (row_max(s).unsqueeze(-1) - s) + score_error + row_max(score_error).unsqueeze(-1)
    rescales = rescales_of(s, rounding)
    exponentials = rounding.exponentials + rescales
    # w_j = E_j + w_own_j
    w_own = _own_error(gap, exponentials, precision)
    w = (score_error + w_own).masked_fill(forbidden, 0.0)
    # log p_j = s_j - m - log sum_l exp(s_l - m)
    log_p = torch.log_softmax(s, -1).masked_fill(forbidden, float("-inf"))
    p, eta = log_p.exp(), _lost_numerator(precision)
    upper, lower, lost = _numerators(log_p, w, eta, forbidden)
    least = lower.sum(-1, keepdim=True).clamp(min=own.flush)
    most = upper.sum(-1, keepdim=True).clamp(min=own.flush)
    # spread_j = max(p^+_j / sum_l p^-_l - p_j, p_j - p^-_j / sum_l p^+_l)
    spread, moved = torch.maximum(upper / least - p, p - lower / most), None
    if w.numel() and float(w.max()) > LARGE_ERROR:
        apart, moved = _moved(log_p, w, w_own, (1 + heads.counts) * eta)
        spread = torch.minimum(spread.nan_to_num(nan=1.0), apart).masked_fill(forbidden, 0.0)
        moved = moved.masked_fill(forbidden, 0.0)
    of_sum = _stored_steps(own, rounding)
    gamma, products = _of_sums(heads, p + spread, gap, rescales, found.max_score, precision)
    return Softmax(
        scores=found.scores,
        p=p,
        w_own=w_own,
        gap=gap,
        exponentials=exponentials,
        excess=(log_p + (w - of_sum)).exp() + lost - p,
        of_sum=of_sum,
        least=least,
        spread=spread,
        moved=moved,
        lost=lost,
        underflow=(precision.units.subnormal + own.flush) * heads.allowed.double(),
        gamma=gamma,
        products=products,
        cast=own.store if rounding.weights_stored else own.accumulate,
        max_score=found.max_score,
        slope=found.slope,
    )


def _numerators(
    log_p: Tensor, w: Tensor, eta: float, forbidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p^+, p^-, and what a numerator loses that underflows, (B, H, L, S)."""
    # p^+_j = p_j exp(w_j), p^-_j = p_j exp(-w_j)
    upper, lower = (log_p + w).exp(), (log_p - w).exp()
    # It is lost before the division, and the denominator is 1 / max_l p^+_l or more:
    # lost = eta max_l p^+_l;  p^+_j += lost, p^-_j -= lost
    lost = (eta * row_max(upper).unsqueeze(-1)).masked_fill(forbidden, 0.0)
    return upper + lost, (lower - lost).clamp(min=0.0), lost


def _lost_numerator(precision: Precision) -> float:
    """Return eta, what a numerator may lose that underflows: eta_a + eta_s [softmax stored]."""
    if precision.rounding.softmax_stored:
        return precision.softmax.flush + precision.units.subnormal
    return precision.softmax.flush


def _of_sums(
    heads: Heads, p: Tensor, gap: Tensor, rescales: Tensor, max_score: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Return gamma, and the relative error of the products with the values, (B, H, L, 1).

    Where there is a normaliser, they have its error too, and the products that of exponentials
    which are not those of the sum.

    p, gap, rescales: as in `made_twice` and `_own_error`.
    max_score: as in `Attended`.
    """
    own, rounding, keys = precision.softmax, precision.rounding, gap.shape[-1]
    n = heads.counts
    gamma, products = own.gammas(n), own.of_products(n)
    if not rounding.log_normaliser:
        return gamma, products
    drift = normaliser_error(max_score, keys, own.accumulate, rounding.merges)
    # A weight has its own exponential, and that of each merge; its part of the sum as many, and
    # those of a running maximum, so that on average of the two it is half of these. What is made
    # so is not stored.
    of_each = 1 + rounding.merges + rescales / 2
    in_accumulator = replace(precision, rounding=replace(rounding, softmax_stored=False))
    apart = made_twice(p, gap, of_each, in_accumulator)
    return compound(gamma, drift), compound(products, drift, apart)


def made_twice(p: Tensor, gap: Tensor, exponentials: Tensor, precision: Precision) -> Tensor:
    """Return how far the sum of a row may be from 1, (B, H, L, 1), if its numerators and the terms
    of its denominator are made apart, of the same scores.

    p: the most that the weights may be, (B, H, L, S), 0 outside A.
    gap: as in `_own_error`.
    exponentials: how many are on the way of each, on average of a numerator and its part of the
        sum.
    """
    # x_j = exp(2 w_own_j) - 1: how far numerator j may be from its part of the denominator
    w_own = _own_error(gap, exponentials, precision)
    x = (2 * w_own).clamp(max=LARGEST_LOG).expm1() * (p > 0)
    n = (p > 0).sum(-1, keepdim=True).clamp(min=1).double()
    # Whatever the scores are, numerators are N_j^(1 +- a) e^(+-c) with N_j = exp(-gap_j), and the
    # derivative of log sum_j N_j^t is at most log(n) / t:  x = exp(2 c + log(n) log((1 + a) / (1 -
    # a))) - 1
    a, each = own_rates(exponentials, precision)
    c = row_max(each).unsqueeze(-1)
    whatever = torch.expm1(2 * c + n.log() * (math.log1p(a) - math.log1p(-a)))
    # min(sum_j p_j x_j, max_j x_j, x)
    most = torch.minimum((p * x).sum(-1, keepdim=True), row_max(x).unsqueeze(-1))
    return torch.minimum(most, whatever)


def _moved(log_p: Tensor, w: Tensor, w_own: Tensor, underflows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far w may move weights, and weights that sum to exactly 1, (B, H, L, S).

    It is less than `spread` where w is large, since a weight is at most 1.

    underflows: what a numerator loses that underflows, and the sum: the largest numerator is 1, and
        the sum is more.
    """
    # A numerator is a part of its own denominator, from the same score: p^+_j / (p^+_j + sum_{l !=
    # j} p^-_l)
    p = log_p.exp()
    highest, lowest = _shares(log_p + w, log_p - w), _shares(log_p - w, log_p + w)
    moved = torch.maximum(highest - p, p - lowest)
    # Where it is made twice, the steps of the softmax may differ: (+) exp(2 w_own_j) - 1
    apart = moved + (2 * w_own).clamp(max=LARGEST_LOG).expm1() * (p + moved)
    # Nothing is known of a row in which a score may overflow.
    unknown = w.isinf()
    apart = (apart + underflows).masked_fill(unknown, float("inf"))
    moved = (moved + underflows).masked_fill(unknown, float("inf"))
    return apart, moved


def _shares(own: Tensor, others: Tensor) -> Tensor:
    """Return exp(own_j) / (exp(own_j) + sum_{l != j} exp(others_l)), (B, H, L, S).

    own, others: logarithms of numerators.
    """
    raised = others.exp()
    rest = raised.sum(-1, keepdim=True) - raised
    # For the largest one, the others are added up, since the difference would cancel.
    place = others.argmax(-1, keepdim=True)
    without = raised.scatter(-1, place, 0.0).sum(-1, keepdim=True)
    rest = rest.scatter(-1, place, without).clamp(min=0.0)
    return (own - rest.log()).sigmoid().nan_to_num(nan=1.0)


def rescales_of(s: Tensor, rounding: Rounding) -> Tensor:
    """Return how often an online softmax may rescale the share of each key.

    It reads the keys from the first to the last, or from the last to the first, in tiles of any
    size, and rescales what it has where a score exceeds all before: at most as often as the scores
    after a key's own make a new maximum.

    s: the scores, -infinity outside A.

    >>> rescales_of(torch.tensor([1.0, 2.0, 0.0, 3.0]), Rounding())
    tensor([2., 1., 1., 0.], dtype=torch.float64)
    """
    if rounding.rescales == 0 or not s.shape[-1]:
        return s.new_zeros(1).double()
    forwards, backwards = _new_maxima_after(s), _new_maxima_after(s.flip(-1)).flip(-1)
    most = torch.maximum(forwards, backwards).double()
    if rounding.rescales is None:
        return most
    return most.clamp(max=rounding.rescales)


def _new_maxima_after(s: Tensor) -> Tensor:
    """Return how many of the scores after each one exceed all before them, (B, H, L, S)."""
    before = s.cummax(-1).values[..., :-1]
    grows = (s[..., 1:] > before) & (before > float("-inf"))
    so_far = torch.nn.functional.pad(grows.cumsum(-1), (1, 0))
    return so_far[..., -1:] - so_far


def _own_error(gap: Tensor, exponentials: Tensor, precision: Precision) -> Tensor:
    """Return w_own, what the steps of the softmax add to w, (B, H, L, S).

    The difference s_j - m, the change of base, and rescaling by a running or a split maximum, whose
    steps add up to the key's own gap: 3 u_a gap_j. The exponential and four roundings of numerator
    and quotient: u_exp + 4 u_a. What is stored between them: (gap_j + 2) (u_s - u_a). Each merge,
    and each growth of a running maximum: another exponential, and four roundings of the factor and
    of what it multiplies.

    gap: the largest m - s_j that is computed, (B, H, L, S).
    exponentials: how many are on the way of each key.
    """
    slope, constant = own_rates(exponentials, precision)
    return slope * gap + constant


def own_rates(exponentials: Tensor, precision: Precision) -> tuple[float, Tensor]:
    """Return a and c of w_own_j = a gap_j + c; see `_own_error`."""
    own = precision.softmax
    stored = _stored_steps(own, precision.rounding)
    constant = exponentials * (precision.exponential + 4) * own.accumulate + 2 * stored
    return 3 * own.accumulate + stored, constant


def _stored_steps(own: Units, rounding: Rounding) -> float:
    """Return u_s - u_a, which storing a step of the softmax adds to its roundoff, or 0."""
    return max(own.store - own.accumulate, 0.0) if rounding.softmax_stored else 0.0


def log_sum_exp(
    heads: Heads, softmax: Softmax, precision: Precision, *, with_sink: bool = True
) -> Ball:
    """Return log sum_j exp(s_j) of each row, (B, H, L), in the accumulator, with its error.

    with_sink: whether the sum has the sink, if there is one.
    """
    s, error, own = softmax.scores.mid, softmax.scores.rad, precision.softmax
    if heads.sinks is not None and not with_sink:
        s = s.index_fill(-1, torch.tensor(s.shape[-1] - 1, device=s.device), float("-inf"))
    lse = s.logsumexp(-1)
    # Scores that are all too large, or all too small, by E_j
    moved = torch.maximum((s + error).logsumexp(-1) - lse, lse - (s - error).logsumexp(-1))
    # A sum that is wrong by r: sum_j p_j (exp(w_own_j) - 1) (+) gamma(n) (+) n eta_a, and of_sum,
    # if it is stored
    n = heads.counts.squeeze(-1)
    of_terms = (softmax.p * softmax.w_own.clamp(max=LARGEST_LOG).expm1()).sum(-1)
    r = compound(of_terms, own.gammas(n), softmax.of_sum) + n * own.flush
    of_sum = -torch.log1p(-r.clamp(max=1.0))
    # The logarithm, and what is added to it, for each merge again; as in `normaliser_error`
    roundings = 3 * softmax.max_score + 10 * n.clamp(min=2).log()
    steps = (1 + precision.rounding.merges) * roundings * own.accumulate
    return Ball(lse, (moved + of_sum + steps).nan_to_num(nan=float("inf")))


def normaliser_error(max_score: Tensor, keys: int, u_a: float, merges: int = 0) -> Tensor:
    """Return the relative error that all weights exp(s_j - z) of a row share, (B, H, L, 1).

    z = log sum_j exp(s_j) is rounded once more, after a sum, two changes of base, and a logarithm
    of at most the number of keys within 2 ulp; where parts of a row are joined, each has its own z,
    and each further merge makes another.

    max_score: as in `Attended`.
    merges: as in `Rounding`.

    >>> f"{float(normaliser_error(torch.tensor([10.0]), 1024, 2.0**-24)):.1e}"
    '5.9e-06'
    """
    # exp((1 + merges) (3 max |m| + 10 log max(2, S)) u_a) - 1
    steps = (1 + merges) * (3 * max_score + 10 * math.log(max(2, keys))) * u_a
    return steps.clamp(max=LARGEST_LOG).expm1().unsqueeze(-1)
