"""Numbers, tensors and configurations as expressions of a script."""

from __future__ import annotations

import base64
import zlib
from dataclasses import fields
from math import isfinite

import torch
from torch import Tensor

from mha.spec import Config

# Above this many numbers a tensor is written as compressed bytes: a longer list helps nobody.
READABLE = 64
# The fastest: masks and repeated numbers shrink at any level, others at none.
COMPRESSION = 1


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
    return f"float({str(value)!r})" if isinstance(value, float) and not isfinite(value) else repr(value)


def name_tensor(value: Tensor, name: str, names: dict[int, str], lines: list[str]) -> str:
    """Return the name of a tensor, writing its definition where it has none yet."""
    if id(value) not in names:
        names[id(value)] = name
        lines.append(f"{name} = {literal(value)}")
    return names[id(value)]
