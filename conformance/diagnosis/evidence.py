"""Evidence for a diagnosis: what was returned in a failing session, and in calls like it.

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
from mha.conformance.cases.space import CaseSpace
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
    config, weights: of the attention that was called.
    output: (B, L, D), in float64.
    right: the oracle's, with its bound.
    wrong: boolean (B, L), the rows outside that bound.
    filled: boolean (B, H, L), the rows with an allowed key.
    """

    step: CallStep
    config: Config
    weights: Weights
    output: Tensor
    right: Ball
    wrong: Tensor
    filled: Tensor

    @property
    def is_wrong(self) -> bool:
        """Whether any row is outside the bound."""
        return bool(self.wrong.any())


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
        """Return the output, and forget it: what differentiates it may change the inputs."""
        output = super().forward(problem, via)
        self.returned.clear()
        return output


def collect(prop: Property, session: Session) -> list[Sequence[Evidence]]:
    """Return the calls of each session, in order, first those of the failing session.

    None if no answer in that is incorrect. The implementation is called again for all of them.
    """
    found: list[Sequence[Evidence]] = [calls_of(prop.function, session, session.case)]
    if not any(call.is_wrong for call in found[0]):
        return []
    for case in related_cases(prop, session.case):
        if calls := calls_of(prop.function, session, case):
            found.append(calls)
    return found


def related_cases(prop: Property, case: Case) -> Iterator[Case]:
    """Yield a case with other numbers, and with other sizes, some with what is special in it."""
    square = case.inputs in ("self", "query_key", "query_value") or prop.domain.square
    for number in range(1, AGAIN):
        # The last two have ordinary numbers.
        values = case.values if number < AGAIN - 2 else "normal"
        yield replace(case, seed=case.seed + number, values=values)
    for number, sizes in enumerate(_related_sizes(case), AGAIN):
        if square:
            sizes["S"] = sizes["L"]
        yield replace(case, **sizes, seed=case.seed + number, values="normal")


def sizes_of(case: Case) -> dict[str, int]:
    """Return the sizes of a case, by `NAMES`."""
    return {name: getattr(case, name) for name in NAMES}


def _related_sizes(case: Case) -> Iterator[dict[str, Any]]:
    own = sizes_of(case)
    larger: dict[str, Any] = dict(zip(NAMES, RELATED[0], strict=True))
    for name, size in own.items():
        if size == 1:
            yield larger | {name: 1}
    special = {name: size for name, size in own.items() if size > LARGE}
    yield larger | special
    yield larger | {name: size * 3 // 2 for name, size in special.items()}  # of another tile
    yield larger | {"S": larger["L"]}
    yield larger | {"n_heads": larger["B"]}
    for row in RELATED:
        yield dict(zip(NAMES, row, strict=True))


# Of the last implementations, by identity, as one need not be hashable; it is kept alive so that
# its id is not reused.
KEPT = 8
_plain: dict[tuple[int, str, str], tuple[Implementation, PlainCalls]] = {}


def plain_calls(session: Session) -> PlainCalls:
    """Return calls with each claimed form of mask, whatever the property is about."""
    key = id(session.implementation), session.case.dtype, session.case.device
    if key not in _plain:
        if len(_plain) == KEPT:
            oldest, *_ = _plain
            del _plain[oldest]
        made = []
        for case in plain_cases(session, PLAIN_SIZES):
            if calls := calls_of(_call_thrice, session, case):
                made.append(tuple(calls))
        _plain[key] = session.implementation, tuple(made)
    return _plain[key][1]


def answers(implementation: Implementation, session: Session) -> list[Tensor]:
    """Return the answers to calls with each claimed form of mask, larger than the plain ones."""
    outputs: list[Tensor] = []
    for plain in plain_cases(session, [WIDE]):
        case = replace(plain, dtype="float64")
        calls = calls_of(_call_thrice, Session(implementation, case), case)
        outputs += [call.output for call in calls]
    return outputs


def _call_thrice(session: Session, case: Case) -> None:
    """Call an attention on three problems of the same shapes: plainly, for weights, in training."""
    first = case.problem()
    session(first)
    second = replace(case, seed=case.seed + 100).problem(weights=first.weights)
    third = replace(case, seed=case.seed + 200).problem(weights=first.weights)
    session(second, need_weights=session.claims.returns_weights)
    session(third, mode="train")


def plain_cases(session: Session, sizes: Sequence[Sizes]) -> Iterator[Case]:
    """Yield cases with each claimed form of mask in each size, with and without the causal flag."""
    domain = PLAIN.within(session.claims)
    if not isinstance(domain, Domain):
        return
    inputs = CLAIMED_INPUTS[session.claims.cross_attention][0]
    longest = max(session.case.L, session.case.S)
    space = CaseSpace(domain, session.claims, session.case.dtype, session.case.device, longest)
    for number, (mask, causal, own) in enumerate(product(domain.masks, domain.causal, sizes)):
        row: dict[str, Any] = dict(zip(NAMES, own, strict=True))
        row |= {
            "mask": mask,
            "causal": causal,
            "inputs": inputs,
            "bias": domain.bias[0],
            "seed": number,
        }
        yield space.case(row)


def calls_of(function: PropertyFunction, session: Session, case: Case) -> list[Evidence]:
    """Run a property; return its plain calls in order."""
    claims = session.claims
    sizes: dict[str, Any] = fit_sizes(sizes_of(case), claims)
    recorder = Recorder(session.implementation, replace(case, **sizes))
    joins = joins_causal(session.implementation)
    # Whatever a case of other sizes leads to, it says nothing about the property.
    with suppress(Exception), preserved():
        function(recorder, recorder.case)
    builds: dict[int, BuildStep] = {}
    calls = []
    for step in recorder.steps:
        if isinstance(step, BuildStep):
            builds[step.number] = step
        elif isinstance(step, CallStep) and step.number in recorder.returned:
            build = builds.get(step.build)
            if build is None or not _is_plain(step, build.config):
                continue
            output = recorder.returned[step.number].double().cpu()
            found = _evidence(step, build, output, claims)
            if joins:
                found = replace(found, step=_with_joined_masks(step, claims))
            calls.append(found)
    return calls


def joins_causal(implementation: Implementation) -> bool:
    """Return whether an adapter joins the causal flag to the mask, as for code without a flag."""
    call, claims = getattr(original_of(implementation), "call", None), implementation.claims
    if not isinstance(call, CallByName) or call.signature.is_causal:
        return False
    masks = call.masks
    by_other_means = claims.always_causal or masks.causal_by_default or masks.causal_word
    return bool(claims.causal) and not by_other_means


def _with_joined_masks(step: CallStep, claims: Claims) -> CallStep:
    problem = step.problem
    if not (problem.is_causal and claims.causal):
        return step
    causal = causal_mask(*problem.shape[2:], claims.causal, problem.query.device)[None, None]
    joined = join_causal(problem.mask, causal)
    return replace(step, problem=problem.change(mask=joined, is_causal=False))


def _is_plain(step: CallStep, config: Config) -> bool:
    """Return whether the textbook's formula says what a call returns."""
    problem = step.problem
    for x in (problem.query, problem.key, problem.value):
        if not bool(x.isfinite().all()):
            return False
    is_variant = config.extra_keys or config.length_first or step.mode == "autocast"
    drops = config.drops and MODES[step.mode].training
    return not is_variant and not drops and _fits_together(problem)


def _fits_together(problem: Problem) -> bool:
    """Return whether shapes agree and no size is 0; other inputs should have been refused."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    if query.ndim != 3 or key.ndim != 3 or len(query) != len(key):
        return False
    if key.shape[:2] != value.shape[:2]:
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
    is_within = (output - right.mid).abs() <= right.rad
    is_same = (output == right.mid) | (output.isnan() & right.mid.isnan())
    wrong = ~(is_within | is_same | right.rad.isinf()).all(-1)
    return Evidence(step, build.config, build.weights, output, right, wrong, ~expected.empty)
