"""The sizes that an implementation takes: heads, their widths, and lengths."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


def _all_positive(sizes: Collection[object]) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _positive_sizes(name: str, sizes: Collection[int]) -> frozenset[int]:
    if not sizes or not isinstance(sizes, Collection) or not _all_positive(sizes):
        raise ValueError(f"Sizes.{name} must be a set of positive integers, but is {sizes!r}")
    return frozenset(sizes)


def _positive_pairs(name: str, pairs: Collection[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    if not pairs or not are_pairs or not all(map(_all_positive, pairs)):
        raise ValueError(
            f"Sizes.{name} must be a set of pairs of positive integers, but is {pairs!r}"
        )
    return frozenset(pairs)


COLLECTIONS_OF_SIZES: dict[str, Callable[[str, Any], frozenset[Any]]] = {
    "n_heads": _positive_sizes,
    "head_dims": _positive_sizes,
    "head_dim_pairs": _positive_pairs,
}


def smallest_from(sizes: Collection[int], least: int) -> int:
    """Return the smallest of these sizes that is at least `least`, or else the largest."""
    return min((size for size in sizes if size >= least), default=max(sizes))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that an implementation takes, such as those of a kernel; it gets no others.

    n_heads, head_dims: the numbers of heads and the widths of a head; None for any.
    length_multiple: L and S are multiples of this.
    max_length: the longest L and S; None for any.
    head_dim_multiple, max_head_dim: of the widths, only multiples of this, and up to this.
    head_dim_pairs: the widths (d_k, d_v) of queries and keys and of values, where these may
        differ; None for any.

    Raises ValueError for a size that is not positive, and if no width or length is left.

    >>> kernel = Sizes(head_dims={64, 128}, length_multiple=16, max_length=2048)
    >>> kernel.refused(n_heads=4, head_dim=32, lengths=(16, 32))
    'the claims have head_dim 64 or 128, not 32'
    """

    n_heads: Collection[int] | None = None
    head_dims: Collection[int] | None = None
    length_multiple: int = 1
    max_length: int | None = None
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    head_dim_pairs: Collection[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        """Turn collections into frozensets; raise ValueError for sizes that no call can have."""
        for name, read in COLLECTIONS_OF_SIZES.items():
            if (sizes := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(name, sizes))
        for name in ("length_multiple", "head_dim_multiple"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Sizes.{name} must be positive, but is {getattr(self, name)!r}")
        if self.head_dims is not None and not self._widths:
            limit = ""
            if self.max_head_dim is not None:
                limit = f" up to max_head_dim ({self.max_head_dim})"
            raise ValueError(
                "none of Sizes.head_dims is a multiple of head_dim_multiple"
                f" ({self.head_dim_multiple}){limit}"
            )
        if self.max_head_dim is not None and self.max_head_dim < self.head_dim_multiple:
            raise ValueError(
                f"Sizes.max_head_dim must be at least head_dim_multiple ({self.head_dim_multiple}),"
                f" but is {self.max_head_dim}"
            )
        if self.max_length is not None and self.max_length < self.length_multiple:
            raise ValueError(
                f"Sizes.max_length must be at least length_multiple ({self.length_multiple}), but"
                f" is {self.max_length}"
            )

    def refused(self, *, n_heads: int, head_dim: int, lengths: tuple[int, int]) -> str:
        """Return why a call of these sizes is not claimed; empty if it is.

        lengths: L and S.
        """
        for name, size, claimed in (
            ("n_heads", n_heads, self.n_heads),
            ("head_dim", head_dim, self.head_dims),
        ):
            if claimed is not None and size not in claimed:
                words = " or ".join(map(str, sorted(claimed)))
                return f"the claims have {name} {words}, not {size}"
        multiple = self.head_dim_multiple
        if head_dim % multiple:
            return f"the claims have a head_dim that is a multiple of {multiple}, not {head_dim}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"the claims have a head_dim up to {self.max_head_dim}, not {head_dim}"
        multiple = self.length_multiple
        for length in lengths:
            if length % multiple:
                return f"the claims have lengths that are multiples of {multiple}, not {length}"
            if self.max_length is not None and length > self.max_length:
                return f"the claims have lengths up to {self.max_length}, not {length}"
        return ""

    def fit_head_dim(self, width: int) -> int:
        """Return the smallest claimed width of a head from `width` on, or else the largest.

        >>> Sizes(head_dim_multiple=2).fit_head_dim(3)
        4
        """
        multiple = self.head_dim_multiple
        if self.head_dims is not None:
            return smallest_from(self._widths, width)
        fitted = -(-width // multiple) * multiple
        if self.max_head_dim is None:
            return fitted
        return min(fitted, self.max_head_dim // multiple * multiple)

    @property
    def _widths(self) -> list[int]:
        """The widths in `head_dims` that the other fields leave."""
        within = [width for width in self.head_dims or () if width % self.head_dim_multiple == 0]
        if self.max_head_dim is None:
            return within
        return [width for width in within if width <= self.max_head_dim]
