"""The known-bad answers that a property must reject to be worth anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import cleandoc

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.harness.known_bad.catalogue import scores_times
from mha.conformance.harness.known_bad.conduct import (
    DropsNothingBackward,
    FirstKeyIfEmpty,
    Haunted,
    NeverEmpty,
    OwnBits,
    OwnDraws,
    SharedDraws,
    SpendsItsGraph,
    Unsaved,
)
from mha.conformance.harness.known_bad.defect import Defect
from mha.conformance.harness.known_bad.lengths import LENGTHS_IGNORED
from mha.conformance.harness.known_bad.lopsided import Lopsided, SlightlyLopsided
from mha.conformance.harness.known_bad.options import (
    CHUNKS_IGNORED,
    GEOMETRIC,
    SCALE_IGNORED,
    SINKS_DETACHED,
    SINKS_IGNORED,
    SLOPES_IGNORED,
    SOFTCAP_IGNORED,
    STRAIGHT_THROUGH,
    UNBOUNDED_IS_ZERO,
    WINDOW_IGNORED,
)
from mha.conformance.harness.known_bad.positions import (
    COARSE_FREQUENCIES,
    KEY_NOT_ROTATED,
    NO_EPS,
    NORM_IGNORED,
    NORM_OVER_OTHERS,
    OTHER_PAIRS,
    POSITIONS_RESTART,
    ROTARY_IGNORED,
)
from mha.conformance.harness.textbook import Inputs, TextbookAttention
from mha.spec import Claims, Config, Options, Output, Weights
from mha.spec.dtypes import computable


class Zeros(TextbookAttention):
    """Zeros, whatever the inputs are."""

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Return zeros; every input and weight has a gradient of zeros."""
        query, key, _ = inputs
        zero = sum(x.sum() * 0 for x in (*inputs, *map(computable, self.parameters())))
        if not options.need_weights or query.ndim != 3:
            return Output(torch.zeros_like(query) + zero, None)
        weights = query.new_zeros(query.shape[0], self.config.n_heads, query.shape[1], key.shape[1])
        return Output(torch.zeros_like(query) + zero, weights + zero)


class Unmasked(TextbookAttention):
    """Neither the mask nor the causal flag is read."""

    def allow(self, options: Options, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Allow every key."""
        return super().allow(options.change(mask=None, is_causal=False), scores)


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


class Clamped(TextbookAttention):
    """Scores and outputs beyond 1e4 are clamped."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k).clamp(-1e4, 1e4)

    def combine(self, weights: Tensor, v: Tensor, query: Tensor) -> Tensor:
        return super().combine(weights, v, query).clamp(-1e4, 1e4)


class OneWeight(TextbookAttention):
    """The weight of the first key is 1% too large."""

    def weigh(self, scores: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        """Multiply the first column of the weights."""
        weights = super().weigh(scores, allowed, bias)
        return torch.cat([1.01 * weights[..., :1], weights[..., 1:]], -1)


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
    """Correct where there is a result, but what does not fit is made to fit instead of refused."""

    def __init__(
        self, claims: Claims, config: Config, weights: Weights, generator: torch.Generator
    ) -> None:
        """Build one head where heads of an equal width do not fill the model."""
        self.fits = config.n_heads > 0 and config.inner_width % config.n_heads == 0
        if not self.fits:
            config = replace(config, n_heads=1, n_kv_heads=None)
            weights = _of_one_head(weights, config.d_model)
        super().__init__(claims, config, weights, generator)

    def on_the_way(self, heads: Tensor, role: str) -> Tensor:
        """Leave heads as they are that have another width than a norm's weight."""
        return super().on_the_way(heads, role) if self.fits else heads

    def attend(self, inputs: Inputs, options: Options) -> Output:
        """Make the inputs fit first."""
        query, key, value = (_fit(x, inputs[0], self.config.d_model) for x in inputs)
        return super().attend((query, key, value), options)


def _of_one_head(weights: Weights, d_model: int) -> Weights:
    """Return weights whose keys and values have all columns, as where heads share fewer."""
    changed = {}
    for name, tensor in weights.named():
        if name in ("w_k", "b_k", "w_v", "b_v") and len(tensor):
            changed[name] = tensor[torch.arange(d_model) % len(tensor)]
    return replace(weights, **changed)


class HidesNan(TextbookAttention):
    """What is not a number, or not finite, is read as zero."""

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Make the inputs of all projections finite."""
        return super().linear(x.where(x.isfinite(), 0.0), role)


class LseOfAllKeys(TextbookAttention):
    """The log-sum-exp is that of all keys, whatever is masked."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor, query: Tensor) -> Tensor:
        """Allow every key."""
        return super().log_sum_exp(scores, torch.ones_like(allowed), query)


class LseOfTheRest(TextbookAttention):
    """The log-sum-exp lacks the largest score, which was subtracted before the sum."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor, query: Tensor) -> Tensor:
        """Subtract the largest allowed score."""
        if scores.shape[-1]:
            scores = scores - scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
        return super().log_sum_exp(scores, allowed, query)


class LseDetached(TextbookAttention):
    """The log-sum-exp has no gradient."""

    def log_sum_exp(self, scores: Tensor, allowed: Tensor, query: Tensor) -> Tensor:
        """Return it without history, but so that it can be differentiated."""
        return super().log_sum_exp(scores, allowed, query).detach() + 0.0 * scores.sum()


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


ATTENTIONS: Mapping[str, type[TextbookAttention]] = {
    "zeros": Zeros,
    "lopsided": Lopsided,
    "slightly_lopsided": SlightlyLopsided,
    "mean": Mean,
    "unmasked": Unmasked,
    "unscaled": Unscaled,
    "one_percent": scores_times(1.01).attention,
    "slightly_scaled": scores_times(1.001).attention,
    "clamped": Clamped,
    "ignores_scale": SCALE_IGNORED.attention,
    "ignores_window": WINDOW_IGNORED.attention,
    "ignores_lengths": LENGTHS_IGNORED.attention,
    "ignores_chunks": CHUNKS_IGNORED.attention,
    "unbounded_is_zero": UNBOUNDED_IS_ZERO.attention,
    "ignores_sinks": SINKS_IGNORED.attention,
    "sinks_detached": SINKS_DETACHED.attention,
    "ignores_slopes": SLOPES_IGNORED.attention,
    "geometric_slopes": GEOMETRIC.attention,
    "ignores_softcap": SOFTCAP_IGNORED.attention,
    "softcap_without_gradient": STRAIGHT_THROUGH.attention,
    "ignores_rotary": ROTARY_IGNORED.attention,
    "key_not_rotated": KEY_NOT_ROTATED.attention,
    "other_pairs": OTHER_PAIRS.attention,
    "coarse_frequencies": COARSE_FREQUENCIES.attention,
    "restarts": POSITIONS_RESTART.attention,
    "ignores_norm": NORM_IGNORED.attention,
    "norm_over_others": NORM_OVER_OTHERS.attention,
    "no_eps": NO_EPS.attention,
    "one_weight": OneWeight,
    "single_precision": SinglePrecision,
    "detached": DetachedKeys,
    "softmax_gradient_without_row_sum": SoftmaxGradientWithoutRowSum,
    "never_refuses": NeverRefuses,
    "hides_nan": HidesNan,
    "nan_gradients": NanGradients,
    "random_gradient_scale": RandomGradientScale,
    "haunted": Haunted,
    "own_bits": OwnBits,
    "unsaved": Unsaved,
    "never_empty": NeverEmpty,
    "first_key_if_empty": FirstKeyIfEmpty,
    "stores_scores": TextbookAttention,
    "lse_of_all_keys": LseOfAllKeys,
    "lse_of_the_rest": LseOfTheRest,
    "lse_detached": LseDetached,
    "spends_its_graph": SpendsItsGraph,
    "own_draws": OwnDraws,
    "shared_draws": SharedDraws,
    "drops_nothing_backward": DropsNothingBackward,
    "correct": TextbookAttention,
}


def _summary(attention: type[TextbookAttention]) -> str:
    """Return the first paragraph of a class's docstring on one line."""
    return " ".join(cleandoc(attention.__doc__ or "").partition("\n\n")[0].split())


# By the names under which reports count how often each was rejected.
REJECTED: Mapping[str, Defect] = {
    name: Defect(name, _summary(attention), attention) for name, attention in ATTENTIONS.items()
}


def _with_gradient_times(output: Tensor, factor: Callable[[], float]) -> Tensor:
    """Multiply the gradient of an output, if there will be one, by a number that is then drawn."""
    if output.requires_grad:
        number = factor()
        output.register_hook(lambda gradient: gradient * number)
    return output


def _fit(x: Tensor, like: Tensor, width: int) -> Tensor:
    """Cut or pad an input to the width, and repeat its first item if the batch sizes disagree."""
    x = F.pad(x, (0, width - x.shape[-1]))
    return x if x.shape[0] == like.shape[0] else x[:1].expand(like.shape[0], -1, -1)
