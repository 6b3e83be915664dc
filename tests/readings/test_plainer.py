"""Options of a constructor that count by default, beside what else a class does with its heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.plainer import plain_settings
from mha.implementations.inference.projections import ParameterMap
from mha.implementations.inference.understanding import _without_options
from mha.implementations.inference.unused import unused_options


class Scaled(nn.Module):
    """As today's decoders: rotary in complex numbers, a window, sinks, interpolated positions."""

    freqs_cis: Tensor

    def __init__(
        self, d_model: int, n_heads: int, sliding_window: int = 2, rope_scaling_factor: float = 4.0
    ) -> None:
        super().__init__()
        self.n_heads, self.sliding_window = n_heads, sliding_window
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.sinks = nn.Parameter(torch.zeros(n_heads))
        width = d_model // n_heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(64) / rope_scaling_factor, frequencies)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.turned(q) @ self.turned(k).mT * q.shape[-1] ** -0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        allowed = (distance >= 0) & (distance < self.sliding_window)
        scores = scores.masked_fill(~allowed, -torch.inf)
        sinks = self.sinks[:, None, None].expand(len(x), -1, length, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        output: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[2]]).flatten(3)


def test_a_window_and_a_factor_of_positions_are_set_so_that_they_add_nothing() -> None:
    parameters: ParameterMap = {"w_qkv": "qkv", "w_o": "out"}
    claims = {"causal": None, "cross_attention": False, "bias": {False}}
    declared = Declared(Scaled, "Scaled", parameters=parameters, claims=claims)
    arguments = {"d_model": "d_model", "n_heads": "n_heads"}
    found = _without_options([[Candidate(declared, arguments=arguments)]])
    assert found is not None
    assert found.claims["rotary"].pairs == "interleaved"
    assert found.declared.sinks == "sinks"
    assert found.rows["set"].finding.endswith("rope_scaling_factor=1.0, not 4.0")
    assert "rope_scaling_factor other than 1.0" in unused_options(found)


def test_other_numbers_of_a_constructor_are_kept() -> None:
    class Attention(nn.Module):
        def __init__(
            self,
            d_model: int,
            n_heads: int,
            scale_factor: float = 2.0,
            rope_theta: float = 1e6,
            window: int | None = None,
            num_prefix_tokens: int = 1,
            logit_cap: float | None = 50.0,
        ) -> None: ...

    assert plain_settings(Attention) == {"num_prefix_tokens": 0, "logit_cap": None}
