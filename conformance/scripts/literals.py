"""Numbers, tensors and configurations as expressions of a script."""

from __future__ import annotations

import base64
import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import fields
from math import isfinite

import torch
from torch import Tensor

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
    """Return an expression for a tensor: the same bits, dtype, device, strides and storage offset."""
    value = value.detach()
    if not value.numel() or (value.is_contiguous() and value.storage_offset() == 0):
        return _dense(value)
    shape, strides, offset = tuple(value.shape), value.stride(), value.storage_offset()
    extent = (
        1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    )
    return (
        f"{_dense(value.as_strided((extent,), (1,), 0))}.as_strided({shape}, {strides}, {offset})"
    )


def _dense(value: Tensor) -> str:
    if value.numel() == 0:
        code = f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
    elif value.numel() <= READABLE:
        # What torch makes of the numbers by itself is not said.
        implied = (
            value.dtype in (torch.bool, torch.float32)
            and torch.get_default_dtype() == torch.float32
        )
        code = f"tensor({value.tolist()!r}{'' if implied else f', dtype={value.dtype}'})"
    else:
        raw = value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        packed = base64.b64encode(zlib.compress(raw, COMPRESSION)).decode()
        unpacked = f'bytearray(zlib.decompress(base64.b64decode("{packed}")))'
        code = f"torch.frombuffer({unpacked}, dtype={value.dtype}).reshape({tuple(value.shape)})"
    return code if value.device.type == "cpu" else f"{code}.to({str(value.device)!r})"


def config_code(config: Config) -> str:
    """Return the expression for a configuration."""
    given = ((field, getattr(config, field.name)) for field in fields(Config))
    return f"Config({', '.join(f'{field.name}={literal_of(x)}' for field, x in given if x != field.default)})"


def literal_of(value: object) -> str:
    """Return a number as an expression that a script can read, NaN included."""
    return (
        f"float({str(value)!r})"
        if isinstance(value, float) and not isfinite(value)
        else repr(value)
    )


def refused(lines: Sequence[str], number: int, *, builds: bool) -> list[str]:
    """Return the lines of a step that must raise, in a `try` that the lines of an assertion end
    with `else`.

    number: of the step. builds: whether it builds an attention; then what follows the constructor
    is left out.
    """
    begins = (
        f"attention_{number} = ",
        f"output_{number}",
        f"context_{number}",
        "returned = ",
        "with ",
    )
    first = next(place for place, line in enumerate(lines) if line.startswith(begins))
    tried = lines[first : first + 1] if builds else lines[first:]
    return [*lines[:first], "try:", *(f"    {line}" for line in tried), *EXCEPT]


def assertion_lines(
    violation: Violation, lines: Sequence[str], *, in_try: bool = True
) -> list[str]:
    """Return the lines that fail, after what was found in words; those that follow a call that must
    raise.

    lines: of the assertion. in_try: whether such a call is in a `try`.
    """
    if violation.must_raise and in_try:
        return ["else:", *(f"    {line}" for line in lines)]
    text = "".join(x if x.isprintable() else " " for x in violation.message)
    said = textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
    return ["", *said, *lines] if lines else []


def name_tensor(value: Tensor, name: str, names: dict[int, str], lines: list[str]) -> str:
    """Return the name of a tensor, writing its definition where it has none yet."""
    if id(value) not in names:
        names[id(value)] = name
        lines.append(f"{name} = {literal(value)}")
    return names[id(value)]
