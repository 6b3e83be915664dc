"""The judge shows what is wrong with the usual forms of attention in tutorials, and under which clause."""

from __future__ import annotations

import pytest
import tutorials

from mha.conformance import check

# docs/tutorials.md has these, and says what each comes from.
VIOLATED = {
    ("vectorized", "float32"): "CFG-2 CFG-3 SHP-5 SHP-6 MSK-8 MSK-10 MSK-12",
    ("minimal", "float32"): "CFG-1 CFG-2 CFG-3 SHP-5 SHP-6 MSK-8 MSK-9 MSK-10 MSK-12",
    ("modular", "float32"): "CFG-3 CFG-6 SHP-6 MSK-8 MSK-10 MSK-12 DRP-4",
    ("modular", "float64"): "CFG-3 CFG-4 CFG-6 SHP-6 SMX-2 SMX-6 MSK-10 MSK-12 HED-1 HED-4 EQV-9 NUM-1 NUM-2 NUM-6",
    ("einops", "float32"): (
        "CFG-1 CFG-2 CFG-3 CFG-4 SHP-5 SHP-6 SMX-6 MSK-1 MSK-6 MSK-7 MSK-10 MSK-12 CAU-1 HED-1 HED-3 HED-4 HED-5 "
        "EQV-9 NUM-1 NUM-6"
    ),
    ("fused_qkv", "float32"): (
        "CFG-2 CFG-3 SHP-5 SMX-5 MSK-1 MSK-3 MSK-5 MSK-6 MSK-7 MSK-8 MSK-9 MSK-12 CAU-2 CAU-4 PTH-3 PTH-4 HED-1 "
        "HED-2 HED-4 EQV-5 EQV-6 NUM-1 NUM-5 NUM-6 GRD-1 GRD-5 STA-3"
    ),
}


@pytest.mark.parametrize(("form", "dtype"), VIOLATED)
def test_tutorial_form_violates_what_it_gets_wrong(form: str, dtype: str) -> None:
    expected = VIOLATED[form, dtype].split()
    report = check(getattr(tutorials, form), "quick", clauses=expected, dtypes=[dtype])
    assert [verdict.clause for verdict in report.verdicts if verdict.status == "fail"] == expected


def test_fill_value_of_tutorials_is_no_number_in_float16() -> None:
    (verdict,) = check(tutorials.vectorized, "quick", clauses=["MSK-1"], dtypes=["float16"]).verdicts
    assert verdict.status == "fail"
    assert "Half without overflow" in verdict.message
