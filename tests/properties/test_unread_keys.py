"""Which draws of MSK-1, MSK-7 and CAU-1 compare nothing, and are discarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mha.conformance.harness.assertions import Discard
from mha.conformance.properties.support.unread_keys import (
    _of_finite_scores,
    expect_unread,
)
from mha.spec import Config, Problem, Weights

# In self-attention, one key of two is hidden from the query at its own position only.
FROM_ITSELF = torch.tensor([[[True, False], [False, False]]])


def test_draw_is_discarded_whose_queries_are_all_replaced() -> None:
    config = Config(d_model=2, n_heads=1)
    x = torch.zeros(1, 2, 2)
    problem = Problem(config, Weights.random(config, 0), x, x, x)
    generator = torch.Generator().manual_seed(0)
    never_called: Any = None
    with pytest.raises(Discard, match="is replaced, too"):
        expect_unread(never_called, problem, FROM_ITSELF, generator, "hidden from")


def test_huge_keys_that_are_normed_have_a_finite_variance() -> None:
    config = Config(d_model=6, n_heads=2)
    x = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    problem = Problem(config, Weights.random(config, 0, torch.float32), x, x, x)
    key = _of_finite_scores(problem, x.double() * 1e30, is_normed=True)
    heads = F.linear(key.float(), *problem.weights.of("k")).unflatten(-1, (2, 3))
    assert heads.abs().max() > 1e15
    assert F.layer_norm(heads, (3,)).isfinite().all()
