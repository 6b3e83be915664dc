"""The plain formula: attention as in a textbook, in the dtype of the inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mha.spec import Problem
from mha.spec.dtypes import computable


def plain_formula(problem: Problem, allowed: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(tau q k^T + mask) v, with the projections, each step in the dtype of the
    inputs.

    allowed: boolean (B, H, L, S), which query may attend to which key. scale: tau, by default
    1/sqrt(d_k).
    """
    weights_by_name = {name: computable(tensor) for name, tensor in problem.weights.named()}
    config = problem.config

    def project(x: Tensor, role: str) -> Tensor:
        if not config.projected:
            return computable(x)
        return F.linear(
            computable(x), weights_by_name[f"w_{role}"], weights_by_name.get(f"b_{role}")
        )

    inputs = {"q": problem.query, "k": problem.key, "v": problem.value}
    split = [
        project(x, role).unflatten(-1, (-1, config.width_of(role))).transpose(1, 2)
        for role, x in inputs.items()
    ]
    q, k, v = (x.repeat_interleave(config.n_heads // x.shape[1], 1) for x in split)
    scores = q @ k.mT * (config.head_dim**-0.5 if scale is None else scale)
    if problem.mask is not None and problem.mask.is_floating_point():
        scores = scores + computable(problem.mask)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return project((weights @ v).transpose(1, 2).flatten(2), "o").to(problem.query.dtype)
