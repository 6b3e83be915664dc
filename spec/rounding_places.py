"""The places of a rounding graph: the numbers at each, and all that may be wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from mha.spec.units import ScaledUnits, Units

# Bits of a float64 that are ignored where numbers are compared: the oracle's own rounding.
IGNORED_BITS = 14


@dataclass(slots=True)
class Place:
    """The numbers at one place of the formula, and all that may be wrong with them.

    size, square, repeated: the sums over all stores of |x|, x^2 and n x^2. own: s. moves: for each
    store, how often it is repeated, and fl(x) - x in each form that may be the one. stores: what
    makes the n 4^e of each, with 2^e the power of two below |x|, so that x is off by half a unit in
    its last place, u_s 2^e.
    """

    size: Tensor | float = 0.0
    square: Tensor | float = 0.0
    repeated: Tensor | float = 0.0
    own: Tensor | float = 0.0
    moves: list[tuple[int, tuple[Tensor, ...]]] = field(default_factory=list)
    stores: list[Callable[[], Tensor]] = field(default_factory=list)
    rows: tuple[Tensor, Tensor, Tensor] | None = None

    def powers(self) -> Tensor | float:
        """Return the sum over all stores of n 4^e, for which only the energy of the error has a
        use.
        """
        return sum(square() for square in self.stores)

    def squares(self, like: Tensor) -> Tensor:
        """Return `square` for numbers in the shape of a tensor."""
        return torch.as_tensor(self.square).to(like).expand_as(like)

    def sums(self, g: Tensor, sizes: Tensor, squares: Tensor) -> list[float]:
        """Return sum n (g x)^2, sum |g x|, sum |g| s, and for each store |sum g (fl(x) - x)|, each
        of its largest form.

        g: all its forms, stacked. sizes, squares: |g| and g^2.
        """
        if self.rows is None or self.rows[0].dtype != g.dtype:  # for all directions to come
            weights = [
                torch.as_tensor(x).to(g).expand(g.shape[1:]).flatten()
                for x in (self.repeated, self.size, self.own)
            ]
            moves = [move.flatten() for _, forms in self.moves for move in forms]
            self.rows = (
                weights[0],
                torch.stack(weights[1:]),
                torch.stack(moves).to(g) if moves else g.new_zeros(0, g[0].numel()),
            )
        repeated, of_sizes, moves_ = self.rows
        by_form = (
            squares.flatten(1) @ repeated,
            *(of_sizes @ sizes.flatten(1).T),
            *(moves_ @ g.flatten(1).T).abs(),
        )
        square, size, own, *moved = torch.stack(by_form).amax(1).tolist()
        each = iter(moved)
        return [square, size, own, *(max(next(each) for _ in forms) for _, forms in self.moves)]

    def store(
        self,
        dtype: torch.dtype,
        units: Units,
        copies: Tensor,
        *forms: tuple[Tensor, float | Tensor],
        times: int = 1,
    ) -> None:
        """Note that x is stored in one of several forms, each with its factor: x is the number of
        the place times that.

        times: how many stores there are, each of a number as large as x.
        """
        least = 2 * torch.finfo(dtype).tiny
        sizes = [x.abs() for x, _ in forms]
        size = _largest(
            [(each / factor).abs() for each, (_, factor) in zip(sizes, forms, strict=True)]
        )
        # What underflows is off by eta_s, or flushed: |x| / u_s is not a bound for it.
        eta = units.subnormal + units.flush
        small = [each < least for each in sizes]
        self._add(size, copies, times)
        self.stores.append(
            lambda: (
                times
                * copies
                * _largest([(power_below(x, dtype) / f).abs() for x, f in forms]) ** 2
            )
        )
        if any(bool(each.any()) for each in small):
            lost = [
                (eta * each / factor).abs() for each, (_, factor) in zip(small, forms, strict=True)
            ]
            self.own = self.own + times * _largest(lost)
        moves = tuple((x.to(dtype).double() - x) / factor for x, factor in forms)
        self.moves.append((times, moves))

    def _add(self, size: Tensor, copies: Tensor, times: int = 1) -> None:
        """Add stores of numbers that are at most so large."""
        square = times * size.square()
        self.size, self.square = self.size + times * size, self.square + square
        self.repeated = self.repeated + copies * square

    def quantise(self, dtype: torch.dtype, store: float, copies: Tensor, *forms: Tensor) -> None:
        """Note that x, (B, H, length, d_k), is stored in a float8 dtype in one of several forms,
        with a scale.

        store: u_s, in whose units other stores are. The scale may be that of all numbers, of a head
        or of a row, and then rounded up to a power of two.
        """
        info, size = torch.finfo(dtype), torch.stack([x.abs() for x in forms]).amax(0)
        scaled = ScaledUnits.of(dtype, size)
        size = size * scaled.store / store
        self._add(size, copies)
        self.stores.append(lambda: copies * size.square())
        self.own = self.own + scaled.subnormal
        moves = list[Tensor]()
        for x in forms if size.numel() else ():
            for dims in ((0, 1, 2, 3), (2, 3), (3,)):
                scale = (x.abs().amax(dims, keepdim=True) / info.max).clamp(
                    min=torch.finfo(torch.float32).tiny
                )
                for each in (scale, torch.exp2(scale.log2().ceil())):
                    moves.append(
                        (x / each).clamp(-info.max, info.max).float().to(dtype).double() * each - x
                    )
        self.moves.append((1, tuple(moves)))

    def store_parts(
        self, copies: Tensor, sum_: Tensor, span: Tensor, times: int, lost: float
    ) -> None:
        """Note that partial sums of the numbers stored last are stored, so many times.

        A partial sum of x_i is at most (sum |x_i| + |sum x_i|) / 2, the larger one of the sum's
        positive and its negative part. sum_: sum x_i. span: sum |x_i|. lost: what is lost of each
        that underflows.
        """
        size = (span + sum_.abs()) / 2
        self._add(size, copies, times)
        self.stores.append(lambda: times * copies * size.square())
        self.own = self.own + times * lost
        self.moves.append((times, self.moves[-1][1]))


def _largest(forms: list[Tensor]) -> Tensor:
    """Return the largest of several numbers, element by element."""
    return reduce(torch.maximum, forms)


def copies_of(x: Tensor) -> Tensor:
    """Return how many of the numbers are equal to each one but for the sign, the oracle's rounding
    aside.
    """
    digits = x.abs().flatten().view(torch.int64) >> IGNORED_BITS
    ordered = digits.cpu().clone()
    ordered.numpy().sort()  # several times as fast as torch's
    repeated, counts = ordered[1:][ordered[1:] == ordered[:-1]].unique_consecutive(
        return_counts=True
    )
    if not len(repeated):
        return torch.ones_like(x)
    repeated, counts = repeated.to(x.device), counts.to(x)
    place = torch.searchsorted(repeated, digits).clamp(max=len(repeated) - 1)
    return torch.where(repeated[place] == digits, counts[place] + 1, 1.0).view(x.shape)


def power_below(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest power of two that is at most |x|, or the smallest normal number if that is
    more; 0 for 0.

    >>> power_below(torch.tensor([3.0, -0.75, 0.0]), torch.float16)
    tensor([2.0000, 0.5000, 0.0000])
    """
    exponent = torch.frexp(x)[1] - 1
    power: Tensor = torch.ldexp(torch.ones_like(x), exponent).clamp(min=torch.finfo(dtype).tiny)
    return power.masked_fill(x == 0, 0.0)
