"""The statistics of dropout: how often right ones fail, and how small an error is caught."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

from mha.conformance.properties.support import dropout_statistics
from mha.conformance.properties.support.dropout_statistics import (
    FALSE_ALARM,
    LARGE_LENGTH,
    PROBABILITIES,
    accepted_counts,
    chance_of_one_pattern,
    least_patterns,
)

DRAWS = LARGE_LENGTH**2


def tails(low: int, high: int, trials: int, p: Fraction) -> tuple[Fraction, Fraction]:
    """Return the exact probabilities of a count below `low`, and of one above `high`."""
    exact = [
        math.comb(trials, count) * p**count * (1 - p) ** (trials - count)
        for count in range(trials + 1)
    ]
    return sum(exact[:low], Fraction(0)), sum(exact[high + 1 :], Fraction(0))


@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 10), Fraction(9, 10)])
@pytest.mark.parametrize("trials", [100, 301])
def test_accepted_counts_are_those_of_the_exact_binomial(trials: int, p: Fraction) -> None:
    low, high = accepted_counts(trials, float(p))
    below, above = tails(low, high, trials, p)
    # 2^-40: what the logarithms of float64 lose.
    assert below + above <= Fraction(FALSE_ALARM) * (1 + Fraction(1, 1 << 40))
    narrower = tails(low + 1, high, trials, p)[0], tails(low, high - 1, trials, p)[1]
    assert all(tail > Fraction(FALSE_ALARM) / 2 for tail in narrower)


def failure_rate(low: int, high: int, p: float) -> float:
    """Return the probability that a count of `DRAWS` is outside the accepted range."""
    counts = torch.arange(DRAWS + 1, dtype=torch.float64)
    logs = torch.distributions.Binomial(DRAWS, torch.tensor(p, dtype=torch.float64)).log_prob(
        counts
    )
    return float(logs[:low].logsumexp(0).exp() + logs[high + 1 :].logsumexp(0).exp())


@pytest.mark.parametrize("p", PROBABILITIES)
def test_correct_dropout_fails_as_rarely_as_stated(p: float) -> None:
    assert failure_rate(*accepted_counts(DRAWS, p), p) <= FALSE_ALARM * (1 + 1e-6)


def smallest_error(p: float, power: float = 0.99) -> float:
    """Return the smallest error of the probability that is caught with probability `power`."""
    low, high = 0.0, 1.0 - p
    for _ in range(24):
        middle = (low + high) / 2
        caught = failure_rate(*accepted_counts(DRAWS, p), p + middle) >= power
        low, high = (low, middle) if caught else (middle, high)
    return high


@pytest.mark.parametrize(("p", "error"), [(0.5, 0.019), (0.1, 0.012), (0.9, 0.011)])
def test_smallest_error_that_is_caught(p: float, error: float) -> None:
    assert round(smallest_error(p), 3) == error


def test_docstring_states_the_power() -> None:
    stated = (
        f"p = 0.5: a probability that is off by {smallest_error(0.5):.3f} is caught with"
        " probability 0.99"
    )
    assert stated in str(dropout_statistics.__doc__)


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_chance_that_all_rows_drop_alike_is_not_underestimated(p: float) -> None:
    """Counted over all patterns of three rows and two columns."""
    rows, columns = 3, 2
    chance = 0.0
    for drops in product((0, 1), repeat=rows * columns):
        pattern = [drops[columns * row : columns * (row + 1)] for row in range(rows)]
        if len({*pattern}) == 1:
            chance += math.prod(p if drop else 1 - p for drop in drops)
    assert chance_of_one_pattern(rows, columns, p) == pytest.approx(chance)


def test_few_columns_need_more_rows_to_tell_patterns_apart() -> None:
    assert [
        least_patterns(65, 65, 0.5),
        least_patterns(15, 15, 0.5),
        least_patterns(15, 15, 0.1),
    ] == [65, 2, 1]
