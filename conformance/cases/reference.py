"""The plain formula: attention as in a textbook, in the dtype of the inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.formula import on_the_way
from mha.spec import Claims, Problem
from mha.spec.dtypes import computable


def plain_formula(
    problem: Problem, allowed: Tensor, scale: float | None = None, claims: Claims | None = None
) -> Tensor:
    """Return softmax(tau q k^T + mask) v, with the projections, in the dtype of the inputs.

    allowed: boolean (B, H, L, S), which query may attend to which key.
    scale: tau, by default 1/sqrt(d_k).
    claims: say whether queries and keys are normed and rotated; by default they are not.
    """
    config = problem.config

    def project(x: Tensor, role: str) -> Tensor:
        if not config.projected:
            return computable(x)
        weight, bias = problem.weights.of(role)
        if bias is not None:
            bias = computable(bias)
        return F.linear(computable(x), computable(weight), bias)

    def heads(x: Tensor, role: str) -> Tensor:
        split: Tensor = project(x, role).unflatten(-1, (-1, config.width_of(role))).transpose(1, 2)
        if claims and claims.changes_heads and role != "v":
            weight = getattr(problem.weights, f"{role}_norm")
            positions = torch.arange(split.shape[2], device=split.device)
            split = on_the_way(split, claims, weight, positions)
        return split.repeat_interleave(config.n_heads // split.shape[1], 1)

    q, k, v = heads(problem.query, "q"), heads(problem.key, "k"), heads(problem.value, "v")
    scores = q @ k.mT * (config.head_dim**-0.5 if scale is None else scale)
    if problem.mask is not None and problem.mask.is_floating_point():
        scores = scores + computable(problem.mask)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return project((weights @ v).transpose(1, 2).flatten(2), "o").to(problem.query.dtype)
