"""The masks of other conventions that MSK-12 passes."""

from __future__ import annotations

import torch

from mha.conformance.properties.invalid_masks import _of_other_conventions
from mha.spec import Claims, Config, Problem, Weights


def test_masks_of_other_conventions_hide_a_key() -> None:
    """One that allows all says nothing of a class that ignores masks."""
    config, x = Config(d_model=2, n_heads=2), torch.zeros(2, 2, 2)
    problem = Problem(config, Weights.random(config, 0), x, x, x)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        for given, _ in _of_other_conventions(Claims(), problem, generator).values():
            assert not given.all()
