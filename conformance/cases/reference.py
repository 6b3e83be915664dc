"""The plain formula: attention as a textbook writes it, in the dtype of the inputs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mha.spec import Problem


def plain_formula(problem: Problem, allowed: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d_k) + mask) v between its projections, step by step in the dtype of the inputs."""
    given, heads = problem.weights, (problem.config.n_heads, problem.config.head_dim)
    q = F.linear(problem.query, given.w_q, given.b_q).unflatten(-1, heads).transpose(1, 2)
    k = F.linear(problem.key, given.w_k, given.b_k).unflatten(-1, heads).transpose(1, 2)
    v = F.linear(problem.value, given.w_v, given.b_v).unflatten(-1, heads).transpose(1, 2)
    scores = q @ k.mT / heads[1] ** 0.5
    if problem.mask is not None and problem.mask.is_floating_point():
        scores = scores + problem.mask
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), given.w_o, given.b_o)
