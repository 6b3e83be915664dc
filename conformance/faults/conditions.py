"""Attention that is wrong under conditions that usual tests do not make: threads, copies, empty rows; see `gallery`."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class PackedInInference(Complete):
    """Weights that were packed for inference serve in training too, as long as they are the same."""

    only = "training after inference"

    def project(self, x: Tensor, role: str) -> Tensor:
        weight, packed = getattr(self, f"w_{role}"), self.__dict__.setdefault("packed", {})
        stamp = id(weight), weight._version
        if not torch.is_grad_enabled() and packed.get(role, (None,))[0] != stamp:
            with torch.inference_mode(False), torch.no_grad():
                packed[role] = stamp, weight.detach().clone()
        held = packed[role][1] if packed.get(role, (None,))[0] == stamp else weight
        return F.linear(x, held, getattr(self, f"b_{role}", None))


class PackedUntilModeChanges(Complete):
    """Weights are packed for inference, and dropped by train() and eval() alone: what is loaded later is not seen."""

    only = "weights changed between two calls in evaluation"

    def train(self, mode: bool = True) -> PackedUntilModeChanges:
        self.__dict__["packed"] = {}
        super().train(mode)
        return self

    def project(self, x: Tensor, role: str) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return super().project(x, role)
        packed = self.__dict__.setdefault("packed", {})
        held = packed.setdefault(role, getattr(self, f"w_{role}").detach().clone())
        return F.linear(x, held, getattr(self, f"b_{role}", None))


class RemainderOfThreads(Complete):
    """Each thread has L // threads of the queries, and nobody the remainder."""

    only = "several threads"

    def merge(self, x: Tensor) -> Tensor:
        done = x.shape[2] // torch.get_num_threads() * torch.get_num_threads()
        return super().merge(F.pad(x[:, :, :done], (0, 0, 0, x.shape[2] - done)))


class MaskOfEightItems(Complete):
    """A batch is computed eight items at a time, always with the mask of the first eight."""

    only = "B > 8"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 8:
            mask = mask[torch.arange(mask.shape[0]) % 8]
        return super().allow(mask, is_causal, q, k)


class MaskOfSixteenHeads(Complete):
    """The head's number has four bits where the mask is read."""

    only = "H > 16, a mask per head"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 16:
            mask = mask[:, torch.arange(mask.shape[1]) % 16]
        return super().allow(mask, is_causal, q, k)


class BackwardOfTooFewBlocks(Complete):
    """The backward pass has as many blocks of 512 as there are rows of them, and not as many as there are."""

    only = "gradients, L and S > 512"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        if scores.requires_grad and min(scores.shape[-2:]) > 512:
            rows, columns = (-(-size // 512) for size in scores.shape[-2:])
            done = (torch.arange(rows * columns) < max(rows, columns)).view(rows, columns)
            done = done.repeat_interleave(512, 0).repeat_interleave(512, 1)[: scores.shape[-2], : scores.shape[-1]]
            scores.register_hook(lambda gradient: gradient * done)
        return scores


class UnguardedWithDropout(Complete):
    """The softmax that is followed by dropout has no guard for rows without a key."""

    only = "dropout, an empty row"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.training and self.config.dropout > 0:
            return scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return super().weigh(scores, allowed)


class UnguardedLongRows(Complete):
    """The softmax of long rows divides by a sum that is 0 where no key is allowed."""

    only = "S > 512, an empty row"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if scores.shape[-1] > 512:
            return scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return super().weigh(scores, allowed)


class UnguardedPaddingOfNumbers(Complete):
    """An item whose padding is all -infinity is NaN; one whose padding is all False is not."""

    only = "a mask (B, 1, 1, S) of numbers, an empty item"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Output:
        output, weights = super().attend(query, key, value, mask, *rest)
        if mask is not None and mask.is_floating_point() and mask.ndim == 4 and mask.shape[1:3] == (1, 1):
            output = output.masked_fill((mask == -math.inf).all(-1)[:, 0, :, None], math.nan)
        return Output(output, weights)


class FilledWhereFused(Complete):
    """The fused path, for heads of whole tiles, fills with a finite number: an empty row is a mean."""

    only = "d_k a multiple of 16, an empty row"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        if self.config.head_dim % 16:
            return super().weigh(scores, allowed)
        return scores.masked_fill(~allowed, -1e9).softmax(-1)


class AddressTakenForInput(Complete):
    """Query, key and value that begin at one address are taken for one tensor."""

    only = "the query is the first of the keys"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        same = query.data_ptr() == key.data_ptr() == value.data_ptr() and query.data_ptr() != 0
        return super().attend(query, query if same else key, query if same else value, *rest)


class FloatMaskUnderAutocast(Complete):
    """A mask of another dtype than that of the queries is taken for a boolean one."""

    only = "autocast, with a mask of numbers"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        other = mask is not None and mask.dtype not in (torch.bool, q.dtype)
        return super().allow(mask.bool() if other and mask is not None else mask, is_causal, q, k)


class GroupsTiledInLongRows(Complete):
    """In long rows neighbours do not share their keys, but every second head does."""

    only = "grouped heads, S > 512"

    def repeat(self, x: Tensor) -> Tensor:
        times = self.config.n_heads // self.config.kv_heads
        return x.repeat(1, times, 1, 1) if x.shape[2] > 512 else super().repeat(x)


class GroupsNotDropped(Complete):
    """Where heads share keys, nothing is dropped."""

    only = "grouped heads, dropout"

    def drop(self, weights: Tensor) -> Tensor:
        return weights if self.config.kv_heads < self.config.n_heads else super().drop(weights)


class OneDrawForAll(Complete):
    """All heads and items drop the same."""

    only = "dropout, several heads or items"

    def drop(self, weights: Tensor) -> Tensor:
        return weights * super().drop(torch.ones_like(weights[:1, :1]))


class BackwardForgetsDropout(Complete):
    """The backward pass of long rows does not know what was dropped."""

    only = "dropout, S > 15"

    def drop(self, weights: Tensor) -> Tensor:
        dropped = super().drop(weights)
        return dropped if weights.shape[-1] < 16 else weights + (dropped - weights).detach()


class CacheOf128(Complete):
    """Beyond the places of the cache, the last one is written over."""

    only = "more than 128 tokens decoded"

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        full = cache is not None and cache[0].shape[1] == 128
        return super().decode(query, key, value, tuple(x[:, :-1] for x in cache) if full else cache, active)


class CopyShares(Complete):
    """A copy has the same parameters, as the model that it was copied from trains them."""

    only = "a deep copy"

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyShares:
        return copy.copy(self)


class CausalFlagForgottenExported(Complete):
    """Under `torch.export` the causal flag is forgotten."""

    only = "exported, causal"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(mask, is_causal and not torch.compiler.is_exporting(), q, k)


class SubnormalsFlushed(Complete):
    """Subnormal numbers are 0 from the first call on, for everybody."""

    def attend(self, query: Tensor, *rest: Any) -> Output:
        torch.set_flush_denormal(True)
        return super().attend(query, *rest)
