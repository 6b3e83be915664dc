"""Problems that properties of several families make: with dropout, with grouped heads, with other widths."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.spec import Config, Problem, Weights


def with_dropout(problem: Problem, dropout: float) -> Problem:
    """Return the problem with this dropout probability in its configuration."""
    return problem.change(config=replace(problem.config, dropout=dropout))


def with_config(case: Case, config: Config) -> Problem:
    """Return the case's problem with another configuration: weights of its own, and inputs of the widths it needs."""
    problem = case.problem()
    weights = Weights.random(config, case.seed).to(problem.query.dtype, case.device)
    generator = case.generator

    def fitted(x: Tensor, width: int) -> Tensor:
        return x if x.shape[-1] == width else torch.randn(*x.shape[:2], width, generator=generator).to(x)

    key = fitted(problem.key, config.key_width)
    shared = problem.value is problem.key and config.kdim == config.vdim
    value = key if shared else fitted(problem.value, config.value_width)
    return problem.change(config=config, weights=weights, key=key, value=value)


def grouped(case: Case) -> Config:
    """Return the case's configuration with fewer key/value heads than query heads."""
    counts = [count for count in range(1, case.n_heads) if case.n_heads % count == 0]
    return replace(case.config, n_kv_heads=counts[case.seed % len(counts)])
