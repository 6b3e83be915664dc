"""Faults that PAK must catch: sequences that are packed one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mha.conformance.faults.families import hooked
from mha.conformance.faults.fault import fault
from mha.implementations import from_kernel
from mha.spec import Claims, Implementation, Packed, Scores, Window

CLAIMS = Claims(
    masks=(),
    causal="bottom_right",
    returns_weights=False,
    value_width=True,
    grouped_query=True,
    scores=Scores(window=Window("left_right")),
    packed=Packed("zero", gaps=True),
)


class Varlen(nn.Module):
    """A correct kernel of packed sequences, in steps; each fault changes one."""

    @classmethod
    def attend(  # noqa: PLR0913  as flash-attention's
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_k: int,
        seqused_q: Tensor,
        seqused_k: Tensor,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Return the contexts (T, H, d_v) of one sequence after another."""
        q = cls.queries(q)
        cls.check(cu_seqlens_q, q)
        cls.check(cu_seqlens_k, k)
        rows, end = [], 0
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        for place, (start, used) in enumerate(cls.sequences(cu_seqlens_q, seqused_q)):
            key_start, keys = cls.sequences(cu_seqlens_k, seqused_k)[place]
            keys = cls.keys_of(keys, max_seqlen_k, len(k) - key_start)
            own = slice(key_start, key_start + keys)
            heads = [x.transpose(0, 1) for x in (q[start : start + used], k[own], v[own])]
            offset = cls.offset(keys - used, len(k) - len(q))
            allowed = cls.allowed(used, keys, offset, causal, window_size)
            # What a gap of the queries would get.
            rows += [v.new_zeros(start - end, *v.shape[1:]), cls.of_sequence(*heads, allowed)]
            end = start + used
        return torch.cat([*rows, cls.tail(v.new_zeros(len(q) - end, *v.shape[1:]))])

    @classmethod
    def queries(cls, q: Tensor) -> Tensor:
        """Return the queries of all tokens."""
        return q

    @classmethod
    def check(cls, offsets: Tensor, tokens: Tensor) -> None:
        """Raise ValueError for offsets that are none."""
        falls = bool((offsets.diff() < 0).any())
        if int(offsets[0]) != 0 or falls or int(offsets[-1]) > len(tokens):
            raise ValueError(f"these are no offsets: {offsets.tolist()}")

    @classmethod
    def sequences(cls, offsets: Tensor, used: Tensor) -> list[tuple[int, int]]:
        """Return where each sequence begins, and how long it is."""
        return list(zip(offsets.tolist(), used.tolist(), strict=False))

    @classmethod
    def keys_of(cls, keys: int, longest: int, left: int) -> int:
        """Return how many keys are read for a sequence; left: those up to the last token."""
        del longest, left
        return keys

    @classmethod
    def offset(cls, own: int, of_all: int) -> int:
        """Return the place of the first query; own: keys less queries; of_all: of all tokens."""
        del of_all
        return own

    @classmethod
    def allowed(
        cls, queries: int, keys: int, offset: int, causal: bool, window: tuple[int, int]
    ) -> Tensor:
        """Return which keys a query sees, boolean (L, S)."""
        distances = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - offset
        allowed = (distances <= 0) | (not causal)
        for bound, away in zip(window, (-distances, distances), strict=True):
            if bound >= 0:
                allowed = allowed & (away <= bound)
        return allowed

    @classmethod
    def of_sequence(cls, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Return the contexts (L, H, d_v) of heads (H, L, d)."""
        if not k.shape[1]:
            return cls.without_keys(q, v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        empty = ~allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~(allowed | empty), -math.inf).softmax(-1)
        return (weights.masked_fill(~allowed, 0.0) @ v).transpose(0, 1)

    @classmethod
    def without_keys(cls, q: Tensor, v: Tensor) -> Tensor:
        """Return what queries get that have no keys."""
        return v.new_zeros(q.shape[1], q.shape[0], v.shape[-1])

    @classmethod
    def tail(cls, rows: Tensor) -> Tensor:
        """Return the rows after the last sequence."""
        return rows


def kernel_of(cls: type[Varlen], claims: Claims = CLAIMS) -> Implementation:
    """Return the kernel of a class as an implementation."""
    return from_kernel(cls.attend, layout="t h d", mask=None, claims=claims, name=cls.__name__)


correct_varlen = kernel_of(Varlen)


def varlen_fault(
    clause: str, caught_by: str, **about: Any
) -> Callable[[type[Varlen]], type[Varlen]]:
    """Declare that a clause must catch a kernel of packed sequences."""

    def declare(cls: type[Varlen]) -> type[Varlen]:
        declared = fault(clause, caught_by=caught_by, implementation=kernel_of(cls), **about)
        return declared(cls)

    return declare


ALONE = "a_packed_sequence_is_attended_to_alone"


@varlen_fault("PAK-1", ALONE, trigger="sequences of different lengths")
class LongestForAll(Varlen):
    """As many keys are read for each sequence as the longest one has."""

    @classmethod
    def keys_of(cls, keys: int, longest: int, left: int) -> int:
        return min(longest, left)


@varlen_fault("PAK-1", ALONE, trigger="a causal call, of sequences with other numbers of keys")
class AlignedToTheRow(Varlen):
    """The causal mask is aligned by the numbers of all queries and keys."""

    @classmethod
    def offset(cls, own: int, of_all: int) -> int:
        return of_all


@varlen_fault("PAK-1", "gaps_reach_nothing", trigger="gaps between sequences")
class GapsAreRead(Varlen):
    """A sequence is taken to end where the next one begins."""

    @classmethod
    def sequences(cls, offsets: Tensor, used: Tensor) -> list[tuple[int, int]]:
        lengths = offsets.diff()
        return list(zip(offsets.tolist(), lengths.tolist(), strict=False))


@varlen_fault("PAK-1", "packing_goes_with_other_options", trigger="a window")
class WindowForgotten(Varlen):
    """The window is ignored."""

    @classmethod
    def allowed(
        cls, queries: int, keys: int, offset: int, causal: bool, window: tuple[int, int]
    ) -> Tensor:
        return super().allowed(queries, keys, offset, causal, (-1, -1))


@varlen_fault("PAK-1", "gradients_are_those_of_each_sequence", trigger="backwards")
class HalfTheGradient(Varlen):
    """The gradient of each sequence is halved."""

    @classmethod
    def of_sequence(cls, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        contexts = super().of_sequence(q, k, v, allowed)
        return hooked(contexts, lambda gradient: gradient / 2)


@varlen_fault(
    "PAK-2",
    "an_empty_sequence_harms_no_other",
    trigger="a sequence without keys",
    source="https://github.com/Dao-AILab/flash-attention/pull/2568",
)
class NanWithoutKeys(Varlen):
    """Queries without keys get NaN."""

    @classmethod
    def without_keys(cls, q: Tensor, v: Tensor) -> Tensor:
        return super().without_keys(q, v) * math.nan


@varlen_fault(
    "PAK-2",
    "an_empty_sequence_harms_no_gradient",
    trigger="a sequence without keys, backwards",
    source="https://github.com/Dao-AILab/flash-attention/issues/1947",
)
class NanGradientWithoutKeys(Varlen):
    """Queries without keys have NaN as their gradient."""

    @classmethod
    def without_keys(cls, q: Tensor, v: Tensor) -> Tensor:
        zeros = (0.0 * q.sum(-1)).transpose(0, 1).unsqueeze(-1)
        contexts = super().without_keys(q, v) + zeros
        return hooked(contexts, lambda gradient: gradient * math.nan)


@varlen_fault(
    "PAK-3",
    "tokens_after_the_last_reach_nothing",
    trigger="tokens after the last offset",
    source="https://github.com/Dao-AILab/flash-attention/pull/2324",
)
class UnwrittenTail(Varlen):
    """Rows after the last offset are as they were."""

    @classmethod
    def tail(cls, rows: Tensor) -> Tensor:
        return rows + 1.0


@varlen_fault(
    "PAK-3",
    "tokens_after_the_last_reach_no_gradient",
    trigger="tokens after the last offset, backwards",
)
class TailInGradients(Varlen):
    """The gradient of the queries is multiplied by 1 + 0 times a sum over all tokens."""

    @classmethod
    def queries(cls, q: Tensor) -> Tensor:
        factor = 1 + 0 * q.detach().sum()
        return hooked(q, lambda gradient: gradient * factor)


@varlen_fault("PAK-4", "")
class AnyOffsets(Varlen):
    """Offsets are not looked at."""

    @classmethod
    def check(cls, offsets: Tensor, tokens: Tensor) -> None:
        del offsets, tokens
