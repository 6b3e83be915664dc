"""DST-1 and DST-2 in half precision: no small defect explains an error better than rounding."""

from __future__ import annotations

from dataclasses import replace

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import WITH_GRADIENT
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed import MANY_ROWS
from mha.conformance.properties.directed_gradients import expect_gradients_by_rounding_alone
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.sharding import GRADIENT_DEFECTS, RANKS, divisible
from mha.conformance.properties.support.directed_errors import expect_rounding_alone

SHARDED_ROWS = replace(
    MANY_ROWS,
    ranks=RANKS,
    need_weights=(False,),
    modes=("eval", "train", "no_grad"),
    sizes={"n_heads": (4, 8), "head_dim": (32, 16), "B": (4,), "L": (64, 32), "S": (64, 32)},
)


@property_of(
    "DST-1",
    SHARDED_ROWS,
    needs="world_sizes",
    requires=None,
    must_reject=("one_percent", "mean", "zeros"),
    max_cases=6,
    number=2,
)
def errors_over_ranks_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In half precision no small defect explains the error over ranks better than rounding."""
    expect_rounding_alone(session, divisible(case))


@property_of(
    "DST-2",
    replace(SHARDED_ROWS, modes=WITH_GRADIENT),
    needs=("world_sizes", "gradients"),
    requires=None,
    must_reject=("mean", "zeros", *GRADIENT_DEFECTS),
    max_cases=4,
    number=2,
)
def errors_of_gradients_over_ranks_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """No small defect explains the errors of gradients over ranks better than rounding."""
    expect_gradients_by_rounding_alone(session, divisible(case))
