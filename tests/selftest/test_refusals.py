"""What must be refused, how strongly, and what a failure says to do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn

from mha.conformance import Verdict, check
from mha.conformance.faults import base, configuration, mask_edges
from mha.spec import Config, Implementation, Weights


class DropoutLayer(base.Complete):
    """Its dropout is one of `torch.nn.Dropout`, which accepts NaN."""

    def __init__(self, config: Config, weights: Weights) -> None:
        nn.Dropout(config.dropout)
        super().__init__(
            replace(config, dropout=0.0) if math.isnan(config.dropout) else config, weights
        )


def judged(implementation: Implementation, clause: str, *, strict: bool = False) -> Verdict:
    (verdict,) = check(
        implementation, "quick", clauses=[clause], dtypes=["float32"], strict=strict
    ).verdicts
    return verdict


def test_sizes_that_are_not_positive_should_be_refused() -> None:
    faulty = base.implementation_of(configuration.NegativeHeads)
    relaxed, strict = judged(faulty, "CFG-3"), judged(faulty, "CFG-3", strict=True)
    assert (relaxed.status, relaxed.level, relaxed.conforms) == ("fail", "SHOULD", True)
    assert (strict.status, strict.conforms) == ("fail", False)


def test_dropout_of_nan_may_be_accepted() -> None:
    assert judged(base.implementation_of(DropoutLayer), "CFG-6").status == "pass"
    failure = judged(base.implementation_of(configuration.DropoutUnchecked), "CFG-6")
    assert (failure.status, failure.level) == ("fail", "SHOULD")
    assert "dropout (-0.1) is not a probability" in failure.message


@pytest.mark.parametrize(
    ("cls", "claimed", "advice"),
    [
        (
            base.Complete,
            "bool",
            'is not claimed: claim masks={"bool", "float"} if it is added to the scores',
        ),
        (
            base.Complete,
            "float",
            'is not claimed: claim masks={"bool", "float"} if True means that a query may',
        ),
        (
            mask_edges.IntegerMaskAdded,
            "bool float",
            "refuse it, so that callers convert it to booleans or floats",
        ),
    ],
)
def test_mask_that_is_not_claimed_says_what_to_claim_or_do(
    cls: type[nn.Module], claimed: str, advice: str
) -> None:
    claims = replace(base.implementation_of(cls).claims, masks=frozenset(claimed.split()))
    failure = judged(base.implementation_of(cls, claims), "MSK-12")
    assert (failure.status, failure.violated) == ("fail", "masks_of_an_unclaimed_dtype_are_refused")
    assert advice in failure.message
