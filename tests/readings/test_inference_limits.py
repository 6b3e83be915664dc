"""The limits of inference: what it asks for, and what names or sizes alone do not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mha.conformance.faults import registry
from mha.implementations import from_module
from mha.implementations.inference.infer import infer
from mha.implementations.process.torch_state import threads
from mha.spec import Claims, Options
from support.judging import expect_fail, expect_pass
from support.readings import evidence, findings, refusal_of


class Unnamed(nn.Module):
    """The names of its layers say nothing."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x


class NeedsRank(nn.Module):
    """Its constructor requires a parameter without a known name."""

    def __init__(self, d_model: int, n_heads: int, rank: int) -> None:
        super().__init__()


class Raises(nn.Module):
    """Its constructor raises."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        raise RuntimeError("no GPU here")


class Exits(registry.Correct):
    """Its forward exits."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # another signature
        raise SystemExit(3)


class ValueFirst(registry.Correct):
    """The value comes first, which no name says."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:  # type: ignore[override]  # another signature
        return super().forward(c, b, a)


class OneHead(registry.Correct):
    """With one head there is no output projection."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.out_proj = self.out_proj if n_heads > 1 else nn.Identity()  # type: ignore[assignment]  # the point

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # another signature
        return super().forward(x, x, x).output


class ReturnsThree(registry.Correct):
    """Returns output, weights and something else."""

    third: Any = "a cache"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]  # another signature
        output, weights, _ = super().forward(query, key, value, mask)
        return output, weights, self.third


class ThirdIsNone(ReturnsThree):
    """Returns output, weights and None."""

    third = None


class UnknownSizes(nn.Module):
    """Its constructor has no known name of d_model."""

    def __init__(self, breadth: int, n: int, length: int) -> None:
        super().__init__()


class PairsOfHeads(nn.Module):
    """Every two heads share one key and one value."""

    group = 2

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, width = n_heads, d_model // n_heads * max(1, n_heads // self.group)
        self.q, self.o = (nn.Linear(d_model, d_model) for _ in range(2))
        self.k, self.v = (nn.Linear(d_model, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (-1, q.shape[-1])).transpose(1, 2) for f in (self.k, self.v))
        k, v = (x.repeat_interleave(self.n_heads // x.shape[1], 1) for x in (k, v))
        output: Tensor = self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class EightsOfHeads(PairsOfHeads):
    """Every eight heads share one key and one value."""

    group = 8


class Wide(Unnamed):
    """One projection is a convolution over several positions."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.q = nn.Conv1d(d_model, d_model, 3)


class Parametrized(Unnamed):
    """Its weights are products."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.q = nn.utils.parametrizations.weight_norm(self.a)


class WithoutProjections(nn.Module):
    """A kernel in a module."""

    def __init__(self, temperature: float) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask)


def makes_nothing(d_model: int, n_heads: int) -> None:
    """A check of sizes, with the parameters of a constructor."""


def makes_compiled(d_model: int, n_heads: int) -> Any:
    """A module that does not name its inputs."""
    return torch.compile(PairsOfHeads(d_model, n_heads), backend="eager")


UNCLEAR: dict[Callable[..., Any], str] = {
    EightsOfHeads: (
        "fewer key heads than query heads; let the constructor take the number of key heads as"
        " n_kv_heads"
    ),
    PairsOfHeads: (
        "fewer key heads than query heads; let the constructor take the number of key heads as"
        " n_kv_heads"
    ),
    Wide: "q.weight looks like w_q, but its shape is (32, 32, 3), not (32, 32) as with d_model=32",
    Parametrized: "its weights are computed each time (a parametrization); judge it without that",
    WithoutProjections: (
        "(q, k, v, mask=None): return WithoutProjections(temperature=q.shape[-1] ** 0.5).eval()("
    ),
    makes_nothing: (
        "makes_nothing(d_model=32, n_heads=2) returned None, which is not a torch.nn.Module"
    ),
    makes_compiled: (
        "returns a compiled module, which does not name its inputs; name what returns it uncompiled"
    ),
    Unnamed: (
        "no parameter looks like the projection of k, q, v (its parameters: a.weight, a.bias,"
        " b.weight"
    ),
    NeedsRank: (
        "its constructor requires rank, which has no known name; supply it with"
        " functools.partial(NeedsRank, "
    ),
    Raises: "Raises(d_model=32, n_heads=2) raised RuntimeError: no GPU here",
    Exits: "cannot be judged: each call raises SystemExit: 3 (test_inference_limits.py, line",
    ValueFirst: "forward(a, b, c) does not name its inputs, and its output matches no formula",
    UnknownSizes: (
        "none of the parameters of its constructor (breadth, n, length) has a known name of d_model"
    ),
}


@pytest.mark.parametrize("made", UNCLEAR, ids=lambda made: made.__name__)
def test_message_names_what_cannot_be_inferred(made: Callable[..., Any]) -> None:
    assert UNCLEAR[made] in refusal_of(made)


def test_one_head_without_an_output_projection_is_not_claimed() -> None:
    result = infer(OneHead)
    assert result.implementation.claims.sizes.n_heads == frozenset(range(2, 9))
    assert (
        findings(result)["heads"]
        == "several: with one, OneHead: w_o (out_proj).weight is missing, but the "
        + "configuration has it; see Claims.bias"
    )
    names = dict(globals())
    exec(result.declaration, names)
    assert names["implementation"].claims == result.implementation.claims
    expect_pass(result, "SHP-1")


class OneWholeHead(nn.Module):
    """Has no output projection if one head is as wide as the model, but has one if it is not."""

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64) -> None:
        super().__init__()
        self.heads, inner = heads, heads * dim_head
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        projects = (heads, dim_head) != (1, dim)
        self.to_out = (
            nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.0)) if projects else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.to_qkv(x).chunk(3, -1)
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # of nn.Module


def test_one_head_as_wide_as_the_model_is_not_claimed_where_it_is_not_projected() -> None:
    result = infer(OneWholeHead)
    assert result.implementation.claims.own_head_dim
    assert findings(result)["heads"].startswith(
        "several: with one, OneWholeHead: the module has no 'to_out.0'"
    )
    expect_pass(result, "SHP-1", "HED-1")


def test_none_after_output_and_weights_is_ignored() -> None:
    implementation = infer(ThirdIsNone).implementation
    assert implementation.claims.returns_weights
    expect_pass(implementation, "SMX-1")


def test_class_that_cannot_be_inferred_can_be_declared() -> None:
    claims = Claims(
        masks=(), causal=None, cross_attention=False, returns_weights=False, bias={True}
    )
    parameters = {f"w_{role}": name for role, name in zip("qkvo", "abcd", strict=True)}
    declared = from_module(Unnamed, parameters=parameters, mask=None, claims=claims)
    expect_fail(declared, "HED-1")


class UnnamedOutput(registry.Correct):
    """The name of its output projection says nothing, and a norm has the name of a projection."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.fc, self.q_norm = self.out_proj, nn.LayerNorm(d_model)
        del self.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]  # another signature
        q, k, v = (
            self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        output: Tensor = self.fc(
            self.merge(self.weigh(self.score(q, k), self.allow(Options(mask), q, k)) @ v)
        )
        return output


class CutsMask(UnnamedOutput):
    """Takes a mask (L, S), and cuts a larger one to this size."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        return super().forward(x, x, x, None if mask is None else mask[: x.shape[1], : x.shape[1]])


class Sharper(UnnamedOutput):
    """Its output matches no formula, but its mask hides keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 1.7


def test_unnamed_output_projection_is_found_by_trial_runs() -> None:
    result = infer(UnnamedOutput)
    assert result.implementation.parameters == {
        "w_q": "q_proj",
        "w_k": "k_proj",
        "w_v": "v_proj",
        "w_o": "fc",
    }
    assert findings(result)["not loaded"] == "q_norm.weight, q_norm.bias"


def test_shape_of_masks_is_tested_with_several_sizes() -> None:
    assert infer(CutsMask).implementation.call.masks.shape == "l s"


def test_mask_of_an_unknown_formula_is_found_by_what_it_hides() -> None:
    result = infer(Sharper)
    assert findings(result)["mask"].startswith("mask: True = may attend")
    assert (
        evidence(result)["formula"]
        == "assumed: it explains the output only where all scores are equal"
    )
    expect_fail(result, "SMX-6")


class NotesThreads(registry.Correct):
    noted: ClassVar[set[int]] = set()

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.noted.add(torch.get_num_threads())
        return super().score(q, k)


def test_trial_runs_are_on_one_thread() -> None:
    with threads(3):
        infer(NotesThreads)
        assert torch.get_num_threads() == 3
    assert NotesThreads.noted == {1}
