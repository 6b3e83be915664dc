"""Attention that decodes wrongly; see `gallery`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.caches import WeightsPacked
from mha.conformance.faults.complete import Complete


class Decoding(Complete):
    """Correct, and knows whether a step is one of decoding."""

    decoding = False

    def decode(self, *inputs: Any, **named: Any) -> tuple[Tensor, Any]:
        self.decoding = True
        try:
            return super().decode(*inputs, **named)
        finally:
            self.decoding = False


class DecodingDrops(Decoding):
    """The fused kernel of a decoding step is given the probability in evaluation too."""

    only = "decoding and dropout"

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.config.dropout, self.training or self.decoding)


class DecodingKeepsWeights(Decoding, WeightsPacked):
    """The output's weights are packed in the first step of decoding, and never again."""

    only = "decoding after other weights were loaded"

    def project(self, x: Tensor, role: str) -> Tensor:
        return super().project(x, role) if self.decoding else Complete.project(self, x, role)


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


class Paged(Complete):
    """A correct decoder: each item's keys are at the beginning of a table, which grows by a page for the longest."""

    page = 8

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if active is None:
            return super().decode(query, key, value, cache)
        keys, values, used = cache or (key[:, :0], value[:, :0], torch.zeros(len(query), dtype=torch.long))
        if int(used.max()) == keys.shape[1]:
            keys, values = (F.pad(x, (0, 0, 0, self.page)) for x in (keys, values))
        items = active.nonzero().flatten()
        places = self.places(used[items], keys.shape[1])
        at = items, places
        keys, values = keys.index_put(at, key[items, 0]), values.index_put(at, value[items, 0])
        used = used.index_put((items,), places + 1)
        seen = self.seen(used)
        mask = torch.arange(seen) < used[:, None]
        return self(query, keys[:, :seen], values[:, :seen], mask=mask[:, None, None]).output, (keys, values, used)

    def places(self, used: Tensor, size: int) -> Tensor:
        """Return where the next keys go of items that have so many, in a table of this size."""
        return used

    def seen(self, used: Tensor) -> int:
        """Return how much of the table is attended to."""
        return int(used.max())


class PagesAllocatedTogether(Paged):
    """An item that needs another page of 32 keys takes the last of the table."""

    only, page = "items of very different lengths, decoded beyond 64 positions", 32

    def places(self, used: Tensor, size: int) -> Tensor:
        return torch.where(used % self.page == 0, size - self.page, used)


class PagesOfTheFirst(Paged):
    """As many pages of 8 keys are read as the first item has."""

    only = "a first item that is not the longest, decoded beyond 8 positions"

    def seen(self, used: Tensor) -> int:
        return min(int(used.max()), -(-max(int(used[0]), 1) // self.page) * self.page)
