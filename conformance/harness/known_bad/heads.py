"""How projections and heads go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.known_bad.defect import Defect, Step, defect
from mha.conformance.harness.textbook import TextbookAttention

BY_W_K = "the values are projected by W_k"


def projections() -> Iterator[Defect]:
    """Yield missing, transposed and exchanged projections, and exchanged inputs."""
    for role, what in zip("qvo", ("query", "value", "output"), strict=True):
        text = f"the bias of the {what} projection is missing"
        yield defect(f"no_b_{role}", text, linear=_only(role, _without_bias))
    yield defect("no_biases", "the biases are missing", linear=_without_bias)
    for role, what in zip("qkvo", ("query", "key", "value", "output"), strict=True):
        subject = f"the {what} is not projected"
        if role == "o":
            subject = "the output projection is missing"
        yield defect(f"no_w_{role}", subject, linear=_only(role, lambda self, x, r: x))
        text = f"the matrix of the {what} projection is transposed"
        yield defect(f"transposed_w_{role}", text, linear=_only(role, _times_transposed))
    text = "the value is projected by W_k"
    yield defect("value_by_w_k", text, BY_W_K, linear=_by_w_of(v="k"))
    yield defect("key_by_w_v", "the key is projected by W_v", linear=_by_w_of(k="v"))
    text = "the query is projected by W_k and the key by W_q"
    yield defect("swapped_w_q_w_k", text, linear=_by_w_of(q="k", k="q"))
    text = "the key, projected, stands in for the value"
    yield defect(
        "key_for_value",
        text,
        take=lambda self, q, k, v: (q, k, k),
        linear=_by_w_of(v="k"),
    )
    yield defect(
        "keys_as_values", "the key is passed for the value", take=lambda self, q, k, v: (q, k, k)
    )
    yield defect(
        "values_as_keys", "the value is passed for the key", take=lambda self, q, k, v: (q, v, v)
    )
    yield defect(
        "swapped_inputs", "key and value are exchanged", take=lambda self, q, k, v: (q, v, k)
    )
    yield defect(
        "self", "the query is passed for key and value", take=lambda self, q, k, v: (q, q, q)
    )


def _without_bias(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
    return F.linear(x, getattr(self, f"w_{role}"))


def _by_w_of(**roles: str) -> Step:
    """Return `linear` with the matrix and the bias of another role."""

    def linear(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
        return TextbookAttention.linear(self, x, roles.get(role, role))

    return linear


def _only(role: str, function: Callable[[TextbookAttention, Tensor, str], Tensor]) -> Step:
    def linear(self: TextbookAttention, x: Tensor, other: str) -> Tensor:
        if other == role:
            return function(self, x, role)
        return TextbookAttention.linear(self, x, other)

    return linear


def _times_transposed(self: TextbookAttention, x: Tensor, role: str) -> Tensor:
    return F.linear(x, getattr(self, f"w_{role}").mT, getattr(self, f"b_{role}", None))


# What may become of the contexts of the heads, (B, H, L, d_k), by the name of the defect.
CONTEXTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "reversed": ("the heads are concatenated in reverse order", lambda x: x.flip(1)),
    "averaged": (
        "each head's context is the mean over all heads",
        lambda x: x.mean(1, keepdim=True).expand_as(x),
    ),
    "no_last_head": (
        "the last head is left out",
        lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1),
    ),
    "first_context": (
        "the first head's context is used for all heads",
        lambda x: x[:, :1].expand_as(x),
    ),
}


def heads() -> Iterator[Defect]:
    """Yield heads that are split or merged wrongly, or stand in for each other."""
    yield from _layouts_of_heads()
    for name, (text, change) in CONTEXTS.items():
        yield defect(f"heads_{name}", text, merge=merging(change))
    yield from _exchanged_heads()


def _layouts_of_heads() -> Iterator[Defect]:
    """Yield heads whose columns are split or merged wrongly."""
    for roles, what in (
        ("q", "queries"),
        ("k", "keys"),
        ("v", "values"),
        ("qk", "queries and keys"),
        ("qkv", "heads"),
    ):
        text = f"the {what} are split with the columns interleaved, as (d_k, n_heads)"
        yield defect(f"interleaved_{roles}", text, split=_split_for(roles, _interleaved))
        text = f"the {what} are split by `view` alone, without the transpose"
        yield defect(f"viewed_{roles}", text, split=_split_for(roles, _viewed))
    interleaved, viewed = _split_for("qkv", _interleaved), _split_for("qkv", _viewed)
    text = "the heads have their columns interleaved, as (d_k, n_heads)"
    yield defect("interleaved", text, split=interleaved, merge=_merge_interleaved)
    text = "the heads are merged with the columns interleaved"
    yield defect("merged_interleaved", text, merge=_merge_interleaved)
    text = "the heads are merged by `view` alone, without the transpose"
    yield defect("merged_by_view", text, merge=_merge_viewed)
    text = "the heads are split and merged by `view` alone, without the transpose"
    yield defect("viewed", text, split=viewed, merge=_merge_viewed)


def _exchanged_heads() -> Iterator[Defect]:
    """Yield heads that stand in for others."""
    text = "the first head's weights are used for all heads"
    yield defect("first_weights", text, weigh=_first_weights)
    text = "the first head's scores are used for all heads"
    yield defect("first_scores", text, score=_first_scores)
    text = (
        "the key/value heads are tiled (`repeat`) instead of repeated one by one"
        " (`repeat_interleave`)"
    )
    yield defect("tiled", text, repeat=lambda self, heads, times: heads.repeat(1, times, 1, 1))
    text = "the first key/value head is used for all query heads"
    yield defect(
        "first_group",
        text,
        repeat=lambda self, heads, times: heads[:, :1].expand(-1, heads.shape[1] * times, -1, -1),
    )


def _split_for(roles: str, split: Step) -> Step:
    def split_some(self: TextbookAttention, projected: Tensor, role: str) -> Tensor:
        if role in roles:
            heads: Tensor = split(self, projected, role)
            return heads
        return TextbookAttention.split(self, projected, role)

    return split_some


def _interleaved(self: TextbookAttention, projected: Tensor, role: str) -> Tensor:
    heads: Tensor = projected.unflatten(-1, (self.config.head_dim, -1)).permute(0, 3, 1, 2)
    return heads


def _merge_interleaved(self: TextbookAttention, contexts: Tensor) -> Tensor:
    return contexts.permute(0, 2, 3, 1).flatten(2)


def _merge_viewed(self: TextbookAttention, contexts: Tensor) -> Tensor:
    return contexts.reshape(contexts.shape[0], contexts.shape[2], -1)


def _viewed(self: TextbookAttention, projected: Tensor, role: str) -> Tensor:
    width = self.config.head_dim
    return projected.reshape(
        len(projected), projected.shape[-1] // width, projected.shape[1], width
    )


def merging(change: Callable[[Tensor], Tensor]) -> Step:
    """Return `merge` of changed contexts (B, H, L, d_k)."""
    return lambda self, contexts: TextbookAttention.merge(self, change(contexts))


def _first_weights(
    self: TextbookAttention, scores: Tensor, allowed: Tensor, bias: Tensor
) -> Tensor:
    weights = TextbookAttention.weigh(self, scores, allowed, bias)
    return weights[:, :1].expand_as(weights)


def _first_scores(self: TextbookAttention, q: Tensor, k: Tensor) -> Tensor:
    scores = TextbookAttention.score(self, q, k)
    return scores[:, :1].expand_as(scores)
