"""How scores and weights go wrong: the scale, the softmax, and precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, Step, defect
from mha.conformance.harness.textbook import TextbookAttention
from mha.spec.dtypes import in_tf32

# What defects that are hard to tell from each other have in common.
TOO_HIGH = "masked scores get a finite number, which is not low enough"


def _scale(name: str, text: str, factor: Callable[[TextbookAttention], float]) -> Defect:
    return defect(name, f"the scores are {text}", scale=factor)


def scales() -> Iterator[Defect]:
    """Yield other scales."""
    yield _scale("unscaled", "not scaled", lambda self: 1.0)
    yield _scale("scaled", "scaled by 1/sqrt(d_k)", lambda self: self.config.head_dim**-0.5)
    yield _scale(
        "scaled_by_model", "scaled by 1/sqrt(d_model)", lambda self: self.config.d_model**-0.5
    )
    yield _scale("scaled_by_width", "scaled by 1/d_k", lambda self: 1 / self.config.head_dim)
    yield _scale(
        "scaled_by_model_width", "scaled by 1/d_model", lambda self: 1 / self.config.d_model
    )
    yield _scale(
        "scaled_by_heads", "scaled by 1/sqrt(n_heads)", lambda self: self.config.n_heads**-0.5
    )
    yield _scale("multiplied", "multiplied by sqrt(d_k)", lambda self: self.config.head_dim**0.5)
    yield _scale("sign", "of the opposite sign", lambda self: -TextbookAttention.scale(self))
    yield _scale("scale_in_float32", "scaled by 1/sqrt(d_k) rounded to float32", _rounded_divisor)
    yield _scale("scale_rounded", "scaled by 1/sqrt(d_k) rounded to float32", _rounded_scale)
    for axis, length in ((2, "L"), (3, "S")):
        text = f"the scores are scaled by 1/sqrt({length}), with {length} the length of a sequence"
        yield defect(f"scaled_by_{length}", text, score=_scaled_by_length(axis))


def _rounded_divisor(self: TextbookAttention) -> float:
    return 1 / float(torch.tensor(float(self.config.head_dim), dtype=torch.float32).sqrt())


def _rounded_scale(self: TextbookAttention) -> float:
    return float(torch.tensor(self.config.head_dim**-0.5, dtype=torch.float32))


def _scaled_by_length(axis: int) -> Step:
    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores / math.sqrt(scores.shape[axis])

    return score


def softmaxes() -> Iterator[Defect]:
    """Yield other axes, masks after the softmax, fills that are not low enough, and other
    denominators.
    """
    for name, axis in (("queries", -2), ("heads", 1), ("items", 0)):
        for fill in (-math.inf, math.nan, -1e9):
            text = f"the softmax runs over the {name}"
            yield defect(f"over_{name}_{fill}", text, weigh=_softmax_over(axis, fill))
    text = "masked weights are zeroed after the softmax, and the others not normalised again"
    yield defect("after_softmax", text, weigh=_after_softmax)
    text = "masked scores are multiplied by 0 instead of excluded"
    yield defect("times_mask", text, weigh=_filled(0.0))
    for fill in (-1e9, -1e5, -1e4, -1e3, -100.0, -20.0, -10.0, -1.0):
        text = f"masked scores are filled with {fill:g}, which is not low enough"
        yield defect(f"filled_{fill:g}", text, TOO_HIGH, weigh=_filled(fill))
        text = f"masked scores are lowered by {-fill:g}, which is not enough"
        yield defect(f"lowered_{-fill:g}", text, TOO_HIGH, weigh=_lowered(fill))
    text = "the softmax does not subtract the maximum of the scores, and overflows"
    yield defect("overflow", text, weigh=_without_maximum)
    yield defect("sink", "1 is added to the denominator of the softmax", weigh=_with_sink)
    yield defect(
        "mean",
        "queries and keys do not count: each context is the mean of the values",
        scale=lambda self: 0.0,
    )


def _softmax_over(axis: int, fill: float) -> Step:
    """Return `weigh` along another axis.

    fill: what masked scores get; NaN for -infinity, with a result of NaN where all are masked.
    """

    def weigh(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        before = -math.inf if math.isnan(fill) else fill
        weights = (scores + bias).masked_fill(~allowed, before).softmax(axis)
        if fill == -math.inf:
            return weights.masked_fill(~allowed, 0.0)
        return weights

    return weigh


def _after_softmax(
    self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor
) -> Tensor:
    return (scores + bias).softmax(-1) * allowed


def _filled(fill: float) -> Step:
    return lambda self, scores, allowed, bias: (
        (scores + bias).masked_fill(~allowed, fill).softmax(-1)
    )


def _lowered(fill: float) -> Step:
    return lambda self, scores, allowed, bias: (scores + bias + fill * ~allowed).softmax(-1)


def _without_maximum(
    self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor
) -> Tensor:
    raised = (scores + bias).exp() * allowed
    return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)


def _with_sink(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    total = F.pad((scores + bias).masked_fill(~allowed, -math.inf), (0, 1))
    return total.softmax(-1)[..., :-1]


def precisions() -> Iterator[Defect]:
    """Yield steps in a lower precision."""
    for name in ("bfloat16", "float16", "float32"):
        dtype: torch.dtype = getattr(torch, name)
        yield defect(f"scores_{name}", f"the scores are rounded to {name}", score=_scores_in(dtype))
        yield defect(f"sums_{name}", f"the scores are rounded to {name}", weigh=_sums_in(dtype))
        yield defect(
            f"softmax_{name}", f"the softmax is computed in {name}", weigh=_softmax_in(dtype)
        )
        text = f"the weights are rounded to {name}"
        yield defect(f"weights_{name}", text, weigh=_weights_in(dtype))


def products() -> Iterator[Defect]:
    """Yield products in TF32, as Triton has them by default: of numbers without their last bits, or
    rounded.
    """
    text = (
        "products with keys and values are in TF32, as tl.dot has them without"
        " input_precision='ieee'"
    )
    for name, added in (("truncated", 0), ("rounded", 1 << 12)):
        made = defect(f"tf32_{name}", text, score=_scores_of(added), combine=_sums_of(added))
        yield replace(made, unexplained=0.25)


def outputs() -> Iterator[Defect]:
    """Yield outputs of zero, and with a residual."""
    yield defect(
        "zeros",
        "the context is zero",
        combine=lambda self, weights, v, query: TextbookAttention.combine(
            self, weights * 0, v, query
        ),
    )
    yield defect(
        "zero",
        "the output is zero",
        combine=lambda self, weights, v, query: (
            0 * TextbookAttention.combine(self, weights, v, query)
        ),
    )
    text = "the query is added to the output, as in a residual connection"
    yield defect(
        "residual",
        text,
        combine=lambda self, weights, v, query: (
            query + TextbookAttention.combine(self, weights, v, query)
        ),
    )


def _scores_of(added: int) -> Step:
    return lambda self, q, k: TextbookAttention.score(self, in_tf32(q, added), in_tf32(k, added))


def _sums_of(added: int) -> Step:
    def combine(self: TextbookAttention, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        # As kernels have it, weights are divided by their sum at the end: before, the largest one
        # is 1.
        largest = weights.amax(-1, keepdim=True)
        raised = in_tf32((weights / largest).nan_to_num(), added)
        return self.linear(self.merge(largest * (raised @ in_tf32(v, added))).to(query), "o")

    return combine


def _scores_in(dtype: torch.dtype) -> Step:
    return lambda self, q, k: TextbookAttention.score(self, q, k).to(dtype).to(q)


def _softmax_in(dtype: torch.dtype) -> Step:
    return lambda self, scores, allowed, bias: TextbookAttention.weigh(
        self, (scores + bias).to(dtype), allowed, 0 * bias.to(dtype)
    ).to(scores)


def _sums_in(dtype: torch.dtype) -> Step:
    return lambda self, scores, allowed, bias: TextbookAttention.weigh(
        self, (scores + bias).to(dtype).to(scores), allowed, 0 * bias
    )


def _weights_in(dtype: torch.dtype) -> Step:
    return lambda self, scores, allowed, bias: (
        TextbookAttention.weigh(self, scores, allowed, bias).to(dtype).to(scores)
    )
