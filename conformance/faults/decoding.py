"""Faults that INC must catch: decoding with a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import Decoding, drops_in_evaluation
from mha.conformance.faults.fault import fault
from mha.spec import causal_mask


@fault("INC-1", script_shows=False, source="https://github.com/TrenTorch/TrenTorch/pull/192")
class ForgetsTheFirst(Complete):
    """The cache starts with the second position."""

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None
    ) -> tuple[Tensor, Any]:
        output, cache = super().decode(query, key, value, cache)
        return output, cache if cache[0].shape[1] > 1 else None


@fault(
    "INC-1",
    caught_by="decoding_equals_one_causal_pass",
    script_shows=False,
    source="https://github.com/harvard-edge/cs249r_book/pull/1953",
)
class DecodesOneBehind(Complete):
    """A position enters the cache after its query has attended."""

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None
    ) -> tuple[Tensor, Any]:
        keys, values = (key, value) if cache is None else cache
        output = self(query, keys, values).output
        if not cache:
            return output, (key, value)
        return output, (torch.cat([keys, key], 1), torch.cat([values, value], 1))


@fault("INC-1", caught_by="decoding_equals_one_causal_pass", script_shows=False)
class FirstGroupDecoded(Complete):
    """Decoding uses the first key/value head for all."""

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None
    ) -> tuple[Tensor, Any]:
        self.decodes_now = True
        result = super().decode(query, key, value, cache)
        self.decodes_now = False
        return result

    def repeat(self, x: Tensor) -> Tensor:
        if getattr(self, "decodes_now", False) and x.shape[1] < self.config.n_heads:
            x = x[:, :1].expand_as(x)
        return super().repeat(x)


@fault(
    "INC-1",
    caught_by="items_of_different_lengths_are_decoded_each_for_itself",
    script_shows=False,
    trigger="items of different lengths",
)
class InactiveAttendedTo(Complete):
    """The inputs of inactive items are cached, and attended to."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        return super().decode(query, key.nan_to_num(0.0), value.nan_to_num(0.0), cache)


@fault(
    "INC-1",
    caught_by="decoding_equals_one_causal_pass",
    script_shows=False,
    trigger="two sequences in turn",
)
class OneCacheForAll(Complete):
    """The cache is kept in the module; the one that is passed only says whether to continue."""

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None
    ) -> tuple[Tensor, Any]:
        kept = None if cache is None else self.cache
        output, self.cache = super().decode(query, key, value, kept)
        return output, True


@fault(
    "INC-1",
    caught_by="long_decoding_equals_one_causal_pass",
    script_shows=False,
    trigger="more than 128 tokens decoded",
)
class CacheOf128(Complete):
    """The cache has room for 128 positions; later ones overwrite the last."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        full = cache is not None and cache[0].shape[1] == 128
        if full:
            cache = tuple(x[:, :-1] for x in cache)
        return super().decode(query, key, value, cache, active)


@fault(
    "INC-1",
    caught_by="decoding_equals_one_causal_pass",
    script_shows=False,
    trigger="decoding and dropout",
)
class DecodingDrops(drops_in_evaluation(when=lambda module: module.decodes_now), Decoding):
    """Dropout is active in decoding steps, in evaluation too."""


@fault(
    "INC-1",
    caught_by="extra_keys_count_once_in_decoding",
    script_shows=False,
    trigger="decoding with extra keys",
)
class ExtraKeyDecodedAnew(Complete):
    """The extra keys are cached with the others, and added again in each step."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        present = query.new_ones(len(query), 1, dtype=torch.bool)
        if active is not None:
            present = active[:, None]
        q, k, v = (
            self.split(self.project(x, role))
            for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        k, v = self.repeat(self.extend(k, "extra_k")), self.repeat(self.extend(v, "extra_v"))
        present = F.pad(present, (0, k.shape[2] - 1), value=True)
        if cache is not None:
            k, v, present = (
                torch.cat([cache[0], k], 2),
                torch.cat([cache[1], v], 2),
                torch.cat([cache[2], present], 1),
            )
        allowed = present[:, None, None].expand(-1, k.shape[1], 1, -1)
        return self.project(self.merge(self.weigh(self.score(q, k), allowed) @ v), "o"), (
            k,
            v,
            present,
        )


class Paged(Complete):
    """Correct: keys are at the start of a table, which grows by a page for the longest item."""

    page = 8

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        if active is None:
            return super().decode(query, key, value, cache)
        keys, values, used = cache or (
            key[:, :0],
            value[:, :0],
            query.new_zeros(len(query), dtype=torch.long),
        )
        if int(used.max()) == keys.shape[1]:
            keys, values = (F.pad(x, (0, 0, 0, self.page)) for x in (keys, values))
        items = active.nonzero().flatten()
        places = self.places(used[items], keys.shape[1])
        at = items, places
        keys, values = keys.index_put(at, key[items, 0]), values.index_put(at, value[items, 0])
        used = used.index_put((items,), places + 1)
        length = self.length(used)
        mask = torch.arange(length, device=used.device) < used[:, None]
        return self(query, keys[:, :length], values[:, :length], mask=mask[:, None, None]).output, (
            keys,
            values,
            used,
        )

    def places(self, used: Tensor, size: int) -> Tensor:
        """Return the position of each item's next key, for its length and the size of the table."""
        return used

    def length(self, used: Tensor) -> int:
        """Return how many positions of the table are attended to."""
        return int(used.max())


@fault(
    "INC-1",
    caught_by="long_items_are_decoded_each_for_itself",
    script_shows=False,
    trigger="items of very different lengths, decoded beyond 64 positions",
)
class PagesAllocatedTogether(Paged):
    """An item that needs another page of 32 keys takes the last page of the table."""

    page = 32

    def places(self, used: Tensor, size: int) -> Tensor:
        return torch.where(used % self.page == 0, size - self.page, used)


@fault(
    "INC-2",
    caught_by="chunks_against_a_cache_equal_one_causal_pass",
    script_shows=False,
    trigger="several new positions at once",
    source="https://github.com/Mikyx-1/TinyLLM/issues/17",
)
class PromptSeesItsFuture(Complete):
    """With a cache, new positions are not masked among themselves: an empty one that a prompt fills
    is a cache too.
    """

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        cache = super().decode(query, key, value, cache, active)[1]
        return self(query, *cache[:2], mask=cache[2].mT.unsqueeze(1)).output, cache


@fault(
    "INC-2",
    caught_by="chunks_against_a_cache_equal_one_causal_pass",
    script_shows=False,
    trigger="several new positions against a cache that has some",
    source="https://github.com/huggingface/candle/issues/3743",
)
class ChunksAlignedTopLeft(Complete):
    """New positions are masked as if the cache were empty, so that they see only its first keys."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        output, cache = super().decode(query, key, value, cache, active)
        if query.shape[1] > 1:
            allowed = causal_mask(query.shape[1], cache[0].shape[1], "top_left", query.device)
            output = self(query, *cache[:2], mask=allowed & cache[2].mT.unsqueeze(1)).output
        return output, cache


@fault(
    "INC-2",
    caught_by="chunks_against_a_cache_equal_one_causal_pass",
    script_shows=False,
    trigger="two chunks of several positions",
    source="https://github.com/pytorch/executorch/issues/21749",
)
class SecondChunkOverwrites(Complete):
    """A chunk that follows a cached one takes the place of its last position."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        if cache is not None and query.shape[1] > 1:
            cache = tuple(part[:, :-1] for part in cache)
        return super().decode(query, key, value, cache, active)


@fault(
    "INC-2",
    caught_by="several_positions_at_once_are_right_or_refused",
    claims=replace(CLAIMS, decodes=True),
    script_shows=False,
    trigger="several new positions, where one at a time is claimed",
)
class SeveralSeeTheirFuture(PromptSeesItsFuture):
    """It is for one position at a time, and takes several, not masked among themselves."""


@fault(
    "INC-3",
    caught_by="reordered_cache_decodes_the_items_that_it_holds",
    script_shows=False,
    trigger="beam search",
)
class KeysReorderedAlone(Complete):
    """A cache is reordered without its values."""

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        keys, values, present = cache
        return keys[items], values, present[items]


@fault(
    "INC-3",
    caught_by="cropped_cache_forgets_what_came_after",
    script_shows=False,
    trigger="cropped after rejected positions",
)
class OnlyKeysCropped(Complete):
    """A cache is cropped in its keys; of the values the last ones are kept."""

    def crop_cache(self, cache: Any, length: int) -> Any:
        keys, values, present = cache
        return keys[:, :length], values[:, -length:], present[:, :length]


@fault(
    "INC-3",
    caught_by="copied_cache_is_one_of_its_own",
    script_shows=False,
    trigger="two continuations of one prompt",
)
class CopyIsTheSame(Complete):
    """The cache is a handle of a table in the module, so that a copy stands for the same keys."""

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        tables = self.__dict__.setdefault("tables", [])
        table = None if cache is None else tables[cache]
        output, table = super().decode(query, key, value, table, active)
        if cache is None:
            cache = len(tables)
            tables.append(None)
        tables[cache] = table
        return output, cache

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        self.tables[cache] = super().reorder_cache(self.tables[cache], items)
        return cache

    def crop_cache(self, cache: Any, length: int) -> Any:
        self.tables[cache] = super().crop_cache(self.tables[cache], length)
        return cache
