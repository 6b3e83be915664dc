"""What is timed: a case with its sizes, in inference or in training, and what it takes at the least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mha.conformance.cases.case import Case
from mha.spec import Claims, Problem

SHAPES: dict[str, dict[str, Any]] = {
    "encoder": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 128, "S": 128, "mask": "padding", "inputs": "self"},
    "long": {"B": 1, "n_heads": 8, "head_dim": 64, "L": 2048, "S": 2048, "causal": True, "inputs": "self"},
    "huge": {"B": 1, "n_heads": 8, "head_dim": 64, "L": 8192, "S": 8192, "causal": True, "inputs": "self"},
    # The last of 1024 tokens: `decode` on the cache of those before, or one query against all of them.
    "token": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 1, "S": 1024, "inputs": "memory"},
}
ON_CUDA: dict[str, dict[str, Any]] = {"huge": {"L": 32768, "S": 32768}}
# Inputs of two seeds take turns, so that what is cached by address is wrong every other time.
SEEDS = (0, 1)


@dataclass(frozen=True)
class Work:
    """One thing to do: a case, in inference or in training (with the backward pass), on so many threads."""

    name: str
    case: Case
    training: bool
    threads: int = 1

    @property
    def title(self) -> str:
        """What it is, in words."""
        told = f"{self.name}, {'training' if self.training else 'inference'}, {self.case.dtype} on {self.case.device}"
        return told if self.case.device == "cuda" else f"{told}, {self.threads} thread{'s' * (self.threads > 1)}"

    def unclaimed(self, claims: Claims) -> str:
        """Return what of it is not claimed, if anything."""
        case = self.case
        if case.dtype not in claims.dtypes or case.device not in claims.devices:
            return f"{case.dtype} on {case.device} is not claimed"
        missing = {
            "cross_attention": case.inputs != "self" and not claims.cross_attention,
            "masks": case.mask != "none" and "bool" not in claims.masks,
            "causal": case.causal and claims.causal is None,
            "gradients": self.training and not claims.gradients,
        }
        return next((f"it does not claim {claim}" for claim, is_missing in missing.items() if is_missing), "")

    @property
    def decodes(self) -> bool:
        """Whether it is one token against a cache, where an implementation has one."""
        return self.case.L == 1

    @property
    def operations(self) -> float:
        """The floating-point operations of its matrix products, of what is needed alone; decoding has a cache."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        rows = case.B * (2 * case.L + 2 * (1 if self.decodes else case.S))
        pairs = case.B * case.n_heads * case.L * case.S * (0.5 if case.causal else 1.0)
        return (2.0 * rows * width**2 + 4.0 * pairs * case.head_dim) * (3 if self.training else 1)

    @property
    def bytes_moved(self) -> int:
        """The bytes of inputs, weights and output, each once: the least that is moved."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        tensors = {"self": 1, "memory": 2}.get(case.inputs, 3)
        numbers = case.B * width * (case.L * 2 + (tensors - 1) * case.S) + 4 * width**2
        return numbers * int(torch.finfo(getattr(torch, case.dtype)).bits // 8)

    def problems(self) -> list[Problem]:
        """Return a problem for each seed, with the same weights."""
        first, second = (Case(**vars(self.case) | {"seed": seed}).problem() for seed in SEEDS)
        return [first, second.change(weights=first.weights)]


def work_of(shape: str, dtype: str, device: str, *, training: bool, threads: int = 1) -> Work:
    """Return the work of one of `SHAPES`, on CUDA with the sizes that it has there."""
    sizes = SHAPES[shape] | (ON_CUDA.get(shape, {}) if device == "cuda" else {})
    return Work(shape, Case(**sizes, dtype=dtype, device=device), training, threads)
