"""One question with one right answer: sizes, weights and inputs of an attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mha.spec.claims import Alignment
from mha.spec.config import Config
from mha.spec.masks import causal_mask
from mha.spec.weights import Weights

INPUTS = ("query", "key", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Everything that determines the result of one call.

    query: (B, L, D); key: (B, S, kdim); value: (B, S, vdim); mask: canonical (boolean or floating point), or None.
    """

    config: Config
    weights: Weights
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False

    def change(self, **fields: Any) -> Problem:
        """Return the problem with some fields replaced; a part of the weights is given by its name, as `w_q=...`."""
        parts = {name: fields.pop(name) for name in list(fields) if name in Weights.__dataclass_fields__}
        if parts:
            fields["weights"] = replace(self.weights, **parts)
        return replace(self, **fields)

    def map_inputs(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Change query, key and value; those that are one tensor stay one."""
        distinct = {id(tensor): tensor for tensor in (self.query, self.key, self.value)}
        changed = {place: change(tensor) for place, tensor in distinct.items()}
        query, key, value = (changed[id(tensor)] for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def distinct(self, names: Sequence[str] = INPUTS) -> dict[str, Tensor]:
        """Return the inputs of these names; those that are one tensor once, under the first name."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name in names:
            tensor = getattr(self, name)
            found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S), the shape of the scores."""
        return self.query.shape[0], self.config.n_heads, self.query.shape[1], self.key.shape[1]

    def allowed(self, alignment: Alignment | None) -> Tensor:
        """Return the boolean (B, H, L, S) mask of the pairs that may attend, the causal mask included."""
        _, _, queries, keys = self.shape
        allowed = torch.ones(self.shape, dtype=torch.bool, device=self.query.device)
        if self.mask is not None:
            allowed = allowed & (self.mask if self.mask.dtype == torch.bool else self.mask != float("-inf"))
        if self.is_causal:
            if alignment is None:
                raise ValueError("a causal problem needs an alignment: the implementation claims none")
            allowed = allowed & causal_mask(queries, keys, alignment, self.query.device)
        return allowed
