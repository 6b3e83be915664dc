"""The textbook's formula as a module, in steps that a known-bad answer overrides."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.formula import (
    Holder,
    allowed_by,
    capped,
    log_sum_exp,
    on_the_way,
    scores_of,
    sinks_of,
    softmax,
    weights_of,
)
from mha.spec import Claims, Config, Lse, Options, Output, Weights, causal_mask
from mha.spec.claims import DROPS_OUTPUT, Alignment
from mha.spec.dtypes import computable
from mha.spec.masks import join_causal

Inputs = tuple[Tensor, Tensor, Tensor]


class TextbookAttention(Holder):
    """Correct attention in steps, each of which a defect may override.

    allowed: what the masks of the last call allow, boolean (B, H, L, S).
    options: of the last call.
    frequencies: the dtype that those of a rotation are rounded to.
    joins_causal: the causal flag arrives as part of the mask, as where an adapter translates it.
    """

    allowed: Tensor
    options = Options()
    frequencies = torch.float64
    joins_causal = False

    def __init__(
        self, claims: Claims, config: Config, weights: Weights, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.claims, self.config, self.generator = claims, config, generator
        self.hold(weights.named())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Output:
        """Return the output (B, L, D), and the weights (B, H, L, S) if they are asked for."""
        options = Options(**given)
        if computable(query) is not query:
            inputs = (computable(x) for x in (query, key, value))
            mask = None if options.mask is None else computable(options.mask)
            output, weights, lse = self(*inputs, **options.change(mask=mask).arguments)
            weights = None if weights is None else weights.to(query)
            return Output(output.to(query), weights, lse)
        self.options = options
        return self.attend((query, key, value), options)

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Run the steps on inputs of a dtype that torch computes in."""
        query, key, value = self.take(*inputs)
        q, k, v = self.project(query, "q"), self.project(key, "k"), self.project(value, "v")
        scores = self.score(q, k)
        if options.is_causal and self.joins_causal:
            causal = causal_mask(scores.shape[2], scores.shape[3], self.alignment, scores.device)
            mask = join_causal(options.mask, causal[None, None])
            options = options.change(mask=mask, is_causal=False)
        self.allowed, bias = self.allow(options, scores)
        scores, bias = self.cap(scores, bias)
        weights = self.weigh(scores, self.allowed, bias)
        output = self.combine(weights, v, inputs[0])
        lse = returned = None
        if options.return_lse:
            lse = self.log_sum_exp(scores + bias, self.allowed, inputs[0])
        if options.need_weights:
            returned = weights.to(inputs[0])
        return Output(output, returned, lse)

    @property
    def alignment(self) -> Alignment:
        """The alignment of the causal mask and the window."""
        return self.claims.alignment or "top_left"

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        """Return the inputs to attend to."""
        return query, key, value

    def scale(self) -> float:
        """Return what the scores are multiplied by."""
        if self.options.scale is None:
            return self.claims.scale_for(self.config.head_dim)
        return self.options.scale

    def project(self, x: Tensor, role: str) -> Tensor:
        """Return the heads (B, H, length, d_k) of an input; role: "q", "k" or "v"."""
        heads = self.on_the_way(self.split(self.linear(x, role), role), role)
        return self.repeat(heads, self.config.n_heads // heads.shape[1])

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        """Norm and rotate heads (B, heads, length, d_k) of queries and keys, as claimed."""
        if role == "v" or not self.claims.changes_heads:
            return heads
        weight = getattr(self, f"{role}_norm", None)
        if weight is not None:
            weight = computable(weight)
        return on_the_way(heads, self.claims, weight, self.positions(heads), self.frequencies)

    def split(self, projected: Tensor, role: str) -> Tensor:
        """Split (B, length, heads * d_k) into heads (B, heads, length, d_k)."""
        width = self.config.width_of(role)
        count = projected.shape[-1] // width
        heads: Tensor = projected.unflatten(-1, (count, width)).transpose(1, 2)
        return heads

    def repeat(self, heads: Tensor, times: int) -> Tensor:
        """Repeat each key/value head for the query heads that share it."""
        return heads.repeat_interleave(times, 1)

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Multiply by W_role and add b_role, if there is one."""
        if not self.config.projected:
            return x
        weight, bias = computable(getattr(self, f"w_{role}")), getattr(self, f"b_{role}", None)
        if bias is not None:
            bias = computable(bias)
        return F.linear(x, weight, bias)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (B, H, L, S), without mask."""
        return scores_of(q, k, self.options.change(scale=self.scale()))

    def allow(self, options: Options, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which keys are allowed, and what is added to the scores, both (B, H, L, S)."""
        mask = options.mask
        if mask is not None and mask.dtype != scores.dtype:
            mask = _fit_mask(mask.bool(), scores)
        declared = self.claims.scores.alibi
        form = declared.form if declared else "signed"
        return allowed_by(options.change(mask=mask), scores, self.alignment, form)

    def cap(self, scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores with the cap of the call, and what is still added to them."""
        cap = self.options.softcap
        if cap is not None and self.claims.scores.softcap == "after_bias":
            return capped(scores + bias, cap), torch.zeros_like(bias)
        return capped(scores, cap), bias

    def sinks(self, scores: Tensor) -> Tensor | None:
        """Return the sinks of the call, (H,), as they are added to the denominators."""
        return sinks_of(self.options, scores)

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S), with empty rows as the claims have them."""
        sinks = self.sinks(scores)
        weights = weights_of(scores + bias, allowed, self.softmax, sinks)
        empty = ~allowed.any(-1, keepdim=True)
        if sinks is not None:
            empty = empty & (sinks == -math.inf).view(-1, 1, 1)
        if self.claims.empty_row == "uniform":
            return torch.where(empty, 1 / max(scores.shape[-1], 1), weights)
        if self.claims.empty_row == "nan":
            return weights.masked_fill(empty, math.nan)
        return weights

    def log_sum_exp(self, scores: Tensor, allowed: Tensor, query: Tensor) -> Tensor:
        """Return the log-sum-exp of each row, (B, H, L), as the claims have it."""
        declared = self.claims.lse or Lse()
        sinks = self.sinks(scores) if declared.sink else None
        lse = log_sum_exp(scores, allowed, sinks) / declared.log_base
        if declared.empty == "+inf":
            lse = lse.masked_fill(~allowed.any(-1), math.inf)
        return lse.to(declared.dtypes_for(query.dtype)[-1])

    def softmax(self, scores: Tensor) -> Tensor:
        """Normalise the scores over the keys."""
        return softmax(scores)

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return the output (B, L, D) in the dtype of the query, with the claimed dropout."""
        claimed, config = self.claims.dropout, self.config
        of_weights = self.training and claimed != "output"
        of_output = self.training and claimed in DROPS_OUTPUT
        dropped = F.dropout(weights, config.dropout, of_weights)
        output = self.linear(self.merge(dropped @ v).to(query), "o")
        return F.dropout(output, config.dropout_of_output, of_output)


def _fit_mask(mask: Tensor, scores: Tensor) -> Tensor:
    """Broadcast a mask to the scores, or allow everything if it cannot be."""
    try:
        return mask.expand(scores.shape)
    except RuntimeError:
        return torch.ones_like(scores, dtype=torch.bool)
