"""The oracle: the expected output of multi-head attention in float64, each number with its error
bound.

A result passes where |result - mid| <= rad, element by element. The bound is a theorem about
rounding: it covers every order of summation, split, tiled or fused, so that no correct
implementation exceeds it. `mha.spec.core` states its assumptions and has the contexts,
`mha.spec.softmax` has the weights; the projections are balls of `mha.spec.bounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mha.spec.bounds import Ball, Units, affine, affine_forms, units_of
from mha.spec.claims import Claims, EmptyRow
from mha.spec.config import Config
from mha.spec.core import Attended, attend, blocks_of_queries
from mha.spec.dtypes import torch_dtype
from mha.spec.heads import Heads, Precision
from mha.spec.problem import Problem
from mha.spec.scores import Lse


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What a correct implementation returns, and the steps on the way there, in float64 with
    bounds.

    output: y, (B, L, D). weights: p, (B, H, L, S). context: (B, L, H * d_k), the contexts o of all
        heads, side by side.
    query: (B, H, L, d_k), key and value: (B, H, S, d_k), projected, each key/value head repeated
        for its query heads.
    bare_key: the key without its bias, where an implementation may leave that out, or None; see
        `mha.spec.core`.
    of_sinks: the weights of the sinks, (B, H, L, 1), or None. With sinks, key and value have a last
        row of zeros.
    slope: the derivative of capped scores by scores, (B, H, L, S), or None. With extra keys
        (`Config.bias_kv`, `Config.zero_key`), S counts them too.
    empty: boolean (B, H, L), the rows without an allowed key. max_score: (B, H, L), the largest
        magnitude that the largest score of a row may have, 0 in an empty row. make_row_sums: makes
        `sums`. make_lse: makes `lse`.

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

    @property
    def sums(self) -> Ball:
        """The sums of the rows of weights, (B, H, L), made when they are asked for, which is
        seldom.
        """
        return self.make_row_sums()

    @property
    def lse(self) -> Ball:
        """The log-sum-exp of the scores, (B, H, L), as `Claims.lse` describes it."""
        return self.make_lse()


def oracle(problem: Problem, claims: Claims, autocast: torch.dtype | None = None) -> Expected:
    """Solve a problem, by equations 1 and 3 of Vaswani et al. 2017.

    claims: decide the scale, the causal alignment, the empty rows and the rounding.
    autocast: the dtype to which every product may round its factors and its result, if there is
        one. Raises ValueError for a causal problem without a claimed alignment.

    >>> from mha.spec import Claims, Config, Problem, Weights
    >>> one, x = torch.eye(1), torch.tensor([[[1.0], [3.0]]])
    >>> weights = Weights(w_q=0 * one, w_k=one, w_v=one, w_o=one)
    >>> oracle(Problem(Config(d_model=1, n_heads=1, bias=False), weights, x, x, x), Claims()).output.mid
    tensor([[[2.],
             [2.]]], dtype=torch.float64)
    """
    low, rounding = autocast is not None, claims.rounding
    if low:  # every product is stored in that dtype, whatever is declared of the problem's own
        rounding = replace(
            rounding,
            scores_stored=True,
            weights_stored=True,
            softmax_stored=True,
            scaling_roundings=2,
        )
    precision = Precision.of(autocast or problem.query.dtype, rounding)
    heads = _project(problem, claims, precision.units, low)
    attended = _attend_in_blocks(heads, problem.scale(claims), precision, claims.empty_row)
    # y = o W_o^T + b_o
    context = Ball(
        *(part.transpose(1, 2).flatten(2) for part in (attended.context.mid, attended.context.rad))
    ).known()
    given = problem.weights
    output = context
    if problem.config.projected:
        output = affine(context, given.w_o, given.b_o, precision.units, low, others=rounding.others)
    return Expected(
        output=output.known(),
        weights=attended.weights if heads.sinks is None else attended.weights[..., :-1],
        of_sinks=None if heads.sinks is None else attended.weights[..., -1:],
        context=context,
        query=heads.query,
        key=heads.key,
        value=heads.value,
        empty=heads.empty.squeeze(-1),
        max_score=attended.max_score,
        make_row_sums=attended.make_row_sums,
        make_lse=lambda: _declared_lse(attended.make_lse(), problem, claims),
        bare_key=heads.bare_key,
        slope=attended.slope,
    )


def _declared_lse(natural: Ball, problem: Problem, claims: Claims) -> Ball:
    """Return the log-sum-exp (B, H, L) in its base, rounded to its dtype, and what it is in an
    empty row.
    """
    declared = claims.lse or Lse()
    lse = natural
    if declared.base == "2":
        # A factor that is rounded, and its product
        mid = natural.mid / declared.log_base
        lse = Ball(
            mid,
            natural.rad / declared.log_base
            + 2 * units_of(problem.query.dtype).accumulate * mid.abs(),
        )
    lse = lse.stored(units_of(declared.dtypes_for(problem.query.dtype)[0]))
    empty = problem.empty_rows(claims.alignment)
    if declared.empty == "undefined":
        return Ball(lse.mid, lse.rad.masked_fill(empty, float("inf")))
    return Ball(lse.mid.masked_fill(empty, float(declared.empty)), lse.rad.masked_fill(empty, 0.0))


def _attend_in_blocks(
    heads: Heads, tau: float, precision: Precision, empty_row: EmptyRow
) -> Attended:
    """Attend with some queries at a time, so that temporaries stay in the cache; queries do not
    depend on others.
    """
    blocks = blocks_of_queries(heads.allowed.shape)
    if len(blocks) <= 1:
        return attend(heads, tau, precision, empty_row)
    parts = [attend(heads.of_queries(block), tau, precision, empty_row) for block in blocks]
    slopes = [part.slope for part in parts if part.slope is not None]
    return Attended(
        weights=Ball.joined([part.weights for part in parts], 2),
        context=Ball.joined([part.context for part in parts], 2),
        make_row_sums=lambda: Ball.joined([part.make_row_sums() for part in parts], 2),
        make_lse=lambda: Ball.joined([part.make_lse() for part in parts], 2),
        max_score=torch.cat([part.max_score for part in parts], 2),
        slope=Ball.joined(slopes, 2) if slopes else None,
    )


def _project(problem: Problem, claims: Claims, units: Units, low: bool) -> Heads:
    """Return q = x_q W_q^T + b_q, k and v, with the extra keys; low: factors are rounded to the
    storage dtype too.
    """
    given, config = problem.weights, problem.config
    others, bias, cap = claims.rounding.reductions, None, problem.options.softcap

    def project(x: Tensor, role: str) -> tuple[Ball, ...]:
        exact = Ball.exact(x)
        if not config.projected:
            return (exact.stored(units) if low else exact,)
        w, b = getattr(given, f"w_{role}"), getattr(given, f"b_{role}")
        return affine_forms(exact, w, b, units, low, others)

    keys = project(problem.key, "k")
    if problem.mask is not None and problem.mask.is_floating_point():
        bias = problem.mask.detach().double().expand(problem.shape)
    if problem.options.alibi is not None:
        of_slopes = problem.alibi_bias(claims).expand(problem.shape)
        bias = of_slopes if bias is None else bias + of_slopes
    heads = Heads(
        query=split_heads(project(problem.query, "q")[-1], config, "q"),
        key=split_heads(keys[-1], config, "k"),
        value=split_heads(project(problem.value, "v")[-1], config, "v"),
        allowed=problem.allowed(claims.alignment),
        bias=bias,
        # A cap moves scores that differ by a constant differently.
        bare_key=(
            split_heads(keys[0], config, "k")
            if len(keys) > 1 and not config.extra_keys and not cap
            else None
        ),
        cap=cap,
        caps_bias=claims.scores.softcap == "after_bias",
    )
    heads = _with_extra_keys(problem, heads) if config.extra_keys else heads
    if problem.options.sinks is not None:
        heads = replace(_with_sinks(problem, heads), sink_in_lse=(claims.lse or Lse()).sink)
    return (
        _quantised(heads, claims.rounding.heads_stored, units)
        if claims.rounding.heads_stored
        else heads
    )


def _with_sinks(problem: Problem, heads: Heads) -> Heads:
    """Append a key with the score of the sink of its head, and a value of zeros; one of -infinity
    is not allowed.
    """
    sinks = torch.as_tensor(
        problem.options.sinks, dtype=torch.float64, device=problem.query.device
    ).detach()
    key, value = (_with_zeros(x) for x in (heads.key, heads.value))
    allowed = torch.nn.functional.pad(heads.allowed, (0, 1))
    allowed[..., -1] = sinks.isfinite().view(-1, 1)
    bias = None if heads.bias is None else torch.nn.functional.pad(heads.bias, (0, 1))
    # With a sink, scores that are all moved by the bias of the keys give other weights.
    return replace(
        heads,
        key=key,
        value=value,
        allowed=allowed,
        bias=bias,
        bare_key=None,
        sinks=sinks.view(-1, 1, 1),
    )


def _with_zeros(x: Ball) -> Ball:
    """Append a row of zeros, which are exact."""
    return Ball(*(torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (x.mid, x.rad)))


def _quantised(heads: Heads, name: str, units: Units) -> Heads:
    """Store queries, keys and values in a dtype of this name."""
    dtype, bare = torch_dtype(name), heads.bare_key
    query, key, value = (x.quantised(dtype, units) for x in (heads.query, heads.key, heads.value))
    return replace(
        heads, query=query, key=key, value=value, bare_key=bare and bare.quantised(dtype, units)
    )


def split_heads(projected: Ball, config: Config, role: str) -> Ball:
    """Split (B, length, heads * d_k) into (B, H, length, d_k), key/value heads repeated for their
    query heads.

    role: "q", "k" or "v"; values have the width d_v. Head i owns the columns i*d_k to (i+1)*d_k
    (clause HED-1). Query head h attends with key/value head h // (n_heads / n_kv_heads) (clause
    GQA-1).

    >>> config = Config(d_model=4, n_heads=4, n_kv_heads=2)
    >>> split_heads(Ball.exact(torch.tensor([[[1, 2]]])), config, "k").mid.flatten()
    tensor([1., 1., 2., 2.], dtype=torch.float64)
    """
    width = config.width_of(role)

    def split(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // width, width)).transpose(1, 2)
        repeats = config.n_heads // heads.shape[1]
        return heads if repeats == 1 else heads.repeat_interleave(repeats, 1)

    return Ball(split(projected.mid), split(projected.rad))


def _with_extra_keys(problem: Problem, heads: Heads) -> Heads:
    """Append the extra keys and values. Every query may attend to them, and no mask adds to their
    scores.
    """
    config, given, key, value = problem.config, problem.weights, heads.key, heads.value
    extras: list[list[Tensor | None]] = [[given.extra_k, given.extra_v]] if config.bias_kv else []
    extras += [[w.new_zeros(len(w)) for w in (given.w_k, given.w_v)]] if config.zero_key else []
    for pair in extras:
        rows = [Ball.exact(row.expand(len(key.mid), 1, -1)) for row in pair if row is not None]
        new_key, new_value = (
            split_heads(row, config, role) for row, role in zip(rows, "kv", strict=True)
        )
        key, value = Ball.joined([key, new_key], 2), Ball.joined([value, new_value], 2)
    grown = (0, len(extras))
    return replace(
        heads,
        key=key,
        value=value,
        allowed=torch.nn.functional.pad(heads.allowed, grown, value=True),
        bias=None if heads.bias is None else torch.nn.functional.pad(heads.bias, grown),
    )
