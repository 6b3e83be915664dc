"""The expected gradients of multi-head attention in float64, each number with its error bound.

The formulas are written out, not taken from autograd: they share no code with what they judge. Y =
C W_o^T + b_o is the output, C = [o_1 ... o_H] the contexts side by side, and dX the gradient of X:

    dW_o = dY^T C    db_o = sum dY    dC = dY W_o
    dV = P^T dC      dP = dC V^T      D = rowsum(P dP) = dC.o      dS = P (dP - D)
    dQ = tau dS K    dK = tau dS^T Q  dB = dS, summed over what the float mask is broadcast to
    dW_q = dQ^T x_q  db_q = sum dQ    dx_q = dQ W_q, and the same for keys and values,

where dQ and dK go back through rotation and norm first, if there are any (`mha.spec.head_steps`).

Assumptions, in addition to those of `mha.spec.core`:

- One set of weights P serves the whole backward pass. It is stored, or recomputed from the
  log-sum-exp of each row.
- Sums run in any order. Partial sums may be stored: of each item for weights, of each head for
  inputs. Over ranks, those of each rank may be too, for dQ, dK and dV as well.
- D is computed as rowsum(P dP) or as dC.o; also in merged parts of a row, in the accumulator.
- The softmax takes the maximum of a row as a constant, or differentiates it once.
- Projections are applied one after the other. If two are multiplied into one, such as W_o W_v,
  gradients may round differently.

Keys may be without their bias, as in the core: the rows of dS sum to 0, so that dQ = tau dS K =
tau dS K'. The error of dS is multiplied by the key that there is, and rad dQ is the larger one of
the two forms.

Sources: Vaswani et al. 2017, equation 1, differentiated; Dao et al. 2022, appendix B; Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, chapter 3. The symbols are those of
`mha.spec.core`; rad X is the error of X.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball
from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.core import QUERIES, blocks_of_queries
from mha.spec.forward import Expected, oracle
from mha.spec.heads import Precision
from mha.spec.problem import INPUTS, Problem
from mha.spec.projection_gradients import (
    Partial,
    gradients_of_projection,
    input_gradient,
    joined_heads,
    through_steps,
    weight_gradients,
)
from mha.spec.scores import Lse
from mha.spec.softmax import normaliser_error
from mha.spec.units import Units, compound, compounded

# Roundings of dP and of D on their way to dS: at most four operations (the backward pass of exp,
# sum and division), and two exponentials of 2 u each where exp and log_softmax take their own.
SOFTMAX_STEPS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Core:
    """What the backward pass of the core starts from.

    weights: P, (B, H, L, S), 0 where not allowed, with the error of weights that are recomputed.
    value: V, (B, H, S, d_k).
    context: o, (B, H, L, d_k).
    d_context: dC, (B, H, L, d_k).
    allowed: boolean (B, H, L, S).
    drift: the relative error that the weights of a row share, (B, H, L, 1).
    d_lse: the gradient of the log-sum-exp of each row, (B, H, L, 1), or None.
    sunk: whether there are sinks.
    """

    weights: Ball
    value: Ball
    context: Ball
    d_context: Ball
    allowed: Tensor
    drift: Tensor
    d_lse: Tensor | None = None
    sunk: bool = False

    def of_queries(self, part: slice) -> _Core:
        """Return the same for some of the queries."""
        queries = slice(None), slice(None), part
        return replace(
            self,
            weights=self.weights[queries],
            context=self.context[queries],
            d_context=self.d_context[queries],
            allowed=self.allowed[queries],
            drift=self.drift[queries],
            d_lse=None if self.d_lse is None else self.d_lse[queries],
        )


def gradients(
    problem: Problem,
    claims: Claims,
    upstream: Tensor,
    expected: Expected | None = None,
    upstream_lse: Tensor | None = None,
) -> dict[str, Ball]:
    """Differentiate sum(output * upstream) by inputs, weights, a float mask and sinks.

    The result is by name. Inputs that are one tensor have a gradient each: see `sum_shared`.

    upstream: dY, of the shape of the output, exact; 0 for queries with an empty row in some head,
        unless `claims.empty_row` is "zeros".
    expected: the result of `oracle` for the problem and the claims, if it is at hand.
    upstream_lse: (B, H, L), exact; sum(lse * upstream_lse) is added to what is differentiated. 0
        for empty rows.

    >>> from mha.spec import Config, Weights
    >>> config, x = Config(d_model=2, n_heads=1), torch.ones(1, 3, 2)
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x)
    >>> found = gradients(problem, Claims(), torch.ones_like(x))
    >>> list(found)
    ['query', 'key', 'value', 'w_q', 'w_k', 'w_v', 'w_o', 'b_q', 'b_k', 'b_v', 'b_o']
    >>> found["b_o"].mid, bool((found["b_k"].mid.abs() <= found["b_k"].rad).all())
    (tensor([3., 3.], dtype=torch.float64), True)
    """
    expected = oracle(problem, claims) if expected is None else expected
    config, given, tau = problem.config, problem.weights, problem.scale(claims)
    precision = Precision.of(problem.query.dtype, claims.rounding)
    units, rounding = precision.units, precision.rounding
    # dW_o = dY^T C, db_o = sum dY, dC = dY W_o
    context = Ball(expected.context.mid.nan_to_num(nan=0.0), expected.context.rad)
    exact = Ball.exact(upstream)
    arriving = Partial(exact, exact.mid.abs())
    found, d_context = dict[str, Ball](), exact
    if config.projected:
        # Partial sums of weights are of each item, and of each rank's part of it.
        pieces = problem.shape[0] * rounding.ranks + rounding.reductions
        found["w_o"], found["b_o"] = weight_gradients(arriving, context, pieces, units)
        terms = config.d_model + config.n_heads
        pieces = config.n_heads + rounding.reductions
        d_context = input_gradient(arriving, given.w_o, terms, pieces, units)
    heads = _split(context, config), _split(d_context, config)
    core = _core_of(problem, claims, expected, *heads, precision)
    if upstream_lse is not None:
        # That of the natural log-sum-exp
        d_lse = upstream_lse.double() / (claims.lse or Lse()).log_base
        core = replace(core, d_lse=d_lse.unsqueeze(-1))
    # dS of what the softmax gets and, with a cap, of the scores before it
    of_softmax = d_scores = _score_gradients_in_blocks(core, precision)
    if expected.slope is not None:
        # dS = dS' (1 - tanh^2);  rad += 2 u |dS|
        relative = 2 * units.accumulate + 2 * units.store
        d_scores = _times(of_softmax, expected.slope, relative)
    of_bias = d_scores if claims.scores.softcap == "after_bias" else of_softmax
    found |= _added_gradients(problem, of_bias, of_softmax, core.allowed, units)
    for name, part in _head_gradients(problem, expected, core, d_scores, tau, precision).items():
        if name in expected.passed:
            part, of_norm = through_steps(problem, name, part, expected.passed[name], rounding)
            found |= of_norm
        found |= gradients_of_projection(problem, name, part, core.allowed, precision)
    weights = [name for name, _ in given.named()]
    return {name: found[name] for name in (*INPUTS, *weights, "mask", "sinks") if name in found}


def sum_shared(problem: Problem, found: dict[str, Ball]) -> dict[str, Ball]:
    """Add up the gradients of inputs that are one tensor, as autograd does.

    The sum is under the first of their names.

    found: the result of `gradients` for the problem. Its radii cover the roundings of these sums.

    >>> from mha.spec import Config, Weights
    >>> config, x = Config(d_model=2, n_heads=1), torch.ones(1, 3, 2)
    >>> problem = Problem(config, Weights.random(config, 0, x.dtype), x, x, x)
    >>> list(sum_shared(problem, gradients(problem, Claims(), x)))[:3]
    ['query', 'w_q', 'w_k']
    """
    summed = dict(found)
    first_names = {id(tensor): name for name, tensor in problem.distinct().items()}
    for name in INPUTS:
        first = first_names[id(getattr(problem, name))]
        if name != first and name in summed and first in summed:
            one, other = summed[first], summed.pop(name)
            summed[first] = Ball(one.mid + other.mid, one.rad + other.rad)
    return summed


def _split(joined: Ball, config: Config) -> Ball:
    """Split contexts (B, L, H * d_v) into (B, H, L, d_v)."""
    heads = config.n_heads, config.value_dim
    return joined.rearranged(lambda part: part.unflatten(-1, heads).transpose(1, 2))


def _core_of(
    problem: Problem,
    claims: Claims,
    expected: Expected,
    context: Ball,
    d_context: Ball,
    precision: Precision,
) -> _Core:
    """Return the inputs of the backward pass of the core; extra keys are allowed to every query."""
    keys, sunk = expected.key.mid.shape[2], expected.of_sinks is not None
    extra = keys - problem.shape[3]
    allowed = torch.nn.functional.pad(problem.allowed(claims.alignment), (0, extra), value=True)
    u_a, merges = precision.softmax.accumulate, precision.rounding.merges
    drift = normaliser_error(expected.max_score, keys, u_a, merges)
    weights = expected.weights
    if expected.of_sinks is not None:
        weights = Ball.joined([weights, expected.of_sinks], 3)
    if claims.empty_row != "zeros":
        weights = weights.rearranged(lambda part: part.masked_fill(~allowed, 0.0))
    # rad P += drift (|P| + rad P), where P is recomputed
    weights = Ball(weights.mid, weights.rad + drift * weights.size)
    return _Core(weights, expected.value, context, d_context, allowed, drift, sunk=sunk)


def _score_gradients_in_blocks(core: _Core, precision: Precision) -> Ball:
    """Return dS with some queries at a time, as the forward pass attends."""
    blocks = blocks_of_queries(core.allowed.shape)
    if len(blocks) <= 1:
        return _score_gradients(core, precision)
    parts = [_score_gradients(core.of_queries(block), precision) for block in blocks]
    return Ball.joined(parts, QUERIES)


def _score_gradients(core: _Core, precision: Precision) -> Ball:
    """Return dS = P (dP - D), (B, H, L, S), where dP = dC V^T and D = rowsum(P dP) = dC.o."""
    softmax, p = precision.softmax, core.weights.mid
    _, _, keys, width = core.value.mid.shape
    # u; r = gamma(d + 1) + u, of an element of dP; gamma(n + 1), for any order of a sum over a row
    u = softmax.store if precision.rounding.scores_stored else softmax.accumulate
    r = precision.units.products(width + 1) + u
    gamma = softmax.gammas(core.allowed.sum(-1, keepdim=True).double() + 1)
    # lost: products that underflow, and dS as it is stored
    lost = (width + keys + 4) * softmax.flush + softmax.subnormal
    # dP = dC V^T;  rad dP = |dC| rad V + (rad dC + r (|dC| + rad dC)) (|V| + rad V) + lost
    product = core.d_context.times(core.value.mT, r)
    d_p = Ball(product.mid, product.rad + lost)
    d = _row_sum(core, d_p, r, gamma, u)
    d = Ball(d.mid, d.rad + lost)
    difference, size = d_p.mid - d.mid, d_p.size + d.size
    if core.sunk and keys:
        # Of parts that are merged, one without the sink may have a context that is far larger than
        # the row's, and D of its own: + max_l |dP_l|.
        size = size + (d_p.size * core.allowed).amax(-1, keepdim=True)
    if core.d_lse is not None:
        # dS = P (dP - D + dlse); dlse may be rounded to another base
        difference, size = difference + core.d_lse, size + core.d_lse.abs()
    # rad (dP - D) = rad dP + rad D + 8 u (|dP| + |D|)
    rad_difference = d_p.rad + d.rad + SOFTMAX_STEPS * u * size
    # rad dS = rad P (|dP - D| + rad (dP - D)) + P rad (dP - D) + lost
    rad = core.weights.rad * (difference.abs() + rad_difference) + p * rad_difference + lost
    if precision.rounding.log_normaliser and keys:
        rad = rad + _of_merged_parts(core, gamma, precision)
    if keys:
        # The maximum of a row, where it is differentiated, gets rowsum(dS), which is 0 except for
        # rounding.
        may_be_maximum = core.weights.size >= (p - core.weights.rad).amax(-1, keepdim=True)
        of_sum = (core.weights.size * size).sum(-1, keepdim=True)
        rad = rad + (3 * gamma + SOFTMAX_STEPS * u) * of_sum * may_be_maximum
    return Ball(p * difference, rad.masked_fill(~core.allowed, 0.0))


def _of_merged_parts(core: _Core, gamma: Tensor, precision: Precision) -> Tensor:
    """Return the error of dS of what cancels where parts of a row are merged, (B, H, L, S).

    Part i of a row has its context c_i, its D_i = dC.c_i, and a share of the row. A key of it gets
    P (dP - D_i) from the context, and P (D_i - D) from the share. D_i is computed twice, as
    rowsum(P dP) and as dC.c_i, each time as a mean over the part: of any keys, but also of this
    one. It may be large where the row's own D is small. So with x_l = |dC| |v_l|:

    rad dS_j = (gamma(n + 1) + gamma(d + 1) + 8 u) min(P_j max_l x_l, sum_l P_l x_l)

    gamma: as in `_score_gradients`.
    """
    width = core.value.mid.shape[-1]
    rate = gamma + precision.units.products(width + 1)
    rate = rate + SOFTMAX_STEPS * precision.softmax.accumulate
    x = (core.d_context.size @ core.value.size.mT) * core.allowed
    p = core.weights.size
    return rate * torch.minimum(p * x.amax(-1, keepdim=True), (p * x).sum(-1, keepdim=True))


def _row_sum(core: _Core, d_p: Ball, r: float, gamma: Tensor, u: float) -> Ball:
    """Return D = rowsum(P dP) = dC.o, (B, H, L, 1), with an error that covers both forms.

    It is small where values are near the context, as far as it comes from the weights: sum_l P_l
    dP_l errs by dC.(sum_l P_l v_l - o), which the context's own radius bounds.

    r, gamma, u: as in `_score_gradients`.
    """
    d_context, context, p_size = core.d_context, core.context, core.weights.size
    d = (d_context.mid * context.mid).sum(-1, keepdim=True)
    # reach = (1 + r) rad o + r sum_l |P_l| |v_l|: the products round, in either form
    reach = (1 + r) * context.rad + r * (p_size @ core.value.size)
    # a = rad dC.|o| + (|dC| + rad dC).reach
    a = (d_context.rad * context.mid.abs() + d_context.size * reach).sum(-1, keepdim=True)
    # rad D = a + gamma(n + 1) sum_l |P_l| |dP_l| + (u + drift) (|D| + a)
    total = (p_size * d_p.size).sum(-1, keepdim=True)
    return Ball(d, a + gamma * total + (u + core.drift) * (d.abs() + a))


def _added_gradients(
    problem: Problem, of_bias: Ball, of_softmax: Ball, allowed: Tensor, units: Units
) -> dict[str, Ball]:
    """Return the gradients of a float mask and of the sinks, which are added to scores, by name.

    of_bias: the gradient of the sum of scores and mask, (B, H, L, S).
    of_softmax: that of what the softmax gets.
    """
    found, keys = dict[str, Ball](), slice(problem.shape[3])
    if problem.mask is not None and problem.mask.is_floating_point():
        found["mask"] = _mask_gradient(of_bias[..., keys], problem.mask, allowed[..., keys], units)
    if problem.options.sinks is not None:
        like = problem.query.new_zeros(problem.config.n_heads, 1, 1)
        of_sinks = _mask_gradient(of_softmax[..., -1:], like, allowed[..., -1:], units)
        found["sinks"] = of_sinks.flatten(0)
    return found


def _times(one: Ball, other: Ball, relative: float) -> Ball:
    """Return the product of two balls, element by element; 0 where one is exactly 0.

    relative: the error of a product.
    """
    rad = one.rad * other.size + one.mid.abs() * other.rad
    mid = one.mid * other.mid
    return Ball(mid, rad + relative * (mid.abs() + rad))


def _mask_gradient(d_scores: Ball, mask: Tensor, allowed: Tensor, units: Units) -> Ball:
    """Return dB: dS, (B, H, L, S), summed over the dimensions that the mask is broadcast over."""
    # rad dB = sum (rad dS + r |dS|) + t eta_a, for t terms, with all partial sums stored
    terms = d_scores.mid.numel() // max(1, mask.numel()) + 1
    relative = compounded(units.gamma(terms), units.stores(terms))
    rad = (d_scores.rad + relative * d_scores.size).sum_to_size(mask.shape) + terms * units.flush
    ball = Ball(d_scores.mid.sum_to_size(mask.shape), rad).stored(units)
    unused = allowed.double().sum_to_size(mask.shape) == 0
    return Ball(ball.mid, ball.rad.masked_fill(unused, 0.0))


def _head_gradients(
    problem: Problem,
    expected: Expected,
    core: _Core,
    d_scores: Ball,
    tau: float,
    precision: Precision,
) -> dict[str, Partial]:
    """Return dQ = tau dS K, dK = tau dS^T Q and dV = P^T dC, by input.

    Each is (B, length, heads * d_k), of the key/value heads for keys and values.
    """
    config, units, rounding = problem.config, precision.units, precision.rounding
    repeats = config.n_heads // config.kv_heads
    # How many keys each query has, and how many queries each key, of all the heads that share it.
    n_query, n_key = (core.allowed.sum(dim).unsqueeze(-1).double() for dim in (3, 2))
    if repeats > 1:
        n_key = n_key.unflatten(1, (-1, repeats)).sum(2).repeat_interleave(repeats, 1) + repeats
    # gamma(n + 5) (+) e_p (+) max(1, pre) u_s: four roundings make tau, one multiplies by it; dS is
    # cast, or a q or k that was scaled before the product was rounded then.
    scaling = max(1, rounding.scaling_roundings) * units.store
    # Parts of each rank: (+) (1 + u_s - u_a)^t - 1, for t others, and 2 t eta_s more
    others = rounding.reductions + rounding.ranks - 1
    parted, lost = units.stores(others), 2 * others * units.subnormal
    of_query = compound(units.of_products(n_query + 5), scaling, parted)
    of_key = compound(units.of_products(n_key + 5), scaling, parted)
    of_value = compound(units.of_products(n_key + 1), parted)
    # dS may be stored again once it is scaled: |tau| rad dS += eta_s
    scaled_lost = units.subnormal / abs(tau) if tau else 0.0
    d_scores = Ball(d_scores.mid, d_scores.rad + scaled_lost * core.allowed)
    # A q or k that was scaled is off by eta_s, too: + max(1, |tau|) eta_s sum |dS|
    of_scaled = 0.0
    if rounding.scaling_roundings:
        of_scaled = max(1.0, abs(tau)) * units.subnormal
    of_keys = lost + of_scaled * d_scores.size.sum(3, keepdim=True)
    of_queries = lost + of_scaled * d_scores.size.sum(2).unsqueeze(-1)
    d_query = [_product(d_scores, key, of_query, tau, units, of_keys) for key in expected.key_forms]
    d_key = _product(d_scores.mT, expected.query, of_key, tau, units, of_queries)
    d_value = _product(core.weights.mT, core.d_context, of_value, 1.0, units, lost)
    return {
        "query": joined_heads(d_query[0].covering(d_query[-1]), 1, units),
        "key": joined_heads(d_key, repeats, units),
        "value": joined_heads(d_value, repeats, units),
    }


def _product(
    a: Ball, b: Ball, relative: Tensor, tau: float, units: Units, lost: Tensor | float
) -> Ball:
    """Return tau a @ b, stored.

    relative: error of each product in a row of a.
    lost: what a row of the product, or all of it, loses in what underflows.
    """
    result = a.times(b, relative)
    rad = abs(tau) * result.rad + (a.mid.shape[-1] + 1) * units.flush + lost
    return Ball(tau * result.mid, rad).stored(units)
