"""Implementations timed in interleaved rounds, with intervals and the machine's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from mha.conformance.benchmarks.runner import Reference, Runner
from mha.conformance.benchmarks.workloads import Workload
from mha.conformance.harness.errors import AdapterError, Violation
from mha.conformance.harness.memory import peak_memory
from mha.spec import Implementation

# The probability that an interval misses the median.
ERROR = 0.05
# The size of the square matrices whose product measures the machine's rate.
PRODUCT = {"cpu": 1024, "cuda": 8192}
# A share of the machine's rate above this is an error of measurement.
TOLERANCE = 1.05
# Seconds after which no new round starts, and the rounds that are made in any case: fewer give no
# interval.
LONGEST, FEWEST = 60.0, 6
HEADINGS = ("ms", "ratio", "95% interval", "share", "GB/s", "MiB")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one implementation took for one workload.

    seconds: of each round.
    ratios: to the first implementation that was timed, in the same round.
    memory: the peak in bytes.
    rate: of the machine's matrix products in the same rounds, in operations per second.
    skip_reason: why it was not timed, empty if it was.
    incorrect: whether that is because its results are incorrect.
    """

    implementation: str
    workload: Workload
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    memory: int = 0
    rate: float = 0.0
    skip_reason: str = ""
    incorrect: bool = False

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The median of the ratios, and its 95% confidence interval."""
        low, high = interval(self.ratios)
        return median(self.ratios), low, high

    @property
    def share(self) -> float:
        """The rate of the necessary operations, as a share of the machine's for matrix products."""
        return self.workload.operations / median(self.seconds) / self.rate

    @property
    def is_impossible(self) -> bool:
        """Whether it is faster than the machine can be, so that the measurement is in error."""
        return not self.skip_reason and self.share > TOLERANCE

    @property
    def is_in_error(self) -> bool:
        """Whether its results are incorrect, or the measurement is."""
        return self.incorrect or self.is_impossible

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table under `HEADINGS`."""
        seconds, (middle, low, high) = median(self.seconds), self.ratio
        rate, memory = self.workload.bytes_moved / seconds / 1e9, self.memory / 2**20
        numbers = f"{1e3 * seconds:.2f}", f"{middle:.2f}", f"[{low:.2f}, {high:.2f}]"
        return *numbers, f"{self.share:.0%}", f"{rate:.1f}", f"{memory:.1f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the median: order statistics, for any distribution."""
    ordered, number = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < number // 2:
        outside += 2 * comb(number, below) / 2**number
        if outside > ERROR:
            break
        below += 1
    place = max(below - 1, 0)
    return ordered[place], ordered[number - 1 - place]


def compare(
    implementations: Sequence[Implementation], workload: Workload, rounds: int
) -> Iterator[Timing]:
    """Yield a timing for each implementation; results are checked outside the time.

    rounds: fewer are made, at least `FEWEST`, where they take longer than `LONGEST`.
    """
    if not implementations:
        return
    race = _Race(implementations, workload)
    rate = race.run(rounds)
    for name in (implementation.name for implementation in implementations):
        if name in race.incorrect:
            yield Timing(
                implementation=name,
                workload=workload,
                skip_reason=race.incorrect[name],
                incorrect=True,
            )
        else:
            yield Timing(
                implementation=name,
                workload=workload,
                seconds=tuple(race.seconds[name]),
                ratios=race.ratios(name),
                memory=race.memory[name],
                rate=rate,
            )


class _Race:
    """The rounds of several implementations on one workload.

    seconds, memory: by name, of implementations whose results are correct so far.
    incorrect: the message on each of the others.
    """

    def __init__(self, implementations: Sequence[Implementation], workload: Workload) -> None:
        self.workload, self.problems = workload, workload.problems()
        self.reference = Reference(workload, self.problems)
        self.runners: dict[str, Runner] = {}
        self.seconds: dict[str, list[float]] = {}
        self.memory: dict[str, int] = {}
        self.incorrect: dict[str, str] = {}
        for implementation in implementations:
            try:
                self._prepare(implementation)
            except (Violation, AdapterError) as violation:
                self.incorrect[implementation.name] = violation.message

    def run(self, rounds: int) -> float:
        """Make the rounds; return the machine's rate of matrix products, in operations a second."""
        case = self.workload.case
        size = PRODUCT[case.device]
        factors = torch.randn(2, size, size).to(case.device, getattr(torch, case.dtype))
        product_seconds(factors)
        products, start = [], perf_counter()
        for number in range(rounds):
            if not self.runners or (number >= FEWEST and perf_counter() - start > LONGEST):
                break
            products.append(product_seconds(factors))
            self._round(number)
        if not products:
            return 0.0
        return 2.0 * size**3 / median(products)  # a multiplication and an addition for each

    def ratios(self, name: str) -> tuple[float, ...]:
        """Return the ratio of each round to the first implementation that was timed."""
        first = next(iter(self.seconds.values()))
        rounds = zip(self.seconds[name], first, strict=True)
        return tuple(own / base for own, base in rounds)

    def _prepare(self, implementation: Implementation) -> None:
        """Build an implementation, check its results and measure its memory; raises Violation."""
        runner = Runner(implementation, self.workload, self.problems)
        for seed in range(len(self.problems)):
            runner.load(seed)
            self.reference.expect(runner.with_weight_gradients(runner.run()), seed)
        self.memory[implementation.name] = peak_memory(runner.run, self.workload.case.device)
        self.runners[implementation.name] = runner
        self.seconds[implementation.name] = []

    def _round(self, number: int) -> None:
        """Time each once, first another one in each round; drop those with incorrect results."""
        names = list(self.runners)
        turn = number % max(1, len(names))
        for name in (*names[turn:], *names[:turn]):
            try:
                self._time(name, number % len(self.problems))
            except Violation as violation:
                self.incorrect[name] = violation.message
                del self.runners[name], self.seconds[name]

    def _time(self, name: str, seed: int) -> None:
        runner = self.runners[name]
        runner.load(seed)
        start = perf_counter()
        results = runner.run()
        self.seconds[name].append(perf_counter() - start)
        self.reference.expect(runner.with_weight_gradients(results), seed)


def product_seconds(factors: Tensor) -> float:
    """Return the seconds of the product of two square matrices; factors: of shape (2, n, n)."""
    if factors.is_cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    torch.mm(factors[0], factors[1])
    if factors.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start
