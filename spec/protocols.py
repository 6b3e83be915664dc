"""The interface between the suite and an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.weights import Weights


class Output(NamedTuple):
    """The result of one call.

    output: (B, L, D).
    weights: (B, H, L, S), the attention weights of each head if `need_weights=True` requested them,
        else None.
    lse: (B, H, L), the log-sum-exp of each row of scores if `return_lse=True` requested it, else
        None.

    >>> Output(torch.zeros(2, 5, 6)).weights is None
    True
    """

    output: Tensor
    weights: Tensor | None = None
    lse: Tensor | None = None


class Attention(Protocol):
    """An attention with its weights loaded, in a mode like a `torch.nn.Module`.

    >>> class MeanOfValues(torch.nn.Module):
    ...     def forward(self, query, key, value, *, mask=None, is_causal=False, need_weights=False):
    ...         return Output(value.mean(1, keepdim=True).expand_as(query))
    >>> MeanOfValues()(torch.ones(2, 5, 6), torch.ones(2, 3, 6), torch.ones(2, 3, 6)).output.shape
    torch.Size([2, 5, 6])
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        **scores: Any,
    ) -> Output:
        """Return the attention of `query` over `key` and `value`.

        query: (B, L, D).
        key: (B, S, kdim).
        value: (B, S, vdim).
        mask: boolean (True = may attend) or floating-point (added to the scores), broadcastable to
            (B, H, L, S).
        is_causal: whether to apply the causal mask as well.
        need_weights: whether to return the weights.
        scores: fields of `Options`, such as scale=0.5 or return_lse=True, if they are claimed.

        Raises for sizes that do not match (clause SHP-6) and for an invalid mask (clause MSK-12).
        """
        ...

    def train(self) -> Any:
        """Switch to training mode and return the attention."""
        ...

    def eval(self) -> Any:
        """Switch to evaluation mode and return the attention."""
        ...


class Decoder(Attention, Protocol):
    """An attention that also decodes position by position, with a cache (clause INC-1).

    The cache holds earlier keys and values. A method `decoder_with(options)` returns a decoder that
    has these `Options` in each step, or None; without it, decoding is judged without options.

    >>> class MeanOfValues(torch.nn.Module):
    ...     def decode(self, query, key, value, cache=None, active=None):
    ...         cache = value if cache is None else torch.cat([cache, value], 1)
    ...         return cache.mean(1, keepdim=True), cache
    >>> output, cache = MeanOfValues().decode(*[torch.ones(2, 1, 6)] * 3)
    >>> output.shape
    torch.Size([2, 1, 6])
    """

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any = None,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the output (B, n, D) at the next n positions, and the cache for those after.

        The positions attend causally.

        query, key, value: (B, n, D), at these positions; n is 1, unless `Claims.decodes` is
            "chunks".
        cache: what the previous call returned; None at the first position.
        active: boolean (B,), given only where `Claims.decodes_ragged` is claimed. Items where it is
            False have no position now (n is 1): their part of the cache stays as it is, and their
            inputs and outputs are ignored.
        """
        ...


class CacheEditor(Decoder, Protocol):
    """A decoder whose caches can be edited between two steps.

    `Claims.cache_edits` names the methods that it has.

    >>> class MeanOfValues(torch.nn.Module):
    ...     def reorder_cache(self, cache, items):
    ...         return cache[items]
    ...     def crop_cache(self, cache, length):
    ...         return cache[:, :length]
    >>> cache = torch.arange(6.0).view(2, 3, 1)
    >>> decoder = MeanOfValues()
    >>> decoder.crop_cache(decoder.reorder_cache(cache, torch.tensor([1, 1])), 2).flatten().tolist()
    [3.0, 4.0, 3.0, 4.0]
    """

    def reorder_cache(self, cache: Any, items: Tensor) -> Any:
        """Return a cache whose item b is the item `items[b]` of this one, as beam search needs it.

        items: integers (B,), some of which may be equal. This cache is not used again.
        """
        ...

    def crop_cache(self, cache: Any, length: int) -> Any:
        """Return a cache of the first `length` positions, as after rejected guesses.

        This cache is not used again.
        """
        ...


class SplitKeys(Attention, Protocol):
    """An attention that merges a row from parts of its keys, as `Claims.split_keys` says (clause
    LSE-2).

    >>> class MeanOfValues(torch.nn.Module):
    ...     def split_keys(self, sizes):
    ...         return self
    >>> MeanOfValues().split_keys((0, 3, 4))
    MeanOfValues()
    """

    def split_keys(self, sizes: Sequence[int]) -> Any:
        """Return the same attention, for calls whose keys are split into parts of these sizes.

        sizes: they add up to S; some may be 0.
        """
        ...


class Differentiable(Attention, Protocol):
    """An attention that gives access to the gradients of its weights.

    >>> class Projection(torch.nn.Linear):
    ...     def weight_gradients(self):
    ...         return {"w_o": self.weight.grad}
    >>> layer = Projection(2, 2)
    >>> layer(torch.ones(1, 3, 2)).sum().backward()
    >>> layer.weight_gradients()["w_o"].tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return the gradients that `backward` accumulated, zeros if none.

        They have the names and shapes of `Weights`.
        """
        ...


@runtime_checkable
class Implementation(Protocol):
    """An implementation of multi-head attention: a name, claims, and a way to build it.

    >>> class Example:
    ...     name = "example"
    ...     claims = Claims(dtypes={"float32"}, returns_weights=False)
    ...
    ...     def build(self, config, weights, *, dtype, device):
    ...         config.validate()
    ...         return ...  # an `Attention` that holds these weights
    >>> isinstance(Example(), Implementation)
    True
    """

    @property
    def name(self) -> str:
        """The name shown in reports."""
        ...

    @property
    def claims(self) -> Claims:
        """What it can do."""
        ...

    def build(
        self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str
    ) -> Attention:
        """Return an attention with this configuration and these weights, in `dtype` on `device`.

        Raises for an invalid configuration (clauses CFG-1 to CFG-6).
        """
        ...
