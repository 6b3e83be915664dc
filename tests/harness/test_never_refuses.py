"""The known-bad answers that refuse nothing, where heads share a key and a value."""

from __future__ import annotations

import torch

from mha.conformance.harness.known_bad.answers import NeverRefuses
from mha.spec import Claims, Config, Options, Weights


def test_width_that_heads_do_not_divide_gives_a_result_with_one_key_head_too() -> None:
    config = Config(d_model=7, n_heads=2, n_kv_heads=1)
    weights = Weights.random(config, 0)
    answers = NeverRefuses(Claims(multi_query=True), config, weights, torch.Generator())
    x = torch.ones(2, 3, 7, dtype=torch.float64)
    assert answers.attend((x, x, x), Options()).output.shape == x.shape
