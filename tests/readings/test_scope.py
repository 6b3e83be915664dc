"""What is not plain attention is named, and what only looks like that is judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError, from_module
from mha.implementations.adapters.construction import MAX_LENGTH
from mha.implementations.inference.infer import infer
from mha.spec import Config, Weights
from support.judging import expect_fail, expect_pass
from support.plain import Plain
from support.readings import evidence, refusal_of

# To look for causes and simpler cases takes longer than to judge; tests/diagnosis does the first.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")


class Swish(Plain):
    """Its parameter of positions has no effect, and its scores are too sharp."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.pos, self.norm = nn.Parameter(torch.zeros(d_model)), nn.LayerNorm(d_model)

    def place(self, q: Tensor) -> Tensor:
        return q * 1.3


def test_what_is_not_used_is_not_out_of_scope() -> None:
    assert not expect_fail(infer(Swish), "SMX-6").conforms


class Normalised(Plain):
    """It normalises its input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(self.norm(x), mask)


class Residual(Normalised):
    """It adds its input."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + super().forward(x, mask)


class Rotary(Plain):
    """It rotates by position."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", torch.tensor([0.5]))

    def place(self, q: Tensor) -> Tensor:
        angle = torch.arange(q.shape[-2])[:, None] * self.inv_freq.to(q.dtype)
        one, other, rest = q[..., :1], q[..., 1:2], q[..., 2:]
        turned = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
        return torch.cat([*turned, rest], -1)


class AbsolutePositions(Normalised):
    """It adds positions to its input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.norm, self.position = nn.Identity(), nn.Embedding(64, d_model)  # type: ignore[assignment]  # the point

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + self.position.weight[: x.shape[1]], mask)


class FeedForward(Plain):
    """It has a feed-forward part."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.ff = nn.Sequential(
            nn.Linear(d_model, 3 * d_model), nn.GELU(), nn.Linear(3 * d_model, d_model)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.ff(self.attend(x, mask))


class TurnedInPlace(Plain):
    """It rotates by position, without a name that says so."""

    def place(self, q: Tensor) -> Tensor:
        angle = torch.arange(q.shape[-2])[:, None].to(q)
        one, other, rest = q[..., :1], q[..., 1:2], q[..., 2:]
        turned = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
        return torch.cat([*turned, rest], -1)


class Uneven(Plain):
    """Its softmax runs over the queries, beside functions that do not matter."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        torch.tanh(scores.norm())
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return (scores * torch.rsqrt(torch.ones_like(scores))).softmax(-2)


def test_function_that_does_not_matter_is_not_out_of_scope() -> None:
    assert not expect_fail(infer(Uneven), "SMX-6").conforms


class NormalisedInVain(Plain):
    """It normalises what it does not use, and its scores are too sharp."""

    def place(self, q: Tensor) -> Tensor:
        nn.functional.normalize(q, dim=-1)
        return q * 1.3


def test_norm_that_does_not_matter_is_not_out_of_scope() -> None:
    assert not expect_fail(infer(NormalisedInVain), "SMX-6").conforms


class OfUnitLength(Plain):
    """It normalises its input: normed queries and keys would be read."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(nn.functional.normalize(x, dim=-1), mask)


def rms_norm(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


class NormedByFunction(Plain):
    """It normalises its output by a function of its file."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return rms_norm(super().forward(x, mask))


class Gated(Plain):
    """It multiplies its context by a gate."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.out, self.proj = self.proj, nn.Identity()  # type: ignore[assignment]  # the point
        self.gate = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output: Tensor = self.out(self.attend(x, mask) * self.gate(x).sigmoid())
        return output


class LayerScaled(Plain):
    """It multiplies its output by a parameter."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.gamma = nn.Parameter(torch.full((d_model,), 0.1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.gamma * self.attend(x, mask)


def distances(scores: Tensor) -> Tensor:
    """Return how far each key is behind each query, (L, S)."""
    queries, keys = (torch.arange(size) for size in scores.shape[-2:])
    return queries[:, None] - keys


class Capped(Plain):
    """It caps its scores."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(5 * torch.tanh(scores / 5), mask)


class Biased(Plain):
    """It adds ALiBi."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, self.n_heads + 1) / self.n_heads)
        return super().weigh(
            scores - slopes.to(scores)[:, None, None] * distances(scores).abs(), mask
        )


class Windowed(Plain):
    """It attends to a window."""

    def __init__(self, d_model: int, n_heads: int, width: int = 2) -> None:
        super().__init__(d_model, n_heads)
        self.width = width

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(
            scores.masked_fill(distances(scores).abs() > self.width, float("-inf")), mask
        )


class WidelyWindowed(Windowed):
    """It attends to a window that is longer than the trial runs."""

    def __init__(self, d_model: int, n_heads: int, sliding_window: int = 128) -> None:
        super().__init__(d_model, n_heads, sliding_window)


def test_window_that_an_argument_gives_is_widened() -> None:
    result = infer(WidelyWindowed)
    assert evidence(result)["formula"] == "tested"
    assert f"partial(WidelyWindowed, sliding_window={MAX_LENGTH})" in result.declaration
    expect_pass(result, "NUM-5")


class Sinking(Plain):
    """It has two scores without a key for each head."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.sinks = nn.Parameter(torch.zeros(n_heads, 2))

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        sinks = self.sinks[:, None].expand(*scores.shape[:-1], 2)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-2]


OUT_OF_SCOPE: dict[type[nn.Module], str] = {
    TurnedInPlace: "it depends on positions (`torch.cos`, `torch.sin`)",
    OfUnitLength: "it normalises what it computes (`normalize`)",
    Capped: "it caps its scores (`tanh`)",
    Biased: "it adds a bias that grows with the distance of query and key (ALiBi)",
    Windowed: "it attends to at most 2 positions on a side",
    Sinking: "it adds scores without a key (`sinks`)",
    Normalised: (
        "Normalised is out of scope: it normalises its input (`norm`); to judge its attention"
        " without that, declare it below the class, and judge that: import torch; from"
    ),
    Residual: (
        "it adds its input to its output (a residual connection); it normalises its input (`norm`);"
        " to judge its attention without that, declare it"
    ),
    Rotary: "it depends on positions (`inv_freq`)",
    AbsolutePositions: "it depends on positions (`position.weight`)",
    FeedForward: "it computes with more than four projections (`ff.0`, `ff.2`)",
}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("cls", OUT_OF_SCOPE, ids=lambda cls: cls.__name__)
def test_what_is_not_plain_attention_is_named(cls: type[nn.Module]) -> None:
    assert OUT_OF_SCOPE[cls] in refusal_of(cls)


IMPORTS = "from mha.implementations import from_module; from mha.spec import Claims; "


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("cls", "neutral"),
    [
        (Normalised, 'neutral={"norm": torch.nn.Identity}, claims='),
        (Residual, 'neutral={"norm": torch.nn.Identity}, residual=True, claims='),
        (OfUnitLength, 'neutral={"normalize": torch.nn.Identity}, claims='),
        (NormedByFunction, 'neutral={"rms_norm": torch.nn.Identity}, claims='),
        (Gated, 'neutral={"gate": float("inf")}, claims='),
        (LayerScaled, 'neutral={"gamma": 1.0}, claims='),
    ],
    ids=["norm", "residual", "of torch", "of the file", "gate", "scale"],
)
def test_declaration_that_leaves_parts_out_is_shown_and_conforms(
    cls: type[nn.Module], neutral: str
) -> None:
    _, _, declaration = refusal_of(cls).partition("judge that: ")
    assert declaration.removeprefix("import torch; ").startswith(IMPORTS)
    assert neutral in declaration
    variables = dict[str, Any](globals())
    exec(declaration, variables)  # as if it were pasted
    expect_pass(variables["implementation"], "HED-1", also=("MSK-1", "STA-7"))


def test_part_that_is_not_there_is_not_left_out() -> None:
    result = from_module(
        Plain, parameters={"w_qkv": "qkv", "w_o": "proj"}, neutral={"nrm": nn.Identity}
    )
    config = Config(d_model=4, n_heads=2)
    with pytest.raises(ImplementationError, match="neutral names nrm, which is no submodule"):
        result.build(config, Weights.random(config, 0), dtype=torch.float32, device="cpu")
