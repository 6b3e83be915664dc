"""Merges of partial results: right ones conform in the conventions of packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.faults.merges import correct_merge
from mha.implementations import ImplementationError, from_merge
from mha.spec import Claims, Config, Lse, Weights
from support.judging import expect_fail, expect_pass

CLAUSES = ["HED-1", "MSK-8", "MSK-10", "LSE-1", "LSE-2"]


def merged(base: str, sign: float = -1.0) -> Callable[..., Any]:
    """Return a merge whose empty parts have an infinite log-sum-exp of this sign."""
    raised, logarithm = (torch.exp, torch.log) if base == "e" else (torch.exp2, torch.log2)
    empty = sign * torch.inf

    def merge(o_a: Tensor, s_a: Tensor, o_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
        s_a, s_b = (s.masked_fill(s == empty, -torch.inf) for s in (s_a, s_b))
        highest = torch.maximum(s_a, s_b)
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
        a, b = raised(s_a - highest), raised(s_b - highest)
        total = a + b
        context = (o_a * a[..., None] + o_b * b[..., None]) / total.clamp(min=1e-30)[..., None]
        lse = highest + logarithm(total)
        return context.to(o_a.dtype), lse.masked_fill(total == 0, empty)

    return merge


FORMS = {
    "the base of the faults": correct_merge,
    "ring attention": from_merge(merged("e"), name="ring"),
    "FlashInfer": from_merge(
        merged("2"), name="state", lse=Lse(base="2", layout="t h"), layout="(b l) h d"
    ),
    "flash-attention": from_merge(
        merged("e", 1.0), name="splits", lse=Lse(empty="+inf", layout="b l h"), layout="b l h d"
    ),
    "Ulysses": from_merge(merged("e"), name="tokens", lse=Lse(layout="h t"), layout="h (b l) d"),
}


@pytest.mark.parametrize("form", FORMS)
def test_right_merges_conform_in_the_conventions_of_packages(form: str) -> None:
    expect_pass(FORMS[form], *CLAUSES, dtypes=["float32", "bfloat16"])


def test_a_merge_read_in_the_other_base_fails() -> None:
    expect_fail(from_merge(merged("2"), name="base_two"), "HED-1")


def test_parts_without_keys_are_given_zeros_and_the_declared_number() -> None:
    given: list[tuple[Tensor, ...]] = []

    def noting(*partials: Tensor) -> Any:
        given.append(partials)
        return merged("e", 1.0)(*partials)

    config = Config(d_model=6, n_heads=2).of_heads()
    attention = from_merge(noting, lse=Lse(empty="+inf", layout="b l h"), layout="b l h d").build(
        config, Weights.random(config, 0), dtype=torch.float64, device="cpu"
    )
    query, key = torch.randn(2, 3, 6).double(), torch.randn(2, 5, 6).double()
    whole = attention(query, key, key, return_lse=True)
    split = attention.split_keys((0, 0, 5))(query, key, key, return_lse=True)
    assert torch.allclose(split.output, whole.output)
    (o_a, lse_a, o_b, _), (_, between, _, _) = given[-2:]
    assert o_a.shape == o_b.shape == (2, 3, 2, 3)
    assert not o_a.any()
    assert (lse_a == torch.inf).all()
    assert lse_a.shape == between.shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layout": "b h l"},
            "layout must name b, h, l and d once each, as 'b h l d', but is 'b h l'",
        ),
        ({"claims": Claims(dropout=True)}, "claims has dropout, which the plain formula"),
    ],
)
def test_declarations_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        from_merge(merged("e"), name="merge", **options)


def test_results_of_other_shapes_are_explained() -> None:
    def transposed(*partials: Tensor) -> Any:
        context, lse = merged("e")(*partials)
        return context, lse.mT

    expect_fail(from_merge(transposed, name="transposed"), "HED-1", "a merge returned the shapes")
