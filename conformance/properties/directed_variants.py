"""Less common configurations in half precision: GQA-1, GRD-5, INC-1, XAT-1, PTH-5, DRP-1, CMP-4.

As in `directed`, errors of many elements are projected on what small defects would do to them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.transforms import with_dropout, with_extra
from mha.conformance.harness.assertions import assume
from mha.conformance.harness.session import Session
from mha.conformance.properties.directed import MANY_ROWS
from mha.conformance.properties.directed_gradients import (
    GRADIENT_ROWS,
    expect_gradients_by_rounding_alone,
)
from mha.conformance.properties.paths import call_with_extras
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.decoded_sequence import DecodedSequence
from mha.conformance.properties.support.directed_errors import (
    assume_modelled,
    expect_errors_of_rounding,
    expect_rounding_alone,
)
from mha.conformance.properties.support.domains import AUTOCAST, AUTOCAST_DTYPE

# So many items that a scale 2% off shows for one query of each, too.
VARIANT_ROWS = replace(
    MANY_ROWS, sizes={"n_heads": (4, 8), "head_dim": (32, 16), "B": (32,), "L": (33, 1), "S": (33,)}
)
EVALUATION = ("eval", "no_grad", "inference")


@property_of(
    "GQA-1",
    replace(VARIANT_ROWS, variants=("grouped",)),
    needs="grouped_query",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=3,
    number=8,
)
def errors_of_grouped_heads_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """With grouped heads no small defect explains the error better than rounding does."""
    expect_rounding_alone(session, case)


@property_of(
    "GQA-1",
    replace(GRADIENT_ROWS, variants=("grouped",)),
    needs=("grouped_query", "gradients"),
    requires="HED-1",
    must_reject=("unscaled", "detached"),
    max_cases=2,
    number=9,
)
def errors_of_gradients_of_grouped_heads_do_not_add_up_to_a_defect(
    session: Session, case: Case
) -> None:
    """With grouped heads no small defect explains the errors of gradients better than rounding."""
    expect_gradients_by_rounding_alone(session, case, case.problem())


@property_of(
    "GRD-5",
    replace(
        GRADIENT_ROWS,
        sizes={"n_heads": (8,), "head_dim": (16,), "B": (16,), "L": (33,), "S": (33,)},
    ),
    needs="gradients",
    requires="HED-1",
    must_reject=("unscaled", "detached"),
    max_cases=1,
    number=5,
)
def errors_with_frozen_weights_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """With frozen weights no small defect explains the errors better than rounding does.

    Those of the gradients of the inputs, and those of the output where these require none either.
    """
    problem = case.problem()
    assume(
        isinstance(session.built(problem).attention, nn.Module),
        "the attention is not a torch.nn.Module",
    )
    expect_gradients_by_rounding_alone(session, case, problem, frozen=True)
    session.scripted = False  # a script would hold all numbers of this call, which is not the first
    frozen = session.frozen(session.built(problem))
    expect_errors_of_rounding(session, case, problem, session(problem, via=frozen).output)


DECODED_ROWS = replace(
    VARIANT_ROWS,
    variants=("plain", "grouped"),
    masks=("none",),
    causal=(True,),
    square=True,
    modes=("eval",),
    need_weights=(False,),
    sizes={**VARIANT_ROWS.sizes, "L": (33,)},
)


@property_of("INC-1", DECODED_ROWS, needs="decodes", requires="HED-1", max_cases=3, number=7)
def errors_of_decoding_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """No small defect explains the errors of all decoded positions better than rounding does."""
    assume_modelled(session, case)
    problem = case.problem()
    sequence = DecodedSequence(session, problem)
    decoded = torch.cat([sequence.decode_position(position) for position in range(case.L)], 1)
    expect_errors_of_rounding(
        session, case, problem, session.unscripted(decoded, "the decoded output")
    )


@property_of(
    "INC-1",
    replace(DECODED_ROWS, variants=("plain",)),
    needs="decodes_ragged",
    requires="HED-1",
    max_cases=1,
    number=8,
)
def errors_of_ragged_decoding_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """No small defect explains the errors of items of different lengths better than rounding."""
    assume_modelled(session, case)
    problem = case.problem()
    decoded = DecodedSequence(session, problem).decode_ragged(case.generator)
    expect_errors_of_rounding(
        session, case, problem, session.unscripted(decoded, "the decoded output")
    )


@property_of(
    "XAT-1",
    replace(VARIANT_ROWS, inputs=("cross", "memory"), variants=("other_widths",)),
    needs=("kv_widths", "cross_attention"),
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=2,
    number=3,
)
def errors_for_other_widths_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """For kdim and vdim other than D no small defect explains the error better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "NUM-7",
    replace(VARIANT_ROWS, variants=("own_width",)),
    needs="own_head_dim",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=4,
    number=6,
)
def errors_of_heads_of_their_own_width_do_not_add_up_to_a_defect(
    session: Session, case: Case
) -> None:
    """For heads of their own width no small defect explains the error better than rounding."""
    expect_rounding_alone(session, case)


@property_of(
    "ROT-1",
    replace(VARIANT_ROWS, variants=("plain", "grouped")),
    needs="rotary",
    must_reject=("mean", "ignores_rotary"),
    max_cases=3,
    number=7,
)
def errors_of_rotated_heads_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """With rotated heads no small defect explains the error better than rounding does."""
    expect_rounding_alone(session, case, changed_heads=True)


@property_of(
    "QKN-1",
    replace(VARIANT_ROWS, variants=("plain", "grouped")),
    needs="qk_norm",
    must_reject=("mean", "ignores_norm"),
    max_cases=3,
    number=5,
)
def errors_of_normed_heads_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """With normed heads no small defect explains the error better than rounding does."""
    expect_rounding_alone(session, case, changed_heads=True)


@property_of(
    "DRP-1",
    replace(VARIANT_ROWS, modes=EVALUATION),
    needs="dropout",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=2,
    number=2,
)
def errors_where_nothing_is_dropped_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """In evaluation, with p = 0.5, no small defect explains the error better than rounding."""
    expect_rounding_alone(session, case, with_dropout(case.problem(), 0.5))


@property_of(
    "PTH-5",
    replace(VARIANT_ROWS, need_weights=(False,), sizes={**VARIANT_ROWS.sizes, "L": (33, 65)}),
    needs="extras",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=3,
    number=4,
)
def errors_with_extras_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """With each claimed extra no small defect explains the error better than rounding does."""
    assume_modelled(session, case)
    for extra in sorted(session.claims.extras):
        # No formula of `directed_script` has another layout, and a script would hold all numbers of
        # a second call.
        session.scripted = extra in ("bias_kv", "zero_key") and not session.steps
        problem = with_extra(case.problem(), case, extra)
        output = call_with_extras(session, problem, (extra,))
        expect_errors_of_rounding(session, case, problem, output)


@property_of(
    "CMP-4",
    replace(VARIANT_ROWS, dtypes=AUTOCAST.dtypes, modes=AUTOCAST.modes),
    needs="composes=autocast",
    requires="HED-1",
    must_reject=("lopsided",),
    max_cases=2,
    number=2,
)
def errors_under_autocast_do_not_add_up_to_a_defect(session: Session, case: Case) -> None:
    """Under autocast no small defect explains the error better than rounding does."""
    assume_modelled(session, case)
    low = replace(case, dtype=str(AUTOCAST_DTYPE).removeprefix("torch.")).problem()
    wide = low.change(weights=low.weights.to(torch.float32)).map_inputs(
        lambda x: x.to(torch.float32)
    )
    if low.mask is not None and low.mask.is_floating_point():
        wide = wide.change(mask=low.mask.to(torch.float32))
    output = session(wide, mode="autocast", dtypes=(AUTOCAST_DTYPE, torch.float32)).output
    # Every product may be stored in that dtype, whatever is declared of the problem's own.
    rounding = replace(
        session.claims.rounding, scores_stored=True, softmax_stored=True, scaling_roundings=2
    )
    claims = replace(session.claims, rounding=rounding)
    expect_errors_of_rounding(session, case, low, output, claims)
