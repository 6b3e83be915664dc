"""GRD-5: what is recorded changes neither outputs nor gradients."""

from __future__ import annotations

from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import COMMON, FEW
from mha.conformance.harness.assertions import expect_agree, expect_close, need
from mha.conformance.harness.session import Trial
from mha.conformance.properties.registry import checks
from mha.spec.problem import INPUTS


@checks(
    "GRD-5",
    Domain(
        masks=COMMON,
        causal=BOTH,
        inputs=("cross",),
        regimes=MODERATE,
        paths=WITH_GRADIENT,
        dtypes=BOUNDED,
    ),
    needs="gradients",
    rejects=("erratic",),
)
def any_subset_has_the_same_gradients(attention: Trial, case: Case) -> None:
    problem = case.problem()
    upstream = attention.upstream(problem)
    names = ("mask", *INPUTS) if problem.mask is not None and problem.mask.is_floating_point() else INPUTS
    subset = [name for place, name in enumerate(names) if case.seed % (2 ** len(names) - 1) >> place & 1]
    bounds = attention.right_gradients(problem, upstream)
    every, some = attention.gradients(problem, upstream), attention.gradients(problem, upstream, subset)
    need(bool(some), "no input requires a gradient, and those of the weights are not told")
    for name, gradient in some.items():
        because = f"with requires_grad on {' and '.join(subset) or 'the weights'} alone, as with all"
        expect_agree(gradient, every[name], bounds=(bounds[name], bounds[name]), because=because)


@checks(
    "GRD-5",
    Domain(masks=("none", *FEW), causal=BOTH, regimes=MODERATE, paths=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    after="HED-1",
    rejects=("wild", "detached"),
    limit=12,
    number=2,
)
def frozen_weights_change_no_gradient(attention: Trial, case: Case) -> None:
    problem = case.problem()
    need(isinstance(attention.built(problem).attention, nn.Module), "the attention is no torch.nn.Module")
    upstream = attention.upstream(problem)
    right = attention.right_gradients(problem, upstream)
    # Also of some inputs alone, as where a prompt is tuned that is key and value.
    some = [name for place, name in enumerate(INPUTS) if (case.seed % 7 + 1) >> place & 1]
    wanted = {"cross": some, "memory": INPUTS[case.seed % 2 :]}.get(case.inputs, INPUTS)
    for name, gradient in attention.gradients(problem, upstream, wanted, frozen=True).items():
        expect_close(gradient, right[name], because="the gradient, with weights that require none")


@checks("GRD-5", Domain(masks=("none", *FEW), causal=BOTH, paths=("eval",)), needs="gradients", number=3)
def recording_changes_no_output(attention: Trial, case: Case) -> None:
    problem = case.problem()
    bound = attention.answer(problem).output
    recorded = problem.map_inputs(leaf_of)
    base = attention(recorded).output
    for path in ("no_grad", "inference"):
        seen = attention(problem, path=path).output
        expect_agree(seen, base, bounds=(bound, bound), because=f"{path!r} against what a recorded call gives")
