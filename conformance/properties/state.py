"""STA: state and purity; calls one after another (STA-3) are in a module of their own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import ALL_LAYOUTS, BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.mask_kinds import BOOLEAN, COMMON, EMPTY, FLOAT
from mha.conformance.cases.transforms import with_dropout
from mha.conformance.harness.assertions import (
    assume,
    expect,
    expect_agree,
    expect_close,
    expect_unchanged,
)
from mha.conformance.harness.global_state import (
    changes_of_call,
    changes_of_construction,
    changes_of_first_call,
)
from mha.conformance.harness.integrity import require_untouched
from mha.conformance.harness.isolation import guarded
from mha.conformance.harness.recording import RecordedTensor
from mha.conformance.harness.session import Instance, Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.decoded_sequence import DecodedSequence
from mha.conformance.properties.support.domains import AUTOCAST, AUTOCAST_DTYPE, DECODING
from mha.conformance.properties.support.shared_assertions import module_of
from mha.implementations.discovery.loaded import attribute, module_named
from mha.spec import Problem, oracle
from mha.spec.problem import INPUTS

THREADS = 4


def _state(instance: Instance) -> dict[str, Tensor]:
    """Return copies of the tensors in the state_dict, if the attention is a module."""
    attention = instance.attention
    state = attention.state_dict() if isinstance(attention, nn.Module) else {}
    return {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _given(problem: Problem) -> dict[str, Tensor]:
    """Return the inputs of a problem by name, and its mask if there is one."""
    given = {name: getattr(problem, name) for name in INPUTS}
    if problem.mask is not None:
        given["mask"] = problem.mask
    return given


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN being equal to NaN."""
    if a.shape != b.shape:
        return False
    equal = a == b
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


@property_of(
    "STA-1",
    Domain(masks=("none", *BOOLEAN, *FLOAT, *EMPTY), causal=BOTH, layouts=ALL_LAYOUTS),
    must_reject=(),
)
def nothing_that_is_given_is_modified(session: Session, case: Case) -> None:
    """A call modifies neither inputs nor mask nor weights."""
    problem = case.problem()
    assume(
        session.claims.empty_row != "error" or case.mask not in EMPTY,
        "the declared policy is 'error'",
    )
    instance = session.built(problem)
    given = _given(problem)
    for name, tensor in problem.weights.named():
        given[f"weights.{name}"] = tensor
    before = {name: tensor.clone() for name, tensor in given.items()}
    state = _state(instance)
    session(problem)
    for name, tensor in given.items():
        expect(_equal(tensor, before[name]), f"the call changed its {name}")
    for name, tensor in _state(instance).items():
        expect(
            _equal(tensor, state.get(name, tensor)),
            f"the call changed {name!r} in the state of the attention",
        )


@property_of(
    "STA-2", Domain(masks=(*COMMON, *EMPTY), causal=BOTH, layouts=ALL_LAYOUTS), must_reject=()
)
def outputs_share_no_memory(session: Session, case: Case) -> None:
    """The result shares no memory with inputs or parameters, and no later call changes it."""
    problem = case.problem()
    assume(
        session.claims.empty_row != "error" or case.mask not in EMPTY,
        "the declared policy is 'error'",
    )
    first = session(problem)
    results = [first.output]
    if first.weights is not None:
        results.append(first.weights)
    for result in results:
        _expect_no_memory_of_inputs(result, problem)
    for result in results:
        _expect_no_memory_of_parameters(result, session.built(problem))
    for shift in (1, 2, 3):  # results may take turns in a few buffers
        session(problem.map_inputs(partial(_flipped, shift=shift)))
    for result in results:
        expect(_equal(_returned(result), result.tensor), f"a later call changed {result.code}")


def _flipped(x: Tensor, shift: int) -> Tensor:
    """Return other numbers of the same shape (B, N, width)."""
    return x.flip(1) + shift


def _returned(result: RecordedTensor) -> Tensor:
    """Return what the call returned, of which the result is a copy."""
    assert result.returned is not None
    return result.returned


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins, of which it may be a part."""
    return tensor.untyped_storage().data_ptr()


def _expect_no_memory_of_parameters(result: RecordedTensor, instance: Instance) -> None:
    """A result that has elements shares no memory with a parameter."""
    module = instance.attention
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    addresses = {_address(parameter) for parameter in parameters}
    shared = result.tensor.numel() > 0 and _address(_returned(result)) in addresses
    expect(not shared, f"{result.code} shares its memory with a parameter")


def _expect_no_memory_of_inputs(result: RecordedTensor, problem: Problem) -> None:
    """A result shares no memory with inputs or mask."""
    for name, tensor in _given(problem).items():
        shared = _address(_returned(result)) == _address(tensor)
        given = f"{name}_{result.name.rpartition('_')[2]}"
        assertion = (
            f"assert {result.code}.untyped_storage().data_ptr() !="
            f" {given}.untyped_storage().data_ptr()"
        )
        expect(not shared, f"{result.code} shares its memory with the {name}", assertion)


def _reloaded(session: Session, problem: Problem, use: Callable[[Problem], object]) -> Instance:
    """Load the saved state of the problem's attention into another one, which is returned.

    use: how both are called before. Half of the time each is part of another module.
    """
    session.scripted = False
    other = problem.change(**{name: tensor + 1 for name, tensor in problem.weights.named()})
    fresh = module_of(session.built(other))
    for each in (problem, other):
        use(each)
    modules = [module_of(session.built(problem)), fresh]
    if session.case.seed % 2:
        modules = [nn.Sequential(module) for module in modules]
    source, target = modules
    saved = io.BytesIO()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    with guarded("load_state_dict"):
        target.load_state_dict(torch.load(saved), strict=True)
    return session.built(other)


@property_of(
    "STA-4",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE),
    needs="projections",
    must_reject=("unsaved",),
    max_cases=20,
)
def state_round_trips(session: Session, case: Case) -> None:
    """A state_dict that is saved and loaded into a new module gives the same output."""
    problem = case.problem()
    module_of(session.built(problem))
    base, bound = session(problem).output, session.bound_of(problem)
    output = session(problem, via=_reloaded(session, problem, session)).output
    expect_unchanged(
        session, output, base, bound=bound, because="the attention has the same state_dict"
    )


@property_of(
    "STA-8",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE),
    needs="projections",
    must_reject=("unsaved",),
    max_cases=20,
)
def copies_are_the_same_attention(session: Session, case: Case) -> None:
    """A deep copy and a pickled one give the same output; a deep copy keeps its own weights."""
    problem = case.problem()
    instance = session.built(problem)
    module = module_of(instance)
    base, bound = session(problem).output, session.bound_of(problem)

    def expect_the_same_of(copied: Instance, because: str) -> None:
        output = session(problem, via=copied).output
        expect_unchanged(session, output, base, bound=bound, because=because)

    copied = session.derive(instance, copy.deepcopy, "copy.deepcopy({})")
    expect_the_same_of(copied, "a deep copy is the same attention")
    if _can_be_found(instance):
        session.scripted = session.scripted and not hasattr(instance.attention, "adapter")
        pickled = session.derive(instance, _pickled, "pickle.loads(pickle.dumps({}))")
        expect_the_same_of(pickled, "a pickled copy is the same attention")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    expect_the_same_of(copied, "only the original of the copy has changed since")


def _pickled(attention: nn.Module) -> nn.Module:
    """Return a copy made by `pickle`; of an adapter, with a pickled copy of its module."""
    if not hasattr(attention, "adapter"):
        pickled: nn.Module = pickle.loads(pickle.dumps(attention))
        return pickled
    adapter = copy.copy(attention)
    modules = {**attention._modules, "module": pickle.loads(pickle.dumps(attention.module))}
    adapter.__dict__["_modules"] = modules
    return adapter


def _can_be_found(instance: Instance) -> bool:
    """Return whether `pickle` finds the class of an attention; not one that a function made."""
    cls = type(getattr(instance.attention, "module", instance.attention))
    return attribute(module_named(cls.__module__), cls.__qualname__) is cls


@property_of(
    "STA-4",
    replace(AUTOCAST, masks=("none",)),
    needs=("projections", "composes=autocast"),
    requires="HED-1",
    max_cases=5,
    number=2,
)
def what_is_loaded_counts_under_autocast(session: Session, case: Case) -> None:
    """Under autocast the output is that of the weights that were loaded last."""
    problem = case.problem()
    call = partial(
        session, mode="autocast", need_weights=False, dtypes=(AUTOCAST_DTYPE, problem.query.dtype)
    )
    with torch.set_grad_enabled(case.seed // 2 % 2 == 1):
        output = call(problem, via=_reloaded(session, problem, call)).output
    expected = oracle(problem, session.claims, autocast=AUTOCAST_DTYPE).output
    expect_close(
        output,
        expected,
        because="the oracle's value for the weights as they are now, under autocast",
    )


@property_of(
    "STA-4",
    replace(DECODING, max_length=3),
    needs="decodes",
    requires="HED-1",
    max_cases=5,
    number=3,
)
def what_is_loaded_counts_in_decoding(session: Session, case: Case) -> None:
    """Decoding gives the output of the weights that were loaded last."""
    problem = case.problem()
    loaded = _reloaded(
        session, problem, lambda other: DecodedSequence(session, other).decode_position(0)
    )
    sequence = DecodedSequence(session, problem, loaded)
    sequence.expect_one_pass(
        torch.cat([sequence.decode_position(position) for position in range(case.L)], 1)
    )


@property_of(
    "STA-5",
    Domain(masks=COMMON, causal=BOTH, values=("normal",), layouts=DENSE),
    must_reject=(),
    max_cases=30,
)
def global_state_is_left_alone(session: Session, case: Case) -> None:
    """Neither a call, nor the first one of the process, nor construction changes global state."""
    session.scripted = False
    problem = case.problem()
    changes = changes_of_construction(session, problem)
    expect(not changes, f"the construction changed {' and '.join(changes)}")
    if session.claims.dropout and case.seed % 2:
        problem = with_dropout(problem, 0.5)
        session.built(problem).attention.eval()  # where nothing is dropped
    changes = changes_of_call(session, problem)
    require_untouched(session.implementation)
    expect(not changes, f"the call changed {' and '.join(changes)}")
    changes = changes_of_first_call(session.implementation, case)
    expect(not changes, f"the first call of the process changed {' and '.join(changes)}")


@property_of("STA-6", Domain(masks=COMMON, causal=BOTH, modes=("eval",)))
def training_mode_matters_to_dropout_only(session: Session, case: Case) -> None:
    """Without dropout, train() and eval() give the same output, and training changes no state."""
    problem = case.problem()
    instance, bound = session.built(problem), session.bound_of(problem)
    state = _state(instance)
    base = session(problem).output
    output = session(problem, mode="train").output
    expect_agree(
        output,
        base,
        bound,
        because="the output in evaluation (instead of in training without dropout)",
    )
    for name, tensor in _state(instance).items():
        # What a first call creates, such as a table of positions, is not a change.
        expect(
            _equal(tensor, state.get(name, tensor)),
            f"a call in training mode changed {name!r} in the state",
        )


@property_of(
    "STA-7",
    Domain(masks=COMMON, causal=BOTH, values=MODERATE, modes=("eval", "no_grad"), min_L=2),
    must_reject=("haunted",),
    max_cases=12,
)
def threads_do_not_disturb_one_another(session: Session, case: Case) -> None:
    """Calls from several threads on one module give the results of calls one by one."""
    problem = case.problem()
    # Inputs, masks and batch sizes of their own.
    others = (
        replace(case, seed=case.seed + place, B=case.B + place % 2) for place in range(1, THREADS)
    )
    problems = [problem, *(other.problem(weights=problem.weights) for other in others)]
    bounds = [session.bound_of(each) for each in problems]
    alone = [session(each).output for each in problems]
    called = session.built(problem).attention
    problems = [session.given.problem(each) for each in problems]

    def call(each: Problem) -> Tensor:
        with torch.no_grad():
            output: Tensor = each.call(called).output
        return output

    with guarded("a call from a thread"), ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(call, problems * 4))
    for own, tensor in zip([*range(THREADS)] * 4, together, strict=True):
        output = session.unscripted(tensor, alone[own].code)
        because = (
            f"the output of the same call by itself (instead of from one of {THREADS} threads)"
        )
        expect_agree(output, alone[own], bounds[own], because=because)
