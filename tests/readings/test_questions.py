"""Scores that are not scaled, and biases by distance: what is asked, and left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference.around import _gates, _line, _may_be_declared
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.probes import CONFIG, Formula
from mha.implementations.inference.questions import require_scale_of_class

PARAMETERS = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
UNSCALED = Formula(scale="none")


class Relative(nn.Module):
    """After T5: a learned bias for each distance and head, and no scale."""

    slopes: Tensor

    def __init__(self, d_model: int, n_heads: int, relative_buckets: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(relative_buckets, n_heads)
        self.register_buffer("slopes", torch.ones(n_heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Unscaled(Relative):
    """Nothing says that scores are not scaled on purpose."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)


def candidate_of(cls: type[nn.Module]) -> Candidate:
    declared = Declared(cls, cls.__name__, parameters=dict(PARAMETERS))
    return Candidate(declared).trying(formula=UNSCALED)


def test_class_with_relative_positions_is_asked_whether_it_scales() -> None:
    with pytest.raises(ImplementationError, match="as in T5") as refused:
        require_scale_of_class(candidate_of(Relative))
    meant, _, fails = str(refused.value).partition("If not")
    assert "scale=1.0" in meant
    assert "scale=1.0" not in fails


def test_class_without_relative_positions_is_judged_without_a_scale() -> None:
    require_scale_of_class(candidate_of(Unscaled))
    assert not _may_be_declared(candidate_of(Unscaled))


def test_declaration_without_a_bias_by_distance_has_both_answers() -> None:
    candidate = candidate_of(Relative)
    assert _may_be_declared(candidate)
    assert _line(candidate).count("scale=1.0") == 2


def test_tables_and_slopes_of_each_head_are_left_out_as_zeros() -> None:
    module = Relative(CONFIG.d_model, CONFIG.n_heads)
    offsets = {"relative_attention_bias.weight": 0.0, "slopes": 0.0}
    assert offsets in _gates([candidate_of(Relative)], module)
