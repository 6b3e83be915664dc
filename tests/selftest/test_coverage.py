"""Coverage: every clause has a property, every claim counts, every known-bad answer is rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from mha.conformance import check
from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import Domain
from mha.conformance.cases.space import CaseSpace
from mha.conformance.engine.search import Budget, Search
from mha.conformance.engine.sensitivity import Sensitivity
from mha.conformance.faults import registry as faults
from mha.conformance.faults.base import CLAIMS
from mha.conformance.faults.ranks import CLAIMS as ON_RANKS
from mha.conformance.faults.ranks import SequenceParallel
from mha.conformance.harness.assertions import expect_agree
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.known_bad.answers import REJECTED
from mha.conformance.harness.known_bad.defect import KnownBad
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import Property, properties
from mha.conformance.settings import PROFILES
from mha.spec import (
    CLAUSES,
    Alibi,
    Claims,
    Implementation,
    Lse,
    Packed,
    QkNorm,
    Rotary,
    Rounding,
    Scores,
    Sizes,
)
from support import variants
from support.effort import EVERYTHING
from support.judging import RIGHT, expect_pass

MEMBERS = [prop for members in properties().values() for prop in members]


def test_every_clause_has_a_property() -> None:
    assert set(properties()) == set(CLAUSES)


# Properties that every known-bad answer passes, and why.
WITHOUT_KNOWN_BAD = {
    "output_has_the_shape_of_the_query": "known-bad answers have the expected shape",
    "weights_are_per_head": "known-bad answers have the expected shape",
    "dtype_and_device_are_those_of_the_inputs": "known-bad answers have the expected dtype",
    "sizes_of_one_stay": "known-bad answers have the expected shape",
    "every_divisor_is_accepted": "known-bad answers refuse no configuration",
    "every_layout_is_accepted": "known-bad answers refuse no layout",
    "empty_rows_give_zeros": "it is about what is declared",
    "dropping_everything_is_not_nan": "known-bad answers are finite",
    "nothing_that_is_given_is_modified": "known-bad answers modify nothing",
    "outputs_share_no_memory": "known-bad answers have their own memory",
    "global_state_is_left_alone": "known-bad answers draw from their own generator",
    "compiled_agrees_with_eager": "a compilation takes seconds",
    "a_module_is_filled_after_construction_without_memory": (
        "known-bad answers have no constructor of their own"
    ),
    "the_constructor_makes_parameters_of_the_dtype_and_device": (
        "known-bad answers have no constructor of their own"
    ),
    "compiled_mask_agrees": "a compilation takes seconds",
    "generated_code_agrees": "generated code takes ten seconds",
    "generated_code_without_gradients_agrees": "generated code takes ten seconds",
    "layers_are_called": "known-bad answers have no layers",
    "exported_program_agrees": "an export takes seconds",
    "exported_mask_agrees": "an export takes seconds",
    "several_positions_at_once_are_right_or_refused": "known-bad answers claim chunks",
    "all_weight_gradients_are_reported": "known-bad answers have a gradient for every weight",
}


def test_every_property_has_known_bad_answers_to_reject() -> None:
    assert {prop.name for prop in MEMBERS if not prop.must_reject} == set(WITHOUT_KNOWN_BAD)
    assert {defect for prop in MEMBERS for defect in prop.must_reject} == set(REJECTED) - {
        "correct"
    }
    assert all(0.2 <= prop.min_rejection_rate <= 1 for prop in MEMBERS)


def the_same_call_twice(prop: Property) -> Property:
    """Return a property that compares two equal calls, instead of what it should."""

    def compare(session: Session, case: Case) -> None:
        problem = case.problem()
        one, other = session(problem).output, session(problem).output
        expect_agree(one, other, session.bound_of(problem), because="the same call")

    return replace(prop, function=compare)


def nothing_asserted(prop: Property) -> Property:
    """Return a property that makes the calls that it should, and accepts whatever they return."""

    def accept(session: Session, case: Case) -> None:
        try:
            prop.function(session, case)
        except CallRaised:
            raise
        except Violation:
            return

    return replace(prop, function=accept)


def emptied_by_turns(prop: Property) -> list[Callable[[Property], Property]]:
    """Return how to empty a property: by turns in either way, or in none.

    Known-bad answers are tried on each emptied property, which takes most of the time.
    """
    if EVERYTHING:
        return [the_same_call_twice, nothing_asserted]
    turn = MEMBERS.index(prop) % 3
    return [the_same_call_twice, nothing_asserted][turn : turn + 1]


# Each takes seconds; a run of `make conformance` tries their known-bad answers as well.
COSTLY = {
    "memory_grows_with_the_lengths",
    "errors_with_extras_do_not_add_up_to_a_defect",
    "errors_of_gradients_for_two_keys_do_not_add_up_to_a_defect",
    "long_decoding_equals_one_causal_pass",
    "errors_of_ragged_decoding_do_not_add_up_to_a_defect",
    "errors_of_many_small_calls_do_not_add_up_to_a_defect",
    "errors_of_gradients_over_ranks_do_not_add_up_to_a_defect",
    "errors_of_gradients_do_not_add_up_to_a_defect",
    "errors_of_gradients_for_many_keys_do_not_add_up_to_a_defect",
    "errors_for_4096_keys_do_not_add_up_to_a_defect",
}


def with_known_bad_answers() -> Iterator[Any]:
    """Yield the properties that must reject one, as parameters of a test."""
    for prop in MEMBERS:
        if prop.must_reject:
            marks = [pytest.mark.slow] if prop.name in COSTLY else []
            yield pytest.param(prop, id=prop.name, marks=marks)


@pytest.mark.parametrize("prop", list(with_known_bad_answers()))
def test_every_property_rejects_its_known_bad_answers(prop: Property) -> None:
    """With a few cases of the quick profile; a property that is emptied does not."""
    dtype = prop.domain.dtypes[0] if prop.domain.dtypes else "float32"
    claims = variants.claims_for(prop)
    complete = faults.implementation_of(faults.Complete, claims)
    domain = prop.within(claims, dtype)
    assert isinstance(domain, Domain)
    limits = replace(PROFILES["quick"], boundary=4, examples=1)
    longest = limits.long_rows if domain.scale == "long" else limits.longest
    space = CaseSpace(domain, claims, dtype, "cpu", longest)
    search = Search(complete, prop, space, Budget.of(prop, limits), seed=0)
    search.run()
    assert not search.sensitivity.problem
    for emptied in emptied_by_turns(prop):
        sensitivity = Sensitivity(emptied(prop), claims)
        sensitivity.sample(search.cases[:4])
        assert sensitivity.problem


SAMPLE = (
    "CFG-5",
    "SHP-1",
    "SMX-2",
    "MSK-1",
    "MSK-8",
    "CAU-2",
    "PTH-1",
    "HED-1",
    "EQV-4",
    "NUM-1",
    "GRD-1",
    "INC-1",
)
# For each defect, a clause that it violates and a dtype that shows it.
REJECTED_BY = {
    "zeros": ("NUM-1", "float32"),
    "lopsided": ("EQV-4", "float32"),
    "slightly_lopsided": ("NUM-1", "float32"),
    "slightly_scaled": ("NUM-1", "float32"),
    "one_weight": ("NUM-1", "float32"),
    "clamped": ("NUM-6", "float16"),
    "ignores_scale": ("SCL-1", "float32"),
    "ignores_window": ("WIN-1", "float32"),
    "unbounded_is_zero": ("WIN-2", "float32"),
    "ignores_sinks": ("SNK-1", "float32"),
    "sinks_detached": ("SNK-2", "float32"),
    "geometric_slopes": ("ALB-2", "float32"),
    "own_bits": ("DET-1", "float32"),
    "ignores_lengths": ("LEN-1", "float32"),
    "ignores_chunks": ("CHK-1", "float32"),
    "ignores_slopes": ("ALB-1", "float32"),
    "ignores_softcap": ("CAP-1", "float32"),
    "softcap_without_gradient": ("CAP-2", "float32"),
    "ignores_rotary": ("ROT-1", "float32"),
    "key_not_rotated": ("ROT-1", "float32"),
    "other_pairs": ("ROT-1", "float32"),
    "restarts": ("ROT-1", "float32"),
    "ignores_norm": ("QKN-1", "float32"),
    "norm_over_others": ("QKN-1", "float32"),
    "no_eps": ("QKN-1", "float32"),
    "haunted": ("STA-3", "float32"),
    "unsaved": ("STA-4", "float32"),
    "never_empty": ("SHP-5", "float32"),
    "hides_nan": ("MSK-13", "float32"),
    "stores_scores": ("MEM-1", "float32"),
    "lse_of_all_keys": ("LSE-1", "float32"),
    "lse_of_the_rest": ("LSE-1", "float32"),
    "lse_detached": ("LSE-3", "float32"),
    "spends_its_graph": ("GRD-10", "float32"),
    "first_key_if_empty": ("MSK-8", "float32"),
    "own_draws": ("DRP-3", "float32"),
    "shared_draws": ("DRP-5", "float32"),
    "drops_nothing_backward": ("GRD-1", "float32"),
    "mean": ("HED-1", "float32"),
    "unmasked": ("MSK-1", "float32"),
    "unscaled": ("SMX-2", "float32"),
    "one_percent": ("NUM-7", "bfloat16"),
    "single_precision": ("NUM-2", "float64"),
    "never_refuses": ("CFG-1", "float32"),
    "nan_gradients": ("GRD-1", "float32"),
    "random_gradient_scale": ("GRD-5", "float32"),
    "detached": ("GRD-2", "float64"),
    "softmax_gradient_without_row_sum": ("GRD-7", "float32"),
}


# What is claimed where queries and keys are rotated or normed.
CHANGED_HEADS: dict[str, dict[str, Any]] = {
    "ROT-1": {"rotary": Rotary()},
    "QKN-1": {"rotary": Rotary(), "qk_norm": QkNorm(eps=1e-2)},
}


@pytest.mark.parametrize(
    "claimed", [{"dropout": "output"}, {"dropout": "both", "scale": 1.0}], ids=str
)
def test_known_bad_answer_without_a_defect_conforms(claimed: Any) -> None:
    claims = replace(CLAIMS, composes=(), extras=(), **claimed)
    expect_pass(KnownBad(REJECTED["correct"], claims), *SAMPLE)


@pytest.mark.mostly_slow(12)
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("defect", [defect for defect in REJECTED if defect != "correct"])
def test_known_bad_answer_does_not_conform(defect: str) -> None:
    clause, dtype = REJECTED_BY[defect]
    claims = replace(CLAIMS, composes=(), extras=(), memory="linear", lse=Lse(gradient=True))
    if clause == "ALB-2":
        claims = replace(claims, scores=Scores(alibi=Alibi("signed", built_in=True)))
    if clause in CHANGED_HEADS:
        claims = replace(claims, **CHANGED_HEADS[clause])
    report = check(
        KnownBad(REJECTED[defect], claims), "quick", clauses=[clause], dtypes=[dtype], strict=True
    )
    assert report.verdicts[0].status in ("fail", "blocked"), report.verdicts
    assert not report.conforms


# For each field, another value than that of `CLAIMS`, and a clause whose verdict it changes.
CHANGES: dict[str, tuple[Any, str]] = {
    "cross_attention": (False, "EQV-2"),
    "masks": ({"bool"}, "GRD-6"),
    "mask_ranks": ({4}, "MSK-5"),
    "per_item_mask": (False, "MSK-2"),
    "per_head_mask": (False, "MSK-2"),
    "per_query_mask": (False, "MSK-2"),
    "joint_masks": (False, "MSK-1"),
    "prefix_masks": (True, "EQV-3"),
    "always_causal": (True, "EQV-2"),
    "causal": ("bottom_right", "CAU-3"),
    "causal_with_mask": (False, "CAU-4"),
    "empty_row": ("nan", "MSK-8"),
    "returns_weights": (False, "SMX-2"),
    "scale": (1.0, "SMX-6"),
    "bias": ({False}, "SMX-3"),
    "dropout": (False, "DRP-1"),
    "own_head_dim": (True, "CFG-1"),
    "projections": (False, "HED-5"),
    "scores": (Scores(), "SCL-1"),
    "rotary": (Rotary(), "ROT-1"),
    "qk_norm": (QkNorm(), "QKN-1"),
    "gradients": (False, "GRD-1"),
    "second_gradients": (False, "GRD-9"),
    "weight_gradients": (False, "GRD-7"),
    "grouped_query": (False, "GQA-1"),
    "multi_query": (True, "HED-1"),
    "kv_widths": (False, "XAT-1"),
    "decodes": (False, "INC-1"),
    "decodes_ragged": (False, "INC-1"),
    "cache_edits": ((), "INC-3"),
    "memory": ("linear", "MEM-1"),
    "split_keys": (True, "LSE-2"),
    "value_width": (True, "VAL-1"),
    "lengths": (None, "LEN-1"),
    "packed": (Packed(), "PAK-1"),
    "repeats": (None, "DET-1"),
    "batch_invariant": ({"num_splits": 1}, "DET-2"),
    "lse": (Lse(), "LSE-1"),
    "composes": ((), "CMP-4"),
    "extras": ((), "PTH-5"),
    "world_sizes": ({2}, "DST-8"),
    "retiles": (True, "EQV-1"),
    "dtypes": ({"float64"}, "SHP-1"),
    "devices": ({"cuda"}, "SHP-1"),
    "sizes": (Sizes(n_heads={2}), "NUM-1"),
    "rounding": (
        Rounding(
            scores_stored=False,
            weights_stored=False,
            scaling_roundings=0,
            exp_error=4,
            log_normaliser=False,
        ),
        "NUM-1",
    ),
}
ROUNDING: dict[str, tuple[Any, str, str]] = {
    "scores_stored": (False, "NUM-1", "bfloat16"),
    "softmax_stored": (False, "NUM-1", "bfloat16"),
    "scaling_roundings": (0, "SMX-2", "bfloat16"),
    "exp_error": (4, "NUM-1", "float32"),
    "log_normaliser": (False, "SMX-4", "float32"),
    "softmax_in_float32": (True, "NUM-2", "float64"),
    "heads_in_float32": (False, "NUM-2", "float64"),
    "merges": (3, "NUM-1", "float32"),
    "mode": ("toward_zero", "NUM-8", "bfloat16"),
    "partials_stored": (False, "DST-1", "bfloat16"),
    "heads_stored": ("float8_e4m3fn", "NUM-1", "float32"),
    "ranks": (3, "HED-1", "bfloat16"),
    "weights_stored": (False, "NUM-1", "bfloat16"),
    "products": ("tf32", "NUM-1", "float32"),
    "accumulator": ("float16", "NUM-1", "float16"),
    "reductions": (1, "NUM-1", "bfloat16"),
    "rescales": (0, "SMX-2", "float32"),
    "flushes": (True, "NUM-8", "float16"),
}


# Claims that change none of the first cases, by the profile whose cases they change.
OF_MORE_CASES = {
    **dict.fromkeys(("cross_attention", "prefix_masks"), "quick"),
    **dict.fromkeys(("scaling_roundings", "log_normaliser", "rescales"), "quick"),
    **dict.fromkeys(("per_item_mask", "per_head_mask", "per_query_mask", "joint_masks"), "default"),
    **dict.fromkeys(("causal", "retiles"), "default"),
}


def verdict_on(
    implementation: Implementation, clause: str, dtype: str, profile: str
) -> tuple[Any, ...]:
    """Return the parts of a verdict that a claim may change."""
    (verdict,) = check(implementation, profile, clauses=[clause], dtypes=[dtype]).verdicts
    return verdict.status, verdict.examples, verdict.margin, verdict.message


@pytest.mark.mostly_slow(10)
@pytest.mark.parametrize("field", [field.name for field in fields(Claims)])
def test_every_claim_changes_a_verdict(field: str) -> None:
    value, clause = CHANGES[field]
    needed = {
        "decodes": {"decodes_ragged": False, "cache_edits": ()},
        "gradients": {"second_gradients": False},
        "multi_query": {"grouped_query": False},
        "rotary": {"extras": ()},
        "qk_norm": {"extras": ()},
    }
    consistent = needed.get(field, {})
    of_fields = {"retiles": variants.OrderOfSummation, "world_sizes": SequenceParallel}
    cls = of_fields.get(field, faults.Complete)
    bases = {"prefix_masks": {"masks": {"bool"}}, "split_keys": {"lse": Lse()}}
    base = replace(CLAIMS, **bases.get(field, {}))
    claimed, changed = (
        faults.implementation_of(cls, replace(base, **claims))
        for claims in ({}, {field: value, **consistent})
    )
    profile = OF_MORE_CASES.get(field, RIGHT)
    assert verdict_on(claimed, clause, "float32", profile) != verdict_on(
        changed, clause, "float32", profile
    )


@pytest.mark.mostly_slow(6)
@pytest.mark.parametrize("field", [field.name for field in fields(Rounding)])
def test_every_rounding_changes_a_verdict(field: str) -> None:
    value, clause, dtype = ROUNDING[field]
    cls, given = (
        (SequenceParallel, ON_RANKS) if field == "partials_stored" else (faults.Complete, CLAIMS)
    )
    if field == "heads_in_float32":
        given = replace(given, extras=(), **CHANGED_HEADS["QKN-1"])
    claims = [replace(given, rounding=Rounding(**rounding)) for rounding in ({}, {field: value})]
    profile = OF_MORE_CASES.get(field, RIGHT)
    one, other = (
        verdict_on(faults.implementation_of(cls, each), clause, dtype, profile) for each in claims
    )
    assert one != other
