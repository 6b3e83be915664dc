"""Implementations side by side: interleaved rounds, ratios with an interval, and what the machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from mha.conformance.benchmarks.memory import peak_memory
from mha.conformance.benchmarks.runner import Reference, Runner
from mha.conformance.benchmarks.workloads import Work
from mha.conformance.harness.errors import Violation
from mha.spec import Implementation

# The probability that an interval leaves out the median, and the size of the product that tells the machine's rate.
ERROR, PRODUCT = 0.05, {"cpu": 1024, "cuda": 8192}
# What more than the limit is called an error of measurement.
TOLERANCE = 1.05
HEADINGS = ("ms", "ratio", "95% interval", "share", "GB/s", "MiB")
# How long a work may take, in seconds, and the rounds that it has all the same: fewer have no interval.
LONGEST, FEWEST = 60.0, 6


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one implementation took for a work, round by round.

    ratios: to the first implementation in the same round. memory: the peak in bytes. rate: of the matrix products that
    the machine made in the same rounds, in operations per second. wrong: why it is not timed, "" if it is.
    """

    implementation: str
    work: Work
    seconds: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    memory: int = 0
    rate: float = 0.0
    wrong: str = ""

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The median of the ratios, and the interval that has it with 95%."""
        low, high = interval(self.ratios)
        return median(self.ratios), low, high

    @property
    def share(self) -> float:
        """The share of the machine's rate of matrix products, by what is needed alone."""
        return self.work.operations / median(self.seconds) / self.rate

    @property
    def impossible(self) -> bool:
        """Whether it is faster than the machine: the measurement is wrong."""
        return self.share > TOLERANCE

    @property
    def cells(self) -> tuple[str, ...]:
        """What a table tells of it, under `HEADINGS`."""
        seconds, (middle, low, high) = median(self.seconds), self.ratio
        rate, memory = self.work.bytes_moved / seconds / 1e9, self.memory / 2**20
        numbers = f"{1e3 * seconds:.2f}", f"{middle:.2f}", f"[{low:.2f}, {high:.2f}]"
        return *numbers, f"{self.share:.0%}", f"{rate:.1f}", f"{memory:.1f}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of order statistics that has the median with 95%, whatever the distribution."""
    ordered, number = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < number // 2:
        outside += 2 * comb(number, below) / 2**number
        if outside > ERROR:
            break
        below += 1
    place = max(below - 1, 0)
    return ordered[place], ordered[number - 1 - place]


def compare(implementations: Sequence[Implementation], work: Work, rounds: int) -> Iterator[Timing]:
    """Time all implementations that are right at a work, in turns; each output is checked, outside the time.

    rounds: fewer are made, but `FEWEST` or more, where they take longer than `LONGEST`.
    """
    if not implementations:
        return
    problems = work.problems()
    reference = Reference(work, problems)
    runners, memory, wrong = dict[str, Runner](), dict[str, int](), dict[str, str]()
    for implementation in implementations:
        try:
            runner = Runner(implementation, work, problems)
            for place in range(len(problems)):
                runner.load(place)
                reference.expect(runner.seen(runner.run()), place)
            memory[implementation.name] = peak_memory(runner.run, work.case.device)
            runners[implementation.name] = runner
        except Violation as violation:
            wrong[implementation.name] = violation.message
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    size, dtype = PRODUCT[work.case.device], getattr(torch, work.case.dtype)
    factors = torch.randn(2, size, size).to(work.case.device, dtype)
    product_seconds(factors)
    products, began = [], perf_counter()
    for number in range(rounds):
        if not runners or (number >= FEWEST and perf_counter() - began > LONGEST):
            break
        products.append(product_seconds(factors))
        names = list(runners)
        turn = number % max(1, len(names))  # nobody is always first
        for name in (*names[turn:], *names[:turn]):
            try:
                runners[name].load(number % len(problems))
                start = perf_counter()
                seen = runners[name].run()
                seconds[name].append(perf_counter() - start)
                reference.expect(runners[name].seen(seen), number % len(problems))
            except Violation as violation:
                wrong[name] = violation.message
                del runners[name]
    rate = 2.0 * size**3 / median(products) if products else 0.0
    yield from _timings(implementations, work, seconds, memory, wrong, rate)


def _timings(
    implementations: Sequence[Implementation],
    work: Work,
    seconds: Mapping[str, list[float]],
    memory: Mapping[str, int],
    wrong: Mapping[str, str],
    rate: float,
) -> Iterator[Timing]:
    names = [implementation.name for implementation in implementations]
    first = next((name for name in names if name not in wrong), "")
    for name in names:
        if name in wrong:
            yield Timing(implementation=name, work=work, wrong=wrong[name])
            continue
        ratios = tuple(own / base for own, base in zip(seconds[name], seconds[first], strict=True))
        own = tuple(seconds[name])
        yield Timing(implementation=name, work=work, seconds=own, ratios=ratios, memory=memory[name], rate=rate)


def product_seconds(factors: Tensor) -> float:
    """Return how long the product of two square matrices takes."""
    if factors.is_cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    torch.mm(factors[0], factors[1])
    if factors.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start
