"""How far a weight may be off where the bound of its scores is infinite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mha.conformance.properties.support.dropout_gradients import _slack
from mha.spec import Claims, Config, Problem, Weights
from mha.spec.bounds import Ball


def test_weight_of_unknown_scores_is_off_by_no_more_than_one() -> None:
    config = Config(d_model=2, n_heads=1)
    x = torch.zeros(1, 2, 2)
    problem = Problem(config, Weights.random(config, 0), x, x, x)
    mid = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64)
    rad = torch.tensor([[[[torch.inf, torch.nan], [0.0, 0.1]]]], dtype=torch.float64)
    expected = SimpleNamespace(weights=Ball(mid, rad))
    session: Any = SimpleNamespace(claims=Claims(), expected=lambda problem: expected)
    slack = _slack(session, problem)
    assert (slack >= 2 * rad.nan_to_num(nan=1.0, posinf=1.0)).all()
    assert (slack < 2.1).all()
