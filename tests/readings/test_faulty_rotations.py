"""Rotations that are none, and rotations of unusual angles, which are only unknown."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.faulty_rotations import with_faulty_rotation
from mha.implementations.inference.probes import CONFIG

PARAMETERS = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}


class Unusual(nn.Module):
    """Angles of two axes, as of the rows and columns of an image."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def angles(self, length: int, width: int) -> Tensor:
        places = torch.arange(length)
        axes = torch.stack([places // 3, places % 3], -1).repeat_interleave(width // 4, -1)
        return torch.cat([axes, axes], -1) * torch.linspace(1, 0.1, width // 2).repeat(2)

    def rotated(self, x: Tensor) -> Tensor:
        angles = self.angles(*x.shape[2:]).to(x)
        one, other = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = self.rotated(q) @ self.rotated(k).mT * q.shape[-1] ** -0.5
        output: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class MixedPairs(Unusual):
    """Angles of neighbours, for columns that are halves of pairs."""

    def angles(self, length: int, width: int) -> Tensor:
        frequencies = 100.0 ** (-torch.arange(0, width, 2) / width)
        return torch.outer(torch.arange(length), frequencies).repeat_interleave(2, -1)


class QueriesAlone(Unusual):
    """Keys are left as they are."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = self.rotated(q) @ k.mT * q.shape[-1] ** -0.5
        output: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


def nearest(cls: type[Unusual]) -> Candidate | None:
    claims = {"causal": None, "cross_attention": False}
    declared = Declared(cls, cls.__name__, parameters=dict(PARAMETERS), claims=claims)
    return with_faulty_rotation([Candidate(declared)], cls(CONFIG.d_model, CONFIG.n_heads))


@pytest.mark.parametrize("cls", [MixedPairs, QueriesAlone])
def test_what_changes_the_lengths_of_heads_is_judged_as_a_rotation(cls: type[Unusual]) -> None:
    found = nearest(cls)
    assert found is not None
    assert found.explained
    assert found.claims["rotary"]
    assert "which no rotation does" in found.rows["positions"].evidence


def test_rotation_of_unusual_angles_is_not_one_of_these() -> None:
    assert nearest(Unusual) is None
