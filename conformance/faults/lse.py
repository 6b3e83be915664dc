"""Faults that LSE must catch: the log-sum-exp beside the context."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.fault import fault
from mha.conformance.faults.variants import WITH_VALUE_WIDTH
from mha.implementations.formula import allowed_by
from mha.spec import Lse

WITH_LSE = replace(WITH_VALUE_WIDTH, value_width=False, lse=Lse(gradient=True))
OF_SCORES = "the_log_sum_exp_is_that_of_the_scores"
WITH_OPTIONS = "the_log_sum_exp_goes_with_other_options"


@fault("LSE-1", claims=WITH_LSE, caught_by=OF_SCORES)
class LseInBaseTwo(Complete):
    """The log-sum-exp is to base 2."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().log_sum_exp(scores, allowed) / math.log(2)


@fault("LSE-1", claims=WITH_LSE, caught_by=OF_SCORES, trigger="a row without keys")
class LseOfNoKeysIsZero(Complete):
    """The log-sum-exp of a row without a key is 0, as of a sum of 1."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().log_sum_exp(scores, allowed).masked_fill(~allowed.any(-1), 0.0)


@fault("LSE-1", claims=WITH_LSE, caught_by=OF_SCORES)
class LseWithoutTheMaximum(Complete):
    """The largest score, which was subtracted before the sum, is not added again."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        highest = scores.masked_fill(~allowed, -math.inf).amax(-1)
        return super().log_sum_exp(scores, allowed) - highest.nan_to_num(neginf=0.0)


@fault("LSE-1", claims=WITH_LSE, caught_by=OF_SCORES, trigger="grouped heads")
class LseOfTheFirstOfAGroup(Complete):
    """Query heads that share a key head get the log-sum-exp of the first of them."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lse = super().log_sum_exp(scores, allowed)
        repeats = self.config.n_heads // self.config.kv_heads
        return lse[:, ::repeats].repeat_interleave(repeats, 1)


@fault(
    "LSE-2",
    claims=replace(WITH_LSE, projections=False),
    caught_by="parts_of_the_keys_merge_to_the_whole",
    script_shows=False,
    trigger="two calls with as many keys",
)
class LseOfAnEarlierCall(Complete):
    """A second call with as many keys gets the log-sum-exp of the first one."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        self.kept = getattr(self, "kept", {})
        lse = super().log_sum_exp(scores, allowed)
        return self.kept.setdefault(scores.shape, lse)


@fault(
    "LSE-3",
    claims=WITH_LSE,
    caught_by="the_log_sum_exp_has_its_gradient",
    script_shows=False,
    trigger="a loss of the log-sum-exp",
)
class GradientOfLseSubtracted(Complete):
    """The gradient of the log-sum-exp has the other sign."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        lse = super().log_sum_exp(scores, allowed)
        return 2 * lse.detach() - lse


@fault("LSE-1", claims=WITH_LSE, caught_by="the_log_sum_exp_has_the_sink_or_not", trigger="sinks")
class LseWithoutTheSink(Complete):
    """The log-sum-exp lacks the sink, although it is declared to have it."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf).logsumexp(-1)


@fault("LSE-1", claims=WITH_LSE, caught_by=WITH_OPTIONS, trigger="a cap")
class LseBeforeTheCap(Complete):
    """The log-sum-exp is that of the scores before the cap."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        self.uncapped = scores + bias
        return super().cap(scores, bias)

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().log_sum_exp(self.uncapped, allowed)


@fault("LSE-1", claims=WITH_LSE, caught_by=WITH_OPTIONS, trigger="a window")
class LsePastTheWindow(Complete):
    """The log-sum-exp is that of all keys, whatever the window is."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.options.window is not None:
            allowed, _ = allowed_by(self.options.change(window=None), scores)
        return super().log_sum_exp(scores, allowed)


@fault("LSE-1", claims=WITH_LSE, caught_by=WITH_OPTIONS, trigger="slopes")
class LseWithoutSlopes(Complete):
    """The log-sum-exp is that of the scores without the bias of the slopes."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.options.alibi is not None:
            with_slopes = allowed_by(self.options, scores)[1]
            scores = scores - with_slopes + allowed_by(self.options.change(alibi=None), scores)[1]
        return super().log_sum_exp(scores, allowed)


@fault(
    "LSE-3",
    claims=WITH_LSE,
    caught_by="the_gradient_of_the_log_sum_exp_goes_with_other_options",
    script_shows=False,
    trigger="a cap, and a loss of the log-sum-exp",
)
class GradientOfLseWithoutTheFactor(Complete):
    """The gradient of the log-sum-exp lacks the factor 1 - tanh^2 of the cap."""

    def cap(self, scores: Tensor, bias: Tensor) -> Tensor:
        result = super().cap(scores, bias)
        self.straight = scores + bias + (result - scores - bias).detach()
        return result

    def log_sum_exp(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return super().log_sum_exp(self.straight, allowed)
