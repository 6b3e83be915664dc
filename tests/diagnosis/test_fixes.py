"""The usual fixes that are code: a class that follows one meets its clause."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from mha.conformance import check
from mha.conformance.faults import registry
from mha.spec import CLAUSES, Options, Output


class ZeroesWeights(registry.Correct):
    """MSK-8: `scores.masked_fill(~mask, float("-inf")).softmax(-1).masked_fill(~mask, 0.0)`."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).softmax(-1).masked_fill(~allowed, 0.0)


class ZeroesValues(ZeroesWeights):
    """MSK-10: `v.masked_fill(~mask.any(-2)[..., None], 0)`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        q, k, v = (
            self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        allowed = self.allow(Options(mask, is_causal), q, k)
        weights = self.weigh(self.score(q, k), allowed)
        return Output(
            self.out_proj(self.merge(weights @ v.masked_fill(~allowed.any(-2)[..., None], 0))),
            weights,
        )


FIXES = {
    ZeroesWeights: ("MSK-8", ("MSK-1", "MSK-2", "MSK-8", "MSK-9", "GRD-4")),
    ZeroesValues: ("MSK-10", ("MSK-9", "MSK-10", "GRD-3")),
}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("cls", FIXES, ids=lambda cls: cls.__name__)
def test_class_that_follows_a_fix_meets_the_clauses(cls: type[registry.Correct]) -> None:
    clause, clauses = FIXES[cls]
    assert (cls.__doc__ or "").removeprefix(f"{clause}: ").rstrip(".") in CLAUSES[clause].fix
    report = check(registry.implementation_of(cls), "quick", clauses=clauses, dtypes="float32")
    statuses = {verdict.clause: verdict.status for verdict in report.verdicts}
    assert statuses == dict.fromkeys(clauses, "pass")
