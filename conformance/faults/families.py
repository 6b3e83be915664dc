"""Bases of faults that differ in one value: where another scale is used, or a mask ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.spec import Options
from mha.spec.dtypes import traits_of


def is_half(x: Tensor) -> bool:
    """Return whether a tensor is of a half-precision dtype."""
    return traits_of(x.dtype).half


def scores_scaled(factor: float, *, when: Callable[[Complete], bool]) -> type[Complete]:
    """Return a class whose scores are multiplied by a factor under a condition on the module."""

    class ScoresScaled(Complete):
        def score(self, q: Tensor, k: Tensor) -> Tensor:
            return super().score(q, k) * (factor if when(self) else 1.0)

    return ScoresScaled


def mask_ignored(*, when: Callable[[Tensor, Options], bool]) -> type[Complete]:
    """Return a class that ignores the mask under a condition on q (B, H, L, d_k) and options."""

    class MaskIgnored(Complete):
        def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            if when(q, options):
                options = options.change(mask=None)
            return super().allow(options, q, k)

    return MaskIgnored


def keys_detached(*, when: Callable[[Tensor], bool]) -> type[Complete]:
    """Return a class that detaches the keys under a condition on them (B, H, S, d_k)."""

    class KeysDetached(Complete):
        def score(self, q: Tensor, k: Tensor) -> Tensor:
            return super().score(q, k.detach() if when(k) else k)

    return KeysDetached


def remainder_dropped(tile: int) -> type[Complete]:
    """Return a class that leaves out the keys after the last whole tile, if there is one."""

    class RemainderDropped(Complete):
        def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
            whole = scores.shape[-1] // tile * tile
            kept = torch.arange(scores.shape[-1], device=scores.device) < (
                whole or scores.shape[-1]
            )
            return super().weigh(scores, allowed & kept)

    return RemainderDropped


def bias_missing(missing: str) -> type[Complete]:
    """Return a class without the bias of one role, "q", "k", "v" or "o"."""

    class BiasMissing(Complete):
        def project(self, x: Tensor, role: str) -> Tensor:
            if role == missing:
                return F.linear(x, getattr(self, f"w_{role}"))
            return super().project(x, role)

    return BiasMissing


def empty_rows_unguarded(*, when: Callable[[Complete, Tensor], bool]) -> type[Complete]:
    """Return a class whose empty rows are NaN under a condition on module and scores."""

    class EmptyRowsUnguarded(Complete):
        def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
            if when(self, scores):
                return scores.masked_fill(~allowed, -math.inf).softmax(-1)
            return super().weigh(scores, allowed)

    return EmptyRowsUnguarded


def drops_in_evaluation(*, when: Callable[[Any], bool]) -> type[Complete]:
    """Return a class whose dropout is active in evaluation too, under a condition on the module."""

    class DropsInEvaluation(Complete):
        def drop(self, weights: Tensor) -> Tensor:
            return F.dropout(weights, self.config.dropout, self.training or when(self))

    return DropsInEvaluation


def one_draw(part: Callable[[Tensor], Tensor]) -> type[Complete]:
    """Return a class that draws for a part of the weights (B, H, L, S), and broadcasts the draw."""

    class OneDraw(Complete):
        def drop(self, weights: Tensor) -> Tensor:
            return weights * super().drop(torch.ones_like(part(weights)))

    return OneDraw


def sinks_changed(change: Callable[[Tensor, Tensor], Tensor]) -> type[Complete]:
    """Return a class that changes the sinks of a call, (H,), given those and the scores."""

    class SinksChanged(Complete):
        def sinks(self, scores: Tensor) -> Tensor | None:
            given = super().sinks(scores)
            return None if given is None else change(given, scores)

    return SinksChanged


def hooked(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with its gradient changed, unless it is undefined, as once in `gradcheck`."""
    if x.requires_grad:
        x.register_hook(lambda gradient: None if gradient is None else change(gradient))
    return x


class Decoding(Complete):
    """Correct; `decodes_now` says whether the current call is a decoding step."""

    decodes_now = False

    def decode(self, *inputs: Any, **named: Any) -> tuple[Tensor, Any]:
        """Decode as `Complete`, with `decodes_now` set meanwhile."""
        self.decodes_now = True
        try:
            return super().decode(*inputs, **named)
        finally:
            self.decodes_now = False
