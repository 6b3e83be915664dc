"""Faults that CHK must catch: chunks of places."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mha.conformance.faults.base import CLAIMS, Complete
from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.spec import Options, Scores, window_mask

Allowed = tuple[Tensor, Tensor]
EXACT, TOGETHER = "a_chunk_has_exactly_its_keys", "chunks_go_with_other_options"
BOTTOM_RIGHT = replace(CLAIMS, causal="bottom_right", scores=Scores(chunk=True))
LLAMA4 = "https://github.com/huggingface/transformers/issues/37351"


def _places(options: Options, q: Tensor, k: Tensor) -> Tensor:
    """Return the places (L, 1) of the queries where bottom-right is declared."""
    return torch.arange(q.shape[2], device=q.device).unsqueeze(1) + k.shape[2] - q.shape[2]


@fault("CHK-1", caught_by=EXACT, source=LLAMA4)
@fault("EFF-1", caught_by="chunks_have_an_effect")
class ChunksIgnored(Complete):
    """Chunks have no effect."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        return super().allow(options.change(chunk=None), q, k)


@fault("CHK-1", caught_by=EXACT, trigger="a chunk")
class ChunkAsWindow(Complete):
    """A chunk of c places is the last c keys, wherever they begin."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options.change(chunk=None), q, k)
        if options.chunk is not None:
            last = options.chunk - 1, None
            allowed = allowed & window_mask(q.shape[2], k.shape[2], last, "top_left", q.device)
        return allowed, bias


@fault("CHK-1", claims=BOTTOM_RIGHT, caught_by=EXACT, trigger="a chunk, and L != S")
class ChunksFromTheLeft(Complete):
    """The chunks of queries are counted top-left, although bottom-right is declared."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        chunked, bias = super().allow(options.change(is_causal=False), q, k)
        if options.is_causal:
            keys = torch.arange(k.shape[2], device=q.device)
            chunked = chunked & (keys <= _places(options, q, k))
        return chunked, bias


@fault("CHK-1", claims=BOTTOM_RIGHT, caught_by=EXACT, trigger="a chunk, and L > S")
class PlacesCutTowardsZero(Complete):
    """Places before the first key are divided as in C, so that they are in its chunk."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        places, keys = _places(options, q, k), torch.arange(k.shape[2], device=q.device)
        allowed = torch.ones_like(places == keys).expand(*q.shape[:3], k.shape[2])
        if options.mask is not None:
            allowed = allowed & options.mask
        if options.is_causal:
            allowed = allowed & (keys <= places)
        if options.chunk is not None:
            chunk = places.div(options.chunk, rounding_mode="trunc")
            allowed = allowed & (chunk == keys // options.chunk)
        return allowed, q.new_zeros(allowed.shape)


@fault("CHK-1", caught_by=EXACT, trigger="a chunk and the causal flag")
class CausalForgottenBesideChunks(Complete):
    """With chunks, the causal flag is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        is_causal = options.is_causal and options.chunk is None
        return super().allow(options.change(is_causal=is_causal), q, k)


@fault("CHK-1", caught_by="chunks_follow_each_other", trigger="more than two chunks")
class TwoChunksOnly(Complete):
    """All places after the first chunk are in the second one."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options.change(chunk=None), q, k)
        if options.chunk is not None:
            queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
            is_later = keys >= options.chunk
            allowed = allowed & ((queries >= options.chunk).unsqueeze(1) == is_later)
        return allowed, bias


@fault("CHK-1", caught_by="a_chunk_of_everything_equals_none", trigger="a chunk above 1000")
class LargeChunksCut(Complete):
    """Chunks have two places at most where 1000 or more are asked for."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        if options.chunk is not None and options.chunk > 1000:
            options = options.change(chunk=2)
        return super().allow(options, q, k)


@fault("CHK-1", caught_by=TOGETHER, trigger="a chunk and a window")
class WindowForgottenBesideChunks(Complete):
    """With chunks, the window is ignored."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        window = options.window if options.chunk is None else None
        return super().allow(options.change(window=window), q, k)


@fault("CHK-1", caught_by="gradients_have_the_chunks", trigger="chunks, backwards")
class ChunksBackwards(Complete):
    """With chunks, the gradients of the scores are halved."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        factor = 1.0 if self.options.chunk is None else 0.5
        return hooked(super().score(q, k), lambda gradient: gradient * factor)


@fault("CHK-1", caught_by="chunks_follow_each_other", trigger="a chunk above a tile of 64")
class LongChunksOverlap(Complete):
    """Queries of a chunk of more than 64 places see the last key of the chunk before."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Allowed:
        allowed, bias = super().allow(options, q, k)
        if options.chunk is None or options.chunk <= 64:
            return allowed, bias
        without, _ = super().allow(options.change(chunk=None), q, k)
        queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        begins = queries.div(options.chunk, rounding_mode="floor") * options.chunk
        is_before = keys == begins.unsqueeze(1) - 1
        return allowed | (without & is_before), bias
