"""Evidence for a diagnosis: what an implementation returned in a failing session, and in calls like
it.

The other calls keep coincidences out. They repeat the property on the same case with other numbers,
and on cases of other sizes; and there are plain calls with each claimed form of mask, whatever the
property is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.claimed import fit_sizes
from mha.conformance.cases.domain import BOTH, CLAIMED_INPUTS, DENSE, Domain
from mha.conformance.cases.modes import MODES
from mha.conformance.harness.recording import BuildStep, CallStep, RecordedOutput
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.registry import Property, PropertyFunction
from mha.implementations.adapters.calling import CallByName
from mha.implementations.discovery.resolve import original_of
from mha.implementations.process.torch_state import preserved
from mha.spec import Claims, Config, Implementation, Problem, Weights, causal_mask, oracle
from mha.spec.bounds import Ball
from mha.spec.masks import join_causal

# Sizes of related cases. None of them repeats within a case, so that no two defects coincide.
NAMES = ("n_heads", "head_dim", "B", "L", "S")
RELATED = ((2, 3, 4, 5, 7), (3, 4, 2, 6, 5), (3, 2, 2, 5, 29), (2, 3, 2, 13, 45))
PLAIN = Domain(
    masks=("none", "padding", "queries", "full", "bias", "full_bias"),
    causal=BOTH,
    values=("normal",),
    layouts=DENSE,
)
# Those of plain calls.
PLAIN_SIZES = (*RELATED[:2], (2, 3, 1, 4, 6), (2, 5, 3, 7, 4))
# Those of calls to a defective formula.
WIDE = (2, 27, 3, 21, 77)
# Sizes above this are special.
LARGE = 8
# How many cases of the same sizes have other numbers.
AGAIN = 8


@dataclass(frozen=True, eq=False)
class Evidence:
    """A plain call, and what it returned.

    step: with the masks that the implementation was given: the causal flag is part of the mask
        where it has no flag.
    config, weights: of the attention that was called. output: (B, L, D), in float64. right: the
        oracle's, with its bound. wrong: boolean (B, L), the rows outside that bound. filled:
        boolean (B, H, L), the rows with an allowed key.
    """

    step: CallStep
    config: Config
    weights: Weights
    output: Tensor
    right: Ball
    wrong: Tensor
    filled: Tensor


Sizes = tuple[int, int, int, int, int]
# The plain calls of each session.
PlainCalls = tuple[tuple[Evidence, ...], ...]


class Recorder(Session):
    """A session that keeps what each call returned."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.returned: dict[int, Tensor] = {}

    def _recorded(
        self, step: CallStep, returned: Any, dtypes: tuple[torch.dtype, ...]
    ) -> RecordedOutput:
        recorded = super()._recorded(step, returned, dtypes)
        self.returned[step.number] = recorded.output.tensor.detach().clone()
        return recorded

    def forward(self, problem: Problem, via: Instance | None = None) -> Tensor:
        """Return the output, which is no evidence: what differentiates it may change the inputs in
        between.
        """
        output = super().forward(problem, via)
        self.returned.clear()
        return output


def collect(prop: Property, session: Session) -> list[Sequence[Evidence]]:
    """Return the calls of each session, first those of the failing one; none if no answer in that
    is incorrect.

    A session is a sequence of calls in order. The implementation is called again for all of them.
    """
    case = session.case
    first = calls_of(prop.function, session, case)
    if not any(bool(call.wrong.any()) for call in first):
        return []
    others = [calls_of(prop.function, session, each) for each in related_cases(prop, case)]
    return [calls for calls in (first, *others) if calls]


def related_cases(prop: Property, case: Case) -> Iterator[Case]:
    """Yield a case of a property with other numbers, and cases of other sizes, some with what is
    special in it.
    """
    square = case.inputs in ("self", "query_key", "query_value") or prop.domain.square
    for number in range(1, AGAIN):
        yield replace(
            case, seed=case.seed + number, values=case.values if number < AGAIN - 2 else "normal"
        )
    for number, sizes in enumerate(_related_sizes(case), AGAIN):
        row = {**sizes, "S": sizes["L"]} if square else sizes
        yield replace(case, **row, seed=case.seed + number, values="normal")


def _related_sizes(case: Case) -> Iterator[dict[str, Any]]:
    own = {name: getattr(case, name) for name in NAMES}
    larger: dict[str, Any] = dict(zip(NAMES, RELATED[0], strict=True))
    for name, size in own.items():
        if size == 1:
            yield larger | {name: 1}
    yield larger | {name: size for name, size in own.items() if size > LARGE}
    yield larger | {
        name: size * 3 // 2 for name, size in own.items() if size > LARGE
    }  # of another tile
    yield larger | {"S": larger["L"]}
    yield larger | {"n_heads": larger["B"]}
    for row in RELATED:
        yield dict(zip(NAMES, row, strict=True))


# Of the last implementations, by identity, as one need not be hashable; it is kept alive so that
# its id is not reused.
KEPT = 8
_plain: dict[tuple[int, str, str], tuple[Implementation, PlainCalls]] = {}


def plain_calls(session: Session) -> PlainCalls:
    """Return calls with each claimed form of mask, whatever the property is about; a session is a
    tuple of them.
    """
    key = id(session.implementation), session.case.dtype, session.case.device
    if key not in _plain:
        if len(_plain) == KEPT:
            del _plain[next(iter(_plain))]
        made = (
            tuple(calls_of(_call_thrice, session, case))
            for case in plain_cases(session, PLAIN_SIZES)
        )
        _plain[key] = session.implementation, tuple(calls for calls in made if calls)
    return _plain[key][1]


def answers(implementation: Implementation, session: Session) -> list[Tensor]:
    """Return what an implementation answers to calls with each claimed form of mask, larger than
    the plain ones.
    """
    cases = [replace(case, dtype="float64") for case in plain_cases(session, [WIDE])]
    calls = (calls_of(_call_thrice, Session(implementation, case), case) for case in cases)
    return [call.output for made in calls for call in made]


def _call_thrice(session: Session, case: Case) -> None:
    """Call an attention on three problems of the same shapes, the second time with weights, the
    third in training.
    """
    problem = case.problem()
    session(problem)
    other, last = (
        replace(case, seed=case.seed + number).problem(weights=problem.weights)
        for number in (100, 200)
    )
    session(other, need_weights=session.claims.returns_weights)
    session(last, mode="train")


def plain_cases(session: Session, sizes: Sequence[Sizes]) -> Iterator[Case]:
    """Yield cases with each claimed form of mask in each of these sizes, with and without the
    causal flag.
    """
    domain = PLAIN.within(session.claims)
    if not isinstance(domain, Domain):
        return
    inputs = CLAIMED_INPUTS[session.claims.cross_attention][0]
    for number, (mask, causal, own) in enumerate(product(domain.masks, domain.causal, sizes)):
        row: dict[str, Any] = dict(zip(NAMES, own, strict=True))
        row |= {
            "mask": mask,
            "causal": causal,
            "inputs": inputs,
            "bias": domain.bias[0],
            "seed": number,
        }
        yield domain.case(session.claims, session.case.dtype, session.case.device, row)


def calls_of(function: PropertyFunction, session: Session, case: Case) -> list[Evidence]:
    """Run a property; return its plain calls in order."""
    claims = session.claims
    sizes: dict[str, Any] = fit_sizes({name: getattr(case, name) for name in NAMES}, claims)
    recorder = Recorder(session.implementation, replace(case, **sizes))
    joins = joins_causal(session.implementation)
    # Whatever a case of other sizes leads to, it says nothing about the property.
    with suppress(Exception), preserved():
        function(recorder, recorder.case)
    builds = {step.number: step for step in recorder.steps if isinstance(step, BuildStep)}
    calls = []
    for step in recorder.steps:
        if isinstance(step, CallStep) and step.number in recorder.returned and step.build in builds:
            build = builds[step.build]
            if _is_plain(step, build.config):
                found = _evidence(
                    step, build, recorder.returned[step.number].double().cpu(), claims
                )
                calls.append(
                    replace(found, step=_with_joined_masks(step, claims)) if joins else found
                )
    return calls


def joins_causal(implementation: Implementation) -> bool:
    """Return whether an adapter makes the causal flag a part of the mask, since what it adapts has
    none.
    """
    call, claims = getattr(original_of(implementation), "call", None), implementation.claims
    if not isinstance(call, CallByName) or call.signature.is_causal:
        return False
    return bool(claims.causal) and not (claims.always_causal or call.masks.causal_by_default)


def _with_joined_masks(step: CallStep, claims: Claims) -> CallStep:
    problem = step.problem
    if not (problem.is_causal and claims.causal):
        return step
    causal = causal_mask(*problem.shape[2:], claims.causal, problem.query.device)[None, None]
    return replace(
        step, problem=problem.change(mask=join_causal(problem.mask, causal), is_causal=False)
    )


def _is_plain(step: CallStep, config: Config) -> bool:
    """Return whether the textbook's formula says what a call returns."""
    problem = step.problem
    if not all(
        bool(x.isfinite().all()) for x in (step.problem.query, step.problem.key, step.problem.value)
    ):
        return False
    variant = config.extra_keys or config.length_first or step.mode == "autocast"
    return (
        not variant and _fits_together(problem) and not (config.drops and MODES[step.mode].training)
    )


def _fits_together(problem: Problem) -> bool:
    """Return whether shapes agree and no size is 0; a call with other inputs should have been
    refused.
    """
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    if (
        query.ndim != 3
        or key.ndim != 3
        or len(query) != len(key)
        or key.shape[:2] != value.shape[:2]
    ):
        return False
    try:
        if mask is not None:
            mask.expand(problem.shape)  # `torch.broadcast_shapes` imports SymPy
    except RuntimeError:
        return False
    return 0 not in problem.shape


def _evidence(step: CallStep, build: BuildStep, output: Tensor, claims: Claims) -> Evidence:
    with torch.inference_mode():
        expected = oracle(step.problem.cpu(), claims)
    right = expected.output
    same = (
        ((output - right.mid).abs() <= right.rad)
        | (output.isnan() & right.mid.isnan())
        | (output == right.mid)
    )
    wrong = ~(same | right.rad.isinf()).all(-1)
    return Evidence(step, build.config, build.weights, output, right, wrong, ~expected.empty)
