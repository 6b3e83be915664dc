"""Layouts: ways in which the same numbers can lie in memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mha.spec.dtypes import traits_of

# Finite in float16 too, and large enough to show.
FAR = 1e4


def _around(x: Tensor, *shape: int) -> Tensor:
    """Return a tensor of this shape, of what lies around x in memory: NaN, which no sum hides.

    On CPUs with AMX, torch reads beyond a row of bfloat16, times zero: large numbers hold a kernel
    to as much as that.
    """
    around = float("nan")
    if x.device.type == "cpu" and traits_of(x.dtype).half:
        around = FAR
    return x.new_full(shape, around)


def _transposed(x: Tensor) -> Tensor:
    """Sequence first in memory, as `batch_first=False` code leaves it."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _sliced(x: Tensor) -> Tensor:
    """A window of a larger tensor: a storage offset, and rows that are not adjacent."""
    batch, length, width = x.shape
    larger = _around(x, batch, length + 2, width + 3)
    larger[:, 1:-1, 2:-1] = x
    return larger[:, 1:-1, 2:-1]


def _strided(x: Tensor) -> Tensor:
    """Every second element of the last dimension, so that not even a row is dense."""
    larger = _around(x, *x.shape[:2], 2 * x.shape[2])
    larger[..., ::2] = x
    return larger[..., ::2]


def _expanded(x: Tensor) -> Tensor:
    """The first item, expanded over the batch with stride 0; the other items are lost."""
    return x[:1].expand_as(x)


def _column_major(x: Tensor) -> Tensor:
    """Length before width in memory, as a convolution or a transposed copy leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _repeated(x: Tensor) -> Tensor:
    """The first position, expanded over the length with stride 0; the other positions are lost."""
    return x[:, :1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": _transposed,
    "sliced": _sliced,
    "strided": _strided,
    "column_major": _column_major,
    "expanded": _expanded,
    "repeated": _repeated,
}
# The layout "mixed": those of query, key and value.
MIXED = ("transposed", "sliced", "strided")


def copy_of(x: Tensor) -> Tensor:
    """Return a detached copy with the same layout, and the same numbers around it in memory."""
    extent = x.untyped_storage().nbytes() // x.element_size()
    whole = x.detach().as_strided((extent,), (1,), 0).clone()
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def leaf_of(x: Tensor) -> Tensor:
    """Return such a copy that requires grad."""
    return copy_of(x).requires_grad_()


def lay_out(layout: str, x: Tensor) -> Tensor:
    """Return x, of shape (batch, length, width), in a layout.

    The numbers around it in memory would spoil a result.
    """
    return LAYOUTS[layout](x)
