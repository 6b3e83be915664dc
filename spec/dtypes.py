"""The floating-point dtypes that are judged, with what differs between them.

A new dtype is one row of `TRAITS`.

The table names dtypes as torch does, and needs no torch: the command line reads it before torch is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeTraits:
    """One dtype. All dtypes are given by name.

    name: the attribute of torch, such as "float32".
    accumulator: the narrowest dtype in which an implementation may add up products.
    compute: the dtype in which torch has every operation (products, softmax, `masked_fill`) on such
        numbers, None for the dtype itself. Formats that are only for storage, such as float8, need
        one.
    narrow: results of ordinary size may exceed its largest number, and its lowest number plus a
        score may be -infinity.
    half: its error bound is loose, so results are also compared with those of the plain formula in
        the same dtype.
    sharp_gradients: the error bound of gradients is small beside the gradients.
    far: how far from 1 the values "tiny" and "huge" go. The dtype holds this number, and its
        product with any weight.
    noise: how large the noise is that replaces hidden keys and values: as large as leaves the
        projections finite.
    companions: other dtypes that a mask may come in (clause MSK-12).

    >>> TRAITS["float16"].narrow, TRAITS["bfloat16"].narrow
    (True, False)
    """

    name: str
    accumulator: str = "float32"
    compute: str | None = None
    narrow: bool = False
    half: bool = False
    sharp_gradients: bool = False
    far: float = 2.0**40
    noise: float = 1e30
    companions: tuple[str, ...] = ()


_ROWS = (
    DtypeTraits(
        name="float64",
        accumulator="float64",
        sharp_gradients=True,
        companions=("float32", "bfloat16"),
    ),
    DtypeTraits(name="float32", sharp_gradients=True, companions=("float64", "bfloat16")),
    DtypeTraits(name="bfloat16", half=True, companions=("float32", "float64")),
    DtypeTraits(
        name="float16",
        half=True,
        narrow=True,
        far=2.0**6,
        noise=1e3,
        companions=("float32", "float64"),
    ),
)
TRAITS: Mapping[str, DtypeTraits] = MappingProxyType({row.name: row for row in _ROWS})


def traits_of(dtype: torch.dtype | str) -> DtypeTraits:
    """Return the row of a dtype, given as torch has it or by name; raise ValueError if it has none.

    >>> traits_of("float64").accumulator
    'float64'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in TRAITS:
        raise ValueError(f"{name} must be one of {', '.join(TRAITS)}")
    return TRAITS[name]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    import torch  # not above: see the docstring of this module

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def computable(x: Tensor) -> Tensor:
    """Return a floating-point tensor in a dtype in which torch can compute on it.

    That is the tensor itself if it can.

    >>> import torch
    >>> computable(torch.ones(2, dtype=torch.float16)).dtype
    torch.float16
    """
    traits = TRAITS.get(str(x.dtype).removeprefix("torch."))
    return x if traits is None or traits.compute is None else x.to(torch_dtype(traits.compute))


def in_tf32(x: Tensor, added: int = 0) -> Tensor:
    """Return numbers of float32 without the last 13 of their 23 bits, as TF32 units take them.

    They are in the dtype of x.

    added: to the bits before, in units of the last one: 1 << 12 rounds to the nearest number.

    >>> import torch
    >>> x = torch.tensor([1 + 2.0**-11])
    >>> in_tf32(x), in_tf32(x, 1 << 12) > 1
    (tensor([1.]), tensor([True]))
    """
    import torch  # not above: see the docstring of this module

    bits = x.float().view(torch.int32) + added
    return (bits & ~0x1FFF).view(torch.float32).to(x)
