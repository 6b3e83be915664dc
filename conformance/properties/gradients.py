"""GRD: gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, EVERYDAY, HALF, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import BOOLEAN, COMMON, EMPTY, FEW, FLOAT
from mha.conformance.cases.reference import plain_formula
from mha.conformance.harness.assertions import assume, expect, expect_close, expect_equal, expect_no_worse
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Session
from mha.conformance.properties.accuracy import EVERYDAY_SIZES, MANY
from mha.conformance.properties.dropout import dropping
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.shared import expect_finite, expect_gradients
from mha.spec.problem import INPUTS

MASKS = ("none", *BOOLEAN, *FLOAT)
WRONGS = ("mean", "unmasked", "unscaled", "detached", "softmax_gradient_without_row_sum")
# Of the regimes, those in which a gradient is neither lost nor out of range.
STEADY = ("normal", "integers", "large", "offset", "duplicates", "heavy", "selection", "uniform")


@property_of(
    "GRD-1",
    Domain(masks=MASKS, causal=BOTH, values=EVERYDAY, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
)
def gradients_are_within_the_bound(session: Session, case: Case) -> None:
    expect_gradients(session, case.problem(), None, "as the formulas have it")


@property_of(
    "GRD-1",
    replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=WRONGS,
    min_rejection_rate=0.3,
    max_cases=4,
    number=2,
)
def gradients_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    expect_gradients(session, case.problem(), None, "as the formulas have it")


@property_of(
    "GRD-1",
    Domain(masks=MASKS, causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=HALF),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "noise"),
    number=3,
)
def half_gradients_are_within_the_bound(session: Session, case: Case) -> None:
    expect_gradients(session, case.problem(), None, "as the formulas have it")


@property_of(
    "GRD-1",
    replace(EVERYDAY_SIZES, modes=WITH_GRADIENT, dtypes=HALF),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "noise"),
    max_cases=3,
    number=4,
)
def half_gradients_of_everyday_sizes_are_within_the_bound(session: Session, case: Case) -> None:
    expect_gradients(session, case.problem(), None, "as the formulas have it")


@property_of(
    "GRD-1",
    replace(MANY, masks=COMMON, causal=BOTH, modes=WITH_GRADIENT, min_B=3, min_L=16),
    needs="gradients",
    requires="HED-1",
    level="SHOULD",
    must_reject=("nan_gradients", "noise"),
    number=5,
)
def half_gradients_are_no_worse_than_plain(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(bool(session.expected(problem).empty.logical_not().all()), "a row is empty")
    upstream = session.upstream(problem)
    seen, right = session.gradients(problem, upstream), session.expected_gradients(problem, upstream)
    copied = problem.map_inputs(leaf_of)
    copied = copied.change(**{name: leaf_of(x) for name, x in problem.weights.named()})
    plain_formula(copied, problem.allowed(session.claims.causal)).backward(upstream)
    leaves = {name: getattr(copied, name) for name in INPUTS} | dict(copied.weights.named())
    # Of the few numbers of a bias, the root mean square is a matter of luck.
    for name in (name for name in leaves if name in seen and leaves[name].ndim > 1):
        expect_no_worse(seen[name].code, seen[name].tensor, leaves[name].grad, right[name].mid)


@property_of(
    "GRD-1",
    Domain(values=("normal",), layouts=DENSE, modes=("train",)),
    needs=("weight_gradients", "gradients"),
    max_cases=4,
    must_reject=(),
    number=6,
)
def the_gradients_of_all_weights_are_told(session: Session, case: Case) -> None:
    problem = case.problem()
    built = session.built(problem)
    told = "it has no method weight_gradients (see mha.spec.Differentiable): give it one, or claim that it has none "
    check = f"assert hasattr(attention_{built.number}, 'weight_gradients')"
    expect(hasattr(built.attention, "weight_gradients"), f"{told}with weight_gradients=False", check)
    session.gradients(problem, session.upstream(problem))  # which looks for each of them


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
    must_reject=("detached", "softmax_gradient_without_row_sum"),
    max_cases=12,
)
def gradcheck_passes(session: Session, case: Case) -> None:
    assume(not session.claims.rounding.softmax_in_float32, "the softmax is declared to be in float32")
    # One time in four with a row longer than a tile; each number takes two calls.
    problem = (replace(case, n_heads=1, head_dim=1, B=1, L=17, S=17) if case.seed % 4 == 3 else case).problem()
    if session.claims.dropout and case.mode == "train":
        problem = dropping(problem, 0.5)
    drops = problem.config.dropout > 0
    session.built(problem)  # now, since a construction may draw random numbers
    inputs = [leaf_of(x) for x in (problem.query, problem.key, problem.value)]
    if case.inputs == "self":
        inputs = inputs[:1]

    def output(*given: Tensor) -> Tensor:
        parts = given * 3 if len(given) == 1 else given
        with torch.random.fork_rng(enabled=drops):
            if drops:  # the same in each call
                torch.manual_seed(case.seed)
            return session.forward(problem.change(**dict(zip(INPUTS, parts, strict=True))))

    with guarded("torch.autograd.gradcheck"):
        right = torch.autograd.gradcheck(output, inputs, fast_mode=False, raise_exception=False)
    expect(right, "torch.autograd.gradcheck fails: numerical and analytical Jacobians differ")


@property_of(
    "GRD-3",
    Domain(masks=(*BOOLEAN, *FLOAT), min_S=2, values=EVERYDAY, inputs=("cross", "memory"), modes=WITH_GRADIENT),
    needs="gradients",
    must_reject=("unmasked",),
)
def masked_keys_have_no_gradient(session: Session, case: Case) -> None:
    problem = case.problem()
    gone = (~problem.allowed(None)).all(1).all(1)
    assume(bool(gone.any()), "no key is masked for every query")
    seen = session.gradients(problem, session.upstream(problem))
    for name in (name for name in ("key", "value") if name in seen):
        for index in range(case.B):
            keys = gone[index].nonzero().flatten()
            if len(keys):
                because = f"keys {keys.tolist()} of item {index} are masked for every query and head"
                expect_equal(seen[name][index, keys], 0.0, because=because)


@property_of(
    "GRD-4",
    Domain(masks=("none", *EMPTY, *FEW, *FLOAT), causal=BOTH, values=STEADY, modes=WITH_GRADIENT),
    needs="gradients",
    must_reject=("nan_gradients",),
)
def gradients_are_finite_where_outputs_are(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(case.dtype in BOUNDED or case.values in MODERATE, "a gradient may be out of the dtype's range")
    assume(
        session.claims.empty_row in ("zeros", "uniform") or not bool(session.expected(problem).empty.any()),
        "a row is empty, and its output is not finite",
    )
    assume(bool(session(problem).output.tensor.isfinite().all()), "an output is not finite")
    every = torch.ones(case.B, case.L, device=problem.query.device)
    for gradient in session.gradients(problem, session.upstream(problem, every)).values():
        expect_finite(gradient, "though every output is finite")


@property_of(
    "GRD-6",
    Domain(masks=FLOAT, causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=("unmasked", "zeros", "unscaled"),
)
def an_additive_mask_has_the_right_gradient(session: Session, case: Case) -> None:
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["mask"]
    expected = session.expected_gradients(problem, upstream)["mask"]
    expect_close(gradient, expected, because="the gradient of the scores, summed over what the mask is broadcast to")


@property_of(
    "GRD-7",
    Domain(masks=("none", *FEW), causal=BOTH, bias=(True,), values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs=("gradients", "weight_gradients"),
    requires="HED-1",
    must_reject=("softmax_gradient_without_row_sum",),
)
def the_key_bias_has_no_gradient(session: Session, case: Case) -> None:
    problem = case.problem()
    upstream = session.upstream(problem)
    seen = session.gradients(problem, upstream)
    expected = session.expected_gradients(problem, upstream)["b_k"]
    expect_close(seen["b_k"], expected, because="it adds the same to every score of a row, which the softmax cancels")


@property_of(
    "GRD-7",
    Domain(masks=("full_bias",), causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    must_reject=("softmax_gradient_without_row_sum",),
    number=2,
)
def the_gradients_of_a_row_sum_to_zero(session: Session, case: Case) -> None:
    problem = case.problem()
    upstream = session.upstream(problem)
    gradient = session.gradients(problem, upstream)["mask"]
    bound = session.expected_gradients(problem, upstream)["mask"].sum(-1)
    expect_close(gradient.row_sums(), bound, because="what all scores of a row share, the softmax cancels")
