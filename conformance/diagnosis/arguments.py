"""How the last call of a session reached the user's own code: its arguments, and their shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.recording import CallStep
from mha.conformance.harness.session import Session
from mha.implementations.adapters.construction import Room
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleAttention, ModuleImplementation
from mha.implementations.discovery.resolve import original_of, with_room
from mha.implementations.process.torch_state import preserved

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _ReachedError(Exception):
    """The user's code was reached; arguments: with its own names, in order."""

    def __init__(self, arguments: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.arguments = arguments


def arguments_of(session: Session) -> str:
    """Return the arguments that the last call of a session passed to an adapted module or kernel.

    Empty for an implementation of another kind, and where the last step was no call. The module is
    built again.
    """
    original, step = original_of(session.implementation), session.steps[-1]
    if not isinstance(original, ModuleImplementation | KernelImplementation):
        return ""
    if not isinstance(step, CallStep):
        return ""
    problem, dtype = step.problem, getattr(torch, session.case.dtype)
    inputs = problem.query, problem.key, problem.value
    options = problem.options.change(need_weights=step.need_weights).arguments
    with judging(session.implementation), preserved(), torch.no_grad():
        roomy = with_room(original, Room.for_calls(max(problem.shape[2:]), problem.shape[0]))
        attention: Any = roomy.build(
            problem.config, problem.weights, dtype=dtype, device=session.case.device
        )
        attention.train(MODES[step.mode].training)
        if isinstance(attention, ModuleAttention):
            attention.module.forward = _recording(attention.module.forward)
        else:
            kernel = attention.kernel
            attention.__dict__["kernel"] = _recording(getattr(kernel, "forward", kernel))
        try:
            attention(*inputs, **options)
        except _ReachedError as reached:
            return _in_words(reached.arguments, dtype)
    return ""


def _in_words(arguments: Iterable[tuple[str, Any]], dtype: torch.dtype) -> str:
    texts = []
    for name, value in arguments:
        if value is not None:
            texts.append(f"{name} {_brief(value, dtype)}")
    return ", ".join(texts)


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises `_ReachedError` with the arguments by another one's names."""
    parameters = inspect.signature(function).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in BY_POSITION]

    def reached(*args: Any, **named: Any) -> Any:
        rest = (f"args[{number}]" for number in range(len(args)))
        raise _ReachedError([*zip((*names, *rest), args, strict=False), *named.items()])

    return reached


def _brief(x: Any, dtype: torch.dtype) -> str:
    """Return what is said of an argument: a tensor's shape, and its dtype if that is another one.

    Numbers and words are said as they are, and of anything else the type.
    """
    if isinstance(x, Tensor):
        text = str(tuple(x.shape))
        if x.dtype != dtype:
            text += f" {x.dtype}".replace(" torch.", " ")
        return text
    plain = bool | int | float | str
    are_plain = type(x) is tuple and all(isinstance(each, plain) for each in x)
    if are_plain or isinstance(x, plain):
        return f"{x!r:.80}"
    return type(x).__name__
