"""Faults that LEN must catch: lengths of the items of a dense batch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.conformance.harness.known_bad.lengths import present_pairs, without_lengths
from mha.implementations.formula import allowed_by
from mha.spec import Lse, Options, Packed

Allowed = tuple[Tensor, Tensor]
EXACT, ALONE = "each_item_has_its_own_lengths", "what_is_after_a_length_reaches_nothing"
TOGETHER = "lengths_go_with_other_options"
BOTTOM_RIGHT = replace(CLAIMS, causal="bottom_right")
WITH_LSE = replace(CLAIMS, lse=Lse(), packed=Packed())


def _longer(options: Options, added: int, longest: int) -> Options:
    """Return options with more or fewer keys of each item."""
    if options.key_lengths is None:
        return options
    changed = (max(0, min(own + added, longest)) for own in options.key_lengths)
    return options.change(key_lengths=tuple(changed))


@fault("LEN-1", caught_by=EXACT)
class LengthsIgnored(Complete):
    """Lengths of items have no effect."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(without_lengths(options), q, k)


@fault("LEN-1", caught_by=EXACT, trigger="fewer keys than there is room for")
class OneKeyAfterTheLength(Complete):
    """The first key after an item's own is seen: `t <= length`."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(_longer(options, 1, k.shape[2]), q, k)


@fault("LEN-1", claims=BOTTOM_RIGHT, caught_by=EXACT, trigger="lengths and the causal flag")
class AlignedToTheRoom(Complete):
    """The causal mask is aligned by the room for keys, and not by an item's own keys."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(without_lengths(options), q, k)
        scores = q.new_zeros(()).expand(*q.shape[:3], k.shape[2])
        return allowed & present_pairs(options, scores), bias


@fault(
    "LEN-1",
    caught_by=ALONE,
    trigger="NaN after a length",
    source="https://github.com/Dao-AILab/flash-attention/issues/1745",
)
class ZeroTimesNaN(Complete):
    """Values after a length are multiplied by weights of zero, so that NaN there spreads."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if self.options.key_lengths is None:
            return super().combine(weights, v, allowed)
        return weights @ v


@fault("LEN-1", caught_by="rows_after_the_queries_are_zero", trigger="fewer queries than L")
class RowsAfterTheQueries(Complete):
    """Rows after the queries of an item attend to all its keys."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(options.change(query_lengths=None), q, k)


@fault("LEN-1", caught_by=TOGETHER, trigger="lengths and a window")
class LengthsForgottenBesideWindow(Complete):
    """With a window, the lengths are ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if options.window is not None:
            options = without_lengths(options)
        return super().allow(options, q, k)


@fault("LEN-1", caught_by="gradients_have_the_lengths", trigger="lengths, backwards")
class LengthsBackwards(Complete):
    """With lengths, the gradients of the scores are halved."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.0 if self.options.key_lengths is None else 0.5
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault(
    "PAK-1",
    claims=WITH_LSE,
    caught_by="the_log_sum_exp_is_that_of_each_sequence",
    trigger="a log-sum-exp",
)
@fault("LEN-1", claims=WITH_LSE, caught_by="the_log_sum_exp_has_the_lengths")
class LseAfterTheLengths(Complete):
    """The log-sum-exp counts keys after the lengths."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        options = without_lengths(self.options)
        if options.key_lengths != self.options.key_lengths:
            allowed, _ = allowed_by(options, scores)
        return super().log_sum_exp(scores, allowed)


@fault(
    "LEN-1",
    caught_by="what_is_after_a_length_reaches_nothing_beside_options",
    trigger="lengths and a window, with NaN after a length",
)
class ZeroTimesNaNBesideWindow(Complete):
    """With a window, values after a length are multiplied by weights of zero."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if self.options.window is None:
            return super().combine(weights, v, allowed)
        return weights @ v


@fault(
    "LEN-1",
    claims=WITH_LSE,
    caught_by="the_log_sum_exp_has_the_lengths_beside_options",
    trigger="lengths and a cap",
)
class LseAfterTheLengthsBesideCap(Complete):
    """With a cap, the log-sum-exp counts keys after the lengths."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.options.softcap is not None:
            allowed, _ = allowed_by(without_lengths(self.options), scores)
        return super().log_sum_exp(scores, allowed)
