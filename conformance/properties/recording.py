"""GRD-5: what is recorded changes neither outputs nor gradients."""

from __future__ import annotations

from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import COMMON, FEW
from mha.conformance.harness.assertions import assume, expect_agree, expect_close
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.spec.problem import INPUTS


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
    problem = case.problem()
    upstream = session.upstream(problem)
    names = ("mask", *INPUTS) if problem.mask is not None and problem.mask.is_floating_point() else INPUTS
    subset = [name for place, name in enumerate(names) if case.seed % (2 ** len(names) - 1) >> place & 1]
    bounds = session.expected_gradients(problem, upstream)
    every, some = session.gradients(problem, upstream), session.gradients(problem, upstream, subset)
    assume(bool(some), "no input requires a gradient, and those of the weights are not told")
    for name, gradient in some.items():
        because = f"with requires_grad on {' and '.join(subset) or 'the weights'} alone, as with all"
        expect_agree(gradient, every[name], bounds=(bounds[name], bounds[name]), because=because)


@property_of(
    "GRD-5",
    Domain(masks=("none", *FEW), causal=BOTH, values=MODERATE, modes=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    requires="HED-1",
    must_reject=("nan_gradients", "detached"),
    max_cases=12,
    number=2,
)
def frozen_weights_change_no_gradient(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(isinstance(session.built(problem).attention, nn.Module), "the attention is no torch.nn.Module")
    upstream = session.upstream(problem)
    right = session.expected_gradients(problem, upstream)
    # Also of some inputs alone, as where a prompt is tuned that is key and value.
    some = [name for place, name in enumerate(INPUTS) if (case.seed % 7 + 1) >> place & 1]
    wanted = {"cross": some, "memory": INPUTS[case.seed % 2 :]}.get(case.inputs, INPUTS)
    for name, gradient in session.gradients(problem, upstream, wanted, frozen=True).items():
        expect_close(gradient, right[name], because="the gradient, with weights that require none")


@property_of("GRD-5", Domain(masks=("none", *FEW), causal=BOTH, modes=("eval",)), needs="gradients", number=3)
def recording_changes_no_output(session: Session, case: Case) -> None:
    problem = case.problem()
    bound = session.expected(problem).output
    recorded = problem.map_inputs(leaf_of)
    base = session(recorded).output
    for mode in ("no_grad", "inference"):
        seen = session(problem, mode=mode).output
        expect_agree(seen, base, bounds=(bound, bound), because=f"{mode!r} against what a recorded call gives")
