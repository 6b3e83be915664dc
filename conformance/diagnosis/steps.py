"""Which step of an incorrect call is the first wrong one, as far as layers and weights show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.cases.modes import MODES
from mha.conformance.diagnosis.evidence import Evidence, calls_of
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.session import Session
from mha.conformance.harness.textbook import TextbookAttention
from mha.conformance.properties.registry import Property
from mha.implementations.adapters.axes_of_inputs import FROM_LAYOUT
from mha.implementations.adapters.construction import Room
from mha.implementations.adapters.loading import ParameterPath
from mha.implementations.adapters.module import ModuleAttention, ModuleImplementation
from mha.implementations.discovery.resolve import original_of, with_room
from mha.implementations.process.torch_state import preserved, threads
from mha.spec import Claims

# How much larger the error of a step may be than that of the textbook's formula in the same dtype,
# as norms.
SLACK = 16.0


class _Formula(TextbookAttention):
    """The textbook's formula, which keeps what its steps gave, by their names."""

    def __init__(self, call: Evidence, claims: Claims, dtype: torch.dtype) -> None:
        super().__init__(claims, call.config, call.weights.to(dtype), torch.Generator())
        self.steps: dict[str, Tensor] = {}
        problem, mask = call.step.problem, call.step.problem.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        inputs = (x.to(dtype) for x in (problem.query, problem.key, problem.value))
        options = problem.options.change(mask=mask).arguments
        with torch.no_grad():
            self.steps["output"] = self(*inputs, **options).output

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S)."""
        self.steps["weights"] = super().weigh(scores, allowed, bias)
        return self.steps["weights"]

    def merge(self, contexts: Tensor) -> Tensor:
        """Return the context (B, L, H * d_k)."""
        self.steps["context"] = super().merge(contexts)
        return self.steps["context"]


def first_wrong_step(prop: Property, session: Session) -> str:
    """Return which steps of the first incorrect call are right, and which is not; "" if unknown.

    Seen are the layers of a module that is adapted by its parameters, and the weights that it
    returns. The implementation is called again.
    """
    original = original_of(session.implementation)
    if not isinstance(original, ModuleImplementation):
        return ""
    with threads(1), judging(session.implementation), preserved():
        calls = calls_of(prop.function, session, session.case)
        wrong = [call for call in calls if call.is_wrong]
        if not wrong:
            return ""
        call = wrong[0]
        problem = call.step.problem
        dtype, device = problem.query.dtype, session.case.device
        room = Room.for_calls(max(problem.shape[2:]), problem.shape[0])
        attention: Any = with_room(original, room).build(
            call.config, call.weights, dtype=dtype, device=device
        )
        steps = list(_steps(attention, call, session.claims))
    return _up_to_the_first_wrong(steps)


def _up_to_the_first_wrong(steps: Sequence[tuple[str, bool]]) -> str:
    """Return the steps in words up to one that is wrong, "" if none is."""
    if len(steps) == 1:  # nothing but the output is seen
        return ""
    texts: list[str] = []
    for name, is_right in steps:
        if not is_right:
            return ", ".join([*texts, f"{name} wrong"])
        texts.append(f"{name} right")
    return ""


def _steps(
    attention: ModuleAttention, call: Evidence, claims: Claims
) -> Iterator[tuple[str, bool]]:
    """Yield whether each step that is seen is right, in order; of a projection, its input."""
    problem, seen = call.step.problem, dict[str, Tensor]()
    for key, layer in _layers(attention):
        layer.register_forward_pre_hook(_recording(key, seen))
    inputs = problem.query, problem.key, problem.value
    with MODES[call.step.mode].enter(str(problem.query.device)):
        attention.train(MODES[call.step.mode].training)
        output, weights, _ = problem.change(need_weights=call.step.need_weights).call(attention)
    back, axes = FROM_LAYOUT[attention.layout], len(attention.layout.split())
    seen = {key: back(x) if x.ndim == axes else x for key, x in seen.items()}
    exact = _Formula(call, claims, torch.float64).steps
    rounded = _Formula(call, claims, problem.query.dtype).steps
    projected = [(x, inputs["qkv".index(key[2])]) for key, x in seen.items() if key != "w_o"]
    if projected:
        yield "projections", all(_is_alike(x, given, given) for x, given in projected)
    for name, tensor in (("weights", weights), ("context", seen.get("w_o")), ("output", output)):
        if tensor is not None:
            yield name, _is_alike(tensor, exact[name], rounded[name])


def _recording(
    key: str, seen: dict[str, Tensor]
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return the hook that keeps the first input of a layer under a key."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        if isinstance(layer, nn.Conv1d):
            x = x.transpose(1, 2)
        seen.setdefault(key, x)

    return hook


def _layers(attention: ModuleAttention) -> Iterator[tuple[str, nn.Module]]:
    """Yield the projections that are modules of their own, by their keys in the declaration."""
    modules = dict(attention.module.named_modules())
    for key, path in attention.parameter_paths.items():
        module = modules.get(_name_of(path))
        if key.startswith("w") and module is not None:
            yield key, module


def _name_of(path: ParameterPath) -> str:
    if isinstance(path, str):
        return path
    return path[0] if path else ""


def _is_alike(actual: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """Return whether a tensor is as near to the exact one as the formula with its roundings.

    It may be flattened.
    """
    if actual.numel() != exact.numel():
        return False
    right = exact.double()
    one_rounding = torch.finfo(rounded.dtype).eps * right.nan_to_num().norm()
    allowed = one_rounding + (rounded - right).nan_to_num().norm()
    error = (actual.double().reshape(right.shape) - right).masked_fill(right.isnan(), 0.0)
    return bool(error.norm() <= SLACK * allowed)
