"""Explanations: the textbook's formula with one plain defect, to be compared with an answer that is incorrect.

Each row overrides steps of `TextbookAttention`. The simplest come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Output, causal_mask

Allowed = tuple[Tensor, Tensor]
Step = Callable[..., Any]
# What explanations that are hard to tell from each other have in common.
TOO_HIGH = "masked scores get a finite number, which is not low enough"
TILE = "the keys after the last whole tile are left out"
BY_W_K = "the values are projected by W_k"
STALE = "something of an earlier call with the same shapes is used again"


class ExplainedAttention(TextbookAttention):
    """The textbook's formula, which keeps what its masks were.

    allowed: boolean (B, H, L, S), of the last call.
    """

    allowed: Tensor

    def attend(self, inputs: Inputs, mask: Tensor | None, is_causal: bool, need_weights: bool) -> Output:
        """Attend to the inputs that the defect leaves."""
        return super().attend(self.take(*inputs), mask, is_causal, need_weights)

    def take(self, query: Tensor, key: Tensor, value: Tensor) -> Inputs:
        """Return the inputs to attend to."""
        return query, key, value

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S)."""
        self.allowed = allowed
        return self.weights_of(scores, allowed, bias)

    def weights_of(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Return the weights (B, H, L, S)."""
        return super().weigh(scores, allowed, bias)


@dataclass(frozen=True)
class Explanation:
    """A defect in words, and the attention that has it; family: the words for all that it is hard to tell from."""

    name: str
    text: str
    attention: type[ExplainedAttention]
    family: str = ""


def _explain(name: str, text: str, family: str = "", **steps: Any) -> Explanation:
    """Return an explanation; steps: the methods and attributes that it overrides."""
    return Explanation(name, text, type(name, (ExplainedAttention,), {"__doc__": text, **steps}), family)


def _scale(name: str, text: str, factor: Callable[[TextbookAttention], float]) -> Explanation:
    return _explain(name, f"the scores are {text}", scale=factor)


def _scales() -> Iterator[Explanation]:
    yield _scale("unscaled", "not scaled", lambda self: 1.0)
    yield _scale("scaled", "scaled by 1/sqrt(d_k)", lambda self: self.config.head_dim**-0.5)
    yield _scale("scaled_by_model", "scaled by 1/sqrt(d_model)", lambda self: self.config.d_model**-0.5)
    yield _scale("scaled_by_width", "scaled by 1/d_k", lambda self: 1 / self.config.head_dim)
    yield _scale("scaled_by_model_width", "scaled by 1/d_model", lambda self: 1 / self.config.d_model)
    yield _scale("scaled_by_heads", "scaled by 1/sqrt(n_heads)", lambda self: self.config.n_heads**-0.5)
    yield _scale("multiplied", "multiplied by sqrt(d_k)", lambda self: self.config.head_dim**0.5)
    yield _scale("sign", "of the opposite sign", lambda self: -TextbookAttention.scale(self))
    yield _scale("scale_in_float32", "scaled by 1/sqrt(d_k) rounded to float32", _rounded_divisor)
    yield _scale("scale_rounded", "scaled by 1/sqrt(d_k) rounded to float32", _rounded_scale)
    for axis, length in ((2, "L"), (3, "S")):
        text = f"the scores are scaled by 1/sqrt({length}), with {length} the length of a sequence"
        yield _explain(f"scaled_by_{length}", text, score=_scaled_by_length(axis))


def _rounded_divisor(self: TextbookAttention) -> float:
    return 1 / float(torch.tensor(float(self.config.head_dim), dtype=torch.float32).sqrt())


def _rounded_scale(self: TextbookAttention) -> float:
    return float(torch.tensor(self.config.head_dim**-0.5, dtype=torch.float32))


def _scaled_by_length(axis: int) -> Step:
    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores / scores.shape[axis] ** 0.5

    return score


def _with_mask(change: Callable[[Tensor], Tensor | None], *, alone: bool = False) -> Step:
    """Return `allow` with another mask, from one of (B, H, L, S); alone: only where there is one."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        changed = None if mask is None else change(mask.expand(scores.shape))
        return TextbookAttention.allow(self, changed, is_causal, scores)

    return allow


def _with_causal(visible: Callable[[TextbookAttention, int, int], Tensor]) -> Step:
    """Return `allow` with another causal mask (L, S)."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, mask, False, scores)
        return (allowed & visible(self, scores.shape[2], scores.shape[3]) if is_causal else allowed), bias

    return allow


def _with_keys(kept: Callable[[int], Tensor]) -> Step:
    """Return `allow` with some keys only; kept: boolean (S,), of the number of keys."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, mask, is_causal, scores)
        return allowed & kept(scores.shape[3]), bias

    return allow


def _always(key: int) -> Step:
    """Return `allow` where no mask can exclude a key."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, mask, is_causal, scores)
        place = torch.arange(scores.shape[3]) == key % scores.shape[3]
        return allowed | place if mask is not None else allowed, bias

    return allow


def _joined_by_or(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
    allowed, bias = TextbookAttention.allow(self, mask, False, scores)
    causal, _ = TextbookAttention.allow(self, None, is_causal, scores)
    return (allowed | causal if mask is not None and is_causal else allowed & causal), bias


def _float(change: Callable[[TextbookAttention, Tensor], Tensor]) -> Step:
    """Return `allow` with another float mask."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        changed = mask if mask is None or mask.dtype == torch.bool else change(self, mask)
        return TextbookAttention.allow(self, changed, is_causal, scores)

    return allow


def _masks() -> Iterator[Explanation]:
    yield _explain("unmasked", "the mask is ignored", allow=_with_mask(lambda mask: None))
    yield _explain(
        "upside_down", "the mask is read the other way round: what it allows is masked", allow=_with_mask(_not)
    )
    for name, part in (("item", slice(1)), ("head", (slice(None), slice(1))), ("query", (..., slice(1), slice(None)))):
        text = f"the mask of the first {name} counts for all"
        yield _explain(f"first_{name}", text, allow=_with_mask(lambda m, part=part: m[part].expand(m.shape)))
    yield _explain(
        "transposed", "the mask is applied to the queries instead of the keys", allow=_with_mask(_transposed)
    )
    yield _explain("crossed", "the mask has items and heads exchanged", allow=_with_mask(_exchanged))
    yield _explain("last_key", "the last key cannot be masked", allow=_always(-1))
    yield _explain("first_key", "the first key cannot be masked", allow=_always(0))
    yield _explain("or", "mask and causal flag are joined by `or` instead of `and`", allow=_joined_by_or)
    text = "the float mask is read as a boolean one"
    yield _explain("as_boolean", text, allow=_float(lambda self, mask: mask.bool()))
    text = "only the infinite entries of the float mask count"
    yield _explain("finite", text, allow=_float(lambda self, mask: mask.masked_fill(mask != -math.inf, 0.0)))
    text = "the float mask is added before the scores are scaled"
    yield _explain("mask_scaled", text, allow=_float(lambda self, mask: mask * self.scale()))
    text = "the float mask is subtracted"
    yield _explain("subtracted", text, allow=_float(lambda self, mask: torch.where(mask == -math.inf, mask, -mask)))


def _transposed(mask: Tensor) -> Tensor:
    if mask.shape[-1] != mask.shape[-2]:
        raise ValueError("only a square mask can be transposed")
    return mask.mT


def _exchanged(mask: Tensor) -> Tensor:
    if mask.shape[0] != mask.shape[1]:
        raise ValueError("as many items as heads are needed")
    return mask.transpose(0, 1)


def _not(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask


def _causal() -> Iterator[Explanation]:
    yield _explain(
        "not_causal", "the causal flag is ignored", allow=_with_causal(lambda self, L, S: torch.ones(L, S).bool())
    )
    for offset, text in (
        (1, "a query sees one key too many"),
        (-1, "a query does not see the key at its own position"),
    ):
        yield _explain(
            f"causal_{offset}", f"the causal mask is off by one: {text}", allow=_with_causal(_shifted(offset))
        )
    text = "the causal mask is aligned at the other end where L != S"
    yield _explain("alignment", text, allow=_with_causal(_other_alignment))
    text = "the causal mask is turned round: a query sees the keys after it"
    yield _explain("anticausal", text, allow=_with_causal(lambda self, L, S: torch.ones(L, S).triu().bool()))


def _shifted(offset: int) -> Callable[[TextbookAttention, int, int], Tensor]:
    def visible(self: TextbookAttention, queries: int, keys: int) -> Tensor:
        base = keys - queries if self.claims.causal == "bottom_right" else 0
        return torch.ones(queries, keys).tril(base + offset).bool()

    return visible


def _other_alignment(self: TextbookAttention, queries: int, keys: int) -> Tensor:
    return causal_mask(queries, keys, "bottom_right" if self.claims.causal == "top_left" else "top_left")


def _softmaxes() -> Iterator[Explanation]:
    for name, axis in (("queries", -2), ("heads", 1), ("items", 0)):
        yield _explain(f"over_{name}", f"the softmax runs over the {name}", weights_of=_softmax_over(axis))
    text = "masked weights are zeroed after the softmax, and the others not normalised again"
    yield _explain("after_softmax", text, weights_of=_after_softmax)
    text = "masked scores are multiplied by 0 instead of excluded"
    yield _explain("times_mask", text, weights_of=_filled(0.0))
    for fill in (-1e9, -1e5, -1e4, -1e3, -100.0, -20.0, -10.0, -1.0):
        text = f"masked scores are filled with {fill:g}, which is not low enough"
        yield _explain(f"filled_{fill:g}", text, TOO_HIGH, weights_of=_filled(fill))
        text = f"masked scores are lowered by {-fill:g}, which is not enough"
        yield _explain(f"lowered_{-fill:g}", text, TOO_HIGH, weights_of=_lowered(fill))
    text = "the softmax does not subtract the maximum of the scores, and overflows"
    yield _explain("overflow", text, weights_of=_without_maximum)
    yield _explain("sink", "1 is added to the denominator of the softmax", weights_of=_with_sink)
    yield _explain(
        "mean", "queries and keys do not count: each context is the mean of the values", scale=lambda self: 0.0
    )


def _softmax_over(axis: int) -> Step:
    def weights_of(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        weights = (scores + bias).masked_fill(~allowed, -math.inf).softmax(axis)
        return weights.masked_fill(~allowed, 0.0)

    return weights_of


def _after_softmax(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    return (scores + bias).softmax(-1) * allowed


def _filled(fill: float) -> Step:
    return lambda self, scores, allowed, bias: (scores + bias).masked_fill(~allowed, fill).softmax(-1)


def _lowered(fill: float) -> Step:
    return lambda self, scores, allowed, bias: (scores + bias + fill * ~allowed).softmax(-1)


def _without_maximum(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    raised = (scores + bias).exp() * allowed
    return raised / raised.sum(-1, keepdim=True).clamp(min=1e-30)


def _with_sink(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    total = F.pad((scores + bias).masked_fill(~allowed, -math.inf), (0, 1))
    return total.softmax(-1)[..., :-1]


def _projections() -> Iterator[Explanation]:
    for role, what in zip("qvo", ("query", "value", "output"), strict=True):
        text = f"the bias of the {what} projection is missing"
        yield _explain(
            f"no_b_{role}", text, linear=_linear(lambda self, x, r, role=role: _product(self, x, r, r != role))
        )
    yield _explain(
        "no_biases", "the biases are missing", linear=_linear(lambda self, x, r: _product(self, x, r, False))
    )
    for role, what in zip("qkvo", ("query", "key", "value", "output"), strict=True):
        subject = "the output projection is missing" if role == "o" else f"the {what} is not projected"
        yield _explain(f"no_w_{role}", subject, linear=_only(role, lambda self, x, r: x))
        text = f"the matrix of the {what} projection is transposed"
        yield _explain(f"transposed_w_{role}", text, linear=_only(role, _times_transposed))
    text = "the value is projected by W_k"
    yield _explain(
        "value_by_w_k", text, BY_W_K, linear=_linear(lambda self, x, r: _product(self, x, "k" if r == "v" else r))
    )
    text = "the query is projected by W_k and the key by W_q"
    yield _explain(
        "swapped_w_q_w_k", text, linear=_linear(lambda self, x, r: _product(self, x, {"q": "k", "k": "q"}.get(r, r)))
    )
    text = "the key, projected, stands in for the value"
    yield _explain(
        "key_for_value",
        text,
        take=lambda self, q, k, v: (q, k, k),
        linear=_linear(lambda self, x, r: _product(self, x, "k" if r == "v" else r)),
    )
    yield _explain("keys_as_values", "the key is passed for the value", take=lambda self, q, k, v: (q, k, k))
    yield _explain("values_as_keys", "the value is passed for the key", take=lambda self, q, k, v: (q, v, v))
    yield _explain("swapped_inputs", "key and value are exchanged", take=lambda self, q, k, v: (q, v, k))
    yield _explain("self", "the query is passed for key and value", take=lambda self, q, k, v: (q, q, q))


def _linear(function: Callable[[TextbookAttention, Tensor, str], Tensor]) -> Step:
    return function


def _product(self: TextbookAttention, x: Tensor, role: str, biased: bool = True) -> Tensor:
    bias = getattr(self, f"b_{role}", None) if biased else None
    return F.linear(x, getattr(self, f"w_{role}"), bias)


def _only(role: str, function: Callable[[TextbookAttention, Tensor, str], Tensor]) -> Step:
    return lambda self, x, r: function(self, x, r) if r == role else TextbookAttention.linear(self, x, r)


def _times_transposed(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
    return F.linear(x, getattr(self, f"w_{role}").mT, getattr(self, f"b_{role}", None))


def _heads() -> Iterator[Explanation]:
    for roles, what in (("q", "queries"), ("k", "keys"), ("v", "values"), ("qk", "queries and keys"), ("qkv", "heads")):
        text = f"the {what} are split with the columns interleaved, as (d_k, n_heads)"
        yield _explain(f"interleaved_{roles}", text, split=_split_for(roles, _interleaved))
        text = f"the {what} are split by `view` alone, without the transpose"
        yield _explain(f"viewed_{roles}", text, split=_split_for(roles, _viewed))
    text = "the heads have their columns interleaved, as (d_k, n_heads)"
    merge: Step = lambda self, contexts: contexts.permute(0, 2, 3, 1).flatten(2)
    yield _explain("interleaved", text, split=_split_for("qkv", _interleaved), merge=merge)
    yield _explain("merged_interleaved", "the heads are merged with the columns interleaved", merge=merge)
    text = "the heads are merged by `view` alone, without the transpose"
    viewed: Step = lambda self, contexts: contexts.reshape(contexts.shape[0], contexts.shape[2], -1)
    yield _explain("merged_by_view", text, merge=viewed)
    yield _explain(
        "viewed",
        "the heads are split and merged by `view` alone, without the transpose",
        split=_split_for("qkv", _viewed),
        merge=viewed,
    )
    for name, text, change in (
        ("reversed", "the heads are concatenated in reverse order", lambda x: x.flip(1)),
        ("averaged", "each head's context is the mean over all heads", lambda x: x.mean(1, keepdim=True).expand_as(x)),
        ("no_last_head", "the last head is left out", lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1)),
        ("first_context", "the first head's context is used for all heads", lambda x: x[:, :1].expand_as(x)),
    ):
        yield _explain(f"heads_{name}", text, merge=_merging(change))
    text = "the first head's weights are used for all heads"
    yield _explain("first_weights", text, weights_of=_first_weights)
    text = "the first head's scores are used for all heads"
    yield _explain("first_scores", text, score=_first_scores)
    text = "the key/value heads are tiled (`repeat`) instead of repeated one by one (`repeat_interleave`)"
    yield _explain("tiled", text, repeat=lambda self, heads, times: heads.repeat(1, times, 1, 1))
    text = "the first key/value head is used for all query heads"
    yield _explain(
        "first_group", text, repeat=lambda self, heads, times: heads[:, :1].expand(-1, heads.shape[1] * times, -1, -1)
    )


def _split_for(roles: str, split: Step) -> Step:
    return lambda self, x, role: (split if role in roles else TextbookAttention.split)(self, x, role)


def _interleaved(self: TextbookAttention, projected: Tensor, role: str) -> Tensor:
    heads: Tensor = projected.unflatten(-1, (self.config.head_dim, -1)).permute(0, 3, 1, 2)
    return heads


def _viewed(self: TextbookAttention, projected: Tensor, role: str) -> Tensor:
    width = self.config.head_dim
    return projected.reshape(len(projected), projected.shape[-1] // width, projected.shape[1], width)


def _merging(change: Callable[[Tensor], Tensor]) -> Step:
    return lambda self, contexts: TextbookAttention.merge(self, change(contexts))


def _first_weights(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    weights = TextbookAttention.weigh(self, scores, allowed, bias)
    return weights[:, :1].expand_as(weights)


def _first_scores(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
    scores = TextbookAttention.score(self, q, k)
    return scores[:, :1].expand_as(scores)


def _tiles() -> Iterator[Explanation]:
    yield _explain(
        "no_last_key", "the last key is left out", allow=_with_keys(lambda S: torch.arange(S) < max(S - 1, 1))
    )
    yield _explain(
        "no_first_key", "the first key is left out", allow=_with_keys(lambda S: torch.arange(S) >= min(1, S - 1))
    )
    for tile in (8, 16, 32, 64, 128):
        text = f"the keys after the last whole tile of {tile} are left out"
        yield _explain(
            f"tile_{tile}", text, allow=_with_keys(lambda S, tile=tile: torch.arange(S) < (S // tile * tile or S))
        )
        text = f"the key after the last whole tile of {tile} is left out"
        yield _explain(
            f"after_{tile}", text, allow=_with_keys(lambda S, tile=tile: torch.arange(S) < S - (S % tile == 1 < S))
        )
        text = f"only the first {tile} keys count"
        yield _explain(f"first_{tile}", text, TILE, allow=_with_keys(lambda S, tile=tile: torch.arange(S) < tile))
    for width in (8, 16, 32, 64, 128, 256):
        text = f"only the first {width} columns of a head enter the scores"
        yield _explain(f"columns_{width}", text, score=_columns(lambda d, width=width: width))
    text = "the columns of a head are read in eights, without the remainder, for the scores"
    yield _explain("columns_in_eights", text, score=_columns(lambda d: d // 8 * 8 or d))
    yield _explain(
        "odd_column",
        "the last column of a head of odd width is left out of the scores",
        score=_columns(lambda d: d // 2 * 2 or 1),
    )
    for tile in (8, 16, 32, 64, 128):
        text = f"the mask is applied to the first {tile} keys only"
        yield _explain(f"mask_of_{tile}", text, allow=_always_from(tile))
    for factor, text in ((0.0, "is read as zero"), (2.0, "counts twice")):
        yield _explain(f"last_value_{factor:g}", f"the value of the last key {text}", project=_last_value(factor))


def _columns(kept: Callable[[int], int]) -> Step:
    """Return `score` of the first columns of each head."""

    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
        width = kept(q.shape[-1])
        return TextbookAttention.score(self, q[..., :width], k[..., :width])

    return score


def _always_from(tile: int) -> Step:
    """Return `allow` where no mask can exclude the keys after the first tile."""

    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        allowed, bias = TextbookAttention.allow(self, mask, is_causal, scores)
        return allowed | (torch.arange(scores.shape[3]) >= tile), bias

    return allow


def _last_value(factor: float) -> Step:
    def project(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
        heads = TextbookAttention.project(self, x, role)
        return torch.cat([heads[:, :, :-1], factor * heads[:, :, -1:]], 2) if role == "v" else heads

    return project


def _empty_rows() -> Iterator[Explanation]:
    for policy, text in (
        ("uniform", "attends to all keys equally, as with a finite fill"),
        ("nan", "is NaN, as with a fill of -infinity"),
        ("zeros", "gets zeros"),
    ):
        text = f"a query without an allowed key {text}"
        yield _explain(f"empty_{policy}", text, weights_of=_empty_as(policy))
    text = "a query without an allowed key attends as if nothing were masked"
    yield _explain("empty_unmasked", text, weights_of=_empty_as("unmasked"))


def _empty_as(policy: str) -> Step:
    def weights_of(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True)
        weights = (scores + bias).masked_fill(~(allowed | empty), -math.inf).softmax(-1)
        if policy == "unmasked":
            return weights
        return weights.masked_fill(empty, {"uniform": 1 / scores.shape[-1], "nan": math.nan, "zeros": 0.0}[policy])

    return weights_of


def _precisions() -> Iterator[Explanation]:
    for name in ("bfloat16", "float16", "float32"):
        dtype: torch.dtype = getattr(torch, name)
        yield _explain(f"scores_{name}", f"the scores are rounded to {name}", score=_scores_in(dtype))
        yield _explain(f"sums_{name}", f"the scores are rounded to {name}", weights_of=_sums_in(dtype))
        yield _explain(f"softmax_{name}", f"the softmax is computed in {name}", weights_of=_softmax_in(dtype))
        text = f"the weights are rounded to {name}"
        yield _explain(f"weights_{name}", text, weights_of=_weights_in(dtype))
    yield _explain(
        "zeros",
        "the context is zero",
        combine=lambda self, weights, v, query: TextbookAttention.combine(self, weights * 0, v, query),
    )
    yield _explain(
        "zero",
        "the output is zero",
        combine=lambda self, weights, v, query: 0 * TextbookAttention.combine(self, weights, v, query),
    )
    text = "the query is added to the output, as in a residual connection"
    yield _explain(
        "residual",
        text,
        combine=lambda self, weights, v, query: query + TextbookAttention.combine(self, weights, v, query),
    )


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
    return lambda self, scores, allowed, bias: TextbookAttention.weigh(self, scores, allowed, bias).to(dtype).to(scores)


def _stale() -> Iterator[Explanation]:
    for newest, which in ((False, "the first call"), (True, "the call before")):
        text = f"the mask of {which} with the same shapes is used again"
        yield _explain(f"stale_mask_{newest}", text, STALE, allow=_stale_mask(newest))
        text = f"the weights of {which} with the same shapes are used again"
        yield _explain(f"stale_weights_{newest}", text, STALE, weights_of=_stale_weights(newest))
        text = f"the scores of {which} with the same shapes are used again"
        yield _explain(f"stale_scores_{newest}", text, STALE, score=_stale_scores(newest))
        text = f"the output of {which} with the same shapes is returned again"
        yield _explain(f"stale_output_{newest}", text, STALE, combine=_stale_output(newest))


def _kept(self: Any, key: Any, value: Any, newest: bool) -> Any:
    """Return what the instance kept under a key in an earlier call, or else this value, which it keeps."""
    kept: dict[Any, Any] = self.__dict__.setdefault("kept", {})
    earlier = kept.get(key, value)
    if newest or key not in kept:
        kept[key] = value
    return earlier


def _stale_mask(newest: bool) -> Step:
    def allow(self: TextbookAttention, mask: Tensor | None, is_causal: bool, scores: Tensor) -> Allowed:
        allowed = TextbookAttention.allow(self, mask, is_causal, scores)
        if mask is None and not is_causal:
            return allowed
        earlier: Allowed = _kept(self, scores.shape, allowed, newest)
        return earlier

    return allow


def _stale_weights(newest: bool) -> Step:
    def weights_of(self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor) -> Any:
        return _kept(self, scores.shape, TextbookAttention.weigh(self, scores, allowed, bias), newest)

    return weights_of


def _stale_scores(newest: bool) -> Step:
    def score(self: TextbookAttention, q: Tensor, k: Tensor) -> Any:
        return _kept(self, (q.shape, k.shape), TextbookAttention.score(self, q, k), newest)

    return score


def _stale_output(newest: bool) -> Step:
    def combine(self: TextbookAttention, weights: Tensor, v: Tensor, query: Tensor) -> Any:
        return _kept(self, query.shape, TextbookAttention.combine(self, weights, v, query), newest)

    return combine


def scores_times(factor: float) -> Explanation:
    """Return the explanation that the scores are multiplied by a number."""
    text = f"the scores are {factor:.6g} times what they should be"
    return _explain("scores_times", text, scale=lambda self: factor * TextbookAttention.scale(self))


def outputs_times(factor: float) -> Explanation:
    """Return the explanation that the output is multiplied by a number."""
    text = f"the output is {factor:.6g} times what it should be"
    return _explain(
        "outputs_times",
        text,
        combine=lambda self, weights, v, query: factor * TextbookAttention.combine(self, weights, v, query),
    )


def sums_times(factor: float) -> Explanation:
    """Return the explanation that scores and float mask together are multiplied by a number."""
    text = f"the scores are {factor:.6g} times what they should be"
    return _explain(
        "sums_times",
        text,
        weights_of=lambda self, scores, allowed, bias: TextbookAttention.weigh(
            self, factor * (scores + bias), allowed, 0 * bias
        ),
    )


def contexts_times(factor: float) -> Explanation:
    """Return the explanation that the weights are multiplied by a number."""
    text = f"the weights are {factor:.6g} times what they should be"
    return _explain("contexts_times", text, merge=_merging(lambda x: x * factor))


def _together(explanations: Iterable[Explanation]) -> Iterator[Explanation]:
    """Yield each two explanations that override other steps, as one."""
    for one, other in combinations(explanations, 2):
        steps = [{k: v for k, v in vars(each.attention).items() if not k.startswith("__")} for each in (one, other)]
        if not steps[0].keys() & steps[1].keys():
            yield _explain(f"{one.name}+{other.name}", f"{one.text}, and {other.text}", **steps[0], **steps[1])


# In groups, the simplest first: what a group explains needs no later one.
EXPLANATIONS: tuple[tuple[Explanation, ...], ...] = tuple(
    tuple(group())
    for group in (
        _scales,
        _projections,
        _heads,
        _masks,
        _causal,
        _empty_rows,
        _softmaxes,
        _tiles,
        _stale,
        _precisions,
    )
)

# Defects that often come together.
COMMON = (
    "unscaled",
    "scaled_by_model",
    "scaled_by_width",
    "no_b_q",
    "no_b_o",
    "no_biases",
    "no_w_o",
    "viewed_qkv",
    "merged_by_view",
    "interleaved_qkv",
    "unmasked",
    "upside_down",
    "transposed",
    "first_item",
    "not_causal",
    "causal_1",
    "empty_uniform",
    "empty_nan",
)
PAIRS = tuple(_together(each for group in EXPLANATIONS for each in group if each.name in COMMON))
