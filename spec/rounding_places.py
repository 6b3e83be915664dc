"""The places of a rounding graph: the numbers at each, and all that may be wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from mha.spec.units import ScaledUnits, Units

# Bits of a float64 that are ignored where numbers are compared: the oracle's own rounding.
IGNORED_BITS = 14


class Sums(NamedTuple):
    """Sums over one use of the numbers x of a place, each of the form that makes it largest.

    square: sum n (g x)^2.
    size: sum |g x|.
    own: sum |g| s.
    moves: for each store, |sum g (fl(x) - x)|.
    """

    square: float
    size: float
    own: float
    moves: tuple[float, ...]


@dataclass(slots=True)
class Place:
    """The numbers at one place of the formula, and all that may be wrong with them.

    size, square, repeated: the sums over all stores of |x|, x^2 and n x^2, with n as in
        `mha.spec.directed`.
    own: s, what else is wrong with them.
    moves: for each store, how often it is repeated, and fl(x) - x in each form that may be the one.
    stores: what makes the n 4^e of each, with 2^e the power of two below |x|, so that x is off by
        half a unit in its last place, u_s 2^e.
    rows: the numbers of `repeated`, of `size` and `own`, and of `moves`, flattened, for `sums`.
    """

    size: Tensor | float = 0.0
    square: Tensor | float = 0.0
    repeated: Tensor | float = 0.0
    own: Tensor | float = 0.0
    moves: list[tuple[int, tuple[Tensor, ...]]] = field(default_factory=list)
    stores: list[Callable[[], Tensor]] = field(default_factory=list)
    rows: tuple[Tensor, Tensor, Tensor] | None = None

    def powers(self) -> Tensor | float:
        """Return the sum over all stores of n 4^e, which only the energy of the error needs."""
        return sum(square() for square in self.stores)

    def squares(self, like: Tensor) -> Tensor:
        """Return `square` for numbers in the shape of a tensor."""
        return torch.as_tensor(self.square).to(like).expand_as(like)

    def sums(self, g: Tensor, sizes: Tensor, squares: Tensor) -> Sums:
        """Return the sums over one use of the numbers.

        g: the gradients of that use, all its forms stacked.
        sizes, squares: |g| and g^2.
        """
        repeated, of_sizes, moves = self._rows(g)
        by_form = (
            squares.flatten(1) @ repeated,
            *(of_sizes @ sizes.flatten(1).T),
            *(moves @ g.flatten(1).T).abs(),
        )
        square, size, own, *moved = torch.stack(by_form).amax(1).tolist()
        largest = list[float]()
        for _, forms in self.moves:
            largest.append(max(moved[: len(forms)]))
            del moved[: len(forms)]
        return Sums(square, size, own, tuple(largest))

    def _rows(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `rows` in the dtype of g; they are kept for the directions to come."""
        if self.rows is None or self.rows[0].dtype != g.dtype:
            numbers = g.shape[1:]

            def row(x: Tensor | float) -> Tensor:
                return torch.as_tensor(x).to(g).expand(numbers).flatten()

            moves = [move.flatten() for _, forms in self.moves for move in forms]
            moved = torch.stack(moves).to(g) if moves else g.new_zeros(0, g[0].numel())
            self.rows = row(self.repeated), torch.stack([row(self.size), row(self.own)]), moved
        return self.rows

    def store(
        self,
        dtype: torch.dtype,
        units: Units,
        copies: Tensor,
        *forms: tuple[Tensor, float | Tensor],
    ) -> None:
        """Note that x is stored in one of several forms.

        copies: n, how many of the numbers are equal to each; see `copies_of`.
        forms: each x with its factor: x is the number of the place times that.
        """
        # What underflows is off by eta_s, or flushed: |x| / u_s is not a bound for it.
        least, eta = 2 * torch.finfo(dtype).tiny, units.subnormal + units.flush
        sizes, moves, lost, underflows = list[Tensor](), list[Tensor](), list[Tensor](), False
        for x, factor in forms:
            sizes.append((x.abs() / factor).abs())
            moves.append((x.to(dtype).double() - x) / factor)
            small = x.abs() < least
            lost.append((eta * small / factor).abs())
            underflows = underflows or bool(small.any())
        if underflows:
            self.own = self.own + _largest(lost)
        self._add(_largest(sizes), copies)
        self.moves.append((1, tuple(moves)))

        def square() -> Tensor:
            powers = [(power_below(x, dtype) / factor).abs() for x, factor in forms]
            return copies * _largest(powers) ** 2

        self.stores.append(square)

    def _add(self, size: Tensor, copies: Tensor, times: int = 1) -> None:
        """Add stores of numbers that are at most so large."""
        square = times * size.square()
        self.size, self.square = self.size + times * size, self.square + square
        self.repeated = self.repeated + copies * square

    def quantise(self, dtype: torch.dtype, store: float, copies: Tensor, *forms: Tensor) -> None:
        """Note that x, (B, H, length, d_k), is stored in a float8 dtype in one of several forms.

        store: u_s, in whose units other stores are.
        """
        info, size = torch.finfo(dtype), torch.stack([x.abs() for x in forms]).amax(0)
        scaled = ScaledUnits.of(dtype, size)
        size = size * scaled.store / store
        self._add(size, copies)
        self.stores.append(lambda: copies * size.square())
        self.own = self.own + scaled.subnormal
        moves = list[Tensor]()
        if size.numel():
            for x in forms:
                for scale in _float8_scales(x, info.max):
                    fitting = (x / scale).clamp(-info.max, info.max).float()
                    moves.append(fitting.to(dtype).double() * scale - x)
        self.moves.append((1, tuple(moves)))

    def store_parts(
        self, copies: Tensor, sum_: Tensor, span: Tensor, times: int, lost: float
    ) -> None:
        """Note that partial sums of the numbers stored last are stored, so many times.

        A partial sum of x_i is at most (sum |x_i| + |sum x_i|) / 2, the larger one of the sum's
        positive and its negative part.

        sum_: sum x_i.
        span: sum |x_i|.
        lost: what is lost of each that underflows.
        """
        size = (span + sum_.abs()) / 2
        self._add(size, copies, times)
        self.stores.append(lambda: times * copies * size.square())
        self.own = self.own + times * lost
        _, last = self.moves[-1]
        self.moves.append((times, last))


def _float8_scales(x: Tensor, most: float) -> Iterator[Tensor]:
    """Yield scales of x, (B, H, length, d_k): of all numbers, of each head, of each row.

    Each comes as it is, and rounded up to a power of two. most: the largest number of the dtype.
    """
    for dims in ((0, 1, 2, 3), (2, 3), (3,)):
        largest = x.abs().amax(dims, keepdim=True)
        scale = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
        yield scale
        yield torch.exp2(scale.log2().ceil())


def _largest(forms: Sequence[Tensor]) -> Tensor:
    """Return the largest of several numbers, element by element."""
    return reduce(torch.maximum, forms)


def copies_of(x: Tensor) -> Tensor:
    """Return how many of the numbers equal each one, sign and the oracle's rounding aside."""
    digits = x.abs().flatten().view(torch.int64) >> IGNORED_BITS
    ordered = digits.cpu().clone()
    ordered.numpy().sort()  # several times as fast as torch's
    same_as_before = ordered[1:] == ordered[:-1]
    repeated, counts = ordered[1:][same_as_before].unique_consecutive(return_counts=True)
    if not len(repeated):
        return torch.ones_like(x)
    repeated, counts = repeated.to(x.device), counts.to(x)
    place = torch.searchsorted(repeated, digits).clamp(max=len(repeated) - 1)
    return torch.where(repeated[place] == digits, counts[place] + 1, 1.0).view(x.shape)


def power_below(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two that is at most |x|; 0 for 0.

    It is the smallest normal number of the dtype if that is more.

    >>> power_below(torch.tensor([3.0, -0.75, 0.0]), torch.float16)
    tensor([2.0000, 0.5000, 0.0000])
    """
    exponent = torch.frexp(x)[1] - 1
    power: Tensor = torch.ldexp(torch.ones_like(x), exponent).clamp(min=torch.finfo(dtype).tiny)
    return power.masked_fill(x == 0, 0.0)
