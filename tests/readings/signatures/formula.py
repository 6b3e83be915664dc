"""The plain formula behind the signatures, with conventions that can be changed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conventions:
    """What an interface leaves to its documentation; each of its own where it differs.

    causal: from which end the places of causal calls count; window: those of windows.
    left_edge, right_edge: the keys that a window lacks on a side that has a bound.
    log_base: of the log-sum-exp, 0.0 for the natural one.
    cap: where the scores are capped.
    alibi: the bias of slopes m.
    groups: how heads of queries find their key heads: the next ones share one, or they take turns.
    sink: which part of the softmax a sink is of.
    ignored: a parameter that is not read.
    scale: 2 for a scale that is applied to queries and keys both.
    keep: what True means in a boolean mask.
    """

    causal: str = "bottom_right"
    window: str = "bottom_right"
    left_edge: int = 0
    right_edge: int = 0
    log_base: float = 0.0
    cap: str = "before_bias"
    alibi: str = "symmetric"
    groups: str = "next"
    sink: str = "denominator"
    sink_in_lse: bool = True
    ignored: str = ""
    scale: int = 1
    keep: bool = True


_changes: dict[str, Any] = {}


@contextmanager
def _changing(changes: dict[str, Any]) -> Iterator[None]:
    before = dict(_changes)
    _changes.update(changes)
    try:
        yield
    finally:
        _changes.clear()
        _changes.update(before)


def changed(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """Return a function with the same signature, and with other conventions."""
    unknown = changes.keys() - {field.name for field in fields(Conventions)}
    assert not unknown, unknown

    @wraps(function)
    def attend(*inputs: Any, **options: Any) -> Any:
        if changes.get("ignored"):
            options.pop(changes["ignored"], None)
        with _changing(changes):
            return function(*inputs, **options)

    return attend


def conventions(**own: Any) -> Conventions:
    """Return the conventions of an interface, and the changed ones."""
    return replace(Conventions(**own), **_changes)


def offset(alignment: str, queries: int, keys: int) -> int:
    """Return the place of the first query among the keys."""
    return keys - queries if alignment == "bottom_right" else 0


def distances(q: Tensor, k: Tensor, alignment: str) -> Tensor:
    """Return how far each key is after each query, (L, S)."""
    queries, keys = q.shape[-2], k.shape[-2]
    of_queries = torch.arange(queries).unsqueeze(1) + offset(alignment, queries, keys)
    return torch.arange(keys) - of_queries


def all_keys(q: Tensor, k: Tensor) -> Tensor:
    """Return the mask that hides nothing, (L, S)."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)


def causal_keys(q: Tensor, k: Tensor, how: Conventions) -> Tensor:
    """Return which keys are not later, (L, S)."""
    return distances(q, k, how.causal) <= 0


def window_keys(
    q: Tensor, k: Tensor, left: int | None, right: int | None, how: Conventions
) -> Tensor:
    """Return which keys are within both bounds, inclusive; None for no bound."""
    away = distances(q, k, how.window)
    allowed = all_keys(q, k)
    if left is not None:
        allowed &= away >= how.left_edge - left
    if right is not None:
        allowed &= away <= right - how.right_edge
    return allowed


def alibi_bias(q: Tensor, k: Tensor, slopes: Tensor, how: Conventions) -> Tensor:
    """Return the bias of slopes (H,) or (B, H)."""
    away = distances(q, k, how.window).to(slopes.dtype)
    kinds = {"symmetric": -away.abs(), "grows": away.abs(), "signed": away, "reversed": -away}
    return slopes[..., None, None] * kinds[how.alibi]


@dataclass(frozen=True)
class Attended:
    """What attention gives: the context (B, H, L, d_v), its log-sum-exp, and its weights."""

    context: Tensor
    lse: Tensor
    weights: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    how: Conventions,
    *,
    scale: float | None = None,
    cap: float | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Attended:
    """Return attention of heads (B, H, L, d), computed in float32 at least.

    bias: what is added to the scores.
    allowed: which keys are seen; a query without any gets zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (of_heads(x.to(wide), q.shape[1], how) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.to(wide) @ k.mT) * factor**how.scale
    if cap and how.cap == "before_bias":
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.to(wide)
    if cap and how.cap == "after_bias":
        hidden = scores.isinf()
        scores = (cap * torch.tanh(scores / cap)).masked_fill(hidden, -torch.inf)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return _weighed(scores, v, sinks, how, q.dtype)


def _weighed(
    scores: Tensor, v: Tensor, sinks: Tensor | None, how: Conventions, dtype: torch.dtype
) -> Attended:
    columns = scores
    lse = scores.logsumexp(-1)
    if sinks is not None:
        of_rows = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        if how.sink == "scaled":
            of_rows = of_rows * v.shape[-1] ** -0.5
        columns = torch.cat([scores, of_rows], -1)
        lse = columns.logsumexp(-1) if how.sink_in_lse else lse
    hidden = columns.isinf()
    empty = hidden.all(-1, keepdim=True)
    weights = columns.masked_fill(empty, 0.0).softmax(-1).masked_fill(hidden & empty, 0.0)
    weights = weights[..., : scores.shape[-1]]
    if how.log_base:
        lse = lse / torch.tensor(how.log_base).log()
    return Attended((weights @ v).to(dtype), lse, weights.to(dtype))


def of_heads(x: Tensor, heads: int, how: Conventions) -> Tensor:
    """Return keys or values of as many heads as the query has."""
    times = heads // x.shape[1]
    if how.groups == "next":
        return x.repeat_interleave(times, 1)
    return x.repeat(1, times, 1, 1)
