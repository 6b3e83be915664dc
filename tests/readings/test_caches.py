"""Classes that decode with a cache object of a call, or with one that a method makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mha.implementations import ImplementationError, from_module
from mha.implementations.adapters.caches import PlainCache
from mha.implementations.inference.infer import Inference, infer
from mha.spec import Claims, Config, Weights
from support.judging import expect_pass, judged
from support.readings import findings


class Cache:
    """The base of caches, which cannot be made without sizes."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class GrowingCache(Cache):
    """Concatenates; is cropped by a number of positions."""

    def __init__(self) -> None:
        super().__init__([])
        self.keys = self.values = torch.empty(0)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.keys.numel():
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        self.keys, self.values = (x[:, :, :tokens_to_remove] for x in (self.keys, self.values))


class Decoder(nn.Module):
    """Causal without a mask, except for a single query."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        is_causal = attention_mask is None and self.is_causal(len(x[0]))
        return self.joined(q, k, v, attention_mask, is_causal)

    def is_causal(self, length: int) -> bool:
        return length > 1

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return q, k, v

    def joined(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool) -> Tensor:
        context = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        output: Tensor = self.o(context.transpose(1, 2).flatten(2))
        return output


class FirstKeyAlone(Decoder):
    """A single query is causal too, and sees the first key of the cache alone."""

    def is_causal(self, length: int) -> bool:
        return True


class OfNoClass(Decoder):
    """Says nothing of the class of its cache."""

    def forward(self, x: Tensor, mask: Any = None, past_key_values: Any = None) -> Tensor:
        return super().forward(x, mask, past_key_values)


class Holding(Decoder):
    """Holds a cache of fixed size, which a method makes; calls need a mask then."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.kv_cache: Any = None
        self.d_head = d_model // n_heads

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        zeros = torch.zeros(2, batch_size, self.n_heads, max_seq_len, self.d_head, dtype=dtype)
        self.kv_cache = zeros

    def forward(  # type: ignore[override]  # positions in the place of a cache
        self, x: Tensor, mask: Tensor | None = None, *, input_pos: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.heads(x)
        if self.kv_cache is not None:
            self.kv_cache[0, :, :, input_pos], self.kv_cache[1, :, :, input_pos] = k, v
            k, v = self.kv_cache
        return self.joined(q, k, v, mask, is_causal=mask is None)


class OfMemory(Holding):
    """Decodes with a memory that grows with its queries, as in torchtune."""

    def forward(  # type: ignore[override]  # a memory
        self, x: Tensor, y: Tensor, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        (q, _, _), (_, k, v) = self.heads(x), self.heads(y)
        if self.kv_cache is not None:
            self.kv_cache[0, :, :, input_pos], self.kv_cache[1, :, :, input_pos] = k, v
            k, v = self.kv_cache
        return self.joined(q, k, v, mask, is_causal=mask is None)


EDITED = "; may be copied, reordered, cropped"
FOUND: dict[type[Decoder], str] = {
    Decoder: f"cache: decodes position by position, and several at once{EDITED}",
    OfNoClass: (
        "past_key_values: decodes position by position, and several at once; may be copied,"
        " reordered"
    ),
    Holding: "kv_cache: decodes position by position, and several at once; may be copied",
    OfMemory: "kv_cache: decodes position by position, and several at once; may be copied",
}


def understood(cls: type[Decoder]) -> Inference:
    """Return what is inferred of a class, whose cache must be found as it is expected."""
    result = infer(cls)
    assert findings(result).get("cache") == FOUND[cls]
    return result


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("cls", FOUND)
def test_class_decodes_with_its_cache(cls: type[Decoder]) -> None:
    expect_pass(understood(cls), "INC-1", "INC-2", "INC-3")


def test_memory_is_decoded_beside_other_queries() -> None:
    implementation = understood(OfMemory).implementation
    assert implementation.claims.cross_attention == "memory"
    config, generator = Config(d_model=8, n_heads=2), torch.Generator().manual_seed(0)
    weights = Weights.random(config, 0)
    attention: Any = implementation.build(config, weights, dtype=torch.float64, device="cpu")
    query, memory = torch.randn(2, 1, 3, 8, generator=generator, dtype=torch.float64)
    cache, outputs = None, []
    for now in range(3):
        inputs = (x[:, now : now + 1] for x in (query, memory, memory))
        output, cache = attention.decode(*inputs, cache)
        outputs.append(output)
    expected = attention(query, memory, memory, mask=None, is_causal=True).output
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


def test_class_that_decodes_otherwise_is_said_not_to_be_covered() -> None:
    result = infer(FirstKeyAlone)
    assert result.not_covered == ("cache",)
    assert not result.implementation.claims.decodes


def test_declared_class_fails_that_sees_the_first_key_alone() -> None:
    implementation = from_module(
        FirstKeyAlone,
        parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"},
        causal_by_default=True,
        cache="cache",
        claims=Claims(
            cross_attention=False, returns_weights=False, causal="top_left", decodes=True
        ),
    )
    (verdict,) = judged(implementation, ["INC-1"]).verdicts
    assert verdict.status == "fail"


def test_cache_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(ImplementationError, match="cache='store', but a call has no parameter"):
        from_module(
            Decoder, parameters={"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}, cache="store"
        )


def test_plain_cache_concatenates() -> None:
    cache = PlainCache()
    assert cache.get_seq_length() == 0
    for length in (2, 1):
        keys, values = cache.update(*torch.ones(2, 1, 1, length, 4), 0)
    assert keys.shape == values.shape == (1, 1, 3, 4)
    assert cache.get_seq_length(0) == 3
