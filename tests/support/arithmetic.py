"""Right and wrong arithmetic: softmaxes, and tables of what is declared of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.spec import Claims, Options, Rounding
from support import variants
from support.products import (
    AddsInHalf,
    DropsBitsOfSums,
    Flushes,
    bf16,
    bf16_cut,
    float8,
    in_parts,
    tf32_cut,
    tf32_nearest,
    two_bf16,
    two_bf16_cut,
    with_factors,
)

ALL = ("float32", "bfloat16", "float16")


SINGLE = ("float32",)


HALF = ("bfloat16", "float16")


# A softmax over whole rows, in the accumulator.
WHOLE_ROWS = Rounding(log_normaliser=False, rescales=0)


# What FlashAttention keeps: scores in float32, and weights that are cast for their product with the
# values.
FLASH = Rounding(
    scores_stored=False, softmax_stored=False, scaling_roundings=0, log_normaliser=False
)


class Softmax(Complete):
    """A softmax of one's own, in float32; masked scores are -infinity, and empty rows zero."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(wide).masked_fill(~allowed, -math.inf)
        raised, total = self.raised(scores)
        return (raised / total.masked_fill(total == 0, 1.0)).to(self.w_q.dtype)

    def raised(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exponentials and their sums."""
        raised = self.exp(scores - finite_max(scores))
        return raised, raised.sum(-1, keepdim=True)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()


def finite_max(scores: Tensor) -> Tensor:
    """Return the largest number of each row, 0 where none is finite."""
    if not scores.shape[-1]:
        return scores.sum(-1, keepdim=True)
    highest = scores.detach().amax(-1, keepdim=True)
    return highest.masked_fill(highest == -math.inf, 0.0)


def exponential_off_by(error: float) -> type[Complete]:
    """The exponential has a relative error that changes from number to number."""

    class Coarse(Softmax):
        def exp(self, x: Tensor) -> Tensor:
            return x.exp() * (1 + error * (1e4 * x.detach().nan_to_num(neginf=0.0)).sin())

    return Coarse


def online(tile: int, *, backwards: bool = False, slack: float = 0.0) -> type[Complete]:
    """A running maximum over tiles, which grows only where a score exceeds it by the slack."""

    class Online(Softmax):
        def raised(self, scores: Tensor) -> tuple[Tensor, Tensor]:
            scores = scores.flip(-1) if backwards else scores
            highest = torch.full_like(scores[..., :1].sum(-1, keepdim=True), -math.inf)
            total, parts = torch.zeros_like(highest), list[Tensor]()
            for part in scores.split(tile, -1):
                if not part.shape[-1]:
                    continue
                reached = torch.maximum(highest, part.detach().amax(-1, keepdim=True))
                higher = torch.where(
                    (reached > highest + slack) | (highest == -math.inf), reached, highest
                )
                shift = higher.masked_fill(higher == -math.inf, 0.0)
                rescale, raised = (highest - shift).exp(), (part - shift).exp()
                parts = [each * rescale for each in parts] + [raised]
                total, highest = total * rescale + raised.sum(-1, keepdim=True), higher
            joined = torch.cat(parts, -1) if parts else scores
            return joined.flip(-1) if backwards else joined, total

    return Online


class FoldsLogarithm(Softmax):
    """Queries times the scale times log2(e), in float32, and an exponential in base two."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return (q.to(wide) * (self.config.head_dim**-0.5 * math.log2(math.e))) @ k.to(wide).mT

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x)

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        return allowed, bias.to(torch.promote_types(q.dtype, torch.float32)) * math.log2(math.e)


class LikeFlash(Softmax):
    """Scores and exponentials in float32; exponentials are cast, and the context is divided."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return super().score(q.to(wide), k.to(wide))


class ScaleOff(Complete):
    factor: ClassVar[float] = 1.01

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.factor


class Epsilon(Softmax):
    def raised(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        raised, total = super().raised(scores)
        return raised, total + 1e-2


class Clamped(Complete):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k).clamp(-20, 20)


class SumsInDtype(Complete):
    """The sum of a row, and the context, are stored after each tile of four keys."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -math.inf)
        raised = (scores - finite_max(scores)).exp()
        total = raised[..., :1].sum(-1, keepdim=True) * 0
        for part in raised.split(4, -1):
            total = total + part.sum(-1, keepdim=True)
        return raised / total.masked_fill(total == 0, 1.0)


class FlushesSmallWeights(Complete):
    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        return weights.masked_fill(weights < 1e-3, 0.0)


class NoMaximum(Softmax):
    def raised(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        raised = scores.exp()
        return raised, raised.sum(-1, keepdim=True)


class Linear(Softmax):
    """The exponential is interpolated between powers of two."""

    def exp(self, x: Tensor) -> Tensor:
        t = (x * math.log2(math.e)).clamp(min=-100.0)
        return (2.0 ** t.floor()) * (1 + t - t.floor()) * (x > -math.inf)


class BackwardScale(Complete):
    """The gradient of the scores is 2% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + 0.02 * (scores - scores.detach())


class DropsFirstColumn(Complete):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q[..., 1:] @ k[..., 1:].mT / math.sqrt(self.config.head_dim)


@dataclass(frozen=True)
class Arithmetic:
    """A class, the dtypes for which it is meant, and where it says that it rounds."""

    cls: type[Complete]
    dtypes: tuple[str, ...]
    rounding: Rounding = CLAIMS.rounding

    @property
    def claims(self) -> Claims:
        return replace(CLAIMS, composes=(), second_gradients=False, rounding=self.rounding)


def _declared(**fields: Any) -> Rounding:
    return replace(WHOLE_ROWS, **fields)


RIGHT = {
    "tf32, bits dropped": Arithmetic(with_factors(tf32_cut), SINGLE, _declared(products="tf32")),
    "tf32, nearest": Arithmetic(with_factors(tf32_nearest), SINGLE, _declared(products="tf32")),
    "bf16": Arithmetic(with_factors(bf16), SINGLE, _declared(products="bf16")),
    "bf16, bits dropped": Arithmetic(
        with_factors(bf16_cut), SINGLE, _declared(products="bf16", mode="toward_zero")
    ),
    "bf16x3": Arithmetic(with_factors(two_bf16), SINGLE, _declared(products="bf16x3")),
    "bf16x3, bits dropped": Arithmetic(
        with_factors(two_bf16_cut), SINGLE, _declared(products="bf16x3", mode="toward_zero")
    ),
    "two parts of products": Arithmetic(in_parts(2), HALF, _declared(reductions=1)),
    "four parts of products": Arithmetic(in_parts(4), HALF, _declared(reductions=3)),
    "flushed": Arithmetic(Flushes, ("float16",), _declared(flushes=True)),
    "sums in float16": Arithmetic(AddsInHalf, ("float16",), _declared(accumulator="float16")),
    "sums drop bits": Arithmetic(DropsBitsOfSums, SINGLE, _declared(accumulator="truncated")),
    "coarse exponential, 2^-10": Arithmetic(
        exponential_off_by(2.0**-10), HALF, _declared(exp_error=1 << 14)
    ),
    "coarse exponential, 16 ulp": Arithmetic(
        exponential_off_by(2.0**-19), ALL, _declared(exp_error=32)
    ),
    "online, tiles of 1": Arithmetic(online(1), ALL, Rounding(log_normaliser=False)),
    "online, tiles of 1, backwards": Arithmetic(
        online(1, backwards=True), ALL, Rounding(log_normaliser=False)
    ),
    "online, tiles of 4": Arithmetic(online(4), ALL, Rounding(log_normaliser=False)),
    "online, tiles of 16": Arithmetic(online(16), ALL, Rounding(log_normaliser=False)),
    "lazy rescale": Arithmetic(online(4, slack=8.0), ALL, Rounding(log_normaliser=False)),
    "log2(e) in the scale": Arithmetic(FoldsLogarithm, ALL, FLASH),
    "like FlashAttention": Arithmetic(LikeFlash, ALL, FLASH),
    "order of the sums": Arithmetic(variants.OrderOfSummation, SINGLE, WHOLE_ROWS),
    "softmax in float32": Arithmetic(variants.SoftmaxInSingle, ALL, WHOLE_ROWS),
    "softmax stored": Arithmetic(variants.SoftmaxStored, ALL, WHOLE_ROWS),
    "log-sum-exp": Arithmetic(variants.LogSumExp, ALL, Rounding(rescales=0)),
    "log-sum-exp in base two": Arithmetic(variants.LogSumExpInBaseTwo, ALL, Rounding(rescales=0)),
    "split keys": Arithmetic(variants.SplitKeys, ALL, Rounding(rescales=0)),
    "no key bias": Arithmetic(variants.NoKeyBias, ALL, WHOLE_ROWS),
    "everything in float32": Arithmetic(variants.EverythingInSingle, ALL, WHOLE_ROWS),
    "adds infinity": Arithmetic(variants.AddsInfinity, ALL, WHOLE_ROWS),
}


WRONG = {
    "tf32, declared ieee": Arithmetic(with_factors(tf32_nearest), SINGLE, WHOLE_ROWS),
    "tf32, declared bf16x3": Arithmetic(
        with_factors(tf32_cut), SINGLE, _declared(products="bf16x3")
    ),
    "bf16, declared tf32": Arithmetic(with_factors(bf16), SINGLE, _declared(products="tf32")),
    "bf16, declared ieee": Arithmetic(with_factors(bf16), SINGLE, WHOLE_ROWS),
    "bf16x3, declared ieee": Arithmetic(with_factors(two_bf16), SINGLE, WHOLE_ROWS),
    "float8, declared bf16": Arithmetic(with_factors(float8), SINGLE, _declared(products="bf16")),
    "coarse exponential, 2^-4": Arithmetic(
        exponential_off_by(2.0**-4), ALL, _declared(exp_error=1 << 14)
    ),
    "coarse exponential, 2^-10": Arithmetic(
        exponential_off_by(2.0**-10), SINGLE, _declared(exp_error=1 << 14)
    ),
    "linear exponential": Arithmetic(Linear, ALL, _declared(exp_error=1 << 14)),
    "sums in bfloat16, declared float16": Arithmetic(
        AddsInHalf, ("bfloat16",), _declared(accumulator="float16")
    ),
    "sums of rows stored": Arithmetic(SumsInDtype, HALF, WHOLE_ROWS),
    "scale 1% off": Arithmetic(ScaleOff, ALL, Rounding()),
    "scale 1% off, tf32": Arithmetic(ScaleOff, SINGLE, Rounding(products="tf32")),
    "epsilon of 0.01": Arithmetic(Epsilon, ALL, Rounding()),
    "scores clamped at 20": Arithmetic(Clamped, ALL, Rounding()),
    "weights below 0.001 flushed": Arithmetic(FlushesSmallWeights, ALL, Rounding(flushes=True)),
    "no maximum": Arithmetic(NoMaximum, ALL, Rounding()),
    "gradient 2% off": Arithmetic(BackwardScale, ALL, Rounding()),
    "first column left out": Arithmetic(DropsFirstColumn, ALL, Rounding()),
    "eight parts, declared one": Arithmetic(in_parts(8), HALF, WHOLE_ROWS),
}
