"""Products and sums as hardware computes them: rounded factors, partial sums, dropped bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import Complete

Limbs = Callable[[Tensor], tuple[Tensor, ...]]


def cut(x: Tensor, bits: int) -> Tensor:
    """Drop the last bits of float32 numbers."""
    return (x.float().view(torch.int32) & -(1 << bits)).view(torch.float32)


def tf32_cut(x: Tensor) -> tuple[Tensor, ...]:
    return (cut(x, 13),)


def tf32_nearest(x: Tensor) -> tuple[Tensor, ...]:
    x = x.nan_to_num(
        nan=math.nan, posinf=math.inf, neginf=-math.inf
    )  # NaN with one pattern of bits
    return (((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32),)


def bf16(x: Tensor) -> tuple[Tensor, ...]:
    return (x.bfloat16().float(),)


def bf16_cut(x: Tensor) -> tuple[Tensor, ...]:
    return (cut(x, 16),)


def two_bf16(x: Tensor) -> tuple[Tensor, ...]:
    high = x.bfloat16().float()
    return high, (x - high).bfloat16().float()


def two_bf16_cut(x: Tensor) -> tuple[Tensor, ...]:
    high = cut(x, 16)
    return high, cut(x - high, 16)


def float8(x: Tensor) -> tuple[Tensor, ...]:
    return (x.to(torch.float8_e4m3fn).float(),)


class Product(torch.autograd.Function):
    """a @ b for numbers of float32 that are rounded first, in the backward pass too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, limbs: Limbs) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.limbs = limbs
        if a.dtype != torch.float32:
            return a @ b
        of_a, of_b = limbs(a), limbs(b)
        product = of_a[0] @ of_b[0]
        return product if len(of_a) == 1 else product + of_a[0] @ of_b[1] + of_a[1] @ of_b[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        of_a, of_b = (
            Product.apply(gradient, b.mT, ctx.limbs),
            Product.apply(a.mT, gradient, ctx.limbs),
        )
        return of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape), None


class Multiplied(Complete):
    """All products go through one method."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def project(self, x: Tensor, role: str) -> Tensor:
        matrix, bias = getattr(self, f"w_{role}"), getattr(self, f"b_{role}", None)
        product = self.multiply(x.flatten(0, 1), matrix.T).unflatten(0, x.shape[:2])
        return product if bias is None else product + bias

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return self.multiply(q, k.mT) / math.sqrt(self.config.head_dim)

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return self.multiply(weights, v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0))


def with_factors(limbs: Limbs) -> type[Complete]:
    class Rounded(Multiplied):
        def multiply(self, a: Tensor, b: Tensor) -> Tensor:
            product: Tensor = Product.apply(a, b, limbs)
            return product

    return Rounded


def in_parts(count: int) -> type[Complete]:
    """Projections and contexts are sums of stored partial sums."""

    class Split(Multiplied):
        def multiply(self, a: Tensor, b: Tensor) -> Tensor:
            size = -(-a.shape[-1] // count) or 1
            parts = [x @ y for x, y in zip(a.split(size, -1), b.split(size, -2), strict=True)]
            return sum(parts[1:], parts[0]) if parts else a @ b

        def score(self, q: Tensor, k: Tensor) -> Tensor:
            return Complete.score(self, q, k)

    return Split


class Flushing(torch.autograd.Function):
    """Numbers below the smallest normal one are stored as zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        flushed: Tensor = Flushing.apply(gradient)
        return flushed


class Flushes(Multiplied):
    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = Flushing.apply(a @ b)
        return product

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights: Tensor = Flushing.apply(super().weigh(scores, allowed))
        return weights


class AddsInHalf(Multiplied):
    """Products are added up one by one, each sum stored in the dtype."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        total = (a @ b) * 0
        for each in range(a.shape[-1]):
            total = total + a[..., each : each + 1] * b[..., each : each + 1, :]
        return total


class Truncated(torch.autograd.Function):
    """Sums of float32 that drop bits at each step; other dtypes are as they are."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.dtype != torch.float32:
            return a @ b
        total = (a @ b).double() * 0
        for each in range(a.shape[-1]):
            exact = total + a[..., each : each + 1].double() * b[..., each : each + 1, :].double()
            nearest = exact.float()
            below = torch.nextafter(nearest, torch.zeros_like(nearest))
            total = torch.where(nearest.double().abs() > exact.abs(), below, nearest).double()
        return total.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        of_a, of_b = Truncated.apply(gradient, b.mT), Truncated.apply(a.mT, gradient)
        return of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape)


class DropsBitsOfSums(Multiplied):
    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = Truncated.apply(a, b)
        return product
