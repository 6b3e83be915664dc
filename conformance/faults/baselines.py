"""Baseline checks: three ways in which an attention is often tested, measured on the same faults.

`allclose`: one batch of normal numbers against `nn.MultiheadAttention`, with a tolerance of 1e-4.
`assert_close`: a few masks against the plain formula, with the tolerances of `torch.testing`.
`grid`: a grid of shapes and masks, outputs and gradients, each with at most twice the error of the
plain formula in the same dtype (the rule of the tests of FlashAttention).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.errors import AdapterError, Violation
from mha.conformance.harness.isolation import guarded
from mha.implementations.process.torch_state import preserved
from mha.implementations.torch_mha import implementation as torch_mha
from mha.spec import Implementation, Problem

GRID = tuple(
    Case(n_heads=n_heads, head_dim=head_dim, B=2, L=L, S=S, mask=mask, causal=causal)
    for n_heads, head_dim, (L, S) in product(
        (1, 4), (8, 64), ((16, 16), (64, 64), (1, 64), (128, 64))
    )
    for mask, causal in (("none", False), ("padding", False), ("none", True))
)
FOUR_MASKS = tuple(
    Case(n_heads=4, head_dim=8, B=2, L=12, S=12, mask=mask, causal=causal)
    for mask, causal in (("none", False), ("padding", False), ("queries", False), ("none", True))
)


def caught_by(implementation: Implementation, dtype: str) -> tuple[str, ...]:
    """Return the names of the baseline checks that fail for an implementation in a dtype."""
    return tuple(
        name for name, check in CHECKS.items() if not _passes(check, implementation, dtype)
    )


def _passes(
    check: Callable[[Implementation, str], bool], implementation: Implementation, dtype: str
) -> bool:
    """Return whether a check passes; any exception is a failure, and global state is restored."""
    try:
        with preserved(), guarded("a baseline check"):
            return check(implementation, dtype)
    except (AdapterError, Violation):
        return False


def allclose(implementation: Implementation, dtype: str) -> bool:
    """Self-attention without a mask; in float32 for half precision: 1e-4 is below its rounding."""
    wide = dtype if dtype == "float64" else "float32"
    problem = Case(n_heads=8, head_dim=8, B=4, L=32, S=32, inputs="self", dtype=wide).problem()
    return torch.allclose(_call(implementation, problem), _call(torch_mha, problem), atol=1e-4)


def assert_close(implementation: Implementation, dtype: str) -> bool:
    """Four masks, in one shape."""
    for case in FOUR_MASKS:
        problem = replace(case, dtype=dtype).problem()
        expected = plain_formula(
            problem,
            problem.allowed(implementation.claims.alignment),
            implementation.claims.scale,
            implementation.claims,
        )
        torch.testing.assert_close(_call(implementation, problem), expected)
    return True


def grid(implementation: Implementation, dtype: str) -> bool:
    """Shapes and masks, both passes, against float64; float64 itself is tried in float32."""
    for case in GRID:
        problem = replace(case, dtype="float32" if dtype == "float64" else dtype).problem()
        allowed = problem.allowed(implementation.claims.alignment)

        def plain(inputs: Problem, allowed: Tensor = allowed) -> Tensor:
            claims = implementation.claims
            return plain_formula(inputs, allowed, claims.scale, claims)

        wide = problem.map_inputs(Tensor.double).change(
            weights=problem.weights.to(torch.float64, "cpu")
        )
        references, baselines = _differentiated(plain, wide), _differentiated(plain, problem)
        results = _differentiated(lambda inputs: _call(implementation, inputs), problem)
        for result, baseline, reference in zip(results, baselines, references, strict=True):
            eps = torch.finfo(baseline.dtype).eps
            allowance = 2 * (baseline - reference).abs().max() + eps * reference.abs().max()
            if not bool((result - reference).abs().max() <= allowance):
                return False
    return True


CHECKS: dict[str, Callable[[Implementation, str], bool]] = {
    "allclose": allclose,
    "assert_close": assert_close,
    "grid": grid,
}


def _call(implementation: Implementation, problem: Problem) -> Tensor:
    """Return the output of an implementation, built for the problem, in evaluation."""
    module: Any = implementation.build(
        problem.config, problem.weights, dtype=problem.query.dtype, device=str(problem.query.device)
    )
    module.eval()
    output: Tensor = problem.call(module).output
    return output


def _differentiated(call: Callable[[Problem], Tensor], problem: Problem) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value for an upstream of ones."""
    leaves = problem.map_inputs(lambda x: x.detach().clone().requires_grad_())
    output = call(leaves)
    output.backward(torch.ones_like(output))
    results = [output.detach()]
    for x in (leaves.query, leaves.key, leaves.value):
        missing = torch.full_like(x, torch.nan)
        results.append(missing if x.grad is None else x.grad.detach())
    return results
