"""What the scripts of a module and of a kernel share: the inputs, the call, and its result."""

from __future__ import annotations

import inspect
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.memory_layouts import copy_of
from mha.conformance.harness.integrity import judging
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep, Step
from mha.conformance.harness.session import Session
from mha.conformance.scripts.literals import in_mode, literal, name_tensor
from mha.conformance.scripts.terms import Imports, InexpressibleError, is_default, value_code
from mha.implementations.process.pristine import as_found
from mha.implementations.process.torch_state import preserved
from mha.spec import Problem
from mha.spec.problem import INPUTS

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Where the assertion asks for the gradient of a weight.
WEIGHT_GRADIENT = re.compile(r"attention_(\d+)\.weight_gradients\(\)\['(\w+)'\]")


class Recorder:
    """Stands for what a call reaches: writes its arguments, calls it, and keeps what it returns.

    write: returns the code of the call.
    ended: whether it returned.
    """

    def __init__(self, target: Callable[..., Any], write: Callable[..., str]) -> None:
        self.target, self.write = target, write
        self.code, self.returned, self.ended = "", None, False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the target."""
        self.code = self.write(args, named)
        self.returned = self.target(*args, **named)
        self.ended = True
        return self.returned


class Writer(ABC):
    """Writes the steps of a session as an author of the code under test would.

    The steps are taken again, to see what reaches that code.

    assertion: the lines that fail.
    careful: whether a gradient that is not there is written as zeros, which few scripts need.
    """

    def __init__(
        self, session: Session, assertion: Sequence[str], target: str, *, careful: bool = False
    ) -> None:
        self.session, self.assertion, self.careful = session, assertion, careful
        self.imports = Imports(target)
        # Names in the script, of tensors by their ids, and of masks by their code.
        self.names: dict[int, str] = {}
        self.masks: dict[str, str] = {}
        # Of each attention, the step that built it.
        self.builds: dict[int, BuildStep] = {}
        # The author's own masks of each call.
        self.own_masks: dict[int, list[str]] = {}

    def lines(self, step: Step) -> list[str]:
        """Return the lines of a step."""
        with self.replaying():
            match step:
                case BuildStep():
                    self.builds[step.number] = step
                    return self.build(step)
                case DeriveStep():
                    self.builds[step.number] = self.builds[step.origin]
                    return self.derive(step)
                case CallStep():
                    return self._call(step)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the author's code run in the block as it is judged, and leave nothing behind."""
        with judging(self.session.implementation), preserved(), as_found():
            warnings.simplefilter("ignore")
            yield

    @abstractmethod
    def build(self, step: BuildStep) -> list[str]:
        """Return the lines that build an attention."""

    @abstractmethod
    def derive(self, step: DeriveStep) -> list[str]:
        """Return the lines that make an attention of another one."""

    @abstractmethod
    def call(self, step: CallStep, inputs: Mapping[str, str], lines: list[str]) -> list[str]:
        """Return the lines of a call; inputs: their names. Definitions are added to `lines`."""

    @abstractmethod
    def weight_gradient(self, number: int, name: str) -> str:
        """Return the code of the gradient of a weight of an attention."""

    def open_lines(self) -> list[str]:
        """Return the lines that stand before all steps, once these are known; by default none."""
        return []

    @abstractmethod
    def parameters_code(self, number: int) -> str:
        """Return the code of what has gradients in an attention, after a star."""

    def assertion_lines(self) -> list[str]:
        """Return the assertion in the author's own names."""

        def own(found: re.Match[str]) -> str:
            return self.weight_gradient(int(found[1]), found[2])

        lines: list[str] = []
        for line in self.assertion:
            lines += self._of_own_masks(WEIGHT_GRADIENT.sub(own, line))
        return lines

    def _of_own_masks(self, line: str) -> list[str]:
        """Return an assertion, for each of the author's masks if it is on a mask that changed."""
        found = re.search(r"\bmask_(\d+)\._version", line)
        if found is None:
            return [line]
        own = self.own_masks.get(int(found[1]), [])
        return [line.replace(f"mask_{found[1]}", name) for name in own] or [line]

    def mentions(self, name: str) -> bool:
        """Return whether the assertion uses the value of a name, and not only its version."""
        return any(re.search(rf"\b{name}\b(?!\._version)", line) for line in self.assertion)

    def _call(self, step: CallStep) -> list[str]:
        problem, number = step.problem, step.number
        lines: list[str] = []
        inputs: dict[str, str] = {}
        for name in INPUTS:
            value = getattr(problem, name)
            inputs[name] = name_tensor(value, f"{name}_{number}", self.names, lines)
        if problem.mask is not None and (self.mentions(f"mask_{number}") or "mask" in step.leaves):
            inputs["mask"] = self._canonical_mask(problem.mask, number, lines)
        upstream = ""
        if step.upstream is not None:
            upstream = name_tensor(step.upstream, f"upstream_{number}", self.names, lines)
        called = self.call(step, inputs, lines)
        if step.seed is not None:
            lines.append(f"torch.manual_seed({step.seed})")
        leaves = list(dict.fromkeys(inputs[name] for name in step.leaves))
        lines += [f"{name}.requires_grad_()" for name in leaves]
        lines += in_mode(step.mode, problem.query.device.type, called)
        if upstream:
            lines += self._backward(step, upstream, leaves)
        return lines

    def _canonical_mask(self, mask: Tensor, number: int, lines: list[str]) -> str:
        """Return the name of a mask as the contract has it, which the assertion uses."""
        if id(mask) not in self.names and mask.dtype == torch.bool:
            lines.append(f"# mask_{number}: True = may attend")
        return name_tensor(mask, f"mask_{number}", self.names, lines)

    def _backward(self, step: CallStep, upstream: str, leaves: Sequence[str]) -> list[str]:
        line = f"output_{step.number}.backward({upstream})"
        if not self.careful:
            return [line]
        differentiated = ", ".join([*leaves, f"*{self.parameters_code(step.build)}"])
        if not leaves:
            differentiated += ","  # a tuple, as (*x) is none
        return [
            f"if output_{step.number}.requires_grad:",
            f"    {line}",
            f"for x in ({differentiated}):",
            "    x.grad = torch.zeros_like(x) if x.grad is None else x.grad  # no gradient is zero",
        ]

    def arguments_code(
        self,
        step: CallStep,
        known: Mapping[int, str],
        parameters: Mapping[str, inspect.Parameter],
        lines: list[str],
    ) -> Callable[[Sequence[Any], Mapping[str, Any]], list[str]]:
        """Return what writes the arguments of a call, tensors by name, without defaults.

        known: the code of tensors by their ids.
        parameters: of the author's function.
        """
        positional = [
            name for name, parameter in parameters.items() if parameter.kind in BY_POSITION
        ]

        def write(args: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
            names = [*positional, *(f"given_{i}" for i in range(len(args)))]
            codes = []
            for name, value in zip(names, args, strict=False):
                codes.append(self._argument(step, name, value, known, lines))
            for name, value in named.items():
                if name in parameters and is_default(value, parameters[name].default):
                    continue
                codes.append(f"{name}={self._argument(step, name, value, known, lines)}")
            return codes

        return write

    def _argument(
        self, step: CallStep, name: str, value: Any, known: Mapping[int, str], lines: list[str]
    ) -> str:
        if not isinstance(value, Tensor):
            return value_code(value, self.imports)
        if id(value) in known:
            return known[id(value)]
        mask = step.problem.mask
        if "mask" in step.wanted and mask is not None and "mask" in name:
            return _of_mask(self.names[id(mask)], mask, value)
        text = literal(value)
        if text not in self.masks:
            own = f"{name}_{step.number}"
            names_canonical = name == "mask" and mask is not None and id(mask) in self.names
            if name in INPUTS or names_canonical:  # the script has that name already
                own = f"own_{own}"
            self.masks[text] = own
            lines.append(f"{own} = {text}")
        self.own_masks.setdefault(step.number, []).append(self.masks[text])
        return self.masks[text]


def _of_mask(code: str, mask: Tensor, value: Tensor) -> str:
    """Return the code of a mask that requires a gradient, in the author's shape.

    Raises InexpressibleError where it is rearranged.
    """
    shape = tuple(value.shape)
    with_axes = mask[(None,) * max(value.ndim - mask.ndim, 0)]
    with torch.no_grad():
        if with_axes.ndim == value.ndim and with_axes.expand(shape).equal(value):
            return f"{code}.expand{shape}"
        if mask.numel() == value.numel() and mask.reshape(shape).equal(value):
            return f"{code}.reshape{shape}"
    raise InexpressibleError(
        "its mask has a gradient, and another layout than that of the contract"
    )


def copies_of(
    problem: Problem, inputs: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Return copies of the inputs by their names, and the code of each by its id.

    Inputs that are one tensor stay one.

    inputs: the names in the script, of which that of the mask may be missing.
    """
    made: dict[int, Tensor] = {}
    given, codes = dict[str, Tensor](), dict[int, str]()
    for name in (*INPUTS, "mask"):
        x = getattr(problem, name)
        if x is None:
            continue
        given[name] = made.setdefault(id(x), copy_of(x))
        if name in inputs:
            codes[id(given[name])] = inputs[name]
    return given, codes


def taken(code: str, returned: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Return the lines that take the wanted tensors, by name, of what a call returns.

    code: of the call.
    """
    names = [*wanted]
    if returned is wanted[names[0]]:
        return [f"{names[0]} = {code}"]
    places = [_place(returned, x) for x in wanted.values()]
    if type(returned) in (tuple, list) and len(returned) == 2 and places[0] == "[0]":
        first, second = [*names, "_"][:2]
        return [f"{first}, {second} = {code}"]
    if len(names) == 1:
        return [f"{names[0]} = {code}{places[0]}"]
    parts = [f"{name} = returned{place}" for name, place in zip(names, places, strict=True)]
    return [f"returned = {code}", *parts]


def _place(returned: Any, wanted: Any) -> str:
    """Return the code that takes a member of what a call returned."""
    if isinstance(returned, Mapping):
        return next(f"[{key!r}]" for key, value in returned.items() if value is wanted)
    if is_dataclass(returned):
        names = [field.name for field in fields(returned)]
    elif isinstance(returned, SimpleNamespace):
        names = [*vars(returned)]
    else:
        names = [*getattr(returned, "_fields", ())]
    for name in names:
        if getattr(returned, name) is wanted:
            return f".{name}"
    return next(f"[{number}]" for number, value in enumerate(returned) if value is wanted)
