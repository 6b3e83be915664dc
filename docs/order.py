"""Which cases of `judge_kernel` find most faults for their time: measures them, and orders them.

python docs/order.py measure lines.jsonl [FAULTS]    a run that was stopped goes on
python docs/order.py show lines.jsonl                prints the table of docs/embedding.md, and
                                                     writes the order, conformance/embedded/order.py

A subject is a fault of the gallery as a kernel, or a right kernel; each is tried on every case of
one dtype, each time afresh: of a fault, in the one in which it must be caught, mostly float32.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import mha.conformance.embedded.order
from mha.conformance.embedded.calling import Kernel, NotExpressed
from mha.conformance.embedded.cases import KernelCase
from mha.conformance.embedded.plan import kernel_cases
from mha.conformance.embedded.repeats import probe_calls
from mha.conformance.embedded.trial import Trial
from mha.conformance.faults.registry import FAULTS, Fault, complete
from mha.spec import CLAUSES, Claims
from support.embedded_kernels import CLAIMS, IMPOSTORS
from support.gallery_kernels import claims_of, kernel_of

# Families of clauses that no call of a kernel can break.
NOT_OF_KERNELS = (
    "CFG",
    "XAT",
    "INC",
    "DRP",
    "DST",
    "CMP",
    "PTH",
    "GRD",
    "LEN",
    "PAK",
    "ROT",
    "QKN",
)
RIGHT, PROBES = "right", "probes"
PLAIN = "NUM-1: plain: more keys than a tile"
# The data that are made, and what stands before the titles.
DATA = Path(mha.conformance.embedded.order.__file__)
MARK = "ORDER = (\n"
# Of the wrong kernels, which are found.
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


# Faults that only the last cases of the plan find, of pairs of options, masks, and rare calls. They
# come before the others, of which a measurement takes some.
LATE = (
    *("MaskForgottenBesideWindow", "SinkOfTheKeyHead", "WholeHeadsUnmasked", "MaskOnQueries"),
    *("FirstItemForAll", "UnguardedPaddingOfNumbers", "FirstHeadOfItems", "FlatMaskForgotten"),
    *("MaskOf64Heads", "CausalForgottenBesideWindow", "UnboundedIsLength", "ZeroScaleIsNone"),
    *("GroupsTiledInLongRows", "TriangleOfSoManyQueries", "TriangleOf2048", "KeylessRowsSeeAll"),
    *("WindowForgottenBesideChunks", "CapForgottenBesideWindow", "WindowOfOneLessForOneQuery"),
)


def subjects() -> Iterator[tuple[str, Any, Claims]]:
    """A right kernel, impostors, and faults of the gallery: those of LATE, others at random."""
    yield RIGHT, kernel_of(complete), claims_of(complete)
    for name, (kernel, _) in IMPOSTORS.items():
        yield name, kernel, CLAIMS
    faults = dict[str, Fault]()
    for fault in FAULTS:
        if CLAUSES[fault.clause].family not in NOT_OF_KERNELS:
            faults.setdefault(fault.name, fault)
    others = sorted(set(faults).difference(LATE))
    random.Random(0).shuffle(others)
    for name in (*LATE, *others):
        fault = faults[name]
        claims = claims_of(fault.implementation)
        if fault.dtype in claims.dtypes:
            claims = replace(claims, dtypes={fault.dtype})
        yield name, kernel_of(fault.implementation), claims


def name_of(case: KernelCase) -> str:
    """What stays the same about a case if others are added: its repr without the seed."""
    text = repr(case)
    return f"{text.partition(', seed=')[0].rstrip(')')})"


def title_of(case: KernelCase) -> str:
    """What a case is, whatever is claimed."""
    return f"{case.clause}: {case.about}"


def tried(kernel: Any, claims: Claims) -> dict[str, tuple[float, bool]]:
    """Seconds of each case on a kernel, and whether it fails."""
    found = {}
    read = Kernel.read(kernel, claims, "b h l d")
    cases = kernel_cases(claims)
    cases = [case for case in cases if case.dtype == cases[0].dtype]  # the second one finds little
    for case in cases:
        trial, start = Trial(read, claims, torch.device("cpu")), process_time()
        try:
            trial.judge(case)
        except NotExpressed:
            continue
        found[name_of(case)] = (round(process_time() - start, 4), fails(trial))
    trial, start = Trial(read, claims, torch.device("cpu")), process_time()
    probe_calls(trial, cases[0])
    found[PROBES] = (round(process_time() - start, 4), fails(trial))
    return found


def fails(trial: Trial) -> bool:
    """Whether something was found that decides."""
    return any(not each.conforms for each in trial.findings.verdicts("kernel", "cpu"))


def measure(file: Path, most: int) -> None:
    """Try so many subjects, and append a line for each."""
    torch.set_num_threads(1)
    known = list[str]()
    if file.exists():
        known = [json.loads(line)[0] for line in file.read_text().splitlines()]
    for number, (name, kernel, claims) in enumerate(subjects()):
        if number >= most:
            return
        if name not in known:
            with file.open("a") as lines:
                lines.write(json.dumps([name, tried(kernel, claims)]) + "\n")


@dataclass(frozen=True)
class Subject:
    """A kernel, with the seconds of each case that was tried, and the cases that fail."""

    name: str
    seconds: dict[str, float]
    failing: frozenset[str]


def read_subjects(file: Path) -> list[Subject]:
    """Read what was measured, by the titles of the cases: a clause and what it tries."""
    claims = {name: claims for name, _, claims in subjects()}
    found = []
    for line in file.read_text().splitlines():
        name, results = json.loads(line)
        titles = {name_of(case): title_of(case) for case in kernel_cases(claims[name])}
        seconds, failing = dict[str, float](), set[str]()
        for case, (cost, has_failed) in results.items():
            if case != PROBES and case not in titles:
                continue  # planned no more
            title = titles.get(case, case)
            seconds[title] = seconds.get(title, 0.0) + cost
            if has_failed:
                failing.add(title)
        found.append(Subject(name, seconds, frozenset(failing)))
    return found


def costs_of(measured: Sequence[Subject]) -> dict[str, float]:
    """The mean seconds of each case, over all kernels on which it was tried."""
    every = dict[str, list[float]]()
    for subject in measured:
        for title, seconds in subject.seconds.items():
            every.setdefault(title, []).append(seconds)
    return {title: fmean(seconds) for title, seconds in every.items()}


def greedy(wrong: Sequence[Subject], costs: dict[str, float]) -> list[str]:
    """The cases in the order of what each finds for its time that those before it do not."""
    order, left = list[str](), list(wrong)
    while left:
        found = Counter(title for subject in left for title in subject.failing)
        best = max(found, key=lambda title: (found[title] / costs[title], title))
        order.append(best)
        left = [subject for subject in left if best not in subject.failing]
    return order


def ordered(every: Sequence[str], wrong: Sequence[Subject], costs: dict[str, float]) -> list[str]:
    """All cases: first the greedy ones, then by what each finds for its time."""
    best = greedy(wrong, costs)
    found = Counter(title for subject in wrong for title in subject.failing)
    rest = [title for title in every if title not in best]
    # A case that has found nothing yet may find something.
    rest.sort(key=lambda title: -(found[title] + 0.3) / costs[title])
    return best + rest


def times_on_others(
    every: Sequence[str], wrong: Sequence[Subject], costs: dict[str, float]
) -> list[float]:
    """The seconds to failure where half of the kernels make the order for the other half."""
    times = list[float]()
    for seed in range(10):
        mixed = random.Random(seed).sample(wrong, len(wrong))
        half = len(mixed) // 2
        for some, others in ((mixed[:half], mixed[half:]), (mixed[half:], mixed[:half])):
            times += times_to_failure(ordered(every, some, costs), others, costs)
    return sorted(times)


def times_to_failure(
    order: Sequence[str], wrong: Sequence[Subject], costs: dict[str, float]
) -> list[float]:
    """The seconds up to the first case that fails, for each wrong kernel, from the least on."""
    times = []
    for subject in wrong:
        passed = 0.0
        for title in order:
            passed += costs[title] if title in subject.seconds else 0.0
            if title in subject.failing:
                break
        times.append(passed)
    return sorted(times)


def show(file: Path) -> None:
    """Print what each order finds within how many seconds, and the best one."""
    measured = read_subjects(file)
    wrong = [subject for subject in measured if subject.failing]
    costs = costs_of(measured)
    every = [title_of(case) for case in kernel_cases(claims_of(complete))]
    every = [title for title in dict.fromkeys([*every, *costs]) if title in costs]
    best = ordered(every, wrong, costs)
    orders = {
        "as planned": times_to_failure(every, wrong, costs),
        "greedy": times_to_failure(best, wrong, costs),
        "greedy, for other kernels": times_on_others(every, wrong, costs),
        "the cheapest first": times_to_failure(sorted(every, key=costs.__getitem__), wrong, costs),
    }
    missed = len(measured) - len(wrong)
    print(f"{len(wrong)} kernels fail a case, {missed} none; {sum(costs.values()):.1f} s in all")
    print(f"| order | {' | '.join(f'{share:.0%}' for share in SHARES)} |")
    print("|---|" + "---|" * len(SHARES))
    for name, times in orders.items():
        cells = [f"{times[ceil(share * len(times)) - 1]:.2f}" for share in SHARES]
        print(f"| {name} | {' | '.join(cells)} |")
    write_order(best)


def write_order(best: Sequence[str]) -> None:
    """Write the order where `kernel_cases` reads it; the plain case is first, for the probes."""
    titles = dict.fromkeys([PLAIN, *best])
    titles.pop(PROBES, None)
    lines = "".join(f'    "{title}",\n' for title in titles)
    DATA.write_text(f"{DATA.read_text().partition(MARK)[0]}{MARK}{lines})\n")


def main() -> None:
    """Measure, or show what was measured."""
    action, file = sys.argv[1], Path(sys.argv[2])
    if action == "show":
        show(file)
    else:
        measure(file, int(sys.argv[3]) if len(sys.argv) > 3 else len(FAULTS))


if __name__ == "__main__":
    main()
