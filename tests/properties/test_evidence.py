"""MSK-6, HED-2 and NUM-5: the cases and the rows in which a wrong answer can show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha.conformance.cases.case import Case
from mha.conformance.harness.assertions import Discard
from mha.conformance.harness.session import Session
from mha.conformance.properties.heads import heads_are_independent
from mha.conformance.properties.long_rows import _sampled_rows
from mha.conformance.properties.support.mask_entries import expect_entry_of_its_own_row
from mha.implementations.modular import implementation

ITEMS = Case(n_heads=2, head_dim=4, B=2, L=9, S=9, mask="items", mask_axes="BS", inputs="self")


def test_entry_of_all_rows_is_no_evidence() -> None:
    """In a single item, and without queries of their own, no row is another one."""
    expect_entry_of_its_own_row(Session(implementation, ITEMS), ITEMS)
    alone = replace(ITEMS, B=1)
    with pytest.raises(Discard, match="no other one could be affected"):
        expect_entry_of_its_own_row(Session(implementation, alone), alone)


def test_head_whose_weights_stay_is_no_evidence() -> None:
    case = Case(n_heads=2, head_dim=4, L=3, S=3, inputs="self", seed=1)
    heads_are_independent(Session(implementation, case), case)
    one_key = replace(case, L=1, S=1)
    with pytest.raises(Discard, match="nothing changes with head 1's rows"):
        heads_are_independent(Session(implementation, one_key), one_key)


@pytest.mark.parametrize(
    ("causal", "rotates", "first"),
    [(True, True, [0, 2]), (True, False, [0]), (False, True, [2])],
)
def test_rows_are_sampled_where_rounding_has_little_room(
    causal: bool, rotates: bool, first: list[int]
) -> None:
    case = Case(L=512, S=512, causal=causal, seed=3)
    rows = _sampled_rows(case, rotates=rotates).tolist()
    assert rows[: len(first)] == first
    assert rows[-1] == 511
    assert len({*rows}) == 4


@pytest.mark.parametrize("causal", [True, False])
def test_a_single_row_is_sampled(causal: bool) -> None:
    case = Case(L=1, S=512, causal=causal)
    assert _sampled_rows(case, rotates=True).tolist() == [0]
