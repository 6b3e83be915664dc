"""Attention that is wrong by 1000, and hides it from comparisons: each must fail."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mha.conformance.faults.base import CLAIMS, Complete, Direct
from mha.conformance.faults.hostile import hostile
from mha.conformance.harness import oracle_answers
from mha.spec import Options, Output, Problem, Weights

OFF = 1000.0
# Methods that who compares a tensor may call.
METHODS = (
    "abs",
    "backward",
    "clone",
    "cpu",
    "detach",
    "double",
    "float",
    "isfinite",
    "isnan",
    "reshape",
    "sum",
    "to",
)


def _wrong(self: Complete, *rest: Any) -> tuple[Output, Output]:
    """Return a result that is wrong, and the right one."""
    right = Complete.attend(self, *rest)
    return Output(right.output + OFF, right.weights), right


def _answering(tensor: Tensor, answer: Tensor) -> Tensor:
    """Return a tensor whose methods answer for another one."""
    for name in METHODS:
        setattr(tensor, name, lambda *_, **__: answer)
    tensor.__dict__["grad"] = answer
    return tensor


@hostile
def answers_for_another(self: Complete, *rest: Any) -> Output:
    """Returns a tensor whose methods give the right one."""
    wrong, right = _wrong(self, *rest)
    return Output(_answering(wrong.output, right.output.detach()), wrong.weights)


def _reporting() -> Direct:
    class reports_for_another(Complete):
        """Right, but for weight gradients and decoded outputs, whose methods give right ones."""

        def weight_gradients(self) -> dict[str, Tensor]:
            """Return wrong gradients."""
            right = super().weight_gradients()
            return {name: _answering(gradient + OFF, gradient) for name, gradient in right.items()}

        def decode(self, *given: Any, **options: Any) -> tuple[Tensor, Any]:
            """Return a wrong output, and the cache."""
            output, cache = super().decode(*given, **options)
            return _answering(output + OFF, output), cache

    return Direct(reports_for_another)


reports_for_another = _reporting()


@hostile
def turns_the_inputs(
    self: Complete, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> Output:
    """Attends to twice the values, and marks the inputs so that anybody else would, too."""
    for tensor in (query, key, value):
        other = tensor.detach() * 2
        for name in ("cpu", "detach", "double", "to"):
            setattr(tensor, name, lambda *_, other=other, **__: other.double())
    return Complete.attend(self, *(torch.mul(x, 2) for x in (query, key, value)), *rest)


class _Zeros(Tensor):
    """A tensor of which every function is zero."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            return torch.zeros_like(result) if isinstance(result, Tensor) else result


@hostile
def turns_the_class(self: Complete, query: Tensor, *rest: Any) -> Output:
    """Returns zeros, and gives the inputs a class of which everything is zero."""
    output = Complete.attend(self, query, *rest).output * 0
    query.__class__ = _Zeros
    return Output(output, None)


@hostile
def repairs_earlier_results(self: Complete, *rest: Any) -> Output:
    """Returns other numbers each time, and writes the last ones into its earlier results."""
    output = Complete.attend(self, *rest).output
    returned = self.__dict__.setdefault("returned", [])
    now = output.detach() + len(returned)
    for each in returned:
        if each.shape == now.shape:
            each.copy_(now)
    returned.append(now)
    return Output(now, None)


class _Equal(TorchFunctionMode):
    """A mode in which every comparison succeeds."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_boolean = isinstance(result, Tensor) and result.dtype == torch.bool
        return torch.ones_like(result) if is_boolean else result


class _EqualBelow(TorchDispatchMode):
    """The same, where operations are dispatched."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_boolean = isinstance(result, Tensor) and result.dtype == torch.bool
        return torch.ones_like(result) if is_boolean else result


@hostile
def leaves_a_mode(self: Complete, *rest: Any) -> Output:
    """Enters a mode, and does not leave it."""
    wrong, _ = _wrong(self, *rest)
    _Equal().__enter__()
    return wrong


@hostile
def leaves_a_mode_of_dispatch(self: Complete, *rest: Any) -> Output:
    """Enters a mode of dispatch, and does not leave it."""
    wrong, _ = _wrong(self, *rest)
    _EqualBelow().__enter__()
    return wrong


@hostile
def leaves_a_device(self: Complete, *rest: Any) -> Output:
    """Makes "meta" the default device, on which no tensor has numbers."""
    wrong, _ = _wrong(self, *rest)
    torch.set_default_device("meta")
    return wrong


def _session_above() -> Any:
    """Return the session that calls, out of the frames above."""
    frame = sys._getframe()
    while frame is not None:
        session = frame.f_locals.get("session")
        if session is not None:
            return session
        frame = frame.f_back
    return None


def _asked(problem: Problem, answers: list[Tensor]) -> None:
    """Ask the judge for the result."""
    try:
        answers.append(oracle_answers.expected(problem, CLAIMS).output.mid)
    except RuntimeError:
        answers.append(problem.query * 0)


@hostile
def asks_the_judge(
    self: Complete, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> Output:
    """Returns what the judge expects."""
    mask = options.mask
    weights = Weights(**{name: p.detach() for name, p in self.named_parameters()})
    problem, answers = (
        Problem(self.config, weights, query, key, value, Options(mask)),
        list[Tensor](),
    )
    _asked(problem, answers)
    return Output(answers[0].to(query), None)


@hostile
def asks_from_a_thread(
    self: Complete, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> Output:
    """The same, from a thread."""
    mask = options.mask
    weights = Weights(**{name: p.detach() for name, p in self.named_parameters()})
    problem, answers = (
        Problem(self.config, weights, query, key, value, Options(mask)),
        list[Tensor](),
    )
    thread = threading.Thread(target=_asked, args=(problem, answers))
    thread.start()
    thread.join()
    return Output(answers[0].to(query), None)


@hostile
def asks_the_session(self: Complete, query: Tensor, *rest: Any) -> Output:
    """The same, of the session that it finds in a frame above."""
    session = _session_above()
    try:
        answer = session.expected(session.case.problem()).output.mid
    except (AttributeError, RuntimeError):
        answer = query * 0
    return Output(answer.to(query), None)
