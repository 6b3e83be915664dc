"""The boundary: what the judge asks of an implementation."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mha.spec.claims import Claims
from mha.spec.config import Config
from mha.spec.weights import Weights


class Output(NamedTuple):
    """What one call gives: `output` (B, L, D), and `weights` (B, H, L, S) where they were asked for, else None."""

    output: Tensor
    weights: Tensor | None = None


class Attention(Protocol):
    """One attention with its weights loaded, in training mode or in evaluation mode as a `torch.nn.Module` is."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> Output:
        """Attend.

        query: (B, L, D); key: (B, S, kdim); value: (B, S, vdim).
        mask: boolean, True = may attend, or floating point, added to the scores; broadcastable to (B, H, L, S).
        """
        ...

    def train(self) -> Any:
        """Switch to training mode and return the attention."""
        ...

    def eval(self) -> Any:
        """Switch to evaluation mode and return the attention."""
        ...


class Decoder(Attention, Protocol):
    """An attention that also takes one position at a time, and keeps the keys and values of those before (INC-1)."""

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any = None, active: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Attend from the next position, causally.

        query, key and value: (B, 1, D), of this position. cache: what the call for the position before gave back, None
        for the first. Returns the output (B, 1, D), and the cache for the next position.
        active: boolean (B,), False for the items that have no position now: they keep their cache, and what is
        given for them and comes out means nothing. Only given where `Claims.decodes_ragged` is claimed.
        """
        ...


class Differentiable(Attention, Protocol):
    """An attention that tells the gradients of its weights."""

    def weight_gradients(self) -> dict[str, Tensor]:
        """Return what `backward` has left, by the names and in the shapes of `Weights`; zeros where nothing came."""
        ...


@runtime_checkable
class Implementation(Protocol):
    """A way to compute multi-head attention, as the judge sees it."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def claims(self) -> Claims:
        """What it says that it can do."""
        ...

    def build(self, config: Config, weights: Weights, *, dtype: torch.dtype, device: str) -> Attention:
        """Return an attention of this configuration with these weights; raise for an invalid one (clause CFG-1)."""
        ...
