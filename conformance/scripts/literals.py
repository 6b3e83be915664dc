"""Numbers, tensors and configurations as expressions of a script."""

from __future__ import annotations

import base64
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import isfinite

import torch
from torch import Tensor

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.errors import Violation
from mha.spec import Config

# Above this many numbers a tensor is written as compressed bytes: a longer list helps nobody.
READABLE = 64
# What follows a call that must raise.
EXCEPT = ("except Exception as error:", '    print(f"refused, as it should be: {error!r}")')
# In columns.
WIDTH = 100
# The fastest: masks and repeated numbers shrink at any level, others at none.
COMPRESSION = 1


def literal(value: Tensor) -> str:
    """Return an expression for a tensor with the same bits, dtype, device, strides and offset."""
    value = value.detach()
    if not value.numel() or (value.is_contiguous() and value.storage_offset() == 0):
        return _dense(value)
    shape, strides, offset = tuple(value.shape), value.stride(), value.storage_offset()
    # Of the storage, up to the last number of the tensor.
    extent = offset + 1
    for size, stride in zip(shape, strides, strict=True):
        extent += (size - 1) * stride
    storage = value.as_strided((extent,), (1,), 0)
    return f"{_dense(storage)}.as_strided({shape}, {strides}, {offset})"


def _dense(value: Tensor) -> str:
    """Return an expression for a contiguous tensor."""
    shape, dtype = tuple(value.shape), value.dtype
    if value.numel() == 0:
        code = f"torch.empty({shape}, dtype={dtype})"
    elif value.numel() <= READABLE:
        of_dtype = "" if _is_implied(dtype) else f", dtype={dtype}"
        code = f"tensor({value.tolist()!r}{of_dtype})"
    else:
        raw = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        packed = base64.b64encode(zlib.compress(raw, COMPRESSION)).decode()
        unpacked = f'bytearray(zlib.decompress(base64.b64decode("{packed}")))'
        code = f"torch.frombuffer({unpacked}, dtype={dtype}).reshape({shape})"
    if value.device.type != "cpu":
        code += f".to({str(value.device)!r})"
    return code


def _is_implied(dtype: torch.dtype) -> bool:
    """Return whether `tensor` makes this dtype of numbers by itself."""
    return dtype in (torch.bool, torch.float32) and torch.get_default_dtype() == torch.float32


def config_code(config: Config) -> str:
    """Return the expression for a configuration."""
    codes: dict[str, str] = {}
    for field in fields(Config):
        value = getattr(config, field.name)
        if value != field.default:
            codes[field.name] = literal_of(value)
    return f"Config({by_name(codes)})"


def by_name(codes: Mapping[str, str]) -> str:
    """Return the code of arguments that are given by name."""
    return ", ".join(f"{name}={code}" for name, code in codes.items())


def literal_of(value: object) -> str:
    """Return a number as an expression that a script can read, NaN included."""
    if isinstance(value, float) and not isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def indented(lines: Iterable[str]) -> list[str]:
    """Return the lines of a block."""
    return [f"    {line}" for line in lines]


def switched(name: str, mode: str) -> str:
    """Return the line that switches a module to training or evaluation."""
    return f"{name}.train()" if MODES[mode].training else f"{name}.eval()"


def in_mode(mode: str, device: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a call in the block of its mode, if that needs one."""
    context = MODES[mode].code.format(device=device)
    if not context:
        return [*lines]
    return [f"with {context}:", *indented(lines)]


def refused(lines: Sequence[str], number: int, *, builds: bool) -> list[str]:
    """Return the lines of a step that must raise, in a `try` that an assertion ends with `else`.

    number: of the step.
    builds: whether it builds an attention; then what follows the constructor is left out.
    """
    begins = (
        f"attention_{number} = ",
        f"output_{number}",
        f"context_{number}",
        "returned = ",
        "with ",
    )
    first = next(place for place, line in enumerate(lines) if line.startswith(begins))
    tried = lines[first:]
    if builds:
        tried = tried[:1]
    return [*lines[:first], "try:", *indented(tried), *EXCEPT]


def assertion_lines(
    violation: Violation, lines: Sequence[str], *, in_try: bool = True
) -> list[str]:
    """Return the lines that fail, after what was found in words.

    lines: of the assertion.
    in_try: whether a call that must raise is in a `try`, which the assertion then ends.
    """
    if violation.must_raise and in_try:
        return ["else:", *indented(lines)]
    if not lines:
        return []
    text = "".join(x if x.isprintable() else " " for x in violation.message)
    said = textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
    return ["", *said, *lines]


def name_tensor(value: Tensor, name: str, names: dict[int, str], lines: list[str]) -> str:
    """Return the name of a tensor, writing its definition where it has none yet."""
    if id(value) not in names:
        names[id(value)] = name
        lines.append(f"{name} = {literal(value)}")
    return names[id(value)]
