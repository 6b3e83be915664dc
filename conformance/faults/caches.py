"""Faults that STA-3 and STA-4 must catch: what is kept from earlier calls, copied or loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import Complete
from mha.conformance.faults.families import Decoding, hooked
from mha.conformance.faults.fault import fault
from mha.spec import Config, Options, Output, Weights, causal_mask


@fault("STA-3", caught_by="calls_do_not_depend_on_calls_before", trigger="a second call")
class SecondCall(Complete):
    """A call uses the scores of the call before it if the shapes agree."""

    kept: Tensor | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores, kept = super().score(q, k), self.kept
        self.kept = scores.detach()
        if kept is not None and kept.shape == scores.shape:
            return kept
        return scores


@fault("STA-3", caught_by="calls_do_not_depend_on_calls_before", trigger="a sixth call")
class Tires(Complete):
    """Only the first five calls are correct."""

    calls = 0

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        self.calls += 1
        return super().score(q, k) * (1.0 if self.calls <= 5 else 1.1)


@fault("STA-3", script_shows=False, trigger="the first call after a failure")
class SpoiltByRefusal(Complete):
    """A call that raises changes the results of later calls."""

    spoilt = 0.0

    def attend(self, query: Tensor, *rest: Any) -> Output:
        before, self.spoilt = self.spoilt, 1.0
        output, weights, _ = super().attend(query, *rest)
        self.spoilt = before
        return Output(output + self.spoilt, weights)


class _LastValues(torch.autograd.Function):
    """weights @ v, whose backward pass uses the values of the module's last call."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, v: Tensor, module: LastCallDifferentiated) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.module = module
        return weights @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient @ ctx.module.last.mT, ctx.saved_tensors[0].mT @ gradient, None


@fault(
    "STA-3",
    caught_by="calls_between_change_no_gradient",
    script_shows=False,
    trigger="another call before the backward pass",
)
class LastCallDifferentiated(Complete):
    """The backward pass uses the values of the most recent call."""

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        self.last = v.detach().masked_fill(~allowed.any(2).unsqueeze(-1), 0.0)
        return _LastValues.apply(weights, v.masked_fill(~allowed.any(2).unsqueeze(-1), 0.0), self)


@fault(
    "STA-3",
    caught_by="one_module_is_correct_throughout_its_life",
    script_shows=False,
    trigger="a second step of training",
)
class GraphKept(Complete):
    """W_o is prepared in the first call, and kept together with its autograd graph."""

    prepared: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not torch.is_grad_enabled():
            return super().project(x, role)
        if self.prepared is None:
            self.prepared = self.w_o * 1.0
        return F.linear(x, self.prepared, getattr(self, "b_o", None))


@fault(
    "STA-3",
    caught_by="keys_may_be_more_in_the_next_causal_call",
    trigger="an earlier call with as many queries on other keys",
)
class TriangleOfSoManyQueries(Complete):
    """The causal mask is cached by the number of queries only: keys beyond those of the first call
    are hidden.
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.kept: dict[int, Tensor] = {}

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options.change(is_causal=False), q, k)
        if options.is_causal:
            queries, keys = allowed.shape[2:]
            kept = self.kept.setdefault(queries, causal_mask(queries, keys, "top_left", q.device))
            allowed = allowed & F.pad(kept, (0, max(0, keys - kept.shape[1])))[:, :keys]
        return allowed, bias


@fault(
    "STA-3",
    caught_by="a_smaller_call_reads_nothing_of_a_larger_one",
    trigger="a call without a mask after one of more items with a mask",
)
class MaskOfLargerBatch(Complete):
    """The mask is kept in a buffer for the largest batch so far, which a smaller one without a mask
    does not clear.
    """

    held: Tensor | None = None

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(options, q, k)
        if (
            self.held is None
            or self.held.shape[1:] != allowed.shape[1:]
            or len(self.held) <= len(allowed)
        ):
            with torch.inference_mode(False):
                self.held = torch.ones_like(allowed)
        own = self.held[: len(allowed)]
        if options.mask is not None or options.is_causal:
            own.copy_(allowed)
        return own.clone(), bias


@fault(
    "STA-3",
    caught_by="a_smaller_call_reads_nothing_of_a_larger_one",
    trigger="a call after one of more keys that had NaN",
)
class OldValuesInTile(Complete):
    """Values are kept in a buffer of whole tiles of 16, and those that an earlier call left are
    multiplied by zero.
    """

    held: Tensor | None = None

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        context = super().combine(weights, v, allowed)
        (batch, heads, keys, width), tile = v.shape, -(-v.shape[2] // 16) * 16
        with torch.inference_mode(False):
            fits = self.held is not None and self.held.shape == (batch, heads, tile, width)
            self.held = self.held if fits else v.new_zeros(batch, heads, tile, width)
        assert self.held is not None
        self.held[:, :, :keys] = v.detach()
        return context + 0.0 * self.held[:, :, keys:].sum(2, keepdim=True)


@fault(
    "STA-4",
    caught_by="state_round_trips",
    script_shows=False,
    trigger="a call after the weights changed",
)
@fault("CMP-3", script_shows=False)
class WeightsCopied(Complete):
    """The weights are copied at construction, and the copies are not in the state_dict."""

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.copies = {
            name: parameter.detach().clone() for name, parameter in self.named_parameters()
        }

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(x, self.copies[f"w_{role}"], self.copies.get(f"b_{role}"))


@fault("STA-8", trigger="a deep copy")
class CopyForgets(Complete):
    """A deep copy flips the sign of the scores."""

    sign = 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyForgets:
        again = CopyForgets(self.config, Weights(**dict(self.named_parameters())))
        again.sign = -1.0
        return again

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * self.sign


@fault(
    "STA-3",
    caught_by="one_module_is_correct_throughout_its_life",
    script_shows=False,
    trigger="a call after the weights changed",
)
@fault("STA-4", caught_by="state_round_trips", script_shows=False)
class WeightsPacked(Complete):
    """W_o is packed in the first call without gradients, and never again."""

    packed: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or torch.is_grad_enabled():
            return super().project(x, role)
        if self.packed is None:
            self.packed = self.w_o.detach().clone()
        return F.linear(x, self.packed, getattr(self, "b_o", None))


@fault("STA-8", script_shows=False, trigger="a deep copy")
class CopyShares(Complete):
    """A deep copy shares its parameters with the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyShares:
        return copy.copy(self)


@fault(
    "STA-4",
    caught_by="state_round_trips",
    script_shows=False,
    trigger="the state_dict of a parent module",
)
class PrefixForgotten(Complete):
    """W_o is saved under an older name, which loading looks up without the prefix of the parent
    module.
    """

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}out_proj"] = destination.pop(f"{prefix}w_o")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state.pop("out_proj", None)
        state.pop(f"{prefix}out_proj", None)
        state[f"{prefix}w_o"] = self.w_o.detach() if weight is None else weight
        super()._load_from_state_dict(state, prefix, *rest)


@fault(
    "STA-4",
    caught_by="what_is_loaded_counts_under_autocast",
    script_shows=False,
    trigger="a call under autocast after other weights were loaded",
)
class CastKept(Complete):
    """W_o is cast in the first call under autocast, and never again."""

    cast: Tensor | None = None

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not torch.is_autocast_enabled(x.device.type) or torch.is_grad_enabled():
            return super().project(x, role)
        if self.cast is None:
            self.cast = self.w_o.to(torch.get_autocast_dtype(x.device.type))
        return F.linear(x, self.cast, getattr(self, "b_o", None))


@fault(
    "STA-4",
    caught_by="what_is_loaded_counts_in_decoding",
    script_shows=False,
    trigger="decoding after other weights were loaded",
)
class DecodingKeepsWeights(Decoding, WeightsPacked):
    """W_o is packed in the first decoding step, and never again."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if self.decodes_now:
            return super().project(x, role)
        return Complete.project(self, x, role)


@fault(
    "STA-3",
    caught_by="one_module_is_correct_throughout_its_life",
    script_shows=False,
    trigger="a second step of training without zero_grad()",
)
class GradientOverwritten(Complete):
    """Each backward pass overwrites the gradient of W_o instead of adding to it."""

    def attend(self, *inputs: Any) -> Output:
        output, weights, _ = super().attend(*inputs)

        def forget(gradient: Tensor) -> Tensor:
            self.w_o.grad = None
            return gradient

        return Output(hooked(output, forget), weights)
