"""Faults that NUM-7, GQA-1, GRD-5, INC-1, XAT-1, DRP-1, PTH-5 and CMP-4 must catch.

They are off by a few percent, in half precision alone, each in one kind of call only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.base import OWN_HEAD_DIM, Complete
from mha.conformance.faults.families import Decoding, hooked, is_half
from mha.conformance.faults.fault import fault
from mha.spec import Options

OF_FEW_QUERIES = "errors_for_few_queries_do_not_add_up_to_a_defect"
OF_SMALL_CALLS = "errors_of_many_small_calls_do_not_add_up_to_a_defect"
OF_OWN_WIDTHS = "errors_of_heads_of_their_own_width_do_not_add_up_to_a_defect"
OF_GROUPS = "errors_of_grouped_heads_do_not_add_up_to_a_defect"
OF_FROZEN_WEIGHTS = "errors_with_frozen_weights_do_not_add_up_to_a_defect"
OF_GRADIENTS_OF_GROUPS = "errors_of_gradients_of_grouped_heads_do_not_add_up_to_a_defect"


def scores_off(*, when: Callable[[Complete, Tensor], bool]) -> type[Complete]:
    """Return a class whose scores are 2% too large in half precision under a condition."""

    class ScoresOff(Complete):
        def score(self, q: Tensor, k: Tensor) -> Tensor:
            return super().score(q, k) * (1.02 if is_half(q) and when(self, q) else 1.0)

    return ScoresOff


@fault("NUM-7", dtype="bfloat16", caught_by=OF_FEW_QUERIES, trigger="half precision, L = 1")
class OneQueryOffInHalf(scores_off(when=lambda module, q: q.shape[2] == 1)):
    """In half precision the scores of a single query are 2% too large."""


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by=OF_SMALL_CALLS,
    script_shows=False,
    trigger="half precision, one item, L = 1",
)
class SingleItemOffInHalf(scores_off(when=lambda module, q: q.shape[0] == q.shape[2] == 1)):
    """In half precision the scores of a single query of a single item are 2% too large."""


@fault(
    "GRD-5",
    dtype="bfloat16",
    caught_by=OF_FROZEN_WEIGHTS,
    script_shows=False,
    trigger="half precision, nothing requires a gradient",
)
class FrozenOffInHalf(
    scores_off(when=lambda module, q: not module.w_q.requires_grad and not q.requires_grad)
):
    """In half precision the scores are 2% too large if neither the weights nor the inputs require a
    gradient.
    """


@fault(
    "GRD-5",
    dtype="bfloat16",
    caught_by=OF_FROZEN_WEIGHTS,
    trigger="half precision, frozen weights, trained inputs",
)
class TunedInputsOffInHalf(
    scores_off(when=lambda module, q: not module.w_q.requires_grad and q.requires_grad)
):
    """In half precision the scores are 2% too large if the inputs require gradients and the weights
    do not.
    """


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    trigger="half precision, d_k >= 128",
)
class WideHeadsOffInHalf(scores_off(when=lambda module, q: q.shape[3] >= 128)):
    """In half precision the scores of heads of width 128 or more are 2% too large."""


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by="errors_do_not_add_up_to_a_defect",
    trigger="half precision, a float mask",
)
class FloatMaskOffInHalf(Complete):
    """In half precision a float mask counts 2% too much."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        if is_half(q):
            bias = bias * 1.02
        return allowed, bias


@fault(
    "NUM-7",
    dtype="bfloat16",
    caught_by=OF_OWN_WIDTHS,
    claims=OWN_HEAD_DIM,
    trigger="half precision, d_k is not d_model / n_heads",
)
class OwnWidthOffInHalf(
    scores_off(
        when=lambda module, q: (
            module.config.head_dim * module.config.n_heads != module.config.d_model
        )
    )
):
    """In half precision the scores of heads of their own width are 2% too large."""


@fault("GQA-1", dtype="bfloat16", caught_by=OF_GROUPS, trigger="half precision, grouped heads")
class GroupsOffInHalf(
    scores_off(when=lambda module, q: module.config.kv_heads < module.config.n_heads)
):
    """In half precision the scores of grouped heads are 2% too large."""


@fault(
    "GQA-1",
    dtype="bfloat16",
    caught_by=OF_GRADIENTS_OF_GROUPS,
    trigger="half precision, grouped heads, backwards",
)
class GroupGradientsOffInHalf(Complete):
    """In half precision the gradients of shared keys and values are 4% too large."""

    def repeat(self, x: Tensor) -> Tensor:
        shared = is_half(x) and self.config.kv_heads < self.config.n_heads
        return super().repeat(hooked(x, lambda gradient: gradient * (1.04 if shared else 1.0)))


@fault(
    "XAT-1",
    dtype="bfloat16",
    caught_by="errors_for_other_widths_do_not_add_up_to_a_defect",
    trigger="half precision, kdim other than d_model",
)
class WidthsOffInHalf(
    scores_off(when=lambda module, q: module.config.key_width != module.config.d_model)
):
    """In half precision the scores of keys of another width are 2% too large."""


@fault(
    "DRP-1",
    dtype="bfloat16",
    caught_by="errors_where_nothing_is_dropped_do_not_add_up_to_a_defect",
    trigger="half precision, evaluation, p > 0",
)
class DropoutScalesInHalf(
    scores_off(when=lambda module, q: module.config.dropout > 0 and not module.training)
):
    """In half precision and in evaluation the scores of a module with dropout are 2% too large."""


@fault(
    "PTH-5",
    dtype="bfloat16",
    caught_by="errors_with_extras_do_not_add_up_to_a_defect",
    script_shows=False,
    trigger="half precision, an extra zero key",
)
class ZeroKeyOffInHalf(scores_off(when=lambda module, q: module.config.zero_key)):
    """In half precision the scores beside an extra zero key are 2% too large."""


@fault(
    "INC-1",
    dtype="bfloat16",
    caught_by="errors_of_decoding_do_not_add_up_to_a_defect",
    script_shows=False,
    trigger="half precision, decoding",
)
class DecodingOffInHalf(Decoding):
    """In half precision the scores of a decoding step are 2% too large."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.02 if self.decodes_now and is_half(q) else 1.0)


@fault(
    "INC-1",
    dtype="bfloat16",
    caught_by="errors_of_ragged_decoding_do_not_add_up_to_a_defect",
    script_shows=False,
    trigger="half precision, items of different lengths",
)
class RaggedDecodingOffInHalf(Complete):
    """In half precision the scores are 2% too large in a decoding step in which an item has no
    position.
    """

    factor = 1.0

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        self.factor = 1.0 if active is None or not is_half(query) or bool(active.all()) else 1.02
        try:
            return super().decode(query, key, value, cache, active)
        finally:
            self.factor = 1.0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.factor


@fault("CMP-4", caught_by="errors_under_autocast_do_not_add_up_to_a_defect", trigger="autocast")
class AutocastOff(scores_off(when=lambda module, q: torch.is_autocast_enabled(q.device.type))):
    """Under autocast the scores are 2% too large."""
