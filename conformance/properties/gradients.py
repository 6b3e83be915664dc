"""GRD: gradients; those of dropout and of long rows are in the modules for these."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import (
    BOTH,
    BOUNDED,
    DENSE,
    HALF,
    MODERATE,
    MOST_VALUES,
    WITH_GRADIENT,
    Domain,
)
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FEW, FLOAT
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_equal,
)
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import UNCHANGED_HEADS, property_of
from mha.conformance.properties.support.domains import (
    EVERYDAY_SIZES,
    MANY_GRADIENTS_IN_HALF,
    ONE_OF_EACH_WIDTH,
)
from mha.conformance.properties.support.numerical_gradients import (
    expect_gradcheck,
    expect_gradients_no_worse_than_plain,
)
from mha.conformance.properties.support.requested_gradients import (
    differentiable,
    subset,
    trained_beside_frozen_weights,
)
from mha.conformance.properties.support.shared_assertions import (
    cases_of_each_width,
    expect_finite,
    expect_gradients,
    has_empty_row,
    hidden_pairs,
    module_of,
)
from mha.spec.bounds import Ball

GRADIENT_DEFECTS = ("lopsided", "unmasked", "detached", "softmax_gradient_without_row_sum")
# Distributions of values for which no gradient overflows or vanishes.
REGULAR_VALUES = (
    "normal",
    "integers",
    "large",
    "offset",
    "duplicates",
    "heavy",
    "selection",
    "uniform",
)


# With every kind of mask that leaves no row empty.
TRAINED = Domain(
    masks=("none", *BOOLEAN, *FLOAT),
    causal=BOTH,
    values=MODERATE,
    modes=WITH_GRADIENT,
    dtypes=BOUNDED,
)
IN_HALF = replace(TRAINED, dtypes=HALF)


@property_of(
    "GRD-1",
    replace(TRAINED, values=MOST_VALUES),
    needs="gradients",
    requires="HED-1",
    must_reject=GRADIENT_DEFECTS,
)
def gradients_are_within_the_bound(session: Session, case: Case) -> None:
    """The gradients of inputs, weights and mask are within the bound of the oracle's."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas")


@property_of(
    "GRD-1",
    replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=GRADIENT_DEFECTS,
    max_cases=4,
    number=2,
)
def gradients_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    """The gradients for the sizes of everyday models are within the bound."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas")


@property_of(
    "GRD-1",
    replace(ONE_OF_EACH_WIDTH, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=1,
    number=11,
)
def gradients_of_each_width_of_heads_are_within_the_bound(session: Session, case: Case) -> None:
    """The gradients for each width that heads of known models have are within the bound."""
    for each in cases_of_each_width(session, case):
        expect_gradients(session, each.problem(), None, "by the oracle's formulas")


@property_of(
    "GRD-1",
    IN_HALF,
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "lopsided"),
    number=3,
)
def half_gradients_are_within_the_bound(session: Session, case: Case) -> None:
    """The gradients in half precision are within the bound."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas")


@property_of(
    "GRD-1",
    replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=HALF),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "lopsided"),
    max_cases=3,
    number=4,
)
def half_gradients_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    """The gradients in half precision for the sizes of everyday models are within the bound."""
    expect_gradients(session, case.problem(), None, "by the oracle's formulas")


@property_of(
    "GRD-1",
    replace(MANY_GRADIENTS_IN_HALF, masks=COMMON, causal=BOTH, modes=WITH_GRADIENT),
    needs="gradients",
    requires="HED-1",
    level="SHOULD",
    must_reject=("nan_gradients", "lopsided"),
    number=5,
)
def half_gradients_are_no_worse_than_plain(session: Session, case: Case) -> None:
    """Root mean square errors of gradients are at most twice those of the plain formula."""
    expect_gradients_no_worse_than_plain(session, case.problem())


@property_of(
    "GRD-1",
    Domain(values=("normal",), layouts=DENSE, modes=("train",)),
    needs=("weight_gradients", "gradients"),
    max_cases=4,
    must_reject=(),
    number=6,
)
def all_weight_gradients_are_reported(session: Session, case: Case) -> None:
    """An attention that claims weight gradients reports one for each of its weights."""
    problem = case.problem()
    instance = session.built(problem)
    message = (
        "it has no method weight_gradients (see mha.spec.Differentiable): add one, or claim that it"
        " has none with weight_gradients=False"
    )
    assertion = f"assert hasattr(attention_{instance.number}, 'weight_gradients')"
    expect(hasattr(instance.attention, "weight_gradients"), message, assertion)
    session.gradients(problem, session.upstream(problem))  # which requires each of them


@property_of(
    "GRD-2",
    Domain(
        masks=("none", "queries", "bias"),
        causal=BOTH,
        values=("normal",),
        layouts=DENSE,
        inputs=("cross", "self"),
        modes=WITH_GRADIENT,
        dtypes=("float64",),
        min_S=2,
        max_length=3,
        max_heads=2,
    ),
    needs="gradients",
    must_reject=("softmax_gradient_without_row_sum",),
    max_cases=12,
)
def gradcheck_passes(session: Session, case: Case) -> None:
    """torch.autograd.gradcheck passes in float64."""
    # One time in four a row is longer than a tile; each element takes two calls.
    if case.seed % 4 == 3:
        width = session.claims.sizes.head_dim_multiple
        case = replace(case, n_heads=1, head_dim=width, B=1, L=17, S=17)
    expect_gradcheck(session, case)


@property_of(
    "GRD-3",
    Domain(
        masks=(*BOOLEAN, *FLOAT),
        min_S=2,
        values=MOST_VALUES,
        inputs=("cross", "memory"),
        modes=WITH_GRADIENT,
    ),
    needs="gradients",
    must_reject=("unmasked",),
)
def masked_keys_have_no_gradient(session: Session, case: Case) -> None:
    """The gradient of a masked key or value is exactly 0."""
    problem = case.problem()
    masked = hidden_pairs(session, problem).all(1).all(1)
    assume(bool(masked.any()), "no key is masked for every query")
    # In self-attention, a masked position is a query as well, whose output is left out.
    rows = ~masked if problem.query is problem.key else None
    gradients = session.gradients(problem, session.upstream(problem, rows))
    names = ["query"] if problem.query is problem.key else list(problem.distinct(("key", "value")))
    for name in names:
        for index in range(case.B):
            keys = masked[index].nonzero().flatten()
            because = f"keys {keys.tolist()} of item {index} are masked for every query and head"
            if len(keys):
                expect_equal(gradients[name][index, keys], 0.0, because=because)


@property_of(
    "GRD-4",
    replace(TRAINED, masks=("none", *EMPTY, *FEW, *FLOAT), values=REGULAR_VALUES, dtypes=()),
    needs="gradients",
    must_reject=("nan_gradients",),
)
def gradients_are_finite_where_outputs_are(session: Session, case: Case) -> None:
    """The gradients are finite wherever the outputs are, beside empty rows too."""
    problem = case.problem()
    in_range = case.dtype in BOUNDED or case.values in MODERATE
    assume(in_range, "a gradient may be out of the dtype's range")
    if session.claims.empty_row not in ("zeros", "uniform"):
        assume(not has_empty_row(session, problem), "a row is empty, and its output is not finite")
    assume(bool(session(problem).output.tensor.isfinite().all()), "an output is not finite")
    every = torch.ones(case.B, case.L, device=problem.query.device)
    for gradient in session.gradients(problem, session.upstream(problem, every)).values():
        expect_finite(gradient, "though every output is finite")


@property_of(
    "GRD-5",
    replace(TRAINED, masks=COMMON, inputs=("cross",)),
    needs="gradients",
    must_reject=("random_gradient_scale",),
)
def any_subset_has_the_same_gradients(session: Session, case: Case) -> None:
    """Inputs that require a gradient have the same gradient, whichever others require one."""
    problem = case.problem()
    upstream = session.upstream(problem)
    names = differentiable(problem)
    chosen = subset(names, case.seed % (2 ** len(names) - 1))
    bounds = cache(partial(session.expected_gradients, problem, upstream))

    def bound_of(name: str) -> Ball:
        return bounds()[name]

    every = session.gradients(problem, upstream)
    some = session.gradients(problem, upstream, chosen)
    assume(bool(some), "no input requires a gradient, and those of the weights are not reported")
    named = " and ".join(chosen) or "the weights"
    because = f"with requires_grad on {named} only, as on everything"
    for name, gradient in some.items():
        expect_agree(gradient, every[name], partial(bound_of, name), because=because)


@property_of(
    "GRD-5",
    replace(TRAINED, masks=COMMON),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=12,
    number=2,
)
def frozen_weights_change_no_gradient(session: Session, case: Case) -> None:
    """Frozen weights change neither the output nor the gradients of inputs and mask."""
    problem = case.problem()
    module_of(session.built(problem))
    upstream = session.upstream(problem)
    wanted = trained_beside_frozen_weights(case, problem)
    gradients = session.gradients(problem, upstream, wanted, frozen=True)
    output = session(problem, via=session.frozen(session.built(problem))).output
    expected = session.expected_gradients(problem, upstream)
    for name, gradient in gradients.items():
        expect_close(
            gradient, expected[name], because="the gradient, with weights that require none"
        )
    because = "the oracle's value, where nothing requires a gradient"
    expect_close(output, session.expected(problem).output, because=because)


@property_of(
    "GRD-5", Domain(masks=("none", *FEW), causal=BOTH, modes=("eval",)), needs="gradients", number=3
)
def recording_changes_no_output(session: Session, case: Case) -> None:
    """The output is the same with gradients, under no_grad and under inference_mode."""
    problem = case.problem()
    bound = session.bound_of(problem)
    recorded = problem.map_inputs(leaf_of)
    base = session(recorded).output
    for mode in ("no_grad", "inference"):
        output = session(problem, mode=mode).output
        because = f"the output in mode {mode!r} equals that of a call that records gradients"
        expect_agree(output, base, bound, because=because)


@property_of(
    "GRD-5",
    replace(IN_HALF, masks=("bias", "none", *FEW), inputs=("cross",)),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients",),
    max_cases=6,
    number=4,
)
def half_gradients_are_there_for_any_subset(session: Session, case: Case) -> None:
    """In half precision every requested gradient is within the bound, with frozen weights too."""
    problem = case.problem()
    upstream, names = session.upstream(problem), differentiable(problem)
    chosen = subset(names, case.seed % (2 ** len(names) - 1) + 1)
    can_be_frozen = isinstance(session.built(problem).attention, nn.Module)
    found = [*session.gradients(problem, upstream, chosen).items()]
    if can_be_frozen:
        found += session.gradients(problem, upstream, chosen, frozen=True).items()
    expected = session.expected_gradients(problem, upstream)
    because = f"with requires_grad on {' and '.join(chosen)}"
    for name, gradient in found:
        expect_close(gradient, expected[name], because=because)


@property_of(
    "GRD-6",
    replace(TRAINED, masks=FLOAT),
    needs="gradients",
    requires="HED-1",
    must_reject=("unmasked", "lopsided"),
    min_rejection_rate=0.5,  # of one allowed key, the score has no gradient
)
def an_additive_mask_has_the_expected_gradient(session: Session, case: Case) -> None:
    """An additive mask that requires a gradient gets the oracle's."""
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["mask"]
    expected = session.expected_gradients(problem, upstream)["mask"]
    because = "the gradient of the scores, summed over the axes along which the mask is broadcast"
    expect_close(gradient, expected, because=because)


@property_of(
    "GRD-7",
    replace(TRAINED, masks=("none", *FEW), bias=("k",)),
    needs=("gradients", "weight_gradients", *UNCHANGED_HEADS),
    requires="HED-1",
    must_reject=("softmax_gradient_without_row_sum",),
)
def the_key_bias_has_no_gradient(session: Session, case: Case) -> None:
    """The gradient of the key bias is 0 within the bound."""
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["b_k"]
    expected = session.expected_gradients(problem, upstream)["b_k"]
    because = "it adds the same to every score of a row, which the softmax cancels"
    expect_close(gradient, expected, because=because)


@property_of(
    "GRD-7",
    replace(TRAINED, masks=("full_bias",)),
    needs="gradients",
    must_reject=("softmax_gradient_without_row_sum",),
    number=2,
)
def the_gradients_of_a_row_sum_to_zero(session: Session, case: Case) -> None:
    """The gradients of the scores of a row sum to 0 within the bound."""
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["mask"]
    bound = session.expected_gradients(problem, upstream)["mask"].sum(-1)
    because = "the softmax cancels what is added to all scores of a row"
    expect_close(gradient.row_sums(), bound, because=because)
