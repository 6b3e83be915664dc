"""Nothing of the contract is left out: clauses have properties, claims are heeded, wrong answers are rejected."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

import variants
from mha.conformance import check
from mha.conformance.cases.domain import Domain
from mha.conformance.engine.search import PROFILES, Search
from mha.conformance.faults import registry as faults
from mha.conformance.faults.base import CLAIMS
from mha.conformance.harness.known_bad import DEFECTS, KnownBad
from mha.conformance.properties.registry import Property, properties
from mha.spec import CLAUSES, Claims, Implementation, Rounding

MEMBERS = [prop for members in properties().values() for prop in members]


def test_every_clause_has_a_property_unless_it_is_deferred() -> None:
    deferred = {id for id, clause in CLAUSES.items() if clause.deferred}
    assert set(properties()) == set(CLAUSES) - deferred


# Whatever a known wrong answer gives, it keeps these clauses: it has shapes, purity and state of its own.
WITHOUT_WRONGS = {
    "output_has_the_shape_of_the_query": "wrong answers have the right shape",
    "weights_are_per_head": "wrong answers have the right shape",
    "dtype_and_device_are_those_of_the_inputs": "wrong answers have the right dtype",
    "sizes_of_one_stay": "wrong answers have the right shape",
    "empty_rows_give_zeros": "it is about what is declared",
    "dropping_everything_is_not_nan": "wrong answers are numbers",
    "nothing_that_is_given_is_modified": "wrong answers leave alone what they are given",
    "outputs_share_no_memory": "wrong answers are in memory of their own",
    "global_state_is_left_alone": "wrong answers draw from a generator of their own",
    "compiled_agrees_with_eager": "a compilation takes seconds",
    "compiled_mask_agrees": "a compilation takes seconds",
    "exported_program_agrees": "a capture takes seconds",
    "exported_mask_agrees": "a capture takes seconds",
    "the_gradients_of_all_weights_are_told": "wrong answers tell them all",
}


def test_every_property_rejects_a_known_wrong_answer_or_says_why_not() -> None:
    assert {prop.name for prop in MEMBERS if not prop.must_reject} == set(WITHOUT_WRONGS)
    assert {defect for prop in MEMBERS for defect in prop.must_reject} == set(DEFECTS) - {"correct"}
    assert all(0.2 <= prop.min_rejection_rate <= 1 for prop in MEMBERS)


@pytest.mark.parametrize("prop", [prop for prop in MEMBERS if prop.must_reject], ids=lambda prop: prop.name)
def test_each_known_wrong_answer_is_rejected(prop: Property) -> None:
    """Also where the cases are too few for the judge to tell."""
    dtype = prop.domain.dtypes[0] if prop.domain.dtypes else "float32"
    domain = prop.within(CLAIMS, dtype)
    assert isinstance(domain, Domain)
    search = Search(faults.complete, prop, domain, dtype, "cpu", PROFILES["quick"], 0)
    search.run(lambda: False)
    assert not search.sensitivity.found
    assert not +search.sensitivity.missed


SAMPLE = ("CFG-5", "SHP-1", "SMX-2", "MSK-1", "MSK-8", "CAU-2", "PTH-1", "HED-1", "EQV-4", "NUM-1", "GRD-1", "INC-1")
CAUGHT_BY = {
    "zeros": ("NUM-1", "float32"),
    "noise": ("EQV-4", "float32"),
    "mean": ("HED-1", "float32"),
    "unmasked": ("MSK-1", "float32"),
    "unscaled": ("SMX-2", "float32"),
    "single_precision": ("NUM-2", "float64"),
    "never_refuses": ("SHP-6", "float32"),
    "nan_gradients": ("GRD-1", "float32"),
    "random_gradient_scale": ("GRD-5", "float32"),
    "detached": ("GRD-2", "float64"),
    "softmax_gradient_without_row_sum": ("GRD-7", "float32"),
}


@pytest.mark.parametrize("dropout", [True, "output"])
def test_correct_attention_among_the_defects_conforms(dropout: Any) -> None:
    claims = replace(CLAIMS, dropout=dropout, composes=(), extras=())
    report = check(KnownBad("correct", claims), "quick", clauses=SAMPLE, dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} == {"pass"}, report.verdicts


@pytest.mark.parametrize("defect", [defect for defect in DEFECTS if defect != "correct"])
def test_known_bad_attention_does_not_conform(defect: str) -> None:
    clause, dtype = CAUGHT_BY[defect]
    claims = replace(CLAIMS, composes=(), extras=())
    report = check(KnownBad(defect, claims), "quick", clauses=[clause], dtypes=[dtype])
    assert report.verdicts[0].status in ("fail", "blocked"), report.verdicts
    assert not report.conforms


# For each field, another value than that of `CLAIMS`, and a clause of which the judge then says something else.
CHANGES: dict[str, tuple[Any, str]] = {
    "cross_attention": (False, "EQV-2"),
    "masks": ({"bool"}, "GRD-6"),
    "per_item_mask": (False, "MSK-2"),
    "per_head_mask": (False, "MSK-2"),
    "per_query_mask": (False, "MSK-2"),
    "always_causal": (True, "SHP-1"),
    "causal": ("bottom_right", "CAU-3"),
    "empty_row": ("nan", "MSK-8"),
    "returns_weights": (False, "SMX-2"),
    "bias": ({False}, "SMX-3"),
    "dropout": (False, "DRP-1"),
    "gradients": (False, "GRD-1"),
    "weight_gradients": (False, "GRD-7"),
    "grouped_query": (False, "GQA-1"),
    "kv_widths": (False, "XAT-1"),
    "decodes": (False, "INC-1"),
    "decodes_ragged": (False, "INC-1"),
    "composes": ((), "CMP-4"),
    "extras": ((), "PTH-5"),
    "retiles": (True, "EQV-1"),
    "dtypes": ({"float64"}, "SHP-1"),
    "devices": ({"cuda"}, "SHP-1"),
    "rounding": (Rounding(scores_stored=False, scaling_roundings=0, exp_error=4, log_normaliser=False), "NUM-1"),
}
ROUNDING: dict[str, tuple[Any, str, str]] = {
    "scores_stored": (False, "NUM-1", "bfloat16"),
    "softmax_stored": (False, "NUM-1", "bfloat16"),
    "scaling_roundings": (0, "SMX-2", "bfloat16"),
    "exp_error": (4, "NUM-1", "float32"),
    "log_normaliser": (False, "SMX-4", "float32"),
    "softmax_in_float32": (True, "NUM-2", "float64"),
}


def told(implementation: Implementation, clause: str, dtype: str) -> tuple[Any, ...]:
    """Return what the judge says of a clause."""
    (verdict,) = check(implementation, clauses=[clause], dtypes=[dtype]).verdicts
    return verdict.status, verdict.examples, verdict.margin, verdict.message


@pytest.mark.parametrize("field", [field.name for field in fields(Claims)])
def test_every_claim_changes_what_is_judged(field: str) -> None:
    value, clause = CHANGES[field]
    fitting = {"decodes_ragged": False} if field == "decodes" else {}
    cls = variants.OrderOfSummation if field == "retiles" else faults.Complete
    claimed, changed = (
        faults.implementation_of(cls, replace(CLAIMS, **given)) for given in ({}, {field: value, **fitting})
    )
    assert told(claimed, clause, "float32") != told(changed, clause, "float32")


@pytest.mark.parametrize("field", [field.name for field in fields(Rounding)])
def test_every_rounding_changes_what_is_judged(field: str) -> None:
    value, clause, dtype = ROUNDING[field]
    claims = [replace(CLAIMS, rounding=Rounding(**given)) for given in ({}, {field: value})]
    one, other = (told(faults.implementation_of(faults.Complete, each), clause, dtype) for each in claims)
    assert one != other
