"""The softmax of the attention core: scores and weights in float64, and what rounding may do to
them.

The symbols and the assumptions are those of `mha.spec.core`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import LARGEST_LOG, Ball, Units, compound, compounded, row_max, units_of
from mha.spec.heads import Heads, Precision
from mha.spec.rounding import Rounding

# An error of a log-weight above which it is worth its time that a weight is at most 1.
LARGE_ERROR = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """The weights, and the terms of their errors, (B, H, L, S) unless another shape is given.

    scores: s, -infinity outside A. score_error: E, 0 outside A.
    p: the weights. w_own: the part of w that the steps of the softmax itself make, w_j - E_j.
    gap, exponentials: as in `_own_error`.
    excess: p^+_j - p_j, where p^+ and p^- are the numerators with all errors up or down, over the
        exact denominator; without the error of the sum, which moves all weights of a row together,
        so that a context feels it whole.
    of_sum: that error, where the sum is stored.
    least: sum_j p^-_j, (B, H, L, 1). spread: the error that w makes in a weight. moved: the same,
        where all weights of a row have exactly the sum 1, or None where it would be hardly less.
    lost: the error of a numerator that underflows. underflow: that of a weight.
    gamma: relative error of a row's sum, (B, H, L, 1). products: that of its products with the
        values.
    cast: u_p, that of a weight that is cast.
    max_score: as in `Attended`. slope: the derivative of capped scores, or None.
    """

    scores: Tensor
    score_error: Tensor
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
    s, score_error, max_score, slope = _scores(heads, tau, precision)
    # log p_j = s_j - m - log sum_l exp(s_l - m)
    log_p = torch.log_softmax(s, -1).masked_fill(forbidden, float("-inf"))
    # The gap as computed: m - s_j + E_j + max_l E_l
    gap = (row_max(s).unsqueeze(-1) - s) + score_error + row_max(score_error).unsqueeze(-1)
    exponentials = rounding.exponentials + (rescales := rescales_of(s, rounding))
    w_own = _own_error(gap, exponentials, precision)
    # w_j = E_j + w_own_j;  p^+_j = p_j exp(w_j), p^-_j = p_j exp(-w_j)
    w = (score_error + w_own).masked_fill(forbidden, 0.0)
    of_sum = _stored_steps(own, rounding)
    p, upper, lower = log_p.exp(), (log_p + w).exp(), (log_p - w).exp()
    # A numerator that underflows is lost before the division, and the denominator is 1 / max_l
    # p^+_l or more: lost = eta max_l p^+_l;  p^+_j += lost, p^-_j -= lost
    eta = _lost_numerator(precision)
    lost = (eta * row_max(upper).unsqueeze(-1)).masked_fill(forbidden, 0.0)
    upper, lower = upper + lost, (lower - lost).clamp(min=0.0)
    least, most = (total.sum(-1, keepdim=True).clamp(min=own.flush) for total in (lower, upper))
    # spread_j = max(p^+_j / sum_l p^-_l - p_j, p_j - p^-_j / sum_l p^+_l)
    spread, moved = torch.maximum(upper / least - p, p - lower / most), None
    if w.numel() and float(w.max()) > LARGE_ERROR:
        apart, moved = _moved(log_p, w, w_own, (1 + heads.counts) * eta)
        spread = torch.minimum(spread.nan_to_num(nan=1.0), apart).masked_fill(forbidden, 0.0)
        moved = moved.masked_fill(forbidden, 0.0)
    gamma, products = _of_sums(heads, p + spread, gap, rescales, max_score, precision)
    return Softmax(
        scores=s,
        score_error=score_error,
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
        max_score=max_score,
        slope=slope,
    )


def _lost_numerator(precision: Precision) -> float:
    """Return eta, what a numerator may lose that underflows: eta_a + eta_s [softmax stored]."""
    return precision.softmax.flush + (
        precision.units.subnormal if precision.rounding.softmax_stored else 0.0
    )


def _of_sums(
    heads: Heads, p: Tensor, gap: Tensor, rescales: Tensor, max_score: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Return gamma, and the relative error of the products with the values, (B, H, L, 1).

    Where there is a normaliser, they have its error too, and the products that of exponentials
    which are not those of the sum. p, gap, rescales: as in `made_twice` and `_own_error`.
    max_score: as in `Attended`.
    """
    own, rounding, keys = precision.softmax, precision.rounding, gap.shape[-1]
    n = heads.counts
    gamma, products = own.gammas(n), own.of_products(n)
    if not rounding.log_normaliser:
        return gamma, products
    drift = normaliser_error(max_score, keys, own.accumulate, rounding.merges)
    # Of a weight: its own exponential, and that of each merge; of its part of the sum: as many, and
    # those of a running maximum. What is made so is not stored.
    of_each = 1 + rounding.merges + rescales / 2
    in_accumulator = replace(precision, rounding=replace(rounding, softmax_stored=False))
    apart = made_twice(p, gap, of_each, in_accumulator)
    return compound(gamma, drift), compound(products, drift, apart)


def made_twice(p: Tensor, gap: Tensor, exponentials: Tensor, precision: Precision) -> Tensor:
    """Return how far the sum of a row may be from 1, (B, H, L, 1), if numerators and their sum are
    made one by one.

    Both are made of the same scores. p: the most that the weights may be, (B, H, L, S), 0 outside
    A. gap: as in `_own_error`. exponentials: how many are on the way of each, on average of a
    numerator and its part of the sum.
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
    """Return how far w may move weights, and weights that sum to exactly 1, (B, H, L, S), with a
    weight at most 1.

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
    apart, moved = ((x + underflows).masked_fill(unknown, float("inf")) for x in (apart, moved))
    return apart, moved


def _shares(own: Tensor, others: Tensor) -> Tensor:
    """Return exp(own_j) / (exp(own_j) + sum_{l != j} exp(others_l)), for logarithms of numerators,
    (B, H, L, S).
    """
    raised = others.exp()
    rest, place = raised.sum(-1, keepdim=True) - raised, others.argmax(-1, keepdim=True)
    # Without cancellation for the largest one.
    without = raised.scatter(-1, place, 0.0).sum(-1, keepdim=True)
    rest = rest.scatter(-1, place, without).clamp(min=0.0)
    return (own - rest.log()).sigmoid().nan_to_num(nan=1.0)


def rescales_of(s: Tensor, rounding: Rounding) -> Tensor:
    """Return how often an online softmax may rescale the share of each key, for scores s, -infinity
    outside A.

    It reads the keys from the first to the last, or from the last to the first, in tiles of any
    size, and rescales what it has where a score exceeds all before: at most as often as the scores
    after a key's own make a new maximum.

    >>> rescales_of(torch.tensor([1.0, 2.0, 0.0, 3.0]), Rounding())
    tensor([2., 1., 1., 0.], dtype=torch.float64)
    """
    if rounding.rescales == 0 or not s.shape[-1]:
        return s.new_zeros(1).double()
    counts = []
    for scores in (s, s.flip(-1)):
        before = scores.cummax(-1).values[..., :-1]
        grows = (scores[..., 1:] > before) & (before > float("-inf"))
        so_far = torch.nn.functional.pad(grows.cumsum(-1), (1, 0))
        counts.append(so_far[..., -1:] - so_far)
    most = torch.maximum(counts[0], counts[1].flip(-1)).double()
    return most if rounding.rescales is None else most.clamp(max=rounding.rescales)


def _own_error(gap: Tensor, exponentials: Tensor, precision: Precision) -> Tensor:
    """Return what the steps of the softmax add to w, from the largest gap_j = m - s_j that is
    computed, (B, H, L, S).

    exponentials: how many are on the way of each key. The difference s_j - m, the change of base,
    and rescaling by a running or a split maximum, whose steps add up to the key's own gap: 3 u_a
    gap_j. The exponential and four roundings of numerator and quotient: u_exp + 4 u_a. What is
    stored between them: (gap_j + 2) (u_s - u_a). Each merge, and each growth of a running maximum:
    another exponential, and four roundings of the factor and of what it multiplies.
    """
    slope, constant = own_rates(exponentials, precision)
    return slope * gap + constant


def own_rates(exponentials: Tensor, precision: Precision) -> tuple[float, Tensor]:
    """Return a and c of w_own_j = a gap_j + c; see `_own_error`."""
    own, rounding = precision.softmax, precision.rounding
    stored = _stored_steps(own, rounding)
    return (
        3 * own.accumulate + stored,
        exponentials * (precision.exponential + 4) * own.accumulate + 2 * stored,
    )


def _stored_steps(own: Units, rounding: Rounding) -> float:
    """Return what storing a step of the softmax adds to its roundoff: u_s - u_a where steps are
    stored.
    """
    return max(own.store - own.accumulate, 0.0) if rounding.softmax_stored else 0.0


def _scores(
    heads: Heads, tau: float, precision: Precision
) -> tuple[Tensor, Tensor, Tensor, Ball | None]:
    """Return s, -infinity outside A, and E, 0 outside A, both (B, H, L, S), and the largest |m|
    possible, (B, H, L).

    Then the derivative of capped scores, None without a cap.
    """
    # E_j = max(E_j, E'_j), and |m| = max(|m|, |m'|) + max_j E_j
    forms = [_scores_of(heads, key, tau, precision) for key in heads.key_forms]
    s, error, slope = forms[0]
    m = row_max(s).abs()
    for other, other_error, _ in forms[1:]:
        error, m = torch.maximum(error, other_error), torch.maximum(m, row_max(other).abs())
    return s, error, m + row_max(error), slope


def _scores_of(
    heads: Heads, k: Ball, tau: float, precision: Precision
) -> tuple[Tensor, Tensor, Ball | None]:
    """Return s and E for one form of the keys, and the derivative of capped scores, see
    `_capped_and_biased`.
    """
    q, units, rounding = heads.query, precision.units, precision.rounding
    width = q.mid.shape[-1]
    # r = gamma(d + 4) (+) e_p (+) (pre + mat) u_s. Four of the roundings make tau: a root, a
    # division, a second root, a cast. pre: how many of q and k are rounded once scaled. mat: 1 if
    # scores are stored, 2 if they are scaled after that, as q.k_j is then stored too. (1 + u / (1 +
    # u))^3 <= 1 + 3 u.
    stores = rounding.scaling_roundings
    if rounding.scores_stored:
        stores = max(stores, 1) + 1
    relative = compounded(units.products(width + 4), stores * units.store)
    # s_j = tau q.k_j
    # E_j = |tau| ((dq + r (|q| + dq)).(|k_j| + dk_j) + |q|.dk_j) + d eta_a
    s = tau * q.mid @ k.mid.mT
    spread, size = abs(tau) * (q.rad + relative * q.size), abs(tau) * q.mid.abs()
    error = spread @ k.size.mT + size @ k.rad.mT + width * units.flush
    u = units.store if rounding.scores_stored else units.accumulate
    s, error, slope = _capped_and_biased(heads, s, error, u, precision)
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
        overflows = heads.allowed & (_reach(q, k, tau) + s.abs() + error >= units.largest)
        error = error.masked_fill(overflows.any(-1, keepdim=True) & heads.allowed, float("inf"))
    # Of an empty row, any finite score serves: the policy sets its weights afterwards.
    return s.masked_fill(heads.forbidden, float("-inf")).masked_fill(heads.empty, 0.0), error, slope


def _capped_and_biased(
    heads: Heads, s: Tensor, error: Tensor, u: float, precision: Precision
) -> tuple[Tensor, Tensor, Ball | None]:
    """Return s and E with the float mask and the cap, and the derivative of the capped scores, None
    without a cap.

    u: the roundoff of scores.
    """
    bias, slope = heads.bias, None
    if heads.cap is None or heads.caps_bias:
        s, error = _biased(heads, s, error, u)
        bias = None
    if heads.cap is not None:
        s, error, slope = _capped(heads.cap, s, error, u, precision)
    if bias is not None:
        s, error = _biased(heads, s, error, u)
    return s, error, slope


def _biased(heads: Heads, s: Tensor, error: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Return s_j + b_j and its error."""
    if heads.bias is None:
        return s, error
    # E_j += u |b_j|, then E_j += u (|s_j| + E_j), unless b_j = 0
    bias = heads.bias.masked_fill(heads.forbidden, 0.0)
    s = s + bias
    return s, torch.where(bias != 0, error + u * (s.abs() + error + (1 + u) * bias.abs()), error)


def _capped(
    cap: float, s: Tensor, error: Tensor, u: float, precision: Precision
) -> tuple[Tensor, Tensor, Ball]:
    """Return c tanh(s / c) with its error, and its derivative 1 - tanh^2.

    A hyperbolic tangent may be made of two exponentials, (e^x - e^-x) / (e^x + e^-x), which errs by
    as much near 0.
    """
    x, t = s / cap, (s / cap).tanh()
    # dx = E_j / c + u (|x| + E_j / c);  |t'| <= 1 - tanh^2 where |x| is least, and |t''| <= 2 |t'|
    dx = error / cap + u * (x.abs() + error / cap)
    steepest = 1 - (x.abs() - dx).clamp(min=0.0).tanh().square()
    of_tanh = (2 * precision.exponential + 3) * precision.units.accumulate
    dt = (steepest * dx).clamp(max=2.0) + of_tanh
    capped = cap * t
    # The product with c is rounded, and t before it, where scores are stored.
    slope = Ball(1 - t.square(), (2 * steepest * dx).clamp(max=1.0) + 2 * of_tanh + 4 * u)
    return capped, cap * dt + 2 * u * (capped.abs() + cap * dt), slope


def _reach(q: Ball, k: Ball, tau: float) -> Tensor:
    """Return how large a number may be on the way to each score, (B, H, L, S)."""
    # (|q| + dq).(|k_j| + dk_j), or a query or key that is scaled: |tau| max_c (|q_c| + dq_c)
    reach = q.size @ k.size.mT
    if abs(tau) > 1:
        scaled = torch.maximum(row_max(q.size).unsqueeze(-1), row_max(k.size).unsqueeze(-2))
        reach = torch.maximum(reach, abs(tau) * scaled)
    return reach


def log_sum_exp(
    heads: Heads, softmax: Softmax, precision: Precision, *, with_sink: bool = True
) -> Ball:
    """Return log sum_j exp(s_j) of each row, (B, H, L), in the accumulator, with its error; with a
    sink, or without.
    """
    s, error, own = softmax.scores, softmax.score_error, precision.softmax
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
    # The logarithm, and what is added to it
    steps = (
        (1 + precision.rounding.merges)
        * (3 * softmax.max_score + 10 * n.clamp(min=2).log())
        * own.accumulate
    )
    return Ball(lse, (moved + of_sum + steps).nan_to_num(nan=float("inf")))


def normaliser_error(max_score: Tensor, keys: int, u_a: float, merges: int = 0) -> Tensor:
    """Return the relative error that all weights of a row share, (B, H, L, 1), where they are
    exp(s_j - z).

    z = log sum_j exp(s_j) is rounded once more, after a sum, two changes of base, and a logarithm
        of at most the number of keys within 2 ulp; where parts of a row are joined, each has its
        own z, and each further merge makes another.
    max_score: as in `Attended`. merges: as in `Rounding`.

    >>> f"{float(normaliser_error(torch.tensor([10.0]), 1024, 2.0**-24)):.1e}"
    '5.9e-06'
    """
    # exp((1 + merges) (3 max |m| + 10 log max(2, S)) u_a) - 1
    steps = (1 + merges) * (3 * max_score + 10 * math.log(max(2, keys))) * u_a
    return steps.clamp(max=LARGEST_LOG).expm1().unsqueeze(-1)
