"""Faults that WIN and EFF must catch: windows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.conformance.harness.known_bad.options import moved
from mha.spec import Options, Scores, Window, window_mask

Allowed = tuple[Tensor, Tensor]
EXACT, LONGER = "a_window_has_exactly_its_keys", "a_window_moves_along_longer_sequences"
BOTTOM_RIGHT = replace(CLAIMS, causal="bottom_right")
COUNTING = replace(CLAIMS, scores=Scores(window=Window("count")))


def _moved(options: Options, left: int = 0, right: int = 0) -> Options:
    """Return options whose window has more or fewer keys on the sides that have a bound."""
    if options.window is None:
        return options
    return options.change(window=moved(options.window, left, right))


@fault("WIN-1", caught_by=EXACT, source="https://github.com/sgl-project/sglang/pull/26516")
@fault("EFF-1", caught_by="a_window_has_an_effect")
class WindowIgnored(Complete):
    """A window has no effect."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(options.change(window=None), q, k)


@fault("WIN-1", caught_by=EXACT, trigger="a window with a left bound")
class LeftEdgeExclusive(Complete):
    """The first key of a window is left out: `t > p - left`."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_moved(options, left=-1), q, k)


@fault("WIN-1", claims=COUNTING, caught_by=EXACT, trigger="a window")
class OneMoreThanCounted(Complete):
    """A window of w keys has one more, the query's own."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_moved(options, left=1), q, k)


@fault("WIN-1", caught_by=EXACT, trigger="a window with a right bound")
class RightEdgeOneLater(Complete):
    """A window has a key too many after the query's own."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_moved(options, right=1), q, k)


@fault("WIN-1", claims=BOTTOM_RIGHT, caught_by=EXACT, trigger="L != S, with a window")
class WindowFromTheLeft(Complete):
    """Windows are aligned top-left, although bottom-right is declared."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options.change(window=None, is_causal=False), q, k)
        lengths = q.shape[2], k.shape[2]
        if options.is_causal:
            allowed = allowed & window_mask(*lengths, (None, 0), "bottom_right", q.device)
        if options.window is not None:
            allowed = allowed & window_mask(*lengths, options.window, "top_left", q.device)
        return allowed, bias


@fault(
    "WIN-1",
    caught_by=EXACT,
    trigger="a window and the causal flag",
    source="https://github.com/facebookresearch/MSLK/pull/263",
)
class CausalForgottenBesideWindow(Complete):
    """With a window, the causal flag is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(
            options.change(is_causal=options.is_causal and options.window is None), q, k
        )


@fault(
    "WIN-1",
    caught_by=EXACT,
    trigger="a window and a mask",
    source="https://github.com/huggingface/transformers/pull/34093",
)
class MaskForgottenBesideWindow(Complete):
    """With a window, the mask is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if options.window is not None:
            options = options.change(mask=None)
        return super().allow(options, q, k)


@fault(
    "WIN-1",
    caught_by=LONGER,
    trigger="a window within tiles of 16 keys",
    source="https://github.com/sgl-project/sglang/pull/31501",
)
class WindowOfTiles(Complete):
    """Whole tiles of 16 keys are seen, where a part of one is in the window."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options, q, k)
        if options.window is None:
            return allowed, bias
        others, _ = super().allow(options.change(window=None), q, k)
        tiles = torch.arange(k.shape[2], device=q.device) // 16
        seen = torch.zeros_like(allowed)
        for tile in tiles.unique():
            of_tile = tiles == tile
            seen = seen | (allowed & of_tile).any(-1, keepdim=True) & of_tile
        return seen & others, bias


@fault("WIN-1", caught_by="gradients_have_the_window", trigger="a window, backwards")
class NoGradientWithWindow(Complete):
    """With a window, the gradients of the scores are halved."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.0 if self.options.window is None else 0.5
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault(
    "WIN-2",
    caught_by="a_window_of_everything_equals_none",
    trigger="L > S, a right bound of S or more",
    source="https://github.com/Dao-AILab/flash-attention/issues/895",
)
class UnboundedIsLength(Complete):
    """A side without a bound is one of S, which is too little for more queries than keys."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if options.window is not None:
            keys = k.shape[2]
            left, right = (keys if bound is None else min(bound, keys) for bound in options.window)
            options = options.change(window=(left, right))
        return super().allow(options, q, k)


@fault(
    "WIN-2", caught_by="a_window_of_masked_keys_is_an_empty_row", trigger="a window of masked keys"
)
class EmptyWindowSeesAll(Complete):
    """A query whose window has only masked keys attends to all keys."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        empty = ~allowed.any(-1, keepdim=True) & (self.options.window is not None)
        return super().weigh(scores, allowed | empty)


@fault("EFF-1", caught_by="a_scale_has_an_effect", trigger="an explicit scale")
class ScaleDropped(Complete):
    """An explicit scale is taken, and not passed on."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.options = self.options.change(scale=None)
        return super().score(q, k)


@fault(
    "WIN-1",
    caught_by="a_window_goes_with_other_options",
    trigger="a window and grouped heads",
)
class WindowForgottenBesideGroups(Complete):
    """With grouped heads, the window is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if self.config.kv_heads < self.config.n_heads:
            options = options.change(window=None)
        return super().allow(options, q, k)
