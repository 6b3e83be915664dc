"""CMP: attention compiled, exported, transformed by torch.func, and under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, BOUNDED, DENSE, MODERATE, Domain
from mha.conformance.cases.mask_kinds import EMPTY
from mha.conformance.cases.memory_layouts import leaf_of
from mha.conformance.cases.modes import MODES
from mha.conformance.harness.assertions import expect_close
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.plain import viewed
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.compiled import (
    CAPTURE,
    assume_code_can_be_generated,
    expect_compiled,
    expect_exported,
    expect_generated_inference,
)
from mha.conformance.properties.support.domains import AUTOCAST, AUTOCAST_DTYPE
from mha.conformance.properties.support.shared_assertions import (
    as_causal,
    assume_answered,
    expect_finite,
    expect_result,
    has_empty_row,
    module_of,
)
from mha.spec import Problem, Weights, oracle
from mha.spec.claims import DTYPES

# A compilation takes a second, and generated code ten, so there is one case of each property. No
# two sizes are equal, and lengths are multiples of 4: at others, Inductor of torch 2.13 may assert
# an alignment of 16 bytes that a part of a tensor does not have, which is not a fault of the
# attention.
ONE_UNMASKED = Domain(
    inputs=("cross",),
    values=("normal",),
    layouts=DENSE,
    modes=("eval",),
    need_weights=(False,),
    min_heads=2,
    min_head_dim=16,
    min_B=3,
    min_L=4,
    min_S=8,
    max_length=8,
)
ONE_MASKED = replace(ONE_UNMASKED, masks=("items", "bias"), inputs=("self",))
# Those in which code is generated.
GENERATED = tuple(dtype for dtype in DTYPES if dtype != "float64")
# The first of its cases has a mask, unless none is claimed.
ONE_OF_ANY = replace(ONE_MASKED, masks=(*ONE_MASKED.masks, "none"))


@property_of(
    "CMP-1", ONE_UNMASKED, needs="composes=compile", requires="HED-1", must_reject=(), max_cases=1
)
def compiled_agrees_with_eager(session: Session, case: Case) -> None:
    """The module compiled by torch.compile agrees with eager, without masks."""
    expect_compiled(session, case, CAPTURE)


@property_of(
    "CMP-1",
    ONE_MASKED,
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=2,
)
def compiled_mask_agrees(session: Session, case: Case) -> None:
    """The module compiled by torch.compile agrees with eager, with a mask and a causal flag."""
    expect_compiled(session, as_causal(session.claims, case), CAPTURE)


@property_of(
    "CMP-1",
    replace(ONE_OF_ANY, dtypes=GENERATED),
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=3,
    slow=True,
)
def generated_code_agrees(session: Session, case: Case) -> None:
    """The code that Inductor generates for the module agrees with eager."""
    assume_code_can_be_generated(case.device)
    expect_compiled(session, as_causal(session.claims, case), "inductor")


@property_of(
    "CMP-1",
    replace(ONE_UNMASKED, dtypes=GENERATED),
    needs="composes=compile",
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=4,
    slow=True,
)
def generated_code_without_gradients_agrees(session: Session, case: Case) -> None:
    """The code that Inductor generates for inference agrees with eager, for equal sizes too."""
    assume_code_can_be_generated(case.device)
    alike = replace(case, n_heads=4, B=4, L=4, S=4)
    for each in (case, alike):
        expect_generated_inference(session, each.problem())


@property_of(
    "CMP-2",
    ONE_UNMASKED,
    needs=("composes=export", "cross_attention=True"),
    requires="HED-1",
    must_reject=(),
    max_cases=1,
)
def exported_program_agrees(session: Session, case: Case) -> None:
    """A program captured by torch.export with dynamic B, L and S agrees, without masks."""
    expect_exported(session, case)


@property_of(
    "CMP-2",
    replace(ONE_MASKED, inputs=("cross",)),
    needs=("composes=export", "cross_attention=True"),
    requires="HED-1",
    must_reject=(),
    max_cases=1,
    number=2,
)
def exported_mask_agrees(session: Session, case: Case) -> None:
    """A program captured by torch.export agrees, with a mask and a causal flag."""
    expect_exported(session, as_causal(session.claims, case))


@property_of(
    "CMP-3",
    Domain(
        masks=("none", "padding", "queries"),
        causal=BOTH,
        values=MODERATE,
        layouts=DENSE,
        need_weights=(False,),
        max_length=17,
        modes=("eval",),
        dtypes=BOUNDED,
    ),
    needs="composes=func",
    requires="HED-1",
    max_cases=12,
)
def functional_transforms_agree(session: Session, case: Case) -> None:
    """functional_call, vmap over two sets of weights, and grad agree with the plain module."""
    problem = case.problem()
    if not problem.config.projected:
        _expect_func_of_queries(session, problem)
        return
    others = Weights.random(problem.config, case.seed + 1).to(problem.query.dtype, case.device)
    other = problem.change(weights=others)
    module = module_of(session.built(problem)).eval()
    own = _parameters(module)
    new = _parameters(module_of(session.built(other)))
    given = session.given.problem(problem)
    options = given.options.arguments

    def call(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
        key, value = (query if x is given.query else x for x in (given.key, given.value))
        result = torch.func.functional_call(module, parameters, (query, key, value), options)
        output: Tensor = result.output
        return output

    upstream = session.upstream(problem)

    def loss(query: Tensor) -> Tensor:
        return (call(new, query) * viewed(upstream)).sum()

    with guarded("torch.func"):
        replaced = call(new, given.query)
        both = {name: torch.stack([own[name], new[name]]) for name in own}
        many = torch.func.vmap(call, in_dims=(0, None))(both, given.query)
        gradient = torch.func.grad(loss)(given.query)
    because = "the oracle's value for other weights, passed by functional_call"
    functional = session.unscripted(replaced, "functional")
    expect_close(functional, session.expected(other).output, because=because)
    _expect_mapped(session, many, (problem, other), "under vmap over two sets of weights")
    _expect_gradient_of_query(session, gradient, other, upstream)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, without history."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _expect_func_of_queries(session: Session, problem: Problem) -> None:
    """Without weights, vmap over two queries and grad of torch.func agree with plain calls."""
    module, given = session.built(problem).attention.eval(), session.given.problem(problem)

    def call(query: Tensor) -> Tensor:
        output: Tensor = given.change(query=query).call(module).output
        return output

    upstream, other = session.upstream(problem), problem.change(query=-problem.query)

    def loss(query: Tensor) -> Tensor:
        return (call(query) * viewed(upstream)).sum()

    with guarded("torch.func"):
        many = torch.func.vmap(call)(torch.stack([given.query, -given.query]))
        gradient = torch.func.grad(loss)(given.query)
    _expect_mapped(session, many, (problem, other), "under vmap over two queries")
    _expect_gradient_of_query(session, gradient, problem, upstream)


def _expect_mapped(session: Session, many: Tensor, problems: Sequence[Problem], how: str) -> None:
    """Each output that vmap gives is the oracle's for its problem; many: (2, B, L, D)."""
    for index, problem in enumerate(problems):
        output = session.unscripted(many[index], f"many[{index}]")
        because = f"the oracle's value, {how}"
        expect_close(output, session.expected(problem).output, because=because)


def _expect_gradient_of_query(
    session: Session, gradient: Tensor, problem: Problem, upstream: Tensor
) -> None:
    """The gradient that torch.func.grad gives is the oracle's of the query."""
    expected = session.expected_gradients(problem, upstream)["query"]
    actual = session.unscripted(gradient, "gradient")
    expect_close(actual, expected, because="the gradient, by torch.func.grad")


@property_of(
    "CMP-4",
    AUTOCAST,
    needs="composes=autocast",
    requires="HED-1",
    must_reject=("lopsided",),
)
def autocast_is_within_the_low_precision_bound(session: Session, case: Case) -> None:
    """Under autocast results are within the bound of low precision, and gradients finite."""
    problem = case.problem()
    assume_answered(session, problem)
    # MSK-8 tests whether empty rows depend on a request for weights.
    need_weights = case.need_weights and case.mask not in EMPTY
    dtypes = AUTOCAST_DTYPE, problem.query.dtype
    result = session(problem, mode="autocast", need_weights=need_weights, dtypes=dtypes)
    because = "the oracle's value, with each product in bfloat16"
    expect_result(result, oracle(problem, session.claims, autocast=AUTOCAST_DTYPE), because)
    if session.claims.gradients and not has_empty_row(session, problem):
        _expect_finite_gradients_under_autocast(session, problem)


def _expect_finite_gradients_under_autocast(session: Session, problem: Problem) -> None:
    """The output of a call under autocast can be differentiated, and every gradient is finite."""
    leaves, instance = session.given.problem(problem.map_inputs(leaf_of)), session.built(problem)
    called, session.scripted = instance.attention, False
    with guarded("backward() of a call under autocast"):
        with MODES["autocast"].enter(session.case.device):
            output = leaves.call(called).output
        output.float().sum().backward()
    gradients = []
    for name, x in leaves.distinct().items():
        if x.grad is not None:
            gradients.append(session.unscripted(x.grad, f"{name}.grad"))
    if session.claims.weight_gradients:
        gradients += session.weight_gradients(instance, problem.weights).values()
    for gradient in gradients:
        expect_finite(gradient, "after a call under autocast")
