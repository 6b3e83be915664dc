"""How long a run may take, by the number of cases and the speed of the oracle here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from time import perf_counter

from mha.conformance.cases.domain import Domain
from mha.conformance.engine.preconditions import plain_cases
from mha.conformance.properties.registry import properties
from mha.conformance.settings import Settings
from mha.implementations.process.torch_state import threads
from mha.spec import Claims, oracle

# What a property and each of its cases cost, in plain calls of the oracle: measured over the
# built-in implementations, whose own share is small.
PER_PROPERTY, PER_CASE = 120, 5
# About how many cases cover all pairs of levels.
ALL_PAIRS = 40
CALLS = 10


def estimate(claims: Iterable[Claims], settings: Settings, share: float = 1.0) -> str:
    """Return in words how long one process takes for a share of the clauses, for all these claims.

    >>> estimate([], Settings(profile="quick"))
    'about 5 s'
    """
    calls = sum(_plain_calls(each, settings) for each in claims)
    return in_words(share * calls * _seconds_of_a_plain_call())


def in_words(seconds: float) -> str:
    """Return a time in words, coarsely.

    >>> in_words(23.4), in_words(100.0), in_words(4000.0)
    ('about 25 s', 'about 2 min', 'about 67 min')
    """
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    return f"about {round(seconds / 60)} min"


def _plain_calls(claims: Claims, settings: Settings) -> int:
    """Return what it costs to judge an implementation, in plain calls of the oracle."""
    cost, limits = 0, settings.limits
    dtypes = {*claims.dtypes}.intersection(settings.dtypes)
    for dtype in dtypes:
        every = limits.float64_every if dtype == "float64" and "float32" in dtypes else 1
        for prop in chain.from_iterable(properties()[each] for each in settings.judged_clauses):
            if (limits.slow or not prop.slow) and isinstance(prop.within(claims, dtype), Domain):
                boundary = min(prop.max_cases, limits.boundary, ALL_PAIRS)
                cases = boundary + min(prop.max_cases, limits.examples)
                cost += PER_PROPERTY + PER_CASE * cases // every
    return cost * len(settings.devices)


def _seconds_of_a_plain_call() -> float:
    """Return how long the oracle takes for a plain case here: the shortest time of several."""
    claims, times = Claims(), list[float]()
    problem = plain_cases(claims, "float32", "cpu")[0].problem()
    with threads(1):
        for _ in range(CALLS):
            begun = perf_counter()
            oracle(problem, claims)
            times.append(perf_counter() - begun)
    return min(times)
