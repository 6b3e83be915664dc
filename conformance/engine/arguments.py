"""How the last call of a session reached the user's own code: the arguments by its own names, and their shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.harness.integrity import judging
from mha.conformance.harness.recording import BuildStep, CallStep
from mha.conformance.harness.session import Session
from mha.implementations.adapters.kernel import KernelImplementation
from mha.implementations.adapters.module import ModuleAttention, ModuleImplementation
from mha.implementations.discovery import original_of
from mha.implementations.torch_state import preserved


class _ReachedError(Exception):
    """The user's code was reached; arguments: by its own names."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def arguments_of(session: Session) -> str:
    """Return the arguments that the last call of a session passed to an adapted module or kernel.

    Empty for an implementation of another kind, and where the last step was no call. The module is built again.
    """
    original, step = original_of(session.implementation), session.steps[-1]
    build = next((each for each in reversed(session.steps) if isinstance(each, BuildStep)), None)
    adapted = isinstance(original, ModuleImplementation | KernelImplementation)
    if not adapted or not isinstance(step, CallStep) or build is None:
        return ""
    problem, dtype = step.problem, getattr(torch, session.case.dtype)
    inputs = problem.query, problem.key, problem.value
    options = {"mask": problem.mask, "is_causal": problem.is_causal, "need_weights": step.need_weights}
    with judging(session.implementation), preserved(), torch.no_grad():
        attention: Any = original.build(build.config, build.weights, dtype=dtype, device=session.case.device)
        if isinstance(attention, ModuleAttention):
            attention.module.forward = _recording(attention.module.forward)
        else:
            kernel = attention.kernel
            attention.__dict__["kernel"] = _recording(getattr(kernel, "forward", kernel))
        try:
            attention(*inputs, **options)
        except _ReachedError as reached:
            given = {name: x for name, x in reached.arguments.items() if x is not None}
            return ", ".join(f"{name} {_brief(x, dtype)}" for name, x in given.items())
    return ""


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises `_ReachedError` with the arguments by the names of another one."""
    signature = inspect.signature(function)

    def reached(*args: Any, **named: Any) -> Any:
        raise _ReachedError(dict(signature.bind(*args, **named).arguments))

    return reached


def _brief(x: Any, dtype: torch.dtype) -> str:
    """Return the shape of a tensor, with its dtype if it is another one, and anything else as it is."""
    if not isinstance(x, Tensor):
        return f"{x!r:.80}"
    return str(tuple(x.shape)) + (f" {x.dtype}".replace(" torch.", " ") if x.dtype != dtype else "")
