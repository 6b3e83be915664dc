"""Known-bad attention: the textbook's formula with one defect, which a property must reject to be worth anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.spec import Claims, Config, Output, Weights, causal_mask
from mha.spec.dtypes import computable

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class KnownBad:
    """An implementation with one of the `DEFECTS`, and with the claims of the one that it stands in for.

    generator: shared by all that it builds, so that no two of their draws are equal.
    """

    name: str
    claims: Claims
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> TextbookAttention:
        """Build it; no configuration is refused."""
        return DEFECTS[self.name](self.claims, config, weights, self.generator)


class TextbookAttention(nn.Module):
    """Correct attention in steps, each of which a defect may override."""

    def __init__(self, claims: Claims, config: Config, weights: Weights, generator: torch.Generator) -> None:
        super().__init__()
        self.claims, self.config, self.generator = claims, config, generator
        for name, tensor in weights.named():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> Output:
        """Return the output (B, L, D), and the weights (B, H, L, S) if they are asked for."""
        if computable(query) is not query:
            inputs = (computable(x) for x in (query, key, value))
            mask = None if mask is None else computable(mask)
            output, weights = self(*inputs, mask=mask, is_causal=is_causal, need_weights=need_weights)
            return Output(output.to(query), None if weights is None else weights.to(query))
        return self.attend((query, key, value), mask, is_causal, need_weights)

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Run the steps on inputs of a dtype that torch computes in."""
        q, k, v = (self.project(x, role) for x, role in zip(inputs, "qkv", strict=True))
        scores = self.score(q, k)
        weights = self.weigh(scores, *self.allow(mask, is_causal, scores))
        output = self.combine(weights, v, inputs[0])
        return Output(output, weights.to(inputs[0]) if need_weights else None)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """See `mha.spec.Decoder`; the cache has keys, values, and which of them are an item's own."""
        active = query.new_ones(len(query)).bool() if active is None else active
        own = active[:, None, None]
        new = key.where(own, 0), value.where(own, 0), own
        cache = new if cache is None else tuple(torch.cat(pair, 1) for pair in zip(cache, new, strict=True))
        key, value, present = cache
        return self(query, key, value, mask=present.mT.unsqueeze(1)).output, cache

    def weight_gradients(self) -> dict[str, Tensor]:
        """See `mha.spec.Differentiable`."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.named_parameters()}

    def scale(self) -> float:
        """Return what the scores are multiplied by."""
        return self.claims.scale_for(self.config.head_dim)

    def project(self, x: Tensor, role: str) -> Tensor:
        """Return the heads (B, H, length, d_k) of an input; role: "q", "k" or "v"."""
        width = self.config.head_dim
        projected = self.linear(x, role)
        heads: Tensor = projected.unflatten(-1, (projected.shape[-1] // width, width)).transpose(1, 2)
        return heads.repeat_interleave(self.config.n_heads // heads.shape[1], 1)

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Multiply by W_role and add b_role, if there is one."""
        bias = getattr(self, f"b_{role}", None)
        return F.linear(x, computable(getattr(self, f"w_{role}")), None if bias is None else computable(bias))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (B, H, L, S), without mask."""
        return q @ k.mT * self.scale()

    def allow(self, mask: Tensor | None, is_causal: bool, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which keys are allowed, and what is added to the scores, both (B, H, L, S)."""
        allowed, bias = torch.ones_like(scores, dtype=torch.bool), torch.zeros_like(scores)
        if mask is not None and mask.dtype == scores.dtype:
            allowed, bias = allowed & (mask != -math.inf), mask.masked_fill(mask == -math.inf, 0.0)
        elif mask is not None:
            allowed = allowed & _fit_mask(mask.bool(), scores)
        if is_causal:
            alignment = self.claims.causal or "top_left"
            allowed = allowed & causal_mask(scores.shape[2], scores.shape[3], alignment, scores.device)
        return allowed, bias

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S), with empty rows as the claims have them."""
        empty = ~allowed.any(-1, keepdim=True)
        weights = self.softmax((scores + bias).masked_fill(~(allowed | empty), -math.inf))
        policy = self.claims.empty_row
        if policy == "uniform":
            return torch.where(empty, 1 / max(scores.shape[-1], 1), weights)
        weights = weights.masked_fill(~allowed, 0.0)
        return weights.masked_fill(empty, math.nan) if policy == "nan" else weights

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalise the scores over the keys."""
        return scores.softmax(-1)

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return the output (B, L, D) in the dtype of the query, with the dropout that is claimed."""
        claimed = self.claims.dropout
        dropped = F.dropout(weights, self.config.dropout, self.training and claimed != "output")
        output = self.linear((dropped @ v).transpose(1, 2).flatten(2).to(query), "o")
        return F.dropout(output, self.config.dropout, self.training and claimed in ("output", "both"))


class MadeUp(TextbookAttention):
    """Numbers that have nothing to do with the inputs."""

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Make up output and weights; every input and weight has a gradient of zeros."""
        query, key, value = inputs
        shape = (query.shape[0], self.config.n_heads, query.shape[1], key.shape[1]) if query.ndim == 3 else (1,)
        touched = sum(x.sum() * 0 for x in (query, key, value, *map(computable, self.parameters())))
        output = self.make_up(query.shape, query, value) + touched
        return Output(output, self.make_up(shape, query, value) if need_weights else None)

    def make_up(self, shape: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
        """Return numbers of this shape, in the dtype of the query."""
        raise NotImplementedError


class Zeros(MadeUp):
    """Zeros, whatever the inputs are."""

    def make_up(self, shape: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros(shape).to(query)


class Noise(MadeUp):
    """Other random numbers at each call, about as large as the values."""

    def make_up(self, shape: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
        """Return random numbers."""
        drawn = torch.randn(shape, generator=self.generator).to(query)
        return drawn * (1 + value.abs().max())


class Unmasked(TextbookAttention):
    """Neither the mask nor the causal flag is read."""

    def allow(self, mask: Tensor | None, is_causal: bool, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Allow every key."""
        return super().allow(None, False, scores)


class Mean(Unmasked):
    """The mean of all values: neither query nor key nor mask matters."""

    def scale(self) -> float:
        """Make every score 0."""
        return 0.0


class Unscaled(TextbookAttention):
    """The scores are not scaled, or scaled where it is claimed that they are not."""

    def scale(self) -> float:
        """Leave the scores as they are, or scale them as usual."""
        return 1.0 if self.claims.scale != 1.0 else float(self.config.head_dim**-0.5)


class SinglePrecision(TextbookAttention):
    """Softmax and context are computed in float32, whatever the dtype."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores in float32."""
        return super().score(q, k).float()

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Combine in float32."""
        return super().combine(weights, v.float(), query)


class DetachedKeys(TextbookAttention):
    """Correct outputs, but nothing is differentiated through the keys."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Cut the keys off from their history."""
        return super().score(q, k.detach())


class SoftmaxGradientWithoutRowSum(TextbookAttention):
    """Correct outputs, but the gradient of the softmax lacks the sum over the row."""

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalise by a sum that is taken for a constant."""
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        return weights / weights.sum(-1, keepdim=True).detach()


class NeverRefuses(TextbookAttention):
    """Correct where there is a result, but inputs that do not fit are made to fit instead of refused."""

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Make the inputs fit first."""
        query, key, value = (_fit(x, inputs[0], self.config.d_model) for x in inputs)
        return super().attend((query, key, value), mask, is_causal, need_weights)


class NanGradients(TextbookAttention):
    """Correct outputs, but every gradient is NaN."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Multiply the gradient of the output."""
        return _with_gradient_times(super().combine(weights, v, query), lambda: math.nan)


class RandomGradientScale(TextbookAttention):
    """Correct outputs, but the gradients are multiplied by another number at each call."""

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Multiply the gradient of the output."""
        output = super().combine(weights, v, query)
        return _with_gradient_times(output, lambda: float(torch.rand((), generator=self.generator)))


# By the names under which reports count how often each was rejected.
DEFECTS: Mapping[str, type[TextbookAttention]] = {
    "zeros": Zeros,
    "noise": Noise,
    "mean": Mean,
    "unmasked": Unmasked,
    "unscaled": Unscaled,
    "single_precision": SinglePrecision,
    "detached": DetachedKeys,
    "softmax_gradient_without_row_sum": SoftmaxGradientWithoutRowSum,
    "never_refuses": NeverRefuses,
    "nan_gradients": NanGradients,
    "random_gradient_scale": RandomGradientScale,
    "correct": TextbookAttention,
}


def _with_gradient_times(output: Tensor, factor: Callable[[], float]) -> Tensor:
    """Multiply the gradient of an output by a number, which is drawn only if there will be a gradient."""
    if output.requires_grad:
        number = factor()
        output.register_hook(lambda gradient: gradient * number)
    return output


def _fit(x: Tensor, like: Tensor, width: int) -> Tensor:
    """Cut or pad an input to the width, and repeat its first item if the batch sizes disagree."""
    x = F.pad(x, (0, width - x.shape[-1]))
    return x if x.shape[0] == like.shape[0] else x[:1].expand(like.shape[0], -1, -1)


def _fit_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Broadcast a mask to the scores, or allow everything if it cannot be."""
    try:
        return mask.expand(scores.shape)
    except RuntimeError:
        return torch.ones_like(scores, dtype=torch.bool)
