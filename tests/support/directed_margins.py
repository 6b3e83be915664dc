"""How near correct implementations come to the thresholds of NUM-7 and GRD-8.

As a program it prints the table of docs/directed.md; its argument is how many problems.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.faults.base import Complete, implementation_of
from mha.conformance.properties import directed_gradients
from mha.conformance.properties.support import directions
from mha.implementations import resolve
from mha.spec import Implementation, Problem
from mha.spec.directed import LARGEST_DEVIATION, Allowance, allowances, projection
from mha.spec.directed_gradients import allowances_of_gradients, projection_of_gradients
from mha.spec.gradient_graph import GradientGraph, gradient_graph
from support import variants
from support.directed_cases import BACKWARD, KINDS, hostile_problem
from support.random_problems import built

BUILT_IN = (
    "loop",
    "einops",
    "vectorized",
    "chunked",
    "tiled",
    "sdpa",
    "torch_mha",
    "grouped_query",
    "fused_qkv",
)
VARIANTS = (
    Complete,
    variants.BaseTwo,
    variants.SoftmaxStored,
    variants.SoftmaxInSingle,
    variants.LogSumExp,
    variants.SplitKeys,
    variants.OrderOfSummation,
    variants.NoKeyBias,
    *BACKWARD.values(),
)
SUBJECTS: dict[str, Implementation] = {name: resolve(name)[0].implementation for name in BUILT_IN}
SUBJECTS |= {cls.__name__: implementation_of(cls) for cls in VARIANTS}


@dataclass(frozen=True)
class Margin:
    """|T| over its standard deviation, and over the threshold, of one test."""

    deviations: float
    ratio: float


@dataclass(frozen=True, eq=False)
class Exact:
    """A graph with its directions and their allowances, forwards and backwards."""

    graph: GradientGraph
    output: list[tuple[Tensor, Allowance]]
    gradients: list[tuple[Mapping[str, Tensor], Allowance]]


def exact_of(problem: Problem, implementation: Implementation, seed: int) -> Exact:
    """Solve a problem; the last directions are a single element each."""
    case, claims = Case(seed=seed), implementation.claims
    upstream = torch.randn(problem.query.shape, generator=case.generator).to(problem.query)
    if KINDS[seed % len(KINDS)] in ("repeated", "expanded"):
        upstream = upstream[:1, :1].expand_as(upstream).contiguous()
    graph = gradient_graph(problem, claims, upstream)
    forwards = [
        direction.change["output"] for direction in directions.directions(graph.forward, case)
    ]
    backwards = [
        dict(direction.change)
        for direction in directed_gradients.directions(graph, graph.exact, case)
    ]
    name = list(graph.exact)[seed % len(graph.exact)]
    forwards.append(single(graph.forward.output, seed))
    backwards.append({name: single(graph.exact[name], seed)})
    return Exact(
        graph,
        list(zip(forwards, allowances(graph.forward, forwards), strict=True)),
        list(zip(backwards, allowances_of_gradients(graph, backwards), strict=True)),
    )


def single(like: Tensor, seed: int) -> Tensor:
    """Return the direction of one element."""
    direction = torch.zeros_like(like).flatten()
    direction[seed % len(direction)] = 1.0
    return direction.view_as(like)


def margins(
    exact: Exact, implementation: Implementation, problem: Problem
) -> Iterator[tuple[str, Margin]]:
    """Yield the clause and the margin of each test of an implementation."""
    copied = problem.map_inputs(lambda x: x.detach().clone().requires_grad_())
    called = built(implementation, problem)
    output = called(
        copied.query,
        copied.key,
        copied.value,
        mask=problem.mask,
        is_causal=problem.is_causal,
        need_weights=False,
    ).output
    output.backward(exact.graph.upstream.to(output))
    found = {name: x.grad for name, x in copied.distinct().items() if x.grad is not None}
    found |= called.weight_gradients()  # type: ignore[attr-defined]  # it is claimed
    tests = [
        ("NUM-7", part, projection(exact.graph.forward, output, w)) for w, part in exact.output
    ]
    tests += [
        ("GRD-8", part, projection_of_gradients(exact.graph, found, w))
        for w, part in exact.gradients
    ]
    for clause, part, projected in tests:
        if part.deviation <= LARGEST_DEVIATION and part.sd:
            yield clause, Margin(abs(projected) / part.sd, abs(projected) / part.threshold)


def measured(problems: range) -> dict[tuple[str, str], list[Margin]]:
    """Return the margins by clause and implementation."""
    found: dict[tuple[str, str], list[Margin]] = {}
    for seed in problems:
        original, solved = hostile_problem(random.Random(seed), seed), {}
        if not bool(original.allowed("top_left").any(-1).all()):
            continue
        for name, implementation in SUBJECTS.items():
            problem, itself = original, name == "fused_qkv"
            if itself:
                problem = original.change(key=original.query, value=original.query, mask=None)
            place = implementation.claims.rounding, itself
            if place not in solved:
                solved[place] = exact_of(problem, implementation, seed)
            for clause, margin in margins(solved[place], implementation, problem):
                found.setdefault((clause, name), []).append(margin)
    return found


def table(found: Mapping[tuple[str, str], Sequence[Margin]]) -> Iterator[str]:
    """Yield the rows of a table, from the clause on."""
    for (clause, name), tests in sorted(found.items()):
        deviations = sorted(test.deviations for test in tests)
        middle, late = deviations[len(tests) // 2], deviations[-1 - len(tests) // 100]
        yield (
            f"| {clause} | {name} | {len(tests)} | {middle:.2f} | {late:.2f} | {deviations[-1]:.2f}"
            f" | {max(test.ratio for test in tests):.2f} |"
        )


def main(count: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    found = measured(range(count))
    print(f"{sum(map(len, found.values()))} tests")
    print(
        "| clause | implementation | tests | median of T/sd | 99% | largest | largest ratio to the"
        " threshold |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
