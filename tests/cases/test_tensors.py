"""The tensors of cases: their values, masks and layouts in memory."""

from __future__ import annotations

import pytest
import torch

from mha.conformance.cases.case import Case
from mha.conformance.cases.mask_kinds import EMPTY, EXTENTS, make_mask
from mha.conformance.cases.memory_layouts import LAYOUTS, lay_out, leaf_of
from mha.conformance.cases.values import VALUES
from mha.spec import causal_mask


@pytest.mark.parametrize(
    ("dtype", "finite"), [("float32", False), ("bfloat16", True), ("float16", True)]
)
def test_what_lies_around_an_input_spoils_a_sum_unless_torch_reads_it(
    dtype: str, finite: bool
) -> None:
    laid_out = lay_out("sliced", torch.ones(2, 3, 4, dtype=getattr(torch, dtype)))
    around = laid_out.as_strided((2, 5, 7), (35, 7, 1), 0)[:, 0]
    assert bool(around.isfinite().all()) is finite
    assert not finite or bool((around > 1e3).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_moves_the_numbers_but_keeps_them(layout: str) -> None:
    x = torch.arange(2.0 * 3 * 5).reshape(2, 3, 5)
    laid_out = lay_out(layout, x)
    overlapping = {"expanded": x[:1].expand(2, -1, -1), "repeated": x[:, :1].expand(-1, 3, -1)}
    assert torch.equal(laid_out, overlapping.get(layout, x))
    assert laid_out.is_contiguous() == (layout == "contiguous")


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (0, 3, 5), (2, 0, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaf_has_the_layout_of_its_original(layout: str, shape: tuple[int, int, int]) -> None:
    x = lay_out(layout, torch.randn(shape))
    leaf = leaf_of(x)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert torch.equal(leaf, x)
    assert (leaf.stride(), leaf.storage_offset()) == (x.stride(), x.storage_offset())
    assert not x.numel() or leaf.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("kind", EXTENTS)
def test_mask_has_the_extent_of_its_kind_and_empty_rows_only_if_named_so(
    kind: str, causal: str | None
) -> None:
    scores = (3, 2, 5, 7)
    if causal and kind == "single":
        pytest.skip("no property has causal calls with this kind")
    for seed in range(20):
        mask = make_mask(kind, scores, causal, torch.Generator().manual_seed(seed))
        assert mask is not None
        assert mask.shape == tuple(
            size if axis in EXTENTS[kind] + "S" else 1
            for axis, size in zip("BHLS", scores, strict=True)
        )
        allowed = (mask if mask.dtype == torch.bool else mask != -torch.inf).expand(scores)
        if causal:
            allowed = allowed & causal_mask(5, 7, causal)
        empty = ~allowed.any(-1)
        assert bool(empty.any()) == (kind in EMPTY)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_are_finite_in_the_dtype(values: str, dtype: str) -> None:
    problem = Case(n_heads=2, head_dim=3, B=2, L=5, S=7, dtype=dtype, values=values).problem()
    tensors = [
        problem.query,
        problem.key,
        problem.value,
        *(tensor for _, tensor in problem.weights.named()),
    ]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert {str(tensor.dtype) for tensor in tensors} == {f"torch.{dtype}"}
