"""Rotations whose angles are divided, or whose base is stretched, for longer inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.changed_heads import with_changed_heads
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.probes import CONFIG
from mha.implementations.inference.rotations import (
    Frequencies,
    bases_of,
    frequencies_of,
    words_of_rotary,
)
from mha.spec import Rotary


class Stretched(nn.Module):
    """Its base depends on the width of a head."""

    inv_freq: Tensor
    divisor = 1.0

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, width = n_heads, d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        frequencies = self.base(width) ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("inv_freq", frequencies / self.divisor)

    def base(self, width: int) -> float:
        return 10000.0 * 4.0 ** (width / (width - 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.turned(q) @ self.turned(k).mT * q.shape[-1] ** -0.5
        output: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]), self.inv_freq)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Divided(Stretched):
    """All its frequencies are divided."""

    divisor = 4.0

    def base(self, width: int) -> float:
        return 500000.0


class DividedByArgument(Divided):
    """Its positions are, by an argument."""

    divisor = 1.0

    def __init__(self, d_model: int, n_heads: int, rope_scaling_factor: float = 2.0) -> None:
        super().__init__(d_model, n_heads)
        self.inv_freq, self.frequencies = None, self.inv_freq  # type: ignore[assignment]  # not found
        self.positions = torch.arange(64) / rope_scaling_factor

    def turned(self, x: Tensor) -> Tensor:
        self.inv_freq = self.frequencies * self.positions[1]
        turned = super().turned(x)
        self.inv_freq = None  # type: ignore[assignment]  # not found
        return turned


def candidate_of(cls: type[nn.Module]) -> Candidate:
    claims = {"causal": None, "cross_attention": False}
    parameters = {"w_qkv": "qkv", "w_o": "out"}
    declared = Declared(cls, cls.__name__, parameters=dict(parameters), claims=claims)
    return Candidate(declared, arguments={"d_model": "d_model", "n_heads": "n_heads"})


@pytest.mark.parametrize(
    ("cls", "rotary", "words"),
    [
        (
            Stretched,
            Rotary(stretch=4.0),
            "rotary, half-split, base 10000, stretched by 4^(r / (r - 2))",
        ),
        (
            Divided,
            Rotary(500000.0, factor=4.0),
            "rotary, half-split, base 500000, angles divided by 4",
        ),
        (
            DividedByArgument,
            Rotary(500000.0, factor=2.0),
            "rotary, half-split, base 500000, angles divided by 2",
        ),
    ],
)
def test_angles_are_those_of_longer_inputs(
    cls: type[nn.Module], rotary: Rotary, words: str
) -> None:
    module = cls(CONFIG.d_model, CONFIG.n_heads)
    (found,) = with_changed_heads([candidate_of(cls)], module)
    assert found.claims["rotary"] == rotary
    assert found.rows["positions"].finding == words == words_of_rotary(rotary)


@pytest.mark.parametrize("base", [40000.0, 150000.0, 20480.0])
def test_a_base_of_its_own_is_not_stretched(base: float) -> None:
    module = nn.Module()
    module.rope_theta = base
    assert frequencies_of(candidate_of(Stretched), module)[0] == Frequencies(base)
    assert bases_of(module)[0] == base
