"""Caches that classes keep themselves: returned, joined by callers, in dictionaries, in buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mha.implementations.adapters.caches import Kept
from mha.implementations.adapters.kept_caches import CacheByStart, _tensors_of
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import Declared
from mha.implementations.inference.decoding import find_decoding
from mha.implementations.inference.probes import Formula
from mha.implementations.inference.unused import unused_options

PARAMETERS = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
CAUSAL = Formula(causal="top_left")


class Causal(nn.Module):
    """Always causal; what comes before is given as keys and values of heads."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        layers = (self.q, self.k, self.v)
        return [layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in layers]

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        context = scaled_dot_product_attention(q, k, v, allowed)
        output: Tensor = self.o(context.transpose(1, 2).flatten(2))
        return output


class Returned(Causal):
    def forward(self, x: Tensor, past: Any = None, use_cache: bool = False) -> Any:
        q, k, v = self.heads(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        output = self.joined(q, k, v)
        return (output, (k, v)) if use_cache else output


class Stacked(Causal):
    """Returns what is new; its caller joins that to what came before."""

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        present = torch.stack([k, v])
        if layer_past is not None:
            k, v = torch.cat([layer_past, present], -2)
        return self.joined(q, k, v), present


class Filled(Causal):
    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if cache is not None:
            k = torch.cat([cache.get("k", k[:, :, :0]), k], 2)
            v = torch.cat([cache.get("v", v[:, :, :0]), v], 2)
            cache.update(k=k, v=v)
        return self.joined(q, k, v)


class Started(Causal):
    """Keeps keys and values in tensors of its own."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.kept = torch.zeros(2, 4, n_heads, 16, d_model // n_heads)

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        q, k, v = self.heads(x)
        end = start_pos + x.shape[1]
        self.kept = self.kept.to(k)
        self.kept[:, : len(x), :, start_pos:end] = torch.stack([k, v]).detach()
        k, v = self.kept[:, : len(x), :, :end]
        return self.joined(q, k, v)


class OneBuffer(Causal):
    """Writes keys and values into one buffer, and reads them by names of their own."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.both = torch.zeros(2, 2, 3, 5)
        self.keys, self.values = self.both.unbind()


class ForgetsItsValues(Returned):
    """A fault: values are not with their keys."""

    def forward(self, x: Tensor, past: Any = None, use_cache: bool = False) -> Any:
        if past is not None:
            past = past[0], past[1].roll(1, 2)
        return super().forward(x, past, use_cache)


class OfPositions(ForgetsItsValues):
    """Its callers may mean other positions than ours."""

    def forward(
        self, x: Tensor, past: Any = None, use_cache: bool = False, position_ids: Any = None
    ) -> Any:
        return super().forward(x, past, use_cache)


def found_of(cls: type[Causal]) -> Candidate:
    claims = {"cross_attention": False, "always_causal": True, "masks": ()}
    declared = Declared(cls, cls.__name__, parameters=dict(PARAMETERS), mask=None, claims=claims)
    return find_decoding(replace(Candidate(declared).trying(formula=CAUSAL), explained=True))


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Returned, "past (returned)"),
        (Stacked, "layer_past (joined)"),
        (Filled, "cache (dict)"),
        (Started, "start_pos"),
    ],
)
def test_class_decodes_with_the_cache_that_it_keeps(cls: type[Causal], name: str) -> None:
    found = found_of(cls)
    assert found.declared.cache == name
    assert found.claims["decodes"] == "chunks"
    assert found.claims["cache_edits"] == {"copy"}
    assert not {"past", "layer_past", "use_cache", "cache", "start_pos"} & {*unused_options(found)}


def test_cache_that_gives_something_else_is_claimed_and_fails() -> None:
    found = found_of(ForgetsItsValues)
    assert found.claims["decodes"] is True
    assert found.rows["cache"].evidence.startswith("assumed")


def test_cache_of_calls_with_positions_is_not_assumed() -> None:
    assert found_of(OfPositions).declared.cache is None


def test_tensors_that_share_memory_do_so_in_each_sequence() -> None:
    module = OneBuffer(4, 2)
    form = CacheByStart("start_pos")
    kept = Kept((module, _tensors_of(module)), 0)
    form.given(kept)
    module.both.fill_(7.0)
    assert bool((module.keys == 7.0).all())
    later = Kept(form.left(module, None, kept), 1)
    form.given(kept)
    assert bool((module.values == 0.0).all())
    form.given(later)
    assert bool((module.values == 7.0).all())
