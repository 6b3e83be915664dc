"""A merge of partial results: contexts and log-sum-exps of two parts of the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mha.implementations.adapters.merge import from_merge


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context (B, H, L, d_v) of both parts, and their log-sum-exp (B, H, L).

    A part without keys has a log-sum-exp of -infinity, and so have two of them.
    """
    highest = torch.maximum(lse_a, lse_b)
    # Scores are shifted by no infinity, which would be subtracted from itself.
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    weight_a, weight_b = (lse_a - highest).exp(), (lse_b - highest).exp()
    total = weight_a + weight_b
    shares = (weight / total.masked_fill(total == 0, 1.0) for weight in (weight_a, weight_b))
    share_a, share_b = (share.unsqueeze(-1) for share in shares)
    return (o_a * share_a + o_b * share_b).to(o_a.dtype), highest + total.log()


implementation = from_merge(merge, name="merge")
