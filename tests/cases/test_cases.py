"""Cases: their tensors, how often corners are drawn, and boundary cases, which miss none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import combinations, product
from operator import attrgetter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mha.conformance.cases.boundary import boundary_cases, pairwise_rows, varied
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    ALL_LAYOUTS,
    MOST_VALUES,
    SIZES,
    TILE_EDGES,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, EMPTY, FLOAT
from mha.conformance.cases.modes import MODES
from mha.conformance.cases.parsing import read_case
from mha.conformance.cases.space import CaseSpace
from mha.conformance.cases.strategies import drawn_cases, integers
from mha.conformance.properties.registry import Property, properties
from mha.conformance.settings import PROFILES, Profile
from mha.implementations import resolve
from mha.spec import Claims, Sizes
from support.variants import claims_for

CLAIMS = Claims(masks={"bool", "float"})


EVERYTHING = Domain(
    masks=("none", "all", *BOOLEAN, *FLOAT, *EMPTY),
    causal=(False, True),
    values=MOST_VALUES,
    layouts=ALL_LAYOUTS,
)


ALL_PROPERTIES = [prop for members in properties().values() for prop in members]


DRAWN = 1000


# Hypothesis collects the integers of loaded source files from this magnitude on.
SMALLEST_CONSTANT = 100


# The least share of the cases drawn from the widest domain for which each of these holds.
SHARES: dict[str, tuple[float, Callable[[Case], bool]]] = {
    "L != S": (0.25, lambda case: case.L != case.S),
    "L > S": (0.1, lambda case: case.L > case.S),
    "a mask": (0.6, lambda case: case.mask != "none"),
    "an empty row": (0.05, lambda case: case.mask in EMPTY),
    "a causal flag": (0.3, lambda case: case.causal),
    "more than 8 queries or keys": (0.1, lambda case: max(case.L, case.S) > 8),
    "S beside a tile edge": (0.03, lambda case: case.S > 8 and case.S % 16 in (1, 15)),
    "one query": (0.05, lambda case: case.L == 1),
    "one head": (0.05, lambda case: case.n_heads == 1),
    "more than eight heads": (0.02, lambda case: case.n_heads > 8),
    "d_k = 1": (0.05, lambda case: case.head_dim == 1),
    "self-attention": (0.15, lambda case: case.inputs == "self"),
    "key and value as one tensor": (0.15, lambda case: case.inputs == "memory"),
    "a layout that is not contiguous": (0.5, lambda case: case.layout != "contiguous"),
    "no gradient": (0.3, lambda case: case.mode in ("no_grad", "inference")),
}


def space_of(domain: Domain, longest: int) -> CaseSpace:
    """Return a space of cases for an implementation that claims both forms of mask."""
    return CaseSpace(domain, CLAIMS, "float32", "cpu", longest)


def full_space(prop: Property, profile: Profile) -> CaseSpace:
    """Return the space of a property for an implementation that claims all that it needs."""
    dtype = (prop.domain.dtypes or ("float32",))[0]
    claims = claims_for(prop)
    domain = prop.within(claims, dtype)
    assert isinstance(domain, Domain)
    return CaseSpace(
        domain,
        claims,
        dtype,
        "cpu",
        profile.long_rows if domain.scale == "long" else profile.longest,
    )


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    cases: list[Case] = []

    @hypothesis.seed(0)
    @settings(max_examples=DRAWN, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @given(drawn_cases(space_of(EVERYTHING, 130)))
    def draw(case: Case) -> None:
        cases.append(case)

    draw()
    return cases


@pytest.mark.parametrize("what", SHARES)
def test_drawn_cases_reach_every_corner(drawn: list[Case], what: str) -> None:
    least, holds = SHARES[what]
    assert sum(map(holds, drawn)) / len(drawn) >= least


def test_drawn_integers_are_below_the_constants_of_source_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, what has been imported would decide cases; see `strategies.integers`."""
    ranges: set[tuple[int, int]] = set()
    draw_integers = st.integers

    def recorded(smallest: int, largest: int) -> st.SearchStrategy[int]:
        ranges.add((smallest, largest))
        return draw_integers(smallest, largest)

    monkeypatch.setattr(st, "integers", recorded)
    for prop, profile in product(ALL_PROPERTIES, PROFILES.values()):
        drawn_cases(full_space(prop, profile))
    integers(0, 1 << 40)
    assert len(ranges) > 10
    assert all(
        -SMALLEST_CONSTANT < smallest <= largest < SMALLEST_CONSTANT for smallest, largest in ranges
    ), ranges


def test_integers_cover_their_range() -> None:
    values: set[int] = set()

    @hypothesis.seed(0)
    @settings(max_examples=300, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @given(integers(7, 300))
    def draw(value: int) -> None:
        values.add(value)

    draw()
    assert 7 <= min(values) < 20
    assert 280 < max(values) <= 300


def level_of(case: Case, name: str) -> Any:
    """Return the level of a field; the first tile edge stands for all of them."""
    value = getattr(case, name)
    return TILE_EDGES[0] if name in ("L", "S") and value in TILE_EDGES else value


def test_boundary_cases_cover_every_pair_of_levels() -> None:
    domain = Domain(masks=("none", "padding", "full"), inputs=("cross",))
    levels = {name: values for name, values in domain.levels(40).items() if len(values) > 1}
    cases = boundary_cases(space_of(domain, 40))
    for one, other in combinations(levels, 2):
        covered = {(level_of(case, one), level_of(case, other)) for case in cases}
        assert covered == set(product(levels[one], levels[other])), (one, other)
    edges = {size for size in TILE_EDGES if size <= 40}
    assert edges <= {case.S for case in cases}


def uncovered_pairs(domain: Domain, longest: int) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the pairs of levels that no row has, although such a row would be small enough."""
    levels = domain.levels(longest)
    rows = [dict(row) for row in pairwise_rows(tuple(levels.items()), domain.volume)]
    smallest = {name: min(levels[name]) for name in SIZES}
    for one, other in combinations(levels, 2):
        covered = {(row[one], row[other]) for row in rows}
        for pair in set(product(levels[one], levels[other])) - covered:
            named = zip((one, other), pair, strict=True)
            sizes = smallest | {name: value for name, value in named if name in SIZES}
            if math.prod(sizes.values()) <= domain.volume:
                yield one, pair[0], other, pair[1]


def test_every_property_covers_every_pair_that_fits() -> None:
    claims = resolve("sdpa")[0].implementation.claims
    for prop in ALL_PROPERTIES:
        domain = prop.within(claims, "float32")
        if isinstance(domain, Domain):
            assert not list(uncovered_pairs(domain, 260)), prop.name


def test_boundary_cases_are_the_same_each_time() -> None:
    space = space_of(EVERYTHING, 130)
    assert boundary_cases(space) == boundary_cases(space)


def test_boundary_cases_are_sorted_by_size_then_by_field() -> None:
    """The order must not depend on the repr of a case, which omits defaults."""
    cases = boundary_cases(space_of(EVERYTHING, 130))
    keys = [(math.prod(attrgetter(*SIZES)(case)), astuple(case)) for case in cases]
    assert keys == sorted(keys)
    reprs = [repr(case) for case in cases]
    assert reprs != sorted(reprs)


def test_repr_runs_as_code(drawn: list[Case]) -> None:
    for case in drawn[:50]:
        copy = eval(repr(case), {"Case": Case})
        assert copy == case
        one, other = case.problem(), copy.problem()
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert (one.mask is None) == (other.mask is None)
        assert one.mask is None or other.mask is None or torch.equal(one.mask, other.mask)


def test_repr_omits_defaults() -> None:
    assert repr(Case()) == "Case()"
    assert repr(Case(L=2, causal=True)) == "Case(L=2, causal=True)"


def test_repr_can_be_read_back(drawn: list[Case]) -> None:
    assert all(read_case(repr(case)) == case for case in drawn[:50])


def test_former_names_of_fields_can_be_read() -> None:
    assert read_case("Case(L=3, regime='large', path='no_grad')") == Case(
        L=3, values="large", mode="no_grad"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "not a call of Case"),
        ("Case(1)", "by name"),
        ("Case(size=1)", "takes only"),
        ("Case(L=-1)", "such as 1, but is -1"),
        ("Case(L='2')", "such as 1, but is '2'"),
        ("Case(mask='round')", "unknown mask"),
        ("Case(regime='round')", "unknown values"),
        ("Case(L=print())", "not a case"),
        ("(" * 10000, "not a case"),
    ],
)
def test_anything_else_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_case(text)
    assert "\n" not in str(error.value)


def test_every_mode_of_a_domain_is_known() -> None:
    assert {mode for prop in ALL_PROPERTIES for mode in prop.domain.modes} <= set(MODES)


def test_unclaimed_levels_are_dropped() -> None:
    claims = Claims(
        masks={"bool"},
        per_head_mask=False,
        causal=None,
        cross_attention=False,
        returns_weights=False,
    )
    domain = EVERYTHING.within(claims)
    assert isinstance(domain, Domain)
    assert not {"heads", "full", "bias", "head_bias"} & set(domain.masks)
    assert {"none", "all", "padding", "items"} <= set(domain.masks)
    assert (domain.causal, domain.inputs, domain.need_weights) == ((False,), ("self",), (False,))


@pytest.mark.parametrize(
    ("domain", "missing"),
    [
        (Domain(masks=FLOAT), 'masks={"float"}'),
        (Domain(passes=("bool", "float")), 'masks={"bool", "float"}'),
        (Domain(causal=(True,)), "causal"),
        (Domain(bias=(True,)), "bias"),
        (Domain(need_weights=(True,)), "returns_weights"),
    ],
)
def test_a_field_without_levels_reports_the_missing_claim(domain: Domain, missing: str) -> None:
    claims = Claims(
        masks={"bool"}, causal=None, cross_attention=False, returns_weights=False, bias={False}
    )
    assert str(domain.within(claims)) == f"needs the claim {missing}"


def test_the_nearest_claimed_level_takes_the_place_of_those_that_are_not() -> None:
    domain = Domain(masks=("items", "empty_rows", "bias"), inputs=("cross",), bias=("k",))
    claims = Claims(
        cross_attention="memory",
        always_causal=True,
        per_query_mask=False,
        masks={"float"},
        bias={"qk", "v", False},
    )
    near = domain.within(claims)
    assert isinstance(near, Domain)
    assert (near.causal, near.inputs, near.bias) == ((True,), ("memory",), ("qk",))
    cases = boundary_cases(CaseSpace(near, claims, "float32", "cpu", 33))
    assert {(case.mask, case.mask_axes, case.additive) for case in cases} == {
        ("items", "BHS", True),
        ("empty_rows", "BHS", True),
        ("bias", "BHS", False),
    }
    for mask in (case.problem().mask for case in cases):
        assert mask is not None
        assert mask.is_floating_point()
        assert mask.shape[1:3] == (1, 1)


def test_a_property_that_fails_for_causal_calls_has_no_form_for_what_is_always_causal() -> None:
    reason = Domain(plain=True).within(Claims(always_causal=True))
    assert str(reason) == "has no form for what is always causal"


def test_widths_that_are_not_claimed_become_the_next_that_are() -> None:
    space = CaseSpace(
        Domain(),
        Claims(sizes=Sizes(head_dims={2, 3, 8}, head_dim_multiple=2)),
        "float32",
        "cpu",
        260,
    )
    assert {case.head_dim for case in boundary_cases(space)} == {2, 8}


def test_sizes_that_are_not_claimed_become_the_next_that_are() -> None:
    sizes = Sizes(n_heads={2, 8}, head_dims={64}, length_multiple=16, max_length=100)
    space = CaseSpace(Domain(), Claims(sizes=sizes), "float32", "cpu", 260)
    for case in boundary_cases(space):
        assert not sizes.refused(
            n_heads=case.n_heads, head_dim=case.head_dim, lengths=(case.L, case.S)
        ), case
    assert {case.L for case in boundary_cases(space)} == {16, 32, 48, 80}


def test_every_property_has_boundary_cases() -> None:
    quick = PROFILES["quick"]
    without = [p.name for p in ALL_PROPERTIES if not boundary_cases(full_space(p, quick))]
    assert without == []


def values_of(cases: Sequence[Case], field: str) -> set[Any]:
    """Return the values that a field has in some cases."""
    return {getattr(case, field) for case in cases}


def test_a_few_varied_cases_have_every_level() -> None:
    domain = Domain(scale="wide", masks=("none", "padding", "bias"), causal=(False, True))
    cases = boundary_cases(space_of(domain, 260))
    few = varied(cases, 6)
    assert len(few) == 6
    assert [case for case in cases if case in few] == few
    for field in ("head_dim", "n_heads", "B", "L", "mask", "causal"):
        assert values_of(few, field) == values_of(cases, field), field
    assert varied(cases, len(cases)) == cases


def test_varied_cases_are_chosen_by_new_levels_then_two_news_then_order() -> None:
    first = Case(L=1, S=1, B=1)
    two_new, nothing_new = replace(first, L=2, S=2), replace(first, seed=1)
    two_other = replace(first, L=3, S=3)
    cases = [first, nothing_new, two_new, replace(first, L=2), two_other]
    # All levels of the first are new. Then two cases have two new levels each, of which the earlier
    # one is chosen.
    assert varied(cases, 1) == [first]
    assert varied(cases, 2) == [first, two_new]
    assert varied(cases, 3) == [first, two_new, two_other]
    # The other two have no new level, but one of them has new pairs.
    assert varied(cases, 4) == [first, two_new, replace(first, L=2), two_other]


def test_fewer_rows_are_made_where_fewest_cases_are_tried() -> None:
    domain = Domain(
        scale="wide", masks=("none", *BOOLEAN), causal=(False, True), layouts=ALL_LAYOUTS
    )
    space = space_of(domain, 33)
    whole, made = boundary_cases(space), boundary_cases(space, 24)
    assert len(whole) > len(made) == 48
    few, best = varied(made, 24), varied(whole, 24)
    for field in ("head_dim", "n_heads", "B", "L", "S", "mask", "causal", "layout"):
        assert values_of(few, field) == values_of(best, field), field
