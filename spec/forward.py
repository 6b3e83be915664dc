"""The oracle: the expected output of multi-head attention in float64, with its error bounds.

A result passes where |result - mid| <= rad, element by element. The bound is a theorem about
rounding: it covers every order of summation, split, tiled or fused, so that no correct
implementation exceeds it. `mha.spec.core` states its assumptions and has the contexts,
`mha.spec.softmax` has the weights; the projections are balls of `mha.spec.bounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mha.spec.bounds import Ball, affine, affine_forms
from mha.spec.claims import Claims, EmptyRow
from mha.spec.config import Config
from mha.spec.core import Attended, attend, blocks_of_queries
from mha.spec.dtypes import torch_dtype
from mha.spec.head_steps import Passed, steps_of
from mha.spec.heads import Heads, Precision, side_by_side
from mha.spec.problem import Problem
from mha.spec.rounding import Rounding
from mha.spec.scores import Lse
from mha.spec.units import Units, units_of

# The error of a power, in roundoffs: of its exponent, of the function, or of a few products.
OF_POWERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What a correct implementation returns, and the steps on the way there, with bounds.

    All numbers are in float64. With extra keys (`Config.bias_kv`, `Config.zero_key`), S counts them
    too. With sinks, key and value have a last row of zeros.

    output: y, (B, L, D).
    weights: p, (B, H, L, S).
    context: (B, L, H * d_k), the contexts o of all heads, side by side.
    query: (B, H, L, d_k), projected, and normed and rotated where that is claimed.
    key, value: (B, H, S, d_k), the same, each key/value head repeated for its query heads.
    empty: boolean (B, H, L), the rows without an allowed key.
    max_score: (B, H, L), the largest magnitude that the largest score of a row may have, 0 in an
        empty row.
    make_row_sums: makes `sums`.
    make_lse: makes `lse`.
    bare_key: the key without its bias, where an implementation may leave that out, or None; see
        `mha.spec.core`.
    slope: the derivative of capped scores by scores, (B, H, L, S), or None.
    of_sinks: the weights of the sinks, (B, H, L, 1), or None.
    passed: queries and keys on their way from the projections, by the name of the input, where
        something is on it.

    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> config, x = Config(d_model=4, n_heads=2), torch.ones(1, 3, 4)
    >>> expected = oracle(Problem(config, Weights.random(config, 0, x.dtype), x, x, x), Claims())
    >>> expected.weights.mid.shape, bool(expected.output.rad.max() < 1e-3)
    (torch.Size([1, 2, 3, 3]), True)
    """

    output: Ball
    weights: Ball
    context: Ball
    query: Ball
    key: Ball
    value: Ball
    empty: Tensor
    max_score: Tensor
    make_row_sums: Callable[[], Ball]
    make_lse: Callable[[], Ball]
    bare_key: Ball | None = None
    slope: Ball | None = None
    of_sinks: Ball | None = None
    passed: Mapping[str, Passed] = field(default_factory=dict)

    @property
    def key_forms(self) -> tuple[Ball, ...]:
        """The keys in each form that gives the same weights: with and without their bias."""
        return (self.key,) if self.bare_key is None else (self.key, self.bare_key)

    @property
    def sums(self) -> Ball:
        """The sums of the rows of weights, (B, H, L), made when asked for, which is seldom."""
        return self.make_row_sums()

    @property
    def lse(self) -> Ball:
        """The log-sum-exp of the scores, (B, H, L), as `Claims.lse` describes it."""
        return self.make_lse()


def oracle(problem: Problem, claims: Claims, autocast: torch.dtype | None = None) -> Expected:
    """Solve a problem, by equations 1 and 3 of Vaswani et al. 2017.

    claims: decide the scale, the causal alignment, the empty rows and the rounding.
    autocast: the dtype to which every product may round its factors and its result, if there is
        one.

    Raises ValueError for a causal problem without a claimed alignment.

    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> one, x = torch.eye(1), torch.tensor([[[1.0], [3.0]]])
    >>> weights = Weights(w_q=0 * one, w_k=one, w_v=one, w_o=one)
    >>> problem = Problem(Config(d_model=1, n_heads=1, bias=False), weights, x, x, x)
    >>> oracle(problem, Claims()).output.mid
    tensor([[[2.],
             [2.]]], dtype=torch.float64)
    """
    low, rounding = autocast is not None, claims.rounding
    if low:
        rounding = _under_autocast(rounding)
    precision = Precision.of(autocast or problem.query.dtype, rounding)
    heads, passed = _project(problem, claims, precision.units, autocast)
    attended = _attend_in_blocks(heads, problem.scale(claims), precision, claims.empty_row)
    # y = o W_o^T + b_o
    context = attended.context.rearranged(side_by_side).known()
    output, given = context, problem.weights
    if problem.config.projected:
        output = affine(context, given.w_o, given.b_o, precision.units, low, others=rounding.others)
    weights, of_sinks = attended.weights, None
    if heads.sinks is not None:
        weights, of_sinks = attended.weights[..., :-1], attended.weights[..., -1:]
    return Expected(
        output=output.known(),
        weights=weights,
        of_sinks=of_sinks,
        context=context,
        query=heads.query,
        key=heads.key,
        value=heads.value,
        empty=heads.empty.squeeze(-1),
        max_score=attended.max_score,
        make_row_sums=attended.make_row_sums,
        make_lse=lambda: declared_lse(
            attended.make_lse(),
            claims.lse or Lse(),
            problem.query.dtype,
            problem.empty_rows(claims.alignment),
        ),
        bare_key=heads.bare_key,
        slope=attended.slope,
        passed=passed,
    )


def _under_autocast(rounding: Rounding) -> Rounding:
    """Return the profile in which every product is stored, as under autocast."""
    return replace(
        rounding,
        scores_stored=True,
        weights_stored=True,
        softmax_stored=True,
        scaling_roundings=2,
    )


def declared_lse(natural: Ball, declared: Lse, dtype: torch.dtype, empty: Tensor) -> Ball:
    """Return the log-sum-exp of rows in its base and its dtype, with that of empty rows.

    natural: to the base e, as the core has it.
    dtype: that of the inputs.
    empty: the rows without a key, boolean, of the same shape.
    """
    lse = natural
    if declared.base == "2":
        # A factor that is rounded, and its product
        mid = natural.mid / declared.log_base
        rounded = 2 * units_of(dtype).accumulate * mid.abs()
        lse = Ball(mid, natural.rad / declared.log_base + rounded)
    lse = lse.stored(units_of(declared.dtypes_for(dtype)[0]))
    if declared.empty == "undefined":
        return Ball(lse.mid, lse.rad.masked_fill(empty, float("inf")))
    return Ball(lse.mid.masked_fill(empty, float(declared.empty)), lse.rad.masked_fill(empty, 0.0))


def _attend_in_blocks(
    heads: Heads, tau: float, precision: Precision, empty_row: EmptyRow
) -> Attended:
    """Attend with some queries at a time, so that temporaries stay in the cache."""
    blocks = blocks_of_queries(heads.allowed.shape)
    if len(blocks) <= 1:
        return attend(heads, tau, precision, empty_row)
    parts = [attend(heads.of_queries(block), tau, precision, empty_row) for block in blocks]
    return Attended.joined(parts)


def _project(
    problem: Problem, claims: Claims, units: Units, autocast: torch.dtype | None
) -> tuple[Heads, dict[str, Passed]]:
    """Return q = x_q W_q^T + b_q, k and v, with the extra keys, and what q and k went through.

    autocast: as for `oracle`; factors are then rounded to the storage dtype too.
    """
    config, rounding, cap = problem.config, claims.rounding, problem.options.softcap
    low, dtype = autocast is not None, autocast or problem.query.dtype
    passed = dict[str, Passed]()

    def project(name: str) -> list[Ball]:
        """Return the heads of an input: without their bias, if they have one, and with it."""
        role, x = name[0], Ball.exact(getattr(problem, name))
        if config.projected:
            matrix, bias = problem.weights.of(role)
            forms = affine_forms(x, matrix, bias, units, low, rounding.reductions)
        else:
            forms = (x.stored(units) if low else x,)
        if steps := steps_of(problem, claims, role, dtype):
            passed[name] = Passed.through(steps, apart(forms[-1], config, role))
            return [repeated(passed[name].after, config)]
        return [split_heads(form, config, role) for form in forms]

    keys = project("key")
    # Extra keys have no bias, and a cap moves scores that differ by a constant differently.
    may_be_bare = len(keys) > 1 and not config.extra_keys and not cap
    heads = Heads(
        query=project("query")[-1],
        key=keys[-1],
        value=project("value")[-1],
        allowed=problem.allowed(claims.alignment),
        bias=_bias_of(problem, claims, units),
        bare_key=keys[0] if may_be_bare else None,
        cap=cap,
        caps_bias=claims.scores.softcap == "after_bias",
    )
    if config.extra_keys:
        heads = _with_extra_keys(problem, heads)
    if problem.options.sinks is not None:
        given, device = problem.options.sinks, problem.query.device
        sinks = torch.as_tensor(given, dtype=torch.float64, device=device).detach()
        heads = with_sinks(heads, sinks.view(-1, 1, 1))
        heads = replace(heads, sink_in_lse=(claims.lse or Lse()).sink)
    if rounding.heads_stored:
        heads = _quantised(heads, rounding.heads_stored, units)
    return heads, passed


def _bias_of(problem: Problem, claims: Claims, units: Units) -> Ball | None:
    """Return the float mask and the bias of slopes, added up, (B, H, L, S), or None."""
    bias = None
    if problem.mask is not None and problem.mask.is_floating_point():
        bias = Ball.exact(problem.mask.detach().expand(problem.shape))
    if problem.options.alibi is None:
        return bias
    of_slopes = _bias_of_slopes(problem, claims, units)
    if bias is None:
        return of_slopes
    return Ball(bias.mid + of_slopes.mid, of_slopes.rad)


def _bias_of_slopes(problem: Problem, claims: Claims, units: Units) -> Ball:
    """Return the bias of the slopes of a call, (B, H, L, S)."""
    mid, declared = problem.alibi_bias(claims).expand(problem.shape), claims.scores.alibi
    error = torch.zeros_like(mid)
    if declared and declared.built_in:
        # Slopes are powers that are computed in float32.
        error = OF_POWERS * units_of(torch.float32).store * mid.abs()
    if declared and declared.origin == "any":
        # Counted from the first or the last place, a bias is as large as that of all places, and
        # rounded, as is its sum with a score.
        slopes = torch.tensor(problem.options.alibi, dtype=torch.float64, device=mid.device)
        farthest = max(problem.shape[2:]) * slopes.abs()[..., None, None]
        error = error + 2 * units.store * farthest
    return Ball(mid, error)


def with_sinks(heads: Heads, sinks: Tensor) -> Heads:
    """Append a key with the score of the sink of its head, and a value of zeros.

    A sink of -infinity is not allowed to any query.

    sinks: float64, (H, 1, 1), or (H, L, 1) for rows of several heads that share keys.
    """
    allowed = pad(heads.allowed, (0, 1))
    allowed[..., -1] = sinks.isfinite().squeeze(-1)
    return replace(
        heads,
        key=_with_zeros(heads.key),
        value=_with_zeros(heads.value),
        allowed=allowed,
        bias=_grown(heads.bias, 1),
        # With a sink, scores that are all moved by the bias of the keys give other weights.
        bare_key=None,
        sinks=sinks,
    )


def _with_zeros(x: Ball) -> Ball:
    """Append a row of zeros, which are exact."""
    return x.rearranged(lambda part: pad(part, (0, 0, 0, 1)))


def _quantised(heads: Heads, name: str, units: Units) -> Heads:
    """Store queries, keys and values in a dtype of this name."""
    dtype, bare = torch_dtype(name), heads.bare_key
    return replace(
        heads,
        query=heads.query.quantised(dtype, units),
        key=heads.key.quantised(dtype, units),
        value=heads.value.quantised(dtype, units),
        bare_key=None if bare is None else bare.quantised(dtype, units),
    )


def split_heads(projected: Ball, config: Config, role: str) -> Ball:
    """Split (B, length, heads * d_k) into (B, H, length, d_k).

    Head i owns the columns i*d_k to (i+1)*d_k (clause HED-1). Query head h attends with key/value
    head h // (n_heads / n_kv_heads) (clause GQA-1), which is repeated for it.

    role: "q", "k" or "v"; values have the width d_v.

    >>> config = Config(d_model=4, n_heads=4, n_kv_heads=2)
    >>> split_heads(Ball.exact(torch.tensor([[[1, 2]]])), config, "k").mid.flatten()
    tensor([1., 1., 2., 2.], dtype=torch.float64)
    """
    return repeated(apart(projected, config, role), config)


def apart(projected: Ball, config: Config, role: str) -> Ball:
    """Split (B, length, heads * d_k) into (B, heads, length, d_k), as many heads as there are."""
    width = config.width_of(role)

    def split(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // width, width)).transpose(1, 2)
        return heads

    return projected.rearranged(split)


def repeated(heads: Ball, config: Config) -> Ball:
    """Repeat each key/value head for the query heads that share it, (B, H, length, d_k)."""
    repeats = config.n_heads // heads.mid.shape[1]
    if repeats == 1:
        return heads
    return heads.rearranged(lambda x: x.repeat_interleave(repeats, 1))


def _with_extra_keys(problem: Problem, heads: Heads) -> Heads:
    """Append the extra keys and values, visible to every query; no mask adds to their scores."""
    config, given = problem.config, problem.weights
    extra_keys, extra_values = list[Tensor](), list[Tensor]()
    if config.bias_kv and given.extra_k is not None and given.extra_v is not None:
        extra_keys.append(given.extra_k)
        extra_values.append(given.extra_v)
    if config.zero_key:
        extra_keys.append(given.w_k.new_zeros(len(given.w_k)))
        extra_values.append(given.w_v.new_zeros(len(given.w_v)))

    def extended(x: Ball, rows: list[Tensor], role: str) -> Ball:
        batch = len(x.mid)
        exact = [Ball.exact(row.expand(batch, 1, -1)) for row in rows]
        return Ball.joined([x, *(split_heads(row, config, role) for row in exact)], 2)

    return replace(
        heads,
        key=extended(heads.key, extra_keys, "k"),
        value=extended(heads.value, extra_values, "v"),
        allowed=pad(heads.allowed, (0, config.extra_keys), value=True),
        bias=_grown(heads.bias, config.extra_keys),
    )


def _grown(bias: Ball | None, keys: int) -> Ball | None:
    """Return what is added to the scores, with nothing for so many more keys."""
    return None if bias is None else bias.rearranged(lambda part: pad(part, (0, keys)))
