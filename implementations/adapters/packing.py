"""A batch packed into one row of tokens, for kernels that take sequences one after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha.implementations.adapters.named_options import first_known
from mha.implementations.adapters.outputs import as_output
from mha.implementations.adapters.signature import input_names
from mha.implementations.discovery.errors import UnsupportedCallError
from mha.spec import Claims, Options, Output, Packed
from mha.spec.option_names import listed

# What a kernel takes beside the tokens, by what it means; k is of keys and values.
NAMES = {
    "offsets_q": listed("cu_seqlens_q cu_seq_q cu_seq_lens_q qo_indptr"),
    "offsets_k": listed("cu_seqlens_k cu_seqlens_kv cu_seq_k cu_seq_lens_k kv_indptr"),
    "offsets": listed("cu_seqlens cu_seq_lens"),
    "longest_q": listed("max_seqlen_q max_q max_length_q"),
    "longest_k": listed("max_seqlen_k max_seqlen_kv max_k max_length_k"),
    "longest": listed("max_seqlen"),
    "starts_q": listed("cu_seqlens_q_padded"),
    "starts_k": listed("cu_seqlens_kv_padded cu_seqlens_k_padded"),
    "used_q": listed("seqused_q"),
    "used_k": listed("seqused_k"),
}
# Tokens after each sequence, and after the last one, where a call has any.
GAP, TAIL = 2, 3


def packing_names(parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return a kernel's names for what it takes beside the tokens, by what it means.

    >>> packing_names(inspect.signature(lambda q, k, v, cu_seqlens, max_seqlen: q).parameters)
    {'offsets': 'cu_seqlens', 'longest': 'max_seqlen'}
    """
    found: dict[str, str] = {}
    for meaning, known in NAMES.items():
        name = first_known(known, parameters)
        if name is not None:
            found[meaning] = name
    return found


@dataclass(frozen=True)
class Row:
    """Where the sequences of a batch are in a row of tokens.

    lengths: of the sequences.
    gap, tail: how many tokens are after each sequence, and after all of them.
    """

    lengths: Sequence[int]
    gap: int = 0
    tail: int = 0

    @property
    def starts(self) -> list[int]:
        """Where each sequence begins, and where the last one ends, with its gap."""
        return [0, *accumulate(length + self.gap for length in self.lengths)]

    @property
    def offsets(self) -> list[int]:
        """The same without gaps."""
        return [0, *accumulate(self.lengths)]

    def pack(self, batch: Tensor) -> Tensor:
        """Return a row (T, H, d) of a batch (B, L, H, d); what is in no sequence is NaN."""
        parts = [batch.new_empty(0, *batch.shape[2:])]
        for item, length in enumerate(self.lengths):
            parts += [batch[item, :length], batch.new_full((self.gap, *batch.shape[2:]), torch.nan)]
        parts.append(batch.new_full((self.tail, *batch.shape[2:]), torch.nan))
        return torch.cat(parts)

    def unpack(self, row: Tensor, longest: int) -> Tensor:
        """Return a batch (B, L, ...) of a row (T, ...); zeros after each sequence."""
        items = [row.new_empty(0, longest, *row.shape[1:])]
        for start, length in zip(self.starts, self.lengths, strict=False):
            after = [0, 0] * (row.ndim - 1) + [0, longest - length]
            items.append(F.pad(row[start : start + length], after).unsqueeze(0))
        return torch.cat(items)


@dataclass(frozen=True)
class Packer:
    """Calls a kernel of tokens with a batch.

    label: the name in messages.
    inputs: its names for query, key and value, or none if these are passed by position.
    names: of what it takes beside the tokens, as of `packing_names`.
    """

    label: str
    inputs: Sequence[str]
    names: Mapping[str, str]
    claims: Claims

    @classmethod
    def read(cls, label: str, function: Callable[..., Any], claims: Claims) -> Packer:
        """Return the packer for a function of tokens."""
        parameters = inspect.signature(function).parameters
        return cls(label, input_names(parameters), packing_names(parameters), claims)

    def of(self, kernel: Callable[..., Any], options: Options) -> Callable[..., Output]:
        """Return a function of query, key and value, (B, L, H, d), that packs and unpacks them.

        options: with the lengths of the items, and what else is in the row.
        """
        kind = options.packing

        def attend(*inputs: Tensor, **named: Any) -> Output:
            query, key, value = inputs or [named.pop(name) for name in self.inputs]
            shape = query.shape[0], query.shape[1], key.shape[1]
            full = [shape[1:]] * shape[0]
            lengths = options.lengths_of(*shape) or full
            gap, tail = GAP * (kind == "gaps"), TAIL * (kind == "tail")
            of_query = Row([own for own, _ in lengths], gap, tail)
            of_key = Row([own for _, own in lengths], gap, tail)
            tokens = of_query.pack(query), of_key.pack(key), of_key.pack(value)
            named |= self._arguments(of_query, of_key, kind, query.device)
            named |= zip(self.inputs, tokens, strict=False)
            returned = kernel(*tokens[len(self.inputs) :], **named)
            return self._unpacked(returned, of_query, shape[1], tokens[0].shape)

        return attend

    def _arguments(
        self, of_query: Row, of_key: Row, kind: str | None, device: torch.device
    ) -> dict[str, Any]:
        """Return what says where sequences are, by the kernel's own names."""
        has_starts = "starts_q" in self.names
        if kind == "gaps" and not (has_starts or "used_q" in self.names):
            raise UnsupportedCallError(f"{self.label} takes no sequences with gaps")
        if "offsets" in self.names and list(of_query.lengths) != list(of_key.lengths):
            raise UnsupportedCallError(f"{self.label} takes as many keys as queries")
        arguments: dict[str, Any] = {}
        for side, row in (("_q", of_query), ("_k", of_key), ("", of_query)):
            numbers = {"offsets": row.starts, "starts": row.starts, "used": list(row.lengths)}
            if has_starts:
                numbers["offsets"] = row.offsets
            numbers["offsets"] = _spoilt(numbers["offsets"], kind)
            for meaning, values in numbers.items():
                name = self.names.get(f"{meaning}{side}")
                if name is not None:
                    arguments[name] = torch.tensor(values, dtype=torch.int32, device=device)
            name = self.names.get(f"longest{side}")
            if name is not None:
                arguments[name] = max(row.lengths, default=0)
        return arguments

    def _unpacked(self, returned: Any, row: Row, longest: int, shape: torch.Size) -> Output:
        """Return the context as a batch, and a log-sum-exp with as many tokens.

        Raises ValueError for rows after the last offset that are not as they are declared.
        """
        declared = self.claims.lse
        context, _, lse = as_output(returned, shape, lse=declared)
        end, packed = row.starts[-1], self.claims.packed or Packed()
        if packed.tail == "zero" and bool((context[end:] != 0).any()):
            raise ValueError("its rows after the last offset are not zero")
        if isinstance(lse, Tensor) and declared is not None:
            of_tokens = 0
            if "t" in declared.layout:
                of_tokens = declared.layout.split().index("t")
            tokens = row.unpack(lse.movedim(of_tokens, 0), longest).flatten(0, 1)
            lse = tokens.movedim(0, of_tokens)
        return Output(row.unpack(context, longest), None, lse)


def _spoilt(offsets: list[int], kind: str | None) -> list[int]:
    """Return offsets that are invalid, if that is asked for."""
    if kind == "late":
        return [1, *offsets[1:]]
    if kind == "falling":
        return [offsets[0], offsets[-1] + 1, *offsets[2:]]
    if kind == "beyond":
        return [*offsets[:-1], offsets[-1] + 1]
    return offsets
