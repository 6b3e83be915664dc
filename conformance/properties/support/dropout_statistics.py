"""What is dropped, judged by its statistics; each test states how often it fails by chance.

A test fails a correct implementation with probability `FALSE_ALARM` at most, and a run makes at
most `TESTS` of them on an implementation, so that it fails a correct one with probability 1e-9 at
most. The power, for `LARGE_LENGTH` squared weights and
p = 0.5: a probability that is off by 0.019 is caught with probability 0.99.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.cases.transforms import showing_weights, with_dropout, zeroed
from mha.conformance.harness.assertions import assume, expect, expect_close, expect_equal
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Session
from mha.spec import Problem
from mha.spec.bounds import Ball

# 24 cases of 3 probabilities and 7 of one, 3 tests for each of up to 9 items times heads and 1 of
# all; 9 more; all in 4 dtypes and on 2 devices. What drops weights and outputs has 9 cases of 3
# probabilities with 9 tests, which are fewer.
TESTS = 4 * 2 * ((24 * 3 + 7) * (9 * 3 + 1) + 9)
FALSE_ALARM = 1e-9 / TESTS
# L = S where the share that is dropped is tested.
LARGE_LENGTH = 256
PROBABILITIES = (0.5, 0.1, 0.9)


def expect_dropped_weights(session: Session, problem: Problem, dropout: float, seed: int) -> None:
    """Each weight is dropped on its own with probability p, and multiplied by 1/(1 - p) otherwise.

    problem: with d_k of 2 S, or more; its weights and values are changed so that the output shows
    the weights and, in a column more, their sum. For every other pair of seeds, queries are
    projected to zero.
    """
    problem = _showing_what_is_dropped(session, problem, dropout, seed)
    batch, heads, _, length = problem.shape
    problem = _with_values_of_the_bias(problem, 2 * length)
    output, expected = session(problem, seed=seed).output, session.expected(problem).output
    allowed = problem.allowed(session.claims.alignment)
    for item in range(batch):
        for head in range(heads):
            begin = head * problem.config.head_dim
            first, second = (slice(start, start + length) for start in (begin, begin + length))
            weights = output[item, slice(None), first]
            expect_zero_or_rescaled(
                session, weights, expected[item, :, first], dropout, "the weight of key"
            )
            repeated = output[item, slice(None), second]
            because = "a weight is dropped for all columns of its value, or for none"
            expect_equal(repeated, weights, because=because)
            expect_share(weights, allowed[item, head], dropout, ("queries", "keys"))
            if problem.config.has_bias("v") and problem.config.head_dim > 2 * length:
                sums = output[item, slice(None), begin + 2 * length]
                reach = (
                    expected.rad[item, :, first].sum(-1) + expected.rad[item, :, begin + 2 * length]
                )
                _expect_sum_of_kept_weights(sums, weights, reach, dropout)


def _expect_sum_of_kept_weights(
    sums: RecordedTensor, weights: RecordedTensor, reach: Tensor, dropout: float
) -> None:
    """The column that is a bias of 1 has the sum of the weights that were kept.

    sums: (L,).
    weights: (L, S).
    reach: the bounds of a sum without dropout, (L,).
    """
    # Of rescaled weights, whose sum was 1.
    reach = reach + 4 * torch.finfo(weights.tensor.dtype).eps
    expected = Ball(weights.tensor.double().sum(-1), reach / (1 - dropout))
    because = "the sum of the weights that were kept, since the bias of a value is dropped with it"
    expect_close(sums, expected, because=because)


def _showing_what_is_dropped(
    session: Session, problem: Problem, dropout: float, seed: int
) -> Problem:
    """Return a problem with dropout whose output shows the weights, for half the seeds uniform."""
    uniform = seed // 2 % 2 == 0
    return with_dropout(showing_dropped_weights(session, problem, uniform=uniform), dropout)


def expect_patterns_of_their_own(
    session: Session, problem: Problem, dropout: float, seed: int
) -> None:
    """No two heads or items drop the same weights; arguments as for `expect_dropped_weights`."""
    problem = _showing_what_is_dropped(session, problem, dropout, seed)
    batch, heads, _, length = problem.shape
    count = int(problem.allowed(session.claims.alignment).all(0).all(0).sum())
    chance = _chance_of_a_repeated_pattern(batch * heads, count, dropout)
    is_rare = batch * heads > 1 and chance <= FALSE_ALARM
    assume(is_rare, "so few weights may be dropped alike by chance")
    output = session(problem, seed=seed).output
    parts = []
    for item in range(batch):
        for head in range(heads):
            begin = head * problem.config.head_dim
            parts.append(output[item, slice(None), slice(begin, begin + length)])
    for one, other in combinations(parts, 2):
        differ = not torch.equal(one.tensor == 0, other.tensor == 0)
        message = f"with p = {dropout}, {one.code} and {other.code} drop the same weights"
        expect(differ, message, f"assert not ({one.code} == 0).equal({other.code} == 0)")


def _with_values_of_the_bias(problem: Problem, column: int) -> Problem:
    """Let a column of each head's values, if there is one, be a bias of 1."""
    bias, head_dim = problem.weights.b_v, problem.config.head_dim
    if bias is None or column >= head_dim:
        return problem
    of_column = torch.arange(len(bias), device=bias.device) % head_dim == column
    return problem.change(b_v=bias.masked_fill(of_column, 1.0))


def expect_dropped_weights_and_outputs(
    session: Session, problem: Problem, dropout: float, seed: int
) -> None:
    """Each weight, and then each output, is dropped on its own with probability p, or rescaled.

    problem: as for `expect_dropped_weights`. A weight that is dropped takes two outputs with it.
    """
    problem = _showing_what_is_dropped(session, problem, dropout, seed)
    batch, heads, _, length = problem.shape
    output, expected = session(problem, seed=seed).output, session.expected(problem).output
    allowed = problem.allowed(session.claims.alignment)
    either = 1 - (1 - dropout) ** 2
    for item in range(batch):
        for head in range(heads):
            begin = head * problem.config.head_dim
            first, second = (
                output[item, slice(None), slice(start, start + length)]
                for start in (begin, begin + length)
            )
            weights = expected[item, :, begin : begin + length]
            for half in (first, second):
                expect_zero_or_rescaled(
                    session, half, weights, dropout, "the output in column", times=2
                )
                expect_share(half, allowed[item, head], either, ("queries", "columns"))
            both = session.record(
                first.tensor.abs() + second.tensor.abs(),
                f"({first.code}.abs() + {second.code}.abs())",
            )
            both_zero = dropout + (1 - dropout) * dropout**2
            expect_share(both, allowed[item, head], both_zero, ("queries", "keys"))


def expect_zero_or_rescaled(
    session: Session,
    result: RecordedTensor,
    expected: Ball,
    dropout: float,
    what: str,
    *,
    times: int = 1,
) -> None:
    """Each element of a matrix is 0, or 1/(1 - p) times its value without dropout.

    expected: the values without dropout.
    what: an element is called in the message, before its column.
    times: how often it may have been dropped, and was rescaled.
    """
    values, factor = result.tensor.double(), (1 - dropout) ** -times
    # 1 - p, its inverse and the product are rounded; the rest is in the bound of the output without
    # dropout.
    in_float32 = session.claims.rounding.softmax_in_float32
    roundoff = torch.finfo(torch.float32 if in_float32 else result.tensor.dtype).eps / 2
    relative = (1 + (1 / (1 - dropout) + 2) * roundoff) ** times - 1
    reach = factor * (expected.rad + relative * expected.mid.abs())
    violations = ((values != 0) & ~((values - factor * expected.mid).abs() <= reach)).nonzero()
    if len(violations):
        place = tuple(violations[0].tolist())
        code, bound = result[place].code, float(reach[place])
        value = factor * float(expected.mid[place])
        scale = "1/(1 - p)" if times == 1 else f"1/(1 - p)^{times}"
        message = (
            f"{code}, {what} {place[1]} with p = {dropout}, is {float(values[place]):.6g}, but"
            f" should be 0 or {value:.6g}, {scale} times its value without dropout"
        )
        assertion = f"assert {code} == 0 or abs({code}.item() - {value!r}) <= {bound!r}, {code}"
        expect(False, message, assertion)


def expect_share(
    result: RecordedTensor, allowed: Tensor, dropout: float, names: tuple[str, str]
) -> None:
    """As many elements are dropped as p says, and no two rows or columns drop the same.

    allowed: boolean, in the shape of the matrix.
    names: what its rows are, and its columns.
    """
    dropped = (result.tensor == 0) & allowed
    count, total = int(dropped.sum()), int(allowed.sum())
    low, high = accepted_counts(total, dropout)
    message = (
        f"with p = {dropout}, {count} of {total} are dropped, but should be {low} to {high}: a"
        f" correct implementation drops more or fewer with probability {FALSE_ALARM:.0e} only"
    )
    masked = allowed.numel() - total
    zeros = f"int(({result.code} == 0).sum())"
    assertion = f"assert {low + masked} <= {zeros} <= {high + masked}, {zeros}"
    expect(low <= count <= high, message, assertion)
    if masked:
        return
    rows, columns = names
    _expect_patterns(dropped, result.code, dropout, f"{rows} of {result.code}")
    _expect_patterns(dropped.T, f"{result.code}.T", dropout, f"{columns} of {result.code}")


def _expect_patterns(dropped: Tensor, code: str, dropout: float, what: str) -> None:
    """No two rows of a matrix drop the same, where that is no chance; code: of the matrix."""
    least = least_patterns(len(dropped), len(dropped.T), dropout)
    some = "two" if least > 2 else "all"
    message = f"with p = {dropout}, {some} {what} drop the same"
    assertion = f"assert len(({code} == 0).unique(dim=0)) >= {least}"
    expect(len(dropped.unique(dim=0)) >= least, message, assertion)


def least_patterns(rows: int, columns: int, dropout: float) -> int:
    """Return how many rows must differ, where equal ones by chance are a false alarm.

    All, if two may not drop the same by chance; two, if all may not; or else one.
    """
    if _chance_of_a_repeated_pattern(rows, columns, dropout) <= FALSE_ALARM:
        return rows
    return 2 if chance_of_one_pattern(rows, columns, dropout) <= FALSE_ALARM else 1


def chance_of_one_pattern(rows: int, columns: int, dropout: float) -> float:
    """Return the probability that all rows drop the same."""
    return (dropout**rows + (1 - dropout) ** rows) ** columns


@cache
def accepted_counts(trials: int, p: float) -> tuple[int, int]:
    """Return the range that a binomial variable leaves with probability `FALSE_ALARM` at most."""
    counts = torch.arange(trials + 1, dtype=torch.float64)
    logs = torch.distributions.Binomial(trials, torch.tensor(p, dtype=torch.float64)).log_prob(
        counts
    )
    each = math.log(FALSE_ALARM / 2)
    low = int((logs.logcumsumexp(0) <= each).sum())
    return low, trials - int((logs.flip(0).logcumsumexp(0) <= each).sum())


def showing_dropped_weights(session: Session, problem: Problem, *, uniform: bool) -> Problem:
    """Let the output show the weights twice: head h has S columns, and the same again.

    uniform: whether queries are projected to zero, so that the weights depend on the mask alone.
    Otherwise scores differ by about 1, so that what is computed from queries and keys shows, and no
    weight is so small that half precision makes it zero, as if it were dropped. Where small numbers
    are flushed, they are uniform in any case.
    """
    problem = showing_weights(problem, copies=2)
    if uniform or session.claims.rounding.flushes:
        return zeroed(problem, "w_q", "b_q")
    weights, heads = problem.weights.to(torch.float64), (-1, problem.config.head_dim)
    q = F.linear(problem.query.double(), weights.w_q, weights.b_q)
    k = F.linear(problem.key.double(), weights.w_k, weights.b_k)
    q, k = (x.unflatten(-1, heads).transpose(1, 2) for x in (q, k))
    scores = q @ k.repeat_interleave(problem.config.n_heads // problem.config.kv_heads, 1).mT
    scores = scores * problem.scale(session.claims)
    factor = 1 / float((scores - scores.mean(-1, keepdim=True)).std())
    scaled = {name: x * factor for name, x in problem.weights.named() if name in ("w_q", "b_q")}
    return problem.change(**scaled)


def _chance_of_a_repeated_pattern(patterns: int, size: int, dropout: float) -> float:
    """Return a bound on the probability that two of so many patterns of this size are equal."""
    return math.comb(patterns, 2) * (dropout**2 + (1 - dropout) ** 2) ** size
