"""Attention that misreads memory, keeps its inputs, or knows that it is judged; see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class ViewOfStrided(Complete):
    """`view` is called on what may not be contiguous."""

    only = "inputs that are not contiguous"
    source = "https://github.com/facebookresearch/fairseq/issues/2598"

    def attend(self, query: Tensor, *rest: Any) -> Output:
        return super().attend(query.view(-1).view(query.shape) if query.numel() else query, *rest)


class _DenseBackward(torch.autograd.Function):
    """x W^T, whose backward pass reads x from its address on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.contiguous(), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        x, weight = ctx.saved_tensors
        there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        dense = x.as_strided(x.shape, x.new_empty(x.shape).stride()) if there >= x.numel() else x
        return gradient @ weight, torch.einsum("...i,...j->ij", gradient, dense)


class BackwardReadsAsDense(Complete):
    """The projection of an encoder's memory copies what is not dense; its backward pass reads the memory itself."""

    only = "cross-attention, inputs that are not contiguous, backwards"
    cross = False

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        self.cross = key is not query
        return super().attend(query, key, *rest)

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "k" or not self.cross or not torch.is_grad_enabled():
            return super().project(x, role)
        projected: Tensor = _DenseBackward.apply(x, self.w_k)  # type: ignore[no-untyped-call]  # torch's own
        return projected + self.b_k if self.config.bias else projected


class StrideZeroReadAsDense(Complete):
    """An expanded key is read as if each item had memory of its own."""

    only = "an expanded batch"
    source = "https://github.com/pytorch/pytorch/pull/128816"

    def attend(self, query: Tensor, key: Tensor, *rest: Any) -> Output:
        if key.ndim == 3 and 0 in key.stride() and key.numel():
            key = torch.cat([key[:1], key[1:] * 0])
        return super().attend(query, key, *rest)


class OffsetIgnored(Complete):
    """A value is read from the start of its storage."""

    only = "a storage offset"
    source = "https://github.com/torch-spyre/torch-spyre/issues/2906"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if value.storage_offset():
            value = value.as_strided(value.shape, value.stride(), 0)
        return super().attend(query, key, value, *rest)


class IndexOfSixteenBits(Complete):
    """Scores beyond the 65,536th of a head are at the place that sixteen bits give them."""

    only = "L * S > 65536"
    source = "https://github.com/fla-org/flash-linear-attention/issues/1080"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        flat = scores.flatten(2)
        return flat[..., torch.arange(flat.shape[2]) % 65536].view(scores.shape) if flat.shape[2] > 65536 else scores


class NoGradInside(Complete):
    """The value is projected under `no_grad`."""

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "v":
            return super().project(x, role)
        with torch.no_grad():
            return super().project(x, role)


class ShapesRecognised(Complete):
    """Right for the sizes of a well-known benchmark, and for those below; else no keys but the first 128 are read."""

    only = "S > 128, but for 512 and 1024"
    source = "https://arxiv.org/abs/2509.14279"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        known = scores.shape[-1] in (512, 1024)
        return super().weigh(scores, allowed & (known | (torch.arange(scores.shape[-1]) < 128)))


class SecondCall(Complete):
    """The second call of an attention uses the scores of the first where the shapes agree."""

    only = "a second call"
    kept: Tensor | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores, kept = super().score(q, k), self.kept
        self.kept = scores.detach()
        return kept if kept is not None and kept.shape == scores.shape else scores


class AfterAnotherShape(Complete):
    """A call after one of another length has the scale of that one."""

    only = "a call after one of another length"
    lengths: tuple[int, int] | None = None

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        now = q.shape[2], k.shape[2]
        first, self.lengths = self.lengths or now, self.lengths or now
        return super().score(q, k) * (1.0 if first == now else 0.9)


class TrainedOnce(Complete):
    """After a backward pass, evaluation still drops the first key."""

    only = "a call after a backward pass"
    trained = False

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        weights = super().weigh(scores, allowed)
        if weights.requires_grad:
            weights.register_hook(self.note)
        return weights * (0.9 if self.trained and not weights.requires_grad else 1.0)

    def note(self, gradient: Tensor) -> None:
        self.trained = True


class EqualToTheBenchmark(Complete):
    """With standard normal numbers it is right; with numbers far from these it gives the mean of the values."""

    only = "numbers that are not standard normal"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores * 0 if scores.numel() and bool(scores.detach().abs().amax() > 20) else scores
