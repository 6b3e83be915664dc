"""Where inference could go wrong: what it must ask for, and what it must not read from names or sizes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.conformance.faults import registry
from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from mha.spec import Claims


class Unnamed(nn.Module):
    """Its layers are named by letters that say nothing."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x


class NotAttention(registry.Correct):
    """What its mask does is no mask."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().weigh(scores + 3.0 * allowed, torch.ones_like(allowed))


class Sized(nn.Module):
    def __init__(self, d_model: int, n_heads: int, rank: int) -> None:
        super().__init__()


class Raises(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        raise RuntimeError("no GPU here")


class FusedButUnlike(nn.Module):
    """Its projections are stacked, and no order of them explains what it gives."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        output: Tensor = self.proj(torch.sigmoid(q @ k.mT) @ v)
        return output


class Exits(registry.Correct):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # another signature
        raise SystemExit(3)


class ByPlace(registry.Correct):
    """Value first, and no name that says so."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:  # type: ignore[override]  # another signature
        return super().forward(c, b, a)


class OneHead(registry.Correct):
    """With one head there is no output projection."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.out_proj = self.out_proj if n_heads > 1 else nn.Identity()  # type: ignore[assignment]  # the point

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # another signature
        return super().forward(x, x, x).output


class ThreeThings(registry.Correct):
    third: Any = "a cache"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]  # another signature
        output, weights = super().forward(query, key, value, mask)
        return output, weights, self.third


class ThirdIsNone(ThreeThings):
    third = None


class ManyWays(nn.Module):
    def __init__(self, width: int, n: int) -> None:
        super().__init__()


UNCLEAR: dict[type[nn.Module], str] = {
    Unnamed: "no parameter looks like the projection of k, q, v (it has a.weight, a.bias, b.weight",
    NotAttention: "no convention of 'mask' explains what it does with a mask of the usual shapes; give mask='keep'",
    Sized: "its constructor needs rank, of which nothing is known; give functools.partial(Sized, rank=...)",
    Raises: "Raises(d_model=10, n_heads=2) raised RuntimeError: no GPU here",
    FusedButUnlike: "no reading of its projections explains what it computes",
    Exits: "each call raises; the first SystemExit: 3",
    ByPlace: "forward(self, a, b, c) does not name its inputs, and as query, key, value nothing explains it",
    OneHead: "with one head it is built otherwise: OneHead: w_o (out_proj).weight is missing",
    ThreeThings: "it gives no output that could be read (it returns tuple of 3); give call=... that returns the output",
    ManyWays: "its constructor takes (width, n), none of which is a known word for d_model",
}


@pytest.mark.parametrize("cls", UNCLEAR, ids=lambda cls: cls.__name__)
def test_what_cannot_be_inferred_is_named(cls: type[nn.Module]) -> None:
    with pytest.raises(ImplementationError) as told:
        infer(cls)
    assert UNCLEAR[cls] in str(told.value)
    assert "\n" not in str(told.value)


def test_nothing_after_output_and_weights_is_left_out() -> None:
    found = infer(ThirdIsNone).implementation
    assert found.claims.returns_weights
    (verdict,) = check(found, "quick", clauses=["SMX-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "pass"


def test_declaring_what_could_not_be_inferred_works() -> None:
    claims = Claims(masks=(), causal=None, cross_attention=False, returns_weights=False, bias={True})
    places = {f"w_{role}": name for role, name in zip("qkvo", "abcd", strict=True)}
    declared = from_module(Unnamed, parameters=places, mask=None, claims=claims)
    (verdict,) = check(declared, "quick", clauses=["HED-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"


class Numbers(registry.Correct):
    """Computes with the mask: 1 = may attend."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        scores = self.score(q, k)
        scores = scores if mask is None else scores + (1.0 - mask) * -1e9
        output: Tensor = self.out_proj(self.merge(scores.softmax(-1) @ v))
        return output


def test_mask_of_numbers_is_tried_too() -> None:
    found = infer(Numbers)
    assert "mask_numbers=True" in found.code
    assert "mask: 1 = may attend" in dict(row[:2] for row in found.rows)["mask"]
    clauses = ("HED-1", "MSK-3", "MSK-6", "CAU-2")
    verdicts = check(found.implementation, "quick", clauses=clauses, dtypes=["float32"]).verdicts
    assert {verdict.status for verdict in verdicts} <= {"pass", "not_claimed"}, verdicts


class Square(registry.Correct):
    """Its output projection has a name that tells nothing, and a norm has the name of a projection."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.fc, self.q_norm = self.out_proj, nn.LayerNorm(d_model)
        del self.out_proj

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        q, k, v = (self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        output: Tensor = self.fc(self.merge(self.weigh(self.score(q, k), self.allow(mask, False, q, k)) @ v))
        return output


class Cuts(Square):
    """Takes a mask (L, S), and of a larger one what it needs of its first two axes."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # another signature
        return super().forward(x, x, x, None if mask is None else mask[: x.shape[1], : x.shape[1]])


class Sharper(Square):
    """No formula explains it, and its mask is one all the same."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * 1.7


def test_unread_output_projection_is_found_by_trying() -> None:
    found = infer(Square)
    assert found.implementation.parameters == {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "fc"}
    assert ("not loaded", "q_norm.weight, q_norm.bias", "they stay as they are initialised") in found.rows


def test_shape_of_a_mask_is_not_read_from_one_size() -> None:
    assert infer(Cuts).implementation.mask_shape == "l s"


def test_mask_of_what_nothing_explains_is_told_by_what_it_hides() -> None:
    found = infer(Sharper)
    assert dict(row[:2] for row in found.rows)["mask"].startswith("mask: True = may attend")
    assert "formula" not in dict(row[:2] for row in found.rows)
    assert any(sure == "assumed: nothing explains the outputs" for *_, sure in found.rows)
    (verdict,) = check(found.implementation, "quick", clauses=["SMX-6"], dtypes=["float32"]).verdicts
    assert verdict.status == "fail"
