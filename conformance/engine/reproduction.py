"""A failure as a stand-alone script: it needs torch, the implementation and its containers, not the judge."""

from __future__ import annotations

import base64
import sys
import textwrap
import zlib
from pathlib import Path

import torch
from torch import Tensor

from mha.conformance.cases.modes import MODES
from mha.conformance.engine.redrawn import config_code, redrawn
from mha.conformance.harness.errors import CallRaised, Violation
from mha.conformance.harness.recording import BuildStep, CallStep, DeriveStep, Step
from mha.conformance.harness.session import Session
from mha.implementations.discovery import original_of, split_name
from mha.spec import CLAUSES, Implementation
from mha.spec.problem import INPUTS

# Above this many numbers a tensor is written as compressed bytes: a longer list helps nobody.
READABLE = 64
# In columns.
DOCSTRING_WIDTH = 100
# What a script may need besides torch.
MODULES = ("base64", "copy", "io", "warnings", "zlib")


def script(session: Session, clause: str, violation: Violation, *, target: str = "") -> str | None:
    """Return a script that repeats a session and fails as it did, or None where its steps do not show the failure.

    target: how the implementation was named; see `mha.implementations.resolve`.
    """
    if not session.scripted or not (violation.assertion or isinstance(violation, CallRaised)):
        return None
    known = CLAUSES[clause]
    names: dict[int, str] = {}
    body = redrawn(session, names)
    for step in session.steps:
        body += _lines(step, session, names)
    body += violation.assertion
    used = [module for module in MODULES if any(f"{module}." in line for line in body)]
    lines = [
        textwrap.fill(f'"""{clause} ({known.level}): {known.statement}', DOCSTRING_WIDTH),
        "",
        f"{session.case!r}",
        '"""',
        "",
        *(f"import {module}" for module in used),
        *[""] * bool(used),
        "import torch",
        "from torch import inf, nan, tensor  # noqa: F401  a script uses what its tensors need",
        "",
        *_import(session.implementation, target),
        "from mha.spec import Config, Weights",
        *_on_ranks(session.case.ranks),
        "",
        "torch.set_num_threads(1)  # as it was judged",
        *body,
    ]
    return "\n".join(lines) + "\n"


def _lines(step: Step, session: Session, names: dict[int, str]) -> list[str]:
    match step:
        case BuildStep():
            return _build(step, session, names)
        case DeriveStep():
            return [f"attention_{step.number} = {step.code.format(f'attention_{step.origin}')}"]
        case CallStep():
            return _call(step, session, names)


def _build(build: BuildStep, session: Session, names: dict[int, str]) -> list[str]:
    lines: list[str] = []
    named = build.weights.named()
    weights = ", ".join(f"{name}={_name(tensor, f'{name}_{build.number}', names, lines)}" for name, tensor in named)
    options = f"dtype=torch.{session.case.dtype}, device={session.case.device!r}"
    config = config_code(build.config)
    lines.append(f"attention_{build.number} = implementation.build({config}, Weights({weights}), {options})")
    return lines


def _call(call: CallStep, session: Session, names: dict[int, str]) -> list[str]:
    lines: list[str] = []
    problem, number, mode = call.problem, call.number, MODES[call.mode]
    inputs = [_name(getattr(problem, name), f"{name}_{number}", names, lines) for name in INPUTS]
    if problem.mask is not None:
        inputs.append(f"mask={_name(problem.mask, f'mask_{number}', names, lines)}")
    options = ", is_causal=True" if problem.is_causal else ""
    options += ", need_weights=True" if call.need_weights else ""
    lines += [] if call.seed is None else [f"torch.manual_seed({call.seed})"]
    lines += [f"attention_{call.build}.{'train' if mode.training else 'eval'}()"] if call.switches else []
    lines += [f"{name}.requires_grad_()" for name in dict.fromkeys(names[id(getattr(problem, n))] for n in call.wanted)]
    called = f"output_{number}, weights_{number} = attention_{call.build}({', '.join(inputs)}{options})"
    code = mode.code.format(device=session.case.device)
    lines += [f"with {code}:", f"    {called}"] if code else [called]
    if call.upstream is not None:
        upstream = _name(call.upstream, f"upstream_{number}", names, lines)
        lines.append(f"output_{number}.backward({upstream})")
    return lines


def _name(value: Tensor, name: str, names: dict[int, str], lines: list[str]) -> str:
    """Return the name of a tensor, writing its definition where it has none yet."""
    if id(value) not in names:
        names[id(value)] = name
        lines.append(f"{name} = {literal(value)}")
    return names[id(value)]


def literal(value: Tensor) -> str:
    """Return an expression for a tensor: the same bits, dtype, device, strides and storage offset."""
    value = value.detach()
    if not value.numel() or (value.is_contiguous() and value.storage_offset() == 0):
        return _dense(value)
    shape, strides, offset = tuple(value.shape), value.stride(), value.storage_offset()
    extent = 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return f"{_dense(value.as_strided((extent,), (1,), 0))}.as_strided({shape}, {strides}, {offset})"


def _dense(value: Tensor) -> str:
    if value.numel() == 0:
        code = f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
    elif value.numel() <= READABLE:
        code = f"tensor({value.tolist()!r}, dtype={value.dtype})"
    else:
        raw = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        packed = base64.b85encode(zlib.compress(raw, 9)).decode()
        unpacked = f'bytearray(zlib.decompress(base64.b85decode("{packed}")))'
        code = f"torch.frombuffer({unpacked}, dtype={value.dtype}).reshape({tuple(value.shape)})"
    return code if value.device.type == "cpu" else f"{code}.to({str(value.device)!r})"


def _on_ranks(ranks: int) -> list[str]:
    """Return the lines that let the implementation run on ranks, if it does; these the judge starts here, too."""
    if not ranks:
        return []
    return [
        "from mha.conformance.sharding.gathered import on_ranks",
        "",
        f"implementation = on_ranks(implementation, {ranks})",
    ]


def _import(implementation: Implementation, target: str) -> list[str]:
    """Return the lines that import the implementation, which is looked for among the modules that are loaded."""
    original = original_of(implementation)
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if module is not None else []:
            if value is original and name not in ("__main__", "__mp_main__"):
                return _import_from(name, str(getattr(module, "__file__", None) or "."), attribute)
    if not target:
        return [f"implementation = ...  # put here the object that was judged as {implementation.name!r}"]
    _, target = split_name(target)
    place, _, name = target.rpartition(":")
    target = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target
    return ["from mha.implementations import resolve", "", f"implementation = resolve({target!r})[0].implementation"]


def _import_from(name: str, file: str, attribute: str) -> list[str]:
    """Return the lines that import an attribute of a module, whose file may lie in a folder of no package."""
    path = Path(file).resolve()
    if "." in name or str(path.parent) in sys.path:
        renamed = "" if attribute == "implementation" else " as implementation"
        return [f"from {name} import {attribute}{renamed}"]
    return [
        "import runpy",
        "import sys",
        "",
        f"sys.path.insert(0, {str(path.parent)!r})",
        f"implementation = runpy.run_path({str(path)!r})[{attribute!r}]",
    ]
