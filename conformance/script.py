"""A failure as a stand-alone script: it needs torch, the implementation and its containers, not the judge."""

from __future__ import annotations

import base64
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor

from mha.conformance.trial import Build, Call, Trial
from mha.conformance.violation import Violation
from mha.spec import CLAUSES, Implementation

# Above this many numbers a tensor is written as compressed bytes: a longer list helps nobody.
READABLE = 64


CONTEXTS = {
    "no_grad": "torch.no_grad()",
    "train_no_grad": "torch.no_grad()",
    "inference": "torch.inference_mode()",
}


def script(trial: Trial, clause: str, violation: Violation) -> str:
    """Return a script that repeats the calls of a trial, and fails as the trial did."""
    known = CLAUSES[clause]
    names: dict[int, str] = {}
    body: list[str] = []
    for step in trial.steps:
        body += _build(step, trial, names) if isinstance(step, Build) else _call(step, names)
    packed = ["import base64", "import zlib", ""] if any("zlib" in line for line in body) else []
    lines = [
        f'"""{clause} ({known.level}): {known.statement}',
        "",
        f"{trial.case!r}",
        '"""',
        "",
        *packed,
        "import torch",
        "from torch import inf, nan, tensor  # noqa: F401  a script uses what its tensors need",
        "",
        *_import(trial.implementation),
        "from mha.spec import Config, Weights",
        "",
        "torch.set_num_threads(1)  # as it was judged",
        *body,
        *violation.check,
    ]
    return "\n".join(lines) + "\n"


def _build(build: Build, trial: Trial, names: dict[int, str]) -> list[str]:
    lines: list[str] = []
    named = build.weights.named()
    weights = ", ".join(f"{name}={_name(tensor, f'{name}_{build.number}', names, lines)}" for name, tensor in named)
    config = f"Config(d_model={build.config.d_model}, n_heads={build.config.n_heads}, bias={build.config.bias})"
    options = f"dtype=torch.{trial.case.dtype}, device={trial.case.device!r}"
    lines.append(f"attention_{build.number} = implementation.build({config}, Weights({weights}), {options})")
    return lines


def _call(call: Call, names: dict[int, str]) -> list[str]:
    lines: list[str] = []
    problem, number = call.problem, call.number
    inputs = [_name(getattr(problem, name), f"{name}_{number}", names, lines) for name in ("query", "key", "value")]
    options = f", mask={_name(problem.mask, f'mask_{number}', names, lines)}" if problem.mask is not None else ""
    options += ", is_causal=True" if problem.is_causal else ""
    options += ", need_weights=True" if call.need_weights else ""
    lines.append(f"attention_{call.build}.{'train' if call.path.startswith('train') else 'eval'}()")
    called = f"output_{number}, weights_{number} = attention_{call.build}({', '.join(inputs)}{options})"
    if call.differentiated is not None:
        lines += [f"{name}.requires_grad_()" for name in dict.fromkeys(inputs)]
        return [*lines, called, f"output_{number}[{call.differentiated}].sum().backward()"]
    context = CONTEXTS.get(call.path)
    return [*lines, f"with {context}:", f"    {called}"] if context else [*lines, called]


def _name(value: Tensor, name: str, names: dict[int, str], lines: list[str]) -> str:
    """Return the name of a tensor, writing its definition where it has none yet."""
    if id(value) not in names:
        names[id(value)] = name
        lines.append(f"{name} = {literal(value)}")
    return names[id(value)]


def literal(value: Tensor) -> str:
    """Return an expression for a tensor: the same bits, dtype, device, strides and storage offset."""
    value = value.detach()
    if value.is_contiguous() and value.storage_offset() == 0:
        return _dense(value)
    shape, strides, offset = tuple(value.shape), value.stride(), value.storage_offset()
    extent = 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return f"{_dense(value.as_strided((extent,), (1,), 0))}.as_strided({shape}, {strides}, {offset})"


def _dense(value: Tensor) -> str:
    if value.numel() <= READABLE:
        code = f"tensor({value.tolist()!r}, dtype={value.dtype})"
    else:
        raw = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        packed = base64.b85encode(zlib.compress(raw, 9)).decode()
        unpacked = f'bytearray(zlib.decompress(base64.b85decode("{packed}")))'
        code = f"torch.frombuffer({unpacked}, dtype={value.dtype}).reshape({tuple(value.shape)})"
    return code if value.device.type == "cpu" else f"{code}.to({str(value.device)!r})"


def _import(implementation: Implementation) -> list[str]:
    """Return the lines that import the implementation, which is looked for among the modules that are loaded."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if module is not None else []:
            if value is implementation and name != "__main__":
                renamed = "" if attribute == "implementation" else " as implementation"
                line = f"from {name} import {attribute}{renamed}"
                folder = str(Path(getattr(module, "__file__", None) or ".").resolve().parent)
                if "." in name or folder in sys.path:
                    return [line]
                path = str(Path(str(module.__file__)).resolve())
                return [
                    "import runpy",
                    "import sys",
                    "",
                    f"sys.path.insert(0, {folder!r})",
                    f"implementation = runpy.run_path({path!r})[{attribute!r}]",
                ]
    return [f"implementation = ...  # put here the object that was judged as {implementation.name!r}"]
