"""The safetensors format, as far as cases need it: a header of JSON, and the numbers.

A file is the length of the header in eight bytes, little-endian; the header, which has for each
tensor its dtype, shape and place among the bytes that follow; and these bytes. Source:
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# Of the length of the header, and what that is a multiple of.
BYTES = 8


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors by name, and texts by name."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts = list[bytes]()
    end = 0
    for name, tensor in tensors.items():
        numbers = tensor.detach().cpu().contiguous().flatten()
        raw = numbers.view(torch.uint8).numpy().tobytes()
        place = [end, end + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] |= {"data_offsets": place}  # type: ignore[operator]  # it is a dict
        parts.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % BYTES)
    path.write_bytes(len(text).to_bytes(BYTES, "little") + text + b"".join(parts))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the texts of a file; raise ValueError for any other file."""
    data = path.read_bytes()
    try:
        length = int.from_bytes(data[:BYTES], "little")
        header = json.loads(data[BYTES : BYTES + length])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            raw = bytearray(data[BYTES + length + start : BYTES + length + end])
            tensors[name] = _tensor(raw, entry["dtype"], entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is no file of safetensors: {error}") from None
    return tensors, metadata


def _tensor(raw: bytearray, dtype: str, shape: list[int]) -> Tensor:
    """Return the tensor of these bytes."""
    if not raw:
        return torch.zeros(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(raw, dtype=DTYPES[dtype]).reshape(shape)
