"""GRD-5: what is recorded changes neither outputs nor gradients; STA-3, as far as it speaks of gradients or lives."""

from __future__ import annotations

import torch
from torch import nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, MODERATE, WITH_GRADIENT, Domain
from mha.conformance.cases.layouts import leaf_of
from mha.conformance.cases.masks import FEW
from mha.conformance.expect import expect_agree, expect_close, expect_unchanged, need
from mha.conformance.properties.changes import expect_slopes, refuses
from mha.conformance.registry import checks
from mha.conformance.trial import Trial
from mha.conformance.violation import Refusal
from mha.spec.problem import INPUTS


@checks(
    "GRD-5",
    Domain(
        masks=("none", *FEW, "bias"),
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


@checks("GRD-5", Domain(masks=("none", *FEW), causal=BOTH, paths=("eval",)), needs="gradients")
def recording_changes_no_output(attention: Trial, case: Case) -> None:
    problem = case.problem()
    bound = attention.answer(problem).output
    recorded = problem.map_inputs(leaf_of)
    base = attention(recorded).output
    for path in ("no_grad", "inference"):
        seen = attention(problem, path=path).output
        expect_agree(seen, base, bounds=(bound, bound), because=f"{path!r} against what a recorded call gives")


@checks(
    "STA-3",
    Domain(masks=("none", *FEW, "bias"), causal=BOTH, regimes=MODERATE, paths=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    after="HED-1",
    rejects=("noise", "wild"),
    limit=20,
)
def calls_between_change_no_gradient(attention: Trial, case: Case) -> None:
    leaves = case.problem().map_inputs(leaf_of)
    output = attention.forward(leaves)
    attention.forward(leaves.map_inputs(lambda x: x.detach().flip(1) + 1))
    expect_slopes(attention, leaves, output, "with another call before the backward pass")


@checks("STA-3", Domain(causal=(True,), inputs=("cross", "memory"), regimes=MODERATE))
def keys_may_be_more_in_the_next_causal_call(attention: Trial, case: Case) -> None:
    problem = case.problem()
    longer = problem.map_inputs(lambda x: x if x is problem.query else torch.cat([x, x.flip(1) + 1], 1))
    need(not refuses(attention, problem), "a row is empty, and the declared policy is 'error'")
    try:
        expected = attention(longer, via=attention.build(problem.config, problem.weights)).output
        attention(problem)
    except Refusal:
        need(False, "L != S is refused, which CAU-3 allows")
    because = "what an attention gives that has not seen as many queries on fewer keys"
    seen = attention(longer).output
    expect_unchanged(attention, seen, expected, bound=lambda: attention.answer(longer).output, because=because)


@checks(
    "STA-3",
    Domain(masks=("none", *FEW), causal=BOTH, regimes=MODERATE, paths=WITH_GRADIENT, dtypes=BOUNDED),
    needs="gradients",
    after="HED-1",
    rejects=("noise", "wild"),
    limit=20,
)
def one_module_serves_all_its_life(attention: Trial, case: Case) -> None:
    """Inference, two steps of training, other weights in the same parameters, and inference again."""
    problem = case.problem()
    built = attention.built(problem)
    module = built.attention
    for path in ("inference", "no_grad"):
        attention(problem, path=path)
    whose = built if isinstance(module, nn.Module) else None  # only its gradients can be cleared
    for step in ("first", "second"):
        if isinstance(module, nn.Module):
            module.zero_grad()
        leaves = problem.map_inputs(leaf_of)
        expect_slopes(attention, leaves, attention.forward(leaves), f"in the {step} step of one module", whose)
    need(isinstance(module, nn.Module), "the attention is no torch.nn.Module")
    assert isinstance(module, nn.Module)
    halved = problem.change(**{name: tensor / 2 for name, tensor in problem.weights.named()})
    other = attention.built(halved).attention
    assert isinstance(other, nn.Module)
    if attention.claims.weight_gradients:
        with torch.no_grad():
            for parameter, new in zip(module.parameters(), other.parameters(), strict=True):
                parameter.copy_(new)
    else:  # the weights need not be parameters
        module.load_state_dict(other.state_dict(), strict=False)
    for path in ("eval", "inference"):
        seen = attention(problem, path=path, via=built).output
        expect_close(
            seen, attention.answer(halved).output, because="the oracle's value for the weights as they are now"
        )
