"""STA: state and purity."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.masks import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.harness.assertions import assume, expect, expect_agree, expect_close, expect_unchanged
from mha.conformance.harness.global_state import changes_of_call, changes_of_first_call
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.autocast import LOW, UNDER_AUTOCAST
from mha.conformance.properties.decoding import STEPS, Sequence
from mha.conformance.properties.registry import property_of
from mha.spec import Problem, oracle
from mha.spec.problem import INPUTS

THREADS = 4


def _module(built: Instance) -> nn.Module:
    """Return the attention as a module; what is none has no state to speak of."""
    attention = built.attention
    assume(isinstance(attention, nn.Module), "the attention is no torch.nn.Module")
    assert isinstance(attention, nn.Module)
    return attention


def _state(built: Instance) -> dict[str, Tensor]:
    attention = built.attention
    held = attention.state_dict() if isinstance(attention, nn.Module) else {}
    return {name: tensor.clone() for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan() if a.is_floating_point() else a == b)).all())


@property_of(
    "STA-1", Domain(masks=("none", *BOOLEAN, *FLOAT, *EMPTY), causal=BOTH, layouts=ALL_LAYOUTS), must_reject=()
)
def nothing_that_is_given_is_modified(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(session.claims.empty_row != "error" or case.mask not in EMPTY, "the declared policy is 'error'")
    built = session.built(problem)
    given = {name: tensor for name in (*INPUTS, "mask") if (tensor := getattr(problem, name)) is not None}
    given |= {f"weights.{name}": tensor for name, tensor in problem.weights.named()}
    before, held = {name: tensor.clone() for name, tensor in given.items()}, _state(built)
    session(problem)
    for name, tensor in given.items():
        expect(_same(tensor, before[name]), f"the call changed its {name}")
    for name, tensor in _state(built).items():
        expect(_same(tensor, held.get(name, tensor)), f"the call changed the state {name!r} of the attention")


@property_of("STA-2", Domain(masks=(*COMMON, *EMPTY), causal=BOTH, layouts=ALL_LAYOUTS), must_reject=())
def outputs_share_no_memory(session: Session, case: Case) -> None:
    problem = case.problem()
    assume(session.claims.empty_row != "error" or case.mask not in EMPTY, "the declared policy is 'error'")
    first = session(problem)
    results = [first.output, *([first.weights] if first.weights else [])]
    given = {name: tensor for name in (*INPUTS, "mask") if (tensor := getattr(problem, name)) is not None}
    for seen in results:
        for name, tensor in given.items():
            shared = seen.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            number = seen.name.rpartition("_")[2]
            check = f"assert {seen.code}.untyped_storage().data_ptr() != {name}_{number}.untyped_storage().data_ptr()"
            expect(not shared, f"{seen.code} has its memory in common with the {name}", check)
    module = session.built(problem).attention
    held = {x.untyped_storage().data_ptr() for x in module.parameters()} if isinstance(module, nn.Module) else set()
    for seen in results:
        shared = seen.tensor.numel() > 0 and seen.tensor.untyped_storage().data_ptr() in held
        expect(not shared, f"{seen.code} has its memory in common with a parameter")
    kept = [seen.tensor.clone() for seen in results]
    session(problem.map_inputs(lambda x: x.flip(1) + 1))
    for seen, old in zip(results, kept, strict=True):
        expect(_same(seen.tensor, old), f"a later call changed {seen.code}")


def _reloaded(session: Session, problem: Problem, use: Callable[[Problem], object]) -> Instance:
    """Load the attention's saved state into another, which was used; half of the time both are part of a module."""
    session.scripted = False
    other = problem.change(**{name: tensor + 1 for name, tensor in problem.weights.named()})
    fresh = _module(session.built(other))
    for each in (problem, other):
        use(each)
    saved, both = io.BytesIO(), [_module(session.built(problem)), fresh]
    source, target = map(nn.Sequential, both) if session.case.seed % 2 else both
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    with guarded("load_state_dict"):
        target.load_state_dict(torch.load(saved), strict=True)
    return session.built(other)


@property_of("STA-4", Domain(masks=COMMON, causal=BOTH, values=MODERATE), max_cases=20)
def state_round_trips(session: Session, case: Case) -> None:
    problem = case.problem()
    _module(built := session.built(problem))
    base, bound = session(problem).output, lambda: session.expected(problem).output
    copied = session.derive(built, copy.deepcopy, "copy.deepcopy({})")
    seen = session(problem, via=copied).output
    expect_unchanged(session, seen, base, bound=bound, because="a deep copy is the same attention")
    seen = session(problem, via=_reloaded(session, problem, session)).output
    expect_unchanged(session, seen, base, bound=bound, because="the attention has the same state_dict")
    with torch.no_grad():
        for parameter in _module(built).parameters():
            parameter.zero_()
    seen = session(problem, via=copied).output
    expect_unchanged(session, seen, base, bound=bound, because="only what it was copied from has changed since")


@property_of(
    "STA-4",
    replace(UNDER_AUTOCAST, masks=("none",)),
    needs="composes=autocast",
    requires="HED-1",
    max_cases=5,
    number=2,
)
def what_is_loaded_counts_under_autocast(session: Session, case: Case) -> None:
    problem = case.problem()
    call = partial(session, mode="autocast", need_weights=False, dtypes=(LOW, problem.query.dtype))
    with torch.set_grad_enabled(case.seed // 2 % 2 == 1):
        seen = call(problem, via=_reloaded(session, problem, call)).output
    right = oracle(problem, session.claims, autocast=LOW).output
    expect_close(seen, right, because="the oracle's value for the weights as they are now, under autocast")


@property_of("STA-4", replace(STEPS, max_length=3), needs="decodes", requires="HED-1", max_cases=5, number=3)
def what_is_loaded_counts_in_decoding(session: Session, case: Case) -> None:
    problem = case.problem()
    loaded = _reloaded(session, problem, lambda other: Sequence(session, other).at(0))
    sequence = Sequence(session, problem, loaded)
    sequence.expect_one_pass(torch.cat([sequence.at(place) for place in range(case.L)], 1))


@property_of(
    "STA-5", Domain(masks=COMMON, causal=BOTH, values=("normal",), layouts=DENSE), must_reject=(), max_cases=30
)
def global_state_is_left_alone(session: Session, case: Case) -> None:
    """Global state is left alone: default dtype, gradient mode, random state, thread count, flags, warnings filter."""
    session.scripted = False
    changes = changes_of_call(session, case.problem())
    require_untouched(session.implementation)
    expect(not changes, f"the call changed {' and '.join(changes)}")
    once = changes_of_first_call(session.implementation, case)
    expect(not once, f"the first call of the process changed {' and '.join(once)}")


@property_of("STA-6", Domain(masks=COMMON, causal=BOTH, modes=("eval",)))
def training_mode_matters_to_dropout_alone(session: Session, case: Case) -> None:
    problem = case.problem()
    built, bound = session.built(problem), session.expected(problem).output
    held = _state(built)
    base = session(problem).output
    seen = session(problem, mode="train").output
    expect_agree(seen, base, bounds=(bound, bound), because="what evaluation gives; there is no dropout")
    for name, tensor in _state(built).items():
        # What a first call makes, such as a table of positions, is no change.
        expect(_same(tensor, held.get(name, tensor)), f"a call in training mode changed the state {name!r}")


@property_of(
    "STA-7", Domain(masks=COMMON, causal=BOTH, values=MODERATE, modes=("eval", "no_grad"), min_L=2), max_cases=12
)
def threads_do_not_disturb_one_another(session: Session, case: Case) -> None:
    problem = case.problem()
    problems = [problem.map_inputs(lambda x, shift=shift: x + shift) for shift in range(THREADS)]  # type: ignore[misc]  # loop
    bounds = [session.expected(each).output for each in problems]
    alone = [session(each).output for each in problems]
    called = session.built(problem).attention

    def call(each: Problem) -> Tensor:
        with torch.no_grad():
            return called(each.query, each.key, each.value, mask=each.mask, is_causal=each.is_causal).output

    with guarded("a call from a thread"), ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(call, problems * 4))
    for own, tensor in zip([*range(THREADS)] * 4, together, strict=True):
        seen = session.unscripted(tensor, alone[own].code)
        because = f"what the same call gives alone, here called from one of {THREADS} threads"
        expect_agree(seen, alone[own], bounds=(bounds[own], bounds[own]), because=because)
