"""GRD: gradients; those of dropout and of long rows are in the modules for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

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
from mha.conformance.cases.reference import plain_formula
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_equal,
    expect_no_worse,
)
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.domains import (
    EVERYDAY_SIZES,
    MANY_GRADIENTS_IN_HALF,
    ONE_OF_EACH_WIDTH,
)
from mha.conformance.properties.support.shared_assertions import (
    assume_as_accurate_as_plain,
    assume_finite,
    cases_of_each_width,
    expect_finite,
    expect_gradients,
    has_empty_row,
    hidden_pairs,
)
from mha.spec import Problem
from mha.spec.problem import INPUTS

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


@property_of(
    "GRD-1",
    Domain(
        masks=("none", *BOOLEAN, *FLOAT),
        causal=BOTH,
        values=MOST_VALUES,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
    ),
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
    Domain(
        masks=("none", *BOOLEAN, *FLOAT),
        causal=BOTH,
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=HALF,
    ),
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
    assume_as_accurate_as_plain(session)
    problem = case.problem()
    assume(not has_empty_row(session, problem), "a row is empty")
    upstream = session.upstream(problem)
    reported, expected = (
        session.gradients(problem, upstream),
        session.expected_gradients(problem, upstream),
    )
    copied = problem.map_inputs(leaf_of)
    if problem.config.projected:
        copied = copied.change(**{name: leaf_of(x) for name, x in problem.weights.named()})
    plain_formula(copied, problem.allowed(session.claims.alignment), session.claims.scale).backward(
        upstream
    )
    leaves = {name: getattr(copied, name) for name in INPUTS}
    leaves |= dict(copied.weights.named()) if problem.config.projected else {}
    # A bias has so few elements that their root mean square is a matter of luck.
    for name in (name for name in leaves if name in reported and leaves[name].ndim > 1):
        expect_no_worse(
            reported[name].code, reported[name].tensor, leaves[name].grad, expected[name].mid
        )


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
        " has none "
    )
    assertion = f"assert hasattr(attention_{instance.number}, 'weight_gradients')"
    expect(
        hasattr(instance.attention, "weight_gradients"),
        f"{message}with weight_gradients=False",
        assertion,
    )
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
    assume(not session.claims.rounding.narrows, "a step is declared to be in a narrower dtype")
    # One time in four a row is longer than a tile; each element takes two calls.
    long = replace(
        case, n_heads=1, head_dim=session.claims.sizes.head_dim_multiple, B=1, L=17, S=17
    )
    problem = (long if case.seed % 4 == 3 else case).problem()
    if session.claims.dropout and case.mode == "train":
        problem = with_dropout(problem, 0.5)
    drops = problem.config.drops
    assume_finite(session, problem)
    session.built(problem)  # now, since a construction may draw random numbers
    inputs = [leaf_of(x) for x in (problem.query, problem.key, problem.value)]
    if case.inputs == "self":
        inputs = inputs[:1]

    def output(*leaves: Tensor) -> Tensor:
        parts = leaves * 3 if len(leaves) == 1 else leaves
        with torch.random.fork_rng(enabled=drops):
            if drops:  # the same in each call
                torch.manual_seed(case.seed)
            return session.forward(problem.change(**dict(zip(INPUTS, parts, strict=True))))

    with guarded("torch.autograd.gradcheck"):
        passes = torch.autograd.gradcheck(output, inputs, fast_mode=False, raise_exception=False)
    expect(passes, "torch.autograd.gradcheck fails: numerical and analytical Jacobians differ")


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
    for name in problem.distinct(("key", "value")) if rows is None else ("query",):
        for index in range(case.B):
            keys = masked[index].nonzero().flatten()
            if len(keys):
                because = (
                    f"keys {keys.tolist()} of item {index} are masked for every query and head"
                )
                expect_equal(gradients[name][index, keys], 0.0, because=because)


@property_of(
    "GRD-4",
    Domain(
        masks=("none", *EMPTY, *FEW, *FLOAT),
        causal=BOTH,
        values=REGULAR_VALUES,
        modes=WITH_GRADIENT,
    ),
    needs="gradients",
    must_reject=("nan_gradients",),
)
def gradients_are_finite_where_outputs_are(session: Session, case: Case) -> None:
    """The gradients are finite wherever the outputs are, beside empty rows too."""
    problem = case.problem()
    assume(
        case.dtype in BOUNDED or case.values in MODERATE,
        "a gradient may be out of the dtype's range",
    )
    assume(
        session.claims.empty_row in ("zeros", "uniform") or not has_empty_row(session, problem),
        "a row is empty, and its output is not finite",
    )
    assume(bool(session(problem).output.tensor.isfinite().all()), "an output is not finite")
    every = torch.ones(case.B, case.L, device=problem.query.device)
    for gradient in session.gradients(problem, session.upstream(problem, every)).values():
        expect_finite(gradient, "though every output is finite")


@property_of(
    "GRD-5",
    Domain(
        masks=COMMON,
        causal=BOTH,
        inputs=("cross",),
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
    ),
    needs="gradients",
    must_reject=("random_gradient_scale",),
)
def any_subset_has_the_same_gradients(session: Session, case: Case) -> None:
    """Inputs that require a gradient have the same gradient, whichever others require one."""
    problem = case.problem()
    upstream = session.upstream(problem)
    names = _differentiable(problem)
    subset = _subset(names, case.seed % (2 ** len(names) - 1))
    bounds = cache(partial(session.expected_gradients, problem, upstream))
    every, some = session.gradients(problem, upstream), session.gradients(problem, upstream, subset)
    assume(bool(some), "no input requires a gradient, and those of the weights are not reported")
    for name, gradient in some.items():
        because = (
            f"with requires_grad on {' and '.join(subset) or 'the weights'} only, as on everything"
        )
        expect_agree(
            gradient, every[name], partial(lambda name: bounds()[name], name), because=because
        )


@property_of(
    "GRD-5",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "detached", "lopsided"),
    max_cases=12,
    number=2,
)
def frozen_weights_change_no_gradient(session: Session, case: Case) -> None:
    """Frozen weights change neither the output nor the gradients of inputs and mask."""
    problem = case.problem()
    assume(
        isinstance(session.built(problem).attention, nn.Module),
        "the attention is not a torch.nn.Module",
    )
    upstream = session.upstream(problem)
    # Also of only some inputs, as in the tuning of a prompt that is key and value.
    some = _subset(INPUTS, case.seed % 7 + 1)
    wanted = {"cross": some, "memory": INPUTS[case.seed % 2 :]}.get(case.inputs, INPUTS)
    if "mask" in _differentiable(problem):  # a learned bias, alone or beside the inputs
        wanted = ("mask", *wanted) if case.seed % 2 else ("mask",)
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
    Domain(
        masks=("bias", "none", *FEW),
        causal=BOTH,
        inputs=("cross",),
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=HALF,
    ),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients",),
    max_cases=6,
    number=4,
)
def half_gradients_are_there_for_any_subset(session: Session, case: Case) -> None:
    """In half precision every requested gradient is within the bound, with frozen weights too."""
    problem = case.problem()
    upstream, names = session.upstream(problem), _differentiable(problem)
    subset = _subset(names, case.seed % (2 ** len(names) - 1) + 1)
    ways = (False, True)[: 1 + isinstance(session.built(problem).attention, nn.Module)]
    found = [
        each
        for way in ways
        for each in session.gradients(problem, upstream, subset, frozen=way).items()
    ]
    expected = session.expected_gradients(problem, upstream)
    for name, gradient in found:
        expect_close(
            gradient, expected[name], because=f"with requires_grad on {' and '.join(subset)}"
        )


def _differentiable(problem: Problem) -> list[str]:
    """Return the names of the inputs, and of an additive mask, first."""
    mask = ["mask"] if problem.mask is not None and problem.mask.is_floating_point() else []
    return [*mask, *problem.distinct()]


def _subset(names: Sequence[str], number: int) -> list[str]:
    """Return the names whose places are the bits of a number that are set."""
    return [name for place, name in enumerate(names) if number >> place & 1]


@property_of(
    "GRD-6",
    Domain(masks=FLOAT, causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
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
    expect_close(
        gradient,
        expected,
        because=(
            "the gradient of the scores, summed over the axes along which the mask is broadcast"
        ),
    )


@property_of(
    "GRD-7",
    Domain(
        masks=("none", *FEW),
        causal=BOTH,
        bias=("k",),
        values=MODERATE,
        modes=WITH_GRADIENT,
        dtypes=BOUNDED,
    ),
    needs=("gradients", "weight_gradients"),
    requires="HED-1",
    must_reject=("softmax_gradient_without_row_sum",),
)
def the_key_bias_has_no_gradient(session: Session, case: Case) -> None:
    """The gradient of the key bias is 0 within the bound."""
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["b_k"]
    expected = session.expected_gradients(problem, upstream)["b_k"]
    expect_close(
        gradient,
        expected,
        because="it adds the same to every score of a row, which the softmax cancels",
    )


@property_of(
    "GRD-7",
    Domain(masks=("full_bias",), causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
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
    expect_close(
        gradient.row_sums(),
        bound,
        because="the softmax cancels what is added to all scores of a row",
    )
