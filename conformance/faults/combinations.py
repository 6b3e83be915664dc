"""Attention that is wrong where two things meet that are each tested alone: see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Config, Output, Weights, causal_mask


class GroupsNotRescaled(Complete):
    """Dropout of grouped heads is a mask alone: what is kept is not divided by 1 - p."""

    only = "grouped heads and dropout"

    def drop(self, weights: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads or not self.training:
            return super().drop(weights)
        return weights * (torch.rand_like(weights) >= self.config.dropout)


class GroupsDroppedAlike(Complete):
    """All heads of a group share one draw of dropout."""

    only = "grouped heads and dropout"

    def drop(self, weights: Tensor) -> Tensor:
        kept = super().drop(torch.ones_like(weights[:, : self.config.kv_heads]))
        return weights * self.repeat(kept)


class GroupsDroppedInEvaluation(Complete):
    """The fused kernel of grouped heads is given the probability in evaluation too."""

    only = "grouped heads and dropout"

    def drop(self, weights: Tensor) -> Tensor:
        grouped = self.config.kv_heads < self.config.n_heads
        return F.dropout(weights, self.config.dropout, self.training or grouped)


class CompiledDrops(Complete):
    """The branch that is compiled is given the probability in evaluation too."""

    only = "compiled, and dropout"

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, self.training or torch.compiler.is_compiling())


class WeightsFoldedCompiled(Complete):
    """Compiled, the projections are constants, and get no gradient."""

    only = "compiled, in training"

    def project(self, x: Tensor, role: str) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().project(x, role)
        bias = getattr(self, f"b_{role}", None)
        return F.linear(x, getattr(self, f"w_{role}").detach(), None if bias is None else bias.detach())


class _OutputProjection(torch.autograd.Function):
    """x W^T, of which W's gradient is that for another x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(weight, other)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        weight, other = ctx.saved_tensors
        return gradient @ weight, torch.einsum("...i,...j->ij", gradient, other), None


class RecomputedWithoutDropout(Complete):
    """To save memory, the contexts are computed again for the gradient of W_o, from weights that were not dropped."""

    only = "training with dropout"
    undropped: Tensor

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        self.undropped = super().combine(self.kept, v, allowed).detach()
        return super().combine(weights, v, allowed)

    def drop(self, weights: Tensor) -> Tensor:
        self.kept = weights
        return super().drop(weights)

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not (self.training and self.config.dropout and torch.is_grad_enabled()):
            return super().project(x, role)
        output: Tensor = _OutputProjection.apply(x, self.w_o, self.merge(self.undropped))  # type: ignore[no-untyped-call]  # torch's own
        return output if not self.config.bias else output + self.b_o


class _Drop(torch.autograd.Function):
    """Dropout whose forward pass alone minds p = 1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, p: float) -> Tensor:
        kept = torch.rand_like(weights) >= p
        ctx.save_for_backward(kept)
        ctx.p = p
        return weights * kept if p == 1 else weights * kept / (1 - p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        (kept,) = ctx.saved_tensors
        return gradient * kept / torch.tensor(1 - ctx.p), None


class NoGradientOfNothing(Complete):
    """Where everything is dropped, the gradient is 0 times infinity."""

    only = "p = 1, backwards"

    def drop(self, weights: Tensor) -> Tensor:
        p = self.config.dropout
        return _Drop.apply(weights, p) if self.training and p else weights  # type: ignore[no-untyped-call,no-any-return]  # torch's own


class EmptyButForTheExtraKey(Complete):
    """A row that the mask leaves without a key is zeroed, though the extra key is left to it."""

    only = "empty rows and an extra key"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        own = allowed[..., : allowed.shape[-1] - self.config.extra_keys]
        return super().weigh(scores, allowed).masked_fill(~own.any(-1, keepdim=True), 0.0)


class LowestBesideLowest(Complete):
    """The causal flag adds the lowest number, as the caller's padding does: in a row of padding both are alike."""

    only = "causal rows of padding alone"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, is_causal, q, k)
        if mask is None or not mask.is_floating_point() or not is_causal:
            return allowed, bias
        own, _ = super().allow(mask, False, q, k)
        later = own & ~causal_mask(q.shape[2], k.shape[2], "top_left") & allowed.any(-1, keepdim=True)
        return allowed | later, bias.masked_fill(later, torch.finfo(q.dtype).min)


class TriangleOfSoManyQueries(Complete):
    """The causal mask is kept by the number of queries alone: keys beyond those of the first call are hidden."""

    only = "a call with as many queries on other keys before"

    def __init__(self, config: Config, weights: Weights) -> None:
        super().__init__(config, weights)
        self.kept: dict[int, Tensor] = {}

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        allowed, bias = super().allow(mask, False, q, k)
        if is_causal:
            queries, keys = allowed.shape[2:]
            kept = self.kept.setdefault(queries, causal_mask(queries, keys, "top_left"))
            allowed = allowed & F.pad(kept, (0, max(0, keys - kept.shape[1])))[:, :keys]
        return allowed, bias


class PrefixForgotten(Complete):
    """W_o is saved under an older name; when it is loaded, that is looked for without the prefix that a parent adds."""

    only = "state of a larger module"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]  # torch's own
        destination[f"{prefix}out_proj"] = destination.pop(f"{prefix}w_o")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        found = state.pop("out_proj", None)
        state.pop(f"{prefix}out_proj", None)
        state[f"{prefix}w_o"] = self.w_o.detach() if found is None else found
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]  # torch's own


class RecordedForTheQuery(Complete):
    """Nothing is recorded where neither the query nor its projection requires a gradient."""

    only = "frozen weights, and keys that are trained"

    def attend(self, query: Tensor, *rest: Any) -> Output:
        with torch.set_grad_enabled(torch.is_grad_enabled() and (query.requires_grad or self.w_q.requires_grad)):
            return super().attend(query, *rest)


class _CastForward(torch.autograd.Function):
    """a @ b, whose backward pass expects one dtype of both and of the gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        a, b = ctx.saved_tensors
        return gradient @ b.mT, a.mT @ gradient


class AutocastForwardAlone(Complete):
    """The weights' product has a backward pass of its own, in which autocast's dtypes do not fit."""

    only = "training under autocast"

    def combine(self, weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return super().combine(weights, v, allowed)
        return _CastForward.apply(weights, v)  # type: ignore[no-untyped-call,no-any-return]  # torch's own


class SharedAddressSharedTensor(Complete):
    """A query of the key's shape that begins where the key does is taken for the key."""

    only = "one position of the keys, expanded, as query"

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        same = query.shape == key.shape and query.numel() > 0 and query.data_ptr() == key.data_ptr()
        return super().attend(key if same else query, key, *rest)
