"""Scores that are cosines of queries and keys, times a scale that is learned."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.changed_heads import learned_scales, with_changed_heads
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.describe import rows_of_module
from mha.implementations.inference.probes import CONFIG
from mha.spec import QkNorm


class Cosines(nn.Module):
    """As in Swin V2: a scale of each head is learned as its logarithm."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.logit_scale = nn.Parameter(torch.full((n_heads, 1, 1), 10.0).log())

    def scale(self) -> Tensor:
        return self.logit_scale.clamp(max=math.log(100)).exp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = normalize(q, dim=-1) @ normalize(k, dim=-1).mT * self.scale()
        output: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class TimesRoot(Cosines):
    """As in x-transformers: each head has a root mean square of 1, without an eps."""

    def scale(self) -> Tensor:
        root: Tensor = self.logit_scale.new_tensor(CONFIG.head_dim).sqrt()
        return root


def test_norms_without_an_eps_are_read_as_such() -> None:
    module = TimesRoot(CONFIG.d_model, CONFIG.n_heads)
    del module.logit_scale
    module.logit_scale = torch.zeros(())
    parameters = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
    claims = {"causal": None, "cross_attention": False}
    declared = Declared(TimesRoot, "TimesRoot", parameters=dict(parameters), claims=claims)
    arguments = {"d_model": "d_model", "n_heads": "n_heads"}
    (found,) = with_changed_heads([Candidate(declared, arguments=arguments)], module)
    assert found.claims["qk_norm"] == QkNorm("unit_rms", eps=1e-24, weight=None)


class Temperature(Cosines):
    """The inverse of a scale is learned."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.logit_scale = nn.Parameter(torch.tensor(0.125))

    def scale(self) -> Tensor:
        return 1 / self.logit_scale


@pytest.mark.parametrize(("cls", "scale"), [(Cosines, 10.0), (Temperature, 8.0)])
def test_cosines_are_read_with_their_scale(cls: type[Cosines], scale: float) -> None:
    module = cls(CONFIG.d_model, CONFIG.n_heads)
    parameters = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
    claims = {"causal": None, "cross_attention": False}
    declared = Declared(cls, cls.__name__, parameters=dict(parameters), claims=claims)
    arguments = {"d_model": "d_model", "n_heads": "n_heads"}
    (found,) = with_changed_heads([Candidate(declared, arguments=arguments)], module)
    assert found.claims["qk_norm"] == QkNorm("l2", eps=1e-24, weight=None)
    assert found.claims["scale"] == pytest.approx(scale)
    shown = {row.topic: row.finding for row in rows_of_module(found, module)}
    assert shown["formula"] == f"softmax({scale:g} q k^T) v W_o"


def test_numbers_that_differ_between_heads_are_no_scale() -> None:
    module = nn.Module()
    module.slopes = nn.Parameter(torch.arange(1.0, 1.0 + CONFIG.n_heads))
    assert learned_scales(module) == []
