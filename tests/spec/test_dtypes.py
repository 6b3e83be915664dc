"""The table of dtypes agrees with torch, and one more row is all that a new dtype needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mha.conformance.cases import domain
from mha.conformance.cases.values import VALUES, make_inputs
from mha.spec import Config, dtypes
from mha.spec.bounds import units_of
from mha.spec.claims import DTYPES
from mha.spec.dtypes import TRAITS, DtypeTraits, computable, torch_dtype, traits_of
from support.folders import ROOT

CONFIG = Config(d_model=8, n_heads=2)
ROWS = pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)


def test_domains_of_properties_follow_the_table() -> None:
    assert DTYPES == ("float64", "float32", "bfloat16", "float16")
    assert domain.BOUNDED == ("float64", "float32")
    assert domain.HALF == ("bfloat16", "float16")
    assert domain.WIDE_RANGE == ("float64", "float32", "bfloat16")


@ROWS
def test_rows_are_looked_up_by_name_and_by_dtype(traits: DtypeTraits) -> None:
    dtype = torch_dtype(traits.name)
    assert dtype.is_floating_point
    assert traits_of(dtype) is traits_of(traits.name) is traits


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 must be one of float64, float32"):
        traits_of(torch.int64)


@ROWS
def test_accumulators_are_at_least_as_precise(traits: DtypeTraits) -> None:
    dtype, accumulator = torch_dtype(traits.name), torch_dtype(traits.accumulator)
    assert torch.promote_types(dtype, accumulator) == accumulator
    assert units_of(dtype).accumulate <= units_of(dtype).store


@ROWS
def test_companions_are_promoted(traits: DtypeTraits) -> None:
    for companion in traits.companions:
        assert companion in TRAITS
        assert companion != traits.name
        assert torch.promote_types(
            torch_dtype(traits.name), torch_dtype(companion)
        ).is_floating_point


@ROWS
def test_only_a_narrow_range_is_exceeded_by_ordinary_scores(traits: DtypeTraits) -> None:
    lowest = torch.tensor(torch.finfo(torch_dtype(traits.name)).min, dtype=torch_dtype(traits.name))
    assert bool((lowest - 100).isinf()) == traits.narrow
    assert (units_of(lowest.dtype).largest < float("inf")) == traits.narrow


@ROWS
@pytest.mark.parametrize("values", VALUES)
def test_values_and_their_projections_are_finite(values: str, traits: DtypeTraits) -> None:
    dtype = torch_dtype(traits.name)
    weights, *inputs = make_inputs(
        values, CONFIG, (2, 5, 7), torch.Generator().manual_seed(0), dtype
    )
    for x, matrix in zip(inputs, (weights.w_q, weights.w_k, weights.w_v), strict=True):
        assert x.to(dtype).isfinite().all()
        assert (x @ matrix.T).to(dtype).isfinite().all()


@ROWS
def test_noise_leaves_projections_finite(traits: DtypeTraits) -> None:
    weights, _, key, _ = make_inputs("normal", CONFIG, (2, 5, 7), torch.Generator().manual_seed(0))
    noise = (traits.noise * key).to(torch_dtype(traits.name)).double()
    assert (noise @ weights.w_k.T).to(torch_dtype(traits.name)).isfinite().all()


def test_tensors_are_computed_on_as_they_are_unless_the_row_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in TRAITS:
        x = torch.ones(2, dtype=torch_dtype(name))
        assert computable(x) is x
    mask = torch.ones(2, dtype=torch.bool)
    assert computable(mask) is mask
    row = replace(TRAITS["float16"], name="float8_e5m2", compute="float32")
    monkeypatch.setattr(dtypes, "TRAITS", {**TRAITS, row.name: row})
    assert computable(torch.ones(2, dtype=torch.float8_e5m2)).dtype == torch.float32


def test_one_row_is_enough_to_judge_a_new_dtype() -> None:
    script = str(ROOT / "tests" / "support" / "float8.py")
    output = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    correct, ignores_mask = map(ast.literal_eval, output.splitlines()[-2:])
    assert correct == dict.fromkeys(("SHP-1", "SHP-3", "MSK-1", "NUM-1"), "pass")
    assert ignores_mask == {"SHP-1": "pass", "SHP-3": "pass", "MSK-1": "fail", "NUM-1": "fail"}
