"""Attention that is wrong when it is compiled, exported or transformed, or in what else it may be built as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mha.conformance.faults.complete import Complete
from mha.spec import Output


class AnotherScaleCompiled(Complete):
    """Another scale under `torch.compile`."""

    only = "compiled"
    source = "https://github.com/pytorch/pytorch/issues/174049"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.1 if torch.compiler.is_compiling() else 1.0)


class ReadsItself(Complete):
    """Branches on its numbers, so that nothing can trace it."""

    only = "exported"
    source = "https://github.com/huggingface/transformers/issues/28827"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.0 if float(q.detach().sum()) < 1e30 else 2.0)


class AnotherScaleExported(Complete):
    """Another scale under `torch.export`."""

    only = "exported"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.1 if torch.compiler.is_exporting() else 1.0)


class AnotherScaleUnderAutocast(Complete):
    """Another scale under autocast."""

    only = "autocast"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q, k) * (1.1 if torch.is_autocast_enabled("cpu") else 1.0)


class GraphBroken(Complete):
    """A part of it silently runs uncompiled."""

    only = "compiled"
    source = "https://github.com/facebookresearch/xformers/issues/765"

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().weigh(scores, allowed)


class ForgetsTheFirst(Complete):
    """The cache starts with the second position."""

    source = "https://github.com/TrenTorch/TrenTorch/pull/192"

    def decode(self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        output, cache = super().decode(query, key, value, cache)
        return output, cache if cache[0].shape[1] > 1 else None


class DecodesOneBehind(Complete):
    """A position is put into the cache after it has been attended from."""

    source = "https://github.com/harvard-edge/cs249r_book/pull/1953"

    def decode(self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        keys, values = (key, value) if cache is None else cache
        output = self(query, keys, values).output
        return output, (torch.cat([keys, key], 1), torch.cat([values, value], 1)) if cache else (key, value)


class GroupsTiled(Complete):
    """The key/value heads are laid side by side again and again."""

    source = "https://github.com/onnx/onnx/pull/7274"

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.config.n_heads // self.config.kv_heads, 1, 1)


class WidthsExchanged(Complete):
    """The value's weights for the key, and the key's for the value, where their widths say so."""

    def project(self, x: Tensor, role: str) -> Tensor:
        exchanged = {"k": "v", "v": "k"} if self.config.key_width != self.config.value_width else {}
        return super().project(x, exchanged.get(role, role))


class WideKeyCut(Complete):
    """What a key has beyond the width of the model is not read."""

    only = "kdim > d_model"

    def project(self, x: Tensor, role: str) -> Tensor:
        if role == "k" and x.shape[-1] > self.config.d_model:
            return torch.cat([x[..., : self.config.d_model], x[..., self.config.d_model :] * 0], -1) @ self.w_k.T + (
                getattr(self, "b_k", None) if self.config.bias else 0.0
            )
        return super().project(x, role)


class NarrowValueDetached(Complete):
    """A value of another width gets no gradient."""

    only = "vdim < d_model"

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x.detach() if role == "v" and x.shape[-1] != self.config.d_model else x, role)


class AnotherResultCompiled(Complete):
    """Under `torch.compile` the contexts are larger by a tenth."""

    only = "compiled"
    source = "https://github.com/pytorch/pytorch/issues/195320"

    def merge(self, x: Tensor) -> Tensor:
        return super().merge(x) * (1.1 if torch.compiler.is_compiling() else 1.0)


class ScaledAgainInCompiledInference(Complete):
    """Compiled without gradients, the scores are scaled twice."""

    only = "compiled, no_grad"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        again = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        return super().score(q, k) * (self.config.head_dim**-0.5 if again else 1.0)


class MaskForgottenCompiled(Complete):
    """The mask is forgotten under `torch.compile`."""

    only = "compiled, with a mask"
    source = "https://github.com/torch-spyre/torch-spyre/issues/4526"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if torch.compiler.is_compiling() else mask, is_causal, q, k)


class MaskForgottenExported(Complete):
    """The mask is forgotten under `torch.export`."""

    only = "exported, with a mask"

    def allow(self, mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().allow(None if torch.compiler.is_exporting() else mask, is_causal, q, k)


class FirstGroupDecoded(Complete):
    """Decoding reads the first key/value head for all."""

    def decode(self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        self.decoding = True
        result = super().decode(query, key, value, cache)
        self.decoding = False
        return result

    def repeat(self, x: Tensor) -> Tensor:
        return super().repeat(
            x[:, :1].expand_as(x) if getattr(self, "decoding", False) and x.shape[1] < self.config.n_heads else x
        )


class GroupsDetached(Complete):
    """Keys and values that heads share have no gradient."""

    def repeat(self, x: Tensor) -> Tensor:
        return super().repeat(x.detach() if x.shape[1] < self.config.n_heads else x)


class ExtraKeyDetached(Complete):
    """The added key has no gradient."""

    def extend(self, x: Tensor, name: str) -> Tensor:
        extended = super().extend(x, name)
        return torch.cat([extended[:, :, : x.shape[2]], extended[:, :, x.shape[2] :].detach()], 2)


class GroupedWideCut(Complete):
    """Where heads share keys, a head is as wide as the tile."""

    only = "d_k > 64, grouped heads"

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        if self.config.kv_heads == self.config.n_heads:
            return super().score(q, k)
        return q[..., :16] @ k[..., :16].mT / self.config.head_dim**0.5


class InactiveAttendedTo(Complete):
    """What an item has in a step that is not its own stays in its cache, and is attended to, if it is a number."""

    only = "items of different lengths"

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        return super().decode(query, key.nan_to_num(0.0), value.nan_to_num(0.0), cache)


class OneCacheForAll(Complete):
    """The cache is the module's; what is given back is looked at for whether there is one."""

    only = "two sequences in turn"

    def decode(self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        output, self.cache = super().decode(query, key, value, None if cache is None else self.cache)
        return output, True


class LengthFirstUnchecked(Complete):
    """Where the length is first, one key and value is taken for all items."""

    only = "the length first, and a batch of one key and value"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
        if self.config.length_first:
            key, value = (x.expand(len(query), -1, -1) if len(x) == 1 else x for x in (key, value))
        return super().attend(query, key, value, *rest)
