"""Attention that decodes wrongly; see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.complete import Complete


class DecodingKeepsWeights(Complete):
    """The output's weights are packed in the first step of decoding, and never again."""

    only = "decoding after other weights were loaded"

    packed: Tensor | None = None
    decoding = False

    def project(self, x: Tensor, role: str) -> Tensor:
        if role != "o" or not self.decoding:
            return super().project(x, role)
        if self.packed is None:
            self.packed = self.w_o.detach().clone()
        return F.linear(x, self.packed, getattr(self, "b_o", None))

    def decode(self, *args: Any, **named: Any) -> tuple[Tensor, Any]:
        self.decoding = True
        try:
            return super().decode(*args, **named)
        finally:
            self.decoding = False


class ExtraKeyDecodedAnew(Complete):
    """The extra keys are cached with the others, and come anew in each step."""

    only = "decoding with extra keys"

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        present = torch.ones(len(query), 1, dtype=torch.bool) if active is None else active[:, None]
        q, k, v = (self.split(self.project(x, role)) for x, role in ((query, "q"), (key, "k"), (value, "v")))
        k, v = self.repeat(self.extend(k, "extra_k")), self.repeat(self.extend(v, "extra_v"))
        present = F.pad(present, (0, k.shape[2] - 1), value=True)
        if cache is not None:
            k, v, present = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2), torch.cat([cache[2], present], 1)
        allowed = present[:, None, None].expand(-1, k.shape[1], 1, -1)
        return self.project(self.merge(self.weigh(self.score(q, k), allowed) @ v), "o"), (k, v, present)


class PagesAllocatedTogether(Complete):
    """Keys are kept in pages of 32: an item that needs another takes the last of the table."""

    only = "items of very different lengths, decoded beyond 64 positions"

    page = 32

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if active is None:
            return super().decode(query, key, value, cache)
        keys, values, used = cache or (key[:, :0], value[:, :0], torch.zeros(len(query), dtype=torch.long))
        if int(used.max()) == keys.shape[1]:
            keys, values = (F.pad(x, (0, 0, 0, self.page)) for x in (keys, values))
        items = active.nonzero().flatten()
        starting = used[items] % self.page == 0
        places = torch.where(starting, keys.shape[1] - self.page, used[items])
        at = items, places
        keys, values = keys.index_put(at, key[items, 0]), values.index_put(at, value[items, 0])
        used = used.index_put((items,), places + 1)
        present = torch.arange(keys.shape[1]) < used[:, None]
        return self(query, keys, values, mask=present[:, None, None]).output, (keys, values, used)
