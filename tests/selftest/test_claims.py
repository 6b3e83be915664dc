"""Right implementations of other conventions or arithmetic conform with their claims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import Verdict, check
from mha.conformance.cases.case import Case
from mha.conformance.faults import mask_edges
from mha.conformance.faults import registry as faults
from mha.conformance.faults.base import CLAIMS, OWN_HEAD_DIM, implementation_of
from mha.conformance.faults.directed import CastsTruncate
from mha.conformance.faults.dropout import OutputDropped
from mha.conformance.faults.float8 import IN_FLOAT8, HeadsInFloat8
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.session import Session
from mha.conformance.properties.masks import masked_keys_have_no_influence
from mha.conformance.properties.registry import properties
from mha.spec import Attention, Claims, Config, Output, Rounding, Sizes, Weights
from support import variants
from support.judging import RIGHT, judged

SELF_ONLY = Claims(cross_attention=False, per_head_mask=False, returns_weights=False)
TIGHTEST = Rounding(
    scores_stored=False,
    weights_stored=False,
    softmax_stored=False,
    scaling_roundings=0,
    exp_error=4,
    log_normaliser=False,
    rescales=0,
)
LOG_NORMALISED = replace(CLAIMS, rounding=Rounding())
SOFTMAX_IN_FLOAT32 = replace(
    CLAIMS, rounding=Rounding(softmax_in_float32=True, log_normaliser=False)
)
FROM_THE_END = Claims(causal="bottom_right", rounding=CLAIMS.rounding)
VARIANTS: dict[str, tuple[type[faults.Correct | faults.Complete], Claims]] = {
    "uniform": (mask_edges.FiniteFill, Claims(empty_row="uniform")),
    "nan": (variants.NanForEmptyRow, Claims(empty_row="nan")),
    "error": (variants.RaisesForEmptyRow, Claims(empty_row="error")),
    "bottom right": (variants.BottomRight, Claims(causal="bottom_right")),
    "always from the end": (
        variants.AlwaysFromTheEnd,
        replace(
            FROM_THE_END,
            always_causal=True,
            empty_row="error",
            returns_weights=False,
            dtypes=CLAIMS.dtypes,
        ),
    ),
    "only self-attention": (variants.SelfOnly, SELF_ONLY),
    "tiled, base two": (variants.BaseTwo, Claims()),
    "no masks": (faults.Correct, Claims(masks=(), causal=None)),
    "another order of summation": (
        variants.OrderOfSummation,
        replace(CLAIMS, retiles=True, composes=()),
    ),
    "NaN in contexts": (variants.NanContext, replace(CLAIMS, empty_row="nan")),
    "stored softmax": (variants.SoftmaxStored, CLAIMS),
    "log-sum-exp": (variants.LogSumExp, LOG_NORMALISED),
    "log-sum-exp in base two": (variants.LogSumExpInBaseTwo, LOG_NORMALISED),
    "split keys": (variants.SplitKeys, LOG_NORMALISED),
    "dropout, bottom right": (
        variants.DropsBottomRight,
        replace(CLAIMS, causal="bottom_right", empty_row="nan", returns_weights=False),
    ),
    "dropout of the output": (OutputDropped, replace(CLAIMS, dropout="output")),
    "hidden by adding": (variants.AddsInfinity, CLAIMS),
    "everything in float32": (variants.EverythingInSingle, replace(CLAIMS, rounding=TIGHTEST)),
    "tightest rounding": (faults.Complete, replace(CLAIMS, rounding=TIGHTEST)),
    "no key bias": (variants.NoKeyBias, replace(CLAIMS, rounding=TIGHTEST)),
    "not scaled": (variants.NotScaled, replace(CLAIMS, scale=1.0)),
    "another scale": (variants.ScaledDown, replace(CLAIMS, scale=-0.02)),
    "heads of their own width": (faults.Complete, OWN_HEAD_DIM),
}
# The clauses and families that each variant is tested on: those that its claims affect. By default,
# all.
ON_EMPTY = (
    "SHP-1",
    "SHP-5",
    "SMX-5",
    "MSK-2",
    "MSK-5",
    "MSK-8",
    "MSK-9",
    "PTH-1",
    "PTH-2",
    "NUM-1",
    "GRD-1",
    "GRD-4",
)
ON_ARITHMETIC = ("SMX", "MSK-8", "HED-1", "EQV-5", "EQV-6", "EQV-7", "NUM", "GRD-1", "GRD-6")
TESTED_ON = {
    "uniform": ON_EMPTY,
    "nan": ON_EMPTY,
    "error": ON_EMPTY,
    "bottom right": (
        "CAU",
        "PTH-3",
        "PTH-4",
        "MSK-5",
        "MSK-8",
        "SMX-5",
        "NUM-1",
        "NUM-5",
        "GRD-1",
        "EQV-5",
    ),
    "always from the end": ("NUM", "GRD-8", "CAU-1"),
    "tiled, base two": (
        "SHP-5",
        "SMX",
        "MSK-1",
        "MSK-6",
        "MSK-8",
        "CAU-1",
        "EQV",
        "NUM",
        "GRD-1",
        "GRD-4",
    ),
    "another order of summation": (
        "MSK",
        "CAU-2",
        "HED",
        "EQV",
        "NUM",
        "DRP-3",
        "STA-3",
        "STA-4",
        "INC",
        "GQA",
        "XAT",
    ),
    "no masks": ("SHP", "SMX", "MSK", "CAU", "PTH", "EQV", "GRD-4", "STA-3", "STA-7"),
    "only self-attention": ("SHP", "SMX", "MSK", "CAU", "PTH", "EQV", "GRD-3", "STA-3", "STA-7"),
    "NaN in contexts": ON_EMPTY,
    "stored softmax": ON_ARITHMETIC,
    "log-sum-exp": ON_ARITHMETIC,
    "log-sum-exp in base two": ON_ARITHMETIC,
    "split keys": ON_ARITHMETIC,
    "dropout, bottom right": ("DRP", "GRD", "CAU"),
    "dropout of the output": ("DRP", "GRD-1", "GRD-2"),
    "hidden by adding": ("SHP", "SMX", "MSK-1", "MSK-7", "CAU-1", "HED-1", "NUM-1", "GRD-1"),
    "everything in float32": (*ON_ARITHMETIC, "CMP-4"),
    "tightest rounding": ("CMP-4", "SMX", "NUM-1", "GRD-1", "DRP"),
    "no key bias": (
        "SMX",
        "MSK-8",
        "HED-1",
        "NUM",
        "GRD-1",
        "GRD-5",
        "GRD-7",
        "STA-3",
        "INC",
        "GQA",
        "CMP-4",
        "PTH-5",
    ),
    "not scaled": ON_ARITHMETIC,
    "another scale": (*ON_ARITHMETIC, "GRD-7"),
    "heads of their own width": ("CFG", "HED-1", "GRD-1"),
}
# In half precision, where each case of a directed test looks at thousands of roundings.
DTYPES = {
    "always from the end": ("float16",),
    "stored softmax": ("bfloat16",),
    "log-sum-exp": ("float16",),
    "log-sum-exp in base two": ("bfloat16",),
    "hidden by adding": ("float16",),
    "everything in float32": ("float16",),
}
# The only recommendations that a plain formula, or a policy other than zeros, may violate.
RECOMMENDED = {
    "MSK-8": "a policy other than zeros",
    "MSK-10": "zero times NaN is NaN",
    "SHP-5": "without keys there is no maximum",
    "GRD-1": (
        "a softmax stored step by step has worse gradients in half precision than the plain formula"
    ),
}


def check_conforms(
    cls: type[faults.Correct | faults.Complete], claims: Claims, **options: Any
) -> list[Verdict]:
    """Expect that a class conforms; return the verdicts that are not "pass" or "not_claimed"."""
    report = check(faults.implementation_of(cls, claims), RIGHT, **options)
    failed = [verdict for verdict in report.verdicts if not verdict.conforms]
    assert not failed, failed
    passed = [verdict for verdict in report.verdicts if verdict.status == "pass"]
    assert len(passed) >= min(20, len(report.verdicts) // 2)
    return [verdict for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")]


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_conforms(variant: str) -> None:
    clauses = {
        clause for clause in properties() if clause.startswith(TESTED_ON.get(variant, ("",)))
    }
    violations = check_conforms(
        *VARIANTS[variant], dtypes=DTYPES.get(variant, ("float32",)), clauses=clauses
    )
    assert {verdict.clause for verdict in violations} <= set(RECOMMENDED), violations
    assert not any(verdict.required for verdict in violations)


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
def test_order_of_summation_that_depends_on_numbers_must_be_claimed() -> None:
    unclaimed = faults.implementation_of(variants.OrderOfSummation, replace(CLAIMS, composes=()))
    report = check(unclaimed, clauses=["MSK-1", "HED-2", "EQV-1"], dtypes=["float32"])
    assert "fail" in {verdict.status for verdict in report.verdicts}


@pytest.mark.usefixtures("undiagnosed", "unshrunk")
def test_softmax_without_division_must_be_claimed() -> None:
    unclaimed = faults.implementation_of(variants.LogSumExp, CLAIMS)
    report = check(unclaimed, clauses=["SMX-4", "HED-1"], dtypes=["float32"])
    assert "fail" in {verdict.status for verdict in report.verdicts}


@pytest.mark.slow
@pytest.mark.usefixtures("undiagnosed", "unshrunk")
def test_softmax_in_float32_must_be_claimed_and_gives_up_num_2() -> None:
    clauses = ["NUM-1", "NUM-2", "SMX-1", "SMX-2", "GRD-1"]
    claimed = faults.implementation_of(variants.SoftmaxInSingle, SOFTMAX_IN_FLOAT32)
    statuses = {
        v.clause: v.status
        for v in check(claimed, "quick", clauses=clauses, dtypes=["float64"]).verdicts
    }
    assert statuses == dict.fromkeys(clauses, "pass") | {"NUM-2": "not_claimed"}
    unclaimed = check(
        faults.implementation_of(variants.SoftmaxInSingle),
        clauses=["NUM-1", "NUM-2"],
        dtypes=["float64"],
    )
    assert {verdict.status for verdict in unclaimed.verdicts} == {"fail"}


def test_gradcheck_does_not_apply_to_softmax_in_float32() -> None:
    claimed = faults.implementation_of(variants.SoftmaxInSingle, SOFTMAX_IN_FLOAT32)
    assert (
        check(claimed, "quick", clauses=["GRD-2"], dtypes=["float64"]).verdicts[0].status
        == "not_claimed"
    )


class NotAModule:
    """A plain function with weights: no `torch.nn.Module`, and no gradients of weights."""

    name, claims = "not-a-module", Claims(weight_gradients=False)

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        inner = faults.complete.build(config, weights, dtype=dtype, device=device)

        class Function:
            def train(self) -> Function:
                return self

            def eval(self) -> Function:
                return self

            def __call__(
                self, *inputs: Tensor, mask: Tensor | None = None, **options: bool
            ) -> Output:
                if mask is not None and mask.dtype != torch.bool:
                    raise TypeError(f"mask must be boolean, but has {mask.dtype}")
                return inner(*inputs, mask=mask, **options)

        return Function()


def test_plain_function_conforms_and_has_no_state() -> None:
    clauses = [
        clause
        for clause in properties()
        if clause.startswith(("CFG", "SHP", "PTH", "GRD", "DRP", "STA", "CMP"))
    ]
    report = judged(NotAModule(), clauses, RIGHT, strict=True)
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    assert report.conforms, [verdict for verdict in report.verdicts if not verdict.conforms]
    unclaimed = {clause for clause, status in statuses.items() if status == "not_claimed"}
    assert {"STA-4", "GRD-7", "CMP-3", "DRP-1"} <= unclaimed
    assert {"STA-1", "GRD-1", "CFG-5"} <= {
        clause for clause, status in statuses.items() if status == "pass"
    }


@pytest.mark.parametrize(
    "claims",
    [
        *(
            {"masks": {"boolean"}},
            {"masks": "bool"},
            {"causal": "left"},
            {"empty_row": "zero"},
            {"dtypes": {"half"}},
        ),
        *({"bias": True}, {"dtypes": None}, {"composes": [["compile"]]}),
    ],
)
def test_unknown_values_are_rejected(claims: dict[str, Any]) -> None:
    (name,) = claims
    with pytest.raises(ValueError, match=f"Claims.{name} must be"):
        Claims(**claims)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"always_causal": True, "causal": None}, "always_causal needs"),
        ({"decodes_ragged": True}, "decodes_ragged needs"),
        (
            {"multi_query": True, "grouped_query": True},
            "multi_query is one key head, and grouped_query any number",
        ),
    ],
)
def test_contradictions_are_rejected(claims: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Claims.{message}"):
        Claims(**claims)


@pytest.mark.parametrize(
    "rounding",
    [
        {"scaling_roundings": 3},
        {"exp_error": (1 << 14) + 1},
        {"exp_error": -1},
        {"heads_stored": "int8"},
        {"products": "tf19"},
        {"accumulator": "bfloat16"},
        {"reductions": 65},
        {"rescales": -1},
    ],
)
def test_roundings_without_a_bound_are_rejected(rounding: dict[str, Any]) -> None:
    (name,) = rounding
    with pytest.raises(ValueError, match=f"Rounding.{name} must be"):
        Rounding(**rounding)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (lambda: Claims(mask_ranks={2}), "must contain 4"),
        (lambda: Claims(scale=math.inf), "must be a finite float"),
        (lambda: Claims(bias={"vq"}), "must be a set of True, False, 'q'"),
        (lambda: Claims(second_gradients=True, gradients=False), "needs Claims.gradients"),
        (lambda: Sizes(head_dims={0}), "must be a set of positive integers"),
        (lambda: Sizes(n_heads=()), "must be a set of positive integers"),
        (lambda: Sizes(length_multiple=16, max_length=8), "must be at least length_multiple"),
        (lambda: Sizes(head_dim_multiple=0), "Sizes.head_dim_multiple must be positive"),
        (
            lambda: Sizes(head_dims={3, 5}, head_dim_multiple=2),
            "none of Sizes.head_dims is a multiple",
        ),
        (
            lambda: Sizes(head_dims={64}, max_head_dim=32),
            "head_dim_multiple (1) up to max_head_dim (32)",
        ),
        (lambda: Sizes(max_head_dim=3, head_dim_multiple=4), "must be at least head_dim_multiple"),
    ],
)
def test_contradictory_claims_are_refused(claims: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        claims()


def test_sizes_of_a_kernel_do_not_hide_what_a_mask_entry_does() -> None:
    """In bfloat16, one of 16 keys adds less than rounding may."""
    complete = implementation_of(faults.Complete)
    kernel = replace(complete.claims, sizes=Sizes(head_dims={64}, length_multiple=16))
    report = check(
        implementation_of(faults.Complete, kernel),
        "quick",
        clauses="MSK-6",
        dtypes="bfloat16",
        seed=1,
    )
    assert [verdict.status for verdict in report.verdicts] == ["pass"], report.verdicts


@pytest.mark.slow
def test_casts_that_are_declared_to_drop_bits_are_left_to_the_bound() -> None:
    truncating = implementation_of(CastsTruncate)
    rounding = replace(truncating.claims.rounding, mode="toward_zero")
    declared = implementation_of(CastsTruncate, replace(truncating.claims, rounding=rounding))
    report = check(
        declared, "quick", clauses=["NUM-1", "NUM-7", "GRD-8", "HED-1"], dtypes=["bfloat16"]
    )
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    assert statuses == {
        "NUM-1": "pass",
        "NUM-7": "not_claimed",
        "GRD-8": "not_claimed",
        "HED-1": "pass",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)]
)
def test_heads_in_float8_conform_once_that_is_declared(dtype: str) -> None:
    declared = implementation_of(HeadsInFloat8, IN_FLOAT8)
    clauses = [
        clause
        for clause in properties()
        if dtype == "float32" or clause.startswith(("HED", "NUM", "GRD"))
    ]
    report = judged(declared, clauses, RIGHT, dtypes=[dtype])
    assert report.conforms, [verdict for verdict in report.verdicts if verdict.status == "fail"]
    if dtype != "float32":
        assert {v.clause: v.status for v in report.verdicts}["NUM-7"] == "pass"
    undeclared = check(implementation_of(HeadsInFloat8), dtypes=[dtype], clauses="NUM-1")
    assert [verdict.status for verdict in undeclared.verdicts] == ["fail"]


def test_what_a_mask_hides_has_finite_scores() -> None:
    """Where -infinity is added to the scores, an infinite one would become NaN."""
    for seed in range(20):
        case = Case(
            n_heads=9,
            head_dim=16,
            B=3,
            L=2,
            S=2,
            dtype="float16",
            mask="keys",
            values="integers",
            seed=seed,
        )
        with suppress(Discard):  # no key is masked
            masked_keys_have_no_influence(
                Session(implementation_of(variants.AddsInfinity), case), case
            )
