"""How a class multiplies numbers of float32: as they are, or rounded first, as TF32 units do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.nearest_projections import is_output
from mha.implementations.inference.probes import Formula, each_once
from mha.spec.dtypes import in_tf32
from mha.spec.rounding import Products

# Of the largest output: ten times what sums of float32 numbers make of a small problem.
SMALL = 2.0**-19
# How like the errors of a simulation those of the outputs must be: the cosine of the angle between
# them. Those of another cause have one near 0, and what is not simulated, such as where a softmax
# is divided, takes some of it.
ALIKE = 0.7

Limbs = tuple[Tensor, ...]


def find_products(candidate: Candidate) -> Candidate:
    """Claim products of rounded numbers, if the errors of outputs in float32 are theirs."""
    dtypes = candidate.implementation().claims.dtypes
    if not candidate.explained or "float32" not in dtypes:
        return candidate
    single = candidate.trying(dtype=torch.float32)
    inputs = each_once(lambda x: x.float().double(), candidate.probes[0].inputs)
    result = single.call_plainly(inputs)
    weights = candidate.weights.to(torch.float32).to(torch.float64)
    exact = candidate.formula(inputs, weights, None)
    if result is None or not is_output(result, exact):
        return candidate
    error = result.output.detach().double() - exact
    if not bool(error.abs().max() > SMALL * exact.abs().max()):
        return candidate
    likeness = dict[Products, float]()
    for kind, formula in _simulations(candidate.formula):
        simulated = formula(inputs, weights, None) - exact
        likeness[kind] = max(likeness.get(kind, 0.0), _likeness(error, simulated))
    best = max(likeness, key=likeness.__getitem__)
    if likeness[best] < ALIKE:
        return candidate
    return candidate.claiming(rounding=replace(candidate.claimed("rounding"), products=best))


def _simulations(formula: Formula) -> Iterator[tuple[Products, Formula]]:
    """Yield the formula with rounded factors: of all products, and of those of heads only.

    Those of heads are the products of a kernel.
    """
    kinds: dict[Products, tuple[Callable[[Tensor], Limbs], ...]] = {
        "tf32": (_without_last_bits, _to_tf32),
        "bf16": (_to_bfloat16,),
        "bf16x3": (_in_two_parts,),
    }
    for kind, roundings in kinds.items():
        for limbs in roundings:
            multiply = partial(_multiply, limbs)
            yield kind, replace(formula, multiply=multiply, project=multiply)
            yield kind, replace(formula, multiply=multiply)


def _multiply(limbs: Callable[[Tensor], Limbs], a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b from the parts of each, without the product of the small ones."""
    of_a, of_b = limbs(a), limbs(b)
    largest = of_a[0] @ of_b[0]
    return largest if len(of_a) == 1 else largest + of_a[0] @ of_b[1] + of_a[1] @ of_b[0]


def _without_last_bits(x: Tensor) -> Limbs:
    return (in_tf32(x),)


def _to_tf32(x: Tensor) -> Limbs:
    return (in_tf32(x, 1 << 12),)


def _to_bfloat16(x: Tensor) -> Limbs:
    return (x.bfloat16().double(),)


def _in_two_parts(x: Tensor) -> Limbs:
    large = x.bfloat16().double()
    return large, (x - large).bfloat16().double()


def _likeness(error: Tensor, simulated: Tensor) -> float:
    """Return the cosine of the angle between two errors; 0 if one is more than twice the other."""
    sizes = error.norm(), simulated.norm()
    if not bool(max(sizes) <= 2 * min(sizes)):
        return 0.0
    return float((error * simulated).sum() / (sizes[0] * sizes[1]))
