"""The axes of query, key, value and context of a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mha.implementations.adapters.called import is_called_without_forward
from mha.implementations.adapters.one_by_one import (
    of_one_query,
    one_by_one,
    query_by_query,
)
from mha.implementations.adapters.packing import packing_names
from mha.implementations.adapters.signature import Signature, numbers_of_heads
from mha.implementations.discovery.errors import ImplementationError

# Layouts of heads that share an axis with the batch, or with the columns.
MERGED_LAYOUTS = ("(b h) l d", "b l (h d)")
# One query of one item, whose keys are (S, H_kv, d_k), as in decoding; and one query of each item,
# with the axes of keys and values.
ONE_QUERY = "h d"
ONE_QUERY_EACH = {"b h d, b l h d": "b l h d", "b h d, b h l d": "b h l d"}
# A kernel of a single head, or of the heads of one item, or of one query, is called for one after
# another of these.
AS_MANY = {"l d": "(b h) l d", "l h d": "b l h d"}
AS_MANY.update(dict.fromkeys((ONE_QUERY, *ONE_QUERY_EACH), "b l h d"))
# How many of query, key and value are one tensor, and the place of the first of them.
PACKED = {"3": 0, "2": 1}
# The flag that calls of a kernel of one query have, which the adapter reads.
CAUSAL = "is_causal"
# The layout of tokens, in which the items of a batch are one after another.
TOKENS = "t h d"


def function_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return what has the parameters of a kernel, which may be a module."""
    if not isinstance(kernel, nn.Module):
        return kernel
    if is_called_without_forward(type(kernel)):
        return kernel.__call__
    return kernel.forward


@dataclass(frozen=True)
class KernelAxes:
    """A `layout` of `from_kernel`.

    heads: the axes of query, key and value.
    context: those of the context.
    packed: "3" or "2", if that many of the inputs are one tensor, stacked along the axis `stacked`.
    one_by_one: whether the kernel is called for each.
    of_tokens: whether it takes a row of tokens, t, the items of a batch one after another.
    one_query: whether it takes one query of each head.
    keys: the axes of keys and values beside one query of each item; "" for any other kernel.

    >>> axes = KernelAxes.read("Mine", "b l 3 h d -> b l (h d)")
    >>> axes.heads, axes.context, axes.packed, axes.stacked
    ('b l h d', 'b l (h d)', '3', 2)
    """

    heads: str
    context: str
    packed: str
    stacked: int
    one_by_one: bool = False
    of_tokens: bool = False
    one_query: bool = False
    keys: str = ""

    @classmethod
    def read(cls, label: str, layout: str) -> KernelAxes:
        """Read a layout; raises ImplementationError for an invalid one, with the label."""
        of_tokens = layout.split()[:1] == ["t"]
        dense = f" {layout}".replace(" t ", " b l ") if of_tokens else AS_MANY.get(layout, layout)
        inputs, _, context = dense.partition("->")
        axes = inputs.split()
        packed = ""
        stacked = 0
        for count in PACKED:
            if count in axes and not packed:
                packed, stacked = count, axes.index(count)
        heads = " ".join(axis for axis in axes if axis != packed)
        context = context.strip() or heads
        if not (_is_of_heads(heads) and _is_of_heads(context)):
            raise ImplementationError(
                f"{label}: layout must name b, h, l and d once each, as 'b h l d', or be one of"
                f" {', '.join(map(repr, (*MERGED_LAYOUTS, *AS_MANY, TOKENS)))}, but is {layout!r}"
            )
        is_single = layout in AS_MANY
        return cls(
            heads,
            context,
            packed,
            stacked,
            one_by_one=is_single,
            of_tokens=of_tokens,
            one_query=layout == ONE_QUERY or layout in ONE_QUERY_EACH,
            keys=ONE_QUERY_EACH.get(layout, ""),
        )

    @property
    def takes_all_heads(self) -> bool:
        """Whether the kernel takes query, key and value, each with all its heads."""
        return not (self.packed or self.one_by_one)

    def parameters_of(
        self, parameters: Mapping[str, inspect.Parameter]
    ) -> dict[str, inspect.Parameter]:
        """Return the parameters of a kernel, with query, key and value for its packed inputs.

        parameters: its own.
        """
        if self.of_tokens:
            offsets = packing_names(parameters).values()
            return {name: p for name, p in parameters.items() if name not in offsets}
        if self.one_query:
            by_name = inspect.Parameter.KEYWORD_ONLY
            return dict(parameters) | {CAUSAL: inspect.Parameter(CAUSAL, by_name, default=False)}
        if not self.packed:
            return dict(parameters)
        # Before the packed inputs comes the query, where it is not among them.
        options = [*parameters.values()][PACKED[self.packed] + 1 :]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        inputs = [inspect.Parameter(name, kind) for name in ("query", "key", "value")]
        return {parameter.name: parameter for parameter in (*inputs, *options)}

    def with_heads(self, kernel: Callable[..., Any], signature: Signature) -> Signature:
        """Return a signature with the number of heads, where the kernel splits heads.

        It is given though it has a default.
        """
        if "(h d)" not in self.heads:
            return signature
        heads = numbers_of_heads(inspect.signature(function_of(kernel)).parameters)
        return replace(signature, others=(*signature.others, *heads))

    def unpacked(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of query, key and value, with all heads, that calls a kernel."""
        if self.keys:
            return of_one_query(kernel, heads_first=self.keys == "b h l d")
        if self.one_query:
            return query_by_query(kernel)
        if self.one_by_one:
            return one_by_one(kernel)
        if not self.packed:
            return function_of(kernel)
        place = PACKED[self.packed]

        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            inputs = (query, key, value)
            return kernel(*inputs[:place], torch.stack(inputs[place:], self.stacked), **options)

        return attend


def _is_of_heads(axes: str) -> bool:
    """Return whether these are the four axes of heads, each on its own, or in a known order."""
    each = axes.replace("(h d)", "h d").split()
    return sorted(each) == ["b", "d", "h", "l"] or axes in MERGED_LAYOUTS
