"""The cases: what they make, how often they are what they should be, and that the rare corners are always met."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings

from mha.conformance.cases.boundary import SIZES, _pairwise, boundary_cases, varied
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, EDGES, EVERYDAY, Domain
from mha.conformance.cases.layouts import LAYOUTS, lay_out, leaf_of
from mha.conformance.cases.masks import BOOLEAN, EMPTY, EXTENTS, FLOAT, make_mask
from mha.conformance.cases.strategies import drawn_cases
from mha.conformance.cases.values import VALUES
from mha.conformance.faults.base import complete
from mha.conformance.properties.registry import Property, properties
from mha.implementations import resolve
from mha.spec import Claims, causal_mask

CLAIMS = Claims(masks={"bool", "float"})
EVERYTHING = Domain(
    masks=("none", "all", *BOOLEAN, *FLOAT, *EMPTY), causal=(False, True), values=EVERYDAY, layouts=ALL_LAYOUTS
)
DRAWN = 1000
# How often a drawn case must be so, at least; the domain is the widest there is.
SHARES: dict[str, tuple[float, Callable[[Case], bool]]] = {
    "L != S": (0.25, lambda case: case.L != case.S),
    "L > S": (0.1, lambda case: case.L > case.S),
    "a mask": (0.6, lambda case: case.mask != "none"),
    "an empty row": (0.05, lambda case: case.mask in EMPTY),
    "a causal flag": (0.3, lambda case: case.causal),
    "a residue of a tile": (0.1, lambda case: max(case.L, case.S) > 8),
    "a key beside the edge of a tile": (0.03, lambda case: case.S > 8 and case.S % 16 in (1, 15)),
    "one query": (0.05, lambda case: case.L == 1),
    "one head": (0.05, lambda case: case.n_heads == 1),
    "more than eight heads": (0.02, lambda case: case.n_heads > 8),
    "d_k = 1": (0.05, lambda case: case.head_dim == 1),
    "self-attention": (0.15, lambda case: case.inputs == "self"),
    "key and value as one tensor": (0.15, lambda case: case.inputs == "memory"),
    "no contiguous layout": (0.5, lambda case: case.layout != "contiguous"),
    "no gradient": (0.3, lambda case: case.mode in ("no_grad", "inference")),
}


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    cases: list[Case] = []

    @hypothesis.seed(0)
    @settings(max_examples=DRAWN, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @given(drawn_cases(EVERYTHING, CLAIMS, "float32", "cpu", 130))
    def draw(case: Case) -> None:
        cases.append(case)

    draw()
    return cases


@pytest.mark.parametrize("what", SHARES)
def test_drawn_cases_have_what_matters(drawn: list[Case], what: str) -> None:
    least, holds = SHARES[what]
    assert sum(map(holds, drawn)) / len(drawn) >= least


def _level(case: Case, name: str) -> Any:
    """The level of a field; the first edge stands for all."""
    value = getattr(case, name)
    return EDGES[0] if name in ("L", "S") and value in EDGES else value


def test_boundary_cases_pair_every_two_levels() -> None:
    domain = Domain(masks=("none", "padding", "full"), inputs=("cross",))
    levels = {name: values for name, values in domain.levels(40).items() if len(values) > 1}
    cases = boundary_cases(domain, CLAIMS, "float32", "cpu", 40)
    for one, other in combinations(levels, 2):
        met = {(_level(case, one), _level(case, other)) for case in cases}
        assert met == {(a, b) for a in levels[one] for b in levels[other]}, (one, other)
    assert {case.S for case in cases} >= {size for size in EDGES if size <= 40}


def test_pairs_that_fit_meet_in_every_property() -> None:
    claims = resolve("sdpa")[0].implementation.claims
    for prop in (prop for members in properties().values() for prop in members):
        domain = prop.within(claims, "float32")
        if isinstance(domain, str):
            continue
        levels = domain.levels(260)
        rows = [dict(row) for row in _pairwise(tuple(levels.items()), domain.volume)]
        least = {name: min(levels[name]) for name in SIZES}
        for one, other in combinations(levels, 2):
            met = {(row[one], row[other]) for row in rows}
            for pair in product(levels[one], levels[other]):
                sizes = least | {name: value for name, value in zip((one, other), pair, strict=True) if name in SIZES}
                assert pair in met or math.prod(sizes.values()) > domain.volume, (prop.name, one, other, pair)


def test_cases_of_one_seed_are_the_same() -> None:
    first = boundary_cases(EVERYTHING, CLAIMS, "float32", "cpu", 130)
    assert first == boundary_cases(EVERYTHING, CLAIMS, "float32", "cpu", 130)


def test_repr_runs_as_code(drawn: list[Case]) -> None:
    for case in drawn[:50]:
        again = eval(repr(case), {"Case": Case})
        assert again == case
        one, other = case.problem(), again.problem()
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert (one.mask is None) == (other.mask is None)
        assert one.mask is None or other.mask is None or torch.equal(one.mask, other.mask)


def test_simplest_case_is_the_shortest() -> None:
    assert repr(Case()) == "Case()"


def test_claims_cut_the_domain() -> None:
    narrow = Claims(masks={"bool"}, per_head_mask=False, causal=None, cross_attention=False, returns_weights=False)
    domain = EVERYTHING.within(narrow)
    assert isinstance(domain, Domain)
    assert not {"heads", "full", "bias", "head_bias"} & set(domain.masks)
    assert (domain.causal, domain.inputs, domain.need_weights) == ((False,), ("self",), (False,))
    assert Domain(masks=FLOAT).within(narrow) == "needs the claim masks"


@pytest.mark.parametrize("prop", [prop for members in properties().values() for prop in members], ids=lambda p: p.name)
def test_every_property_has_boundary_cases(prop: Property) -> None:
    dtype = (prop.domain.dtypes or ("float32",))[0]
    domain = prop.within(complete.claims, dtype)
    assert isinstance(domain, Domain)
    assert boundary_cases(domain, complete.claims, dtype, "cpu", 512)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_keeps_the_numbers_and_moves_them(layout: str) -> None:
    x = torch.arange(2.0 * 3 * 5).reshape(2, 3, 5)
    laid_out = lay_out(layout, x)
    lost = {"expanded": x[:1].expand(2, -1, -1), "repeated": x[:, :1].expand(-1, 3, -1)}
    expected = lost.get(layout, x)
    assert torch.equal(laid_out, expected)
    assert laid_out.is_contiguous() == (layout == "contiguous")


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (0, 3, 5), (2, 0, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_leaf_lies_in_memory_as_what_it_was_made_of(layout: str, shape: tuple[int, int, int]) -> None:
    x = lay_out(layout, torch.randn(shape))
    leaf = leaf_of(x)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert torch.equal(leaf, x)
    assert (leaf.stride(), leaf.storage_offset()) == (x.stride(), x.storage_offset())
    assert not x.numel() or leaf.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("kind", EXTENTS)
def test_mask_differs_where_its_kind_says_and_leaves_no_row_empty(kind: str, causal: str | None) -> None:
    scores = (3, 2, 5, 7)
    if causal and kind == "single":
        pytest.skip("one allowed key and a causal flag are never drawn together")
    for seed in range(20):
        mask = make_mask(kind, scores, causal, torch.Generator().manual_seed(seed))
        assert mask is not None
        assert mask.shape == tuple(
            size if axis in EXTENTS[kind] else 1 for axis, size in zip("BHLS", scores, strict=True)
        )
        allowed = (mask if mask.dtype == torch.bool else mask != -torch.inf).expand(scores)
        if causal:
            allowed = allowed & causal_mask(5, 7, causal)
        empty = ~allowed.any(-1)
        assert bool(empty.any()) == (kind in EMPTY)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_regime_makes_finite_numbers(values: str, dtype: str) -> None:
    problem = Case(n_heads=2, head_dim=3, B=2, L=5, S=7, dtype=dtype, values=values).problem()
    tensors = [problem.query, problem.key, problem.value, *(tensor for _, tensor in problem.weights.named())]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert {str(tensor.dtype) for tensor in tensors} == {f"torch.{dtype}"}


def test_a_few_cases_have_every_level_that_they_can() -> None:
    domain = Domain(scale="wide", masks=("none", "padding", "bias"), causal=(False, True))
    cases = boundary_cases(domain, Claims(masks={"bool", "float"}), "float32", "cpu", 260)
    few = varied(cases, 6)
    assert len(few) == 6
    assert [case for case in cases if case in few] == few
    for field in ("head_dim", "n_heads", "B", "L", "mask", "causal"):
        assert {getattr(case, field) for case in few} == {getattr(case, field) for case in cases}, field
    assert varied(cases, len(cases)) == cases
