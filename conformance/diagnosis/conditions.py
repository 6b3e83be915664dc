"""Conditions: what tells the calls that a defect shows in from those that it does not show in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mha.conformance.cases.modes import MODES
from mha.conformance.harness.recording import CallStep

SIZES: Mapping[str, Callable[[CallStep], int]] = {
    "S": lambda step: step.problem.shape[3],
    "L": lambda step: step.problem.shape[2],
    "B": lambda step: step.problem.shape[0],
    "n_heads": lambda step: step.problem.shape[1],
    "d_k": lambda step: step.problem.config.head_dim,
}
# What is not called large.
SMALL = 8
CONDITIONS: Mapping[str, Callable[[CallStep], bool]] = {
    "with a causal flag": lambda step: step.problem.is_causal,
    "without a causal flag": lambda step: not step.problem.is_causal,
    "with a mask": lambda step: step.problem.mask is not None,
    "without a mask": lambda step: step.problem.mask is None,
    "with neither a mask nor a causal flag": (
        lambda step: not step.problem.is_causal and step.problem.mask is None
    ),
    "with a causal flag and a mask": (
        lambda step: step.problem.is_causal and step.problem.mask is not None
    ),
    "with a boolean mask": lambda step: _mask_dtype(step) == torch.bool,
    "with a float mask": lambda step: _mask_dtype(step) not in (None, torch.bool),
    "without a boolean mask": lambda step: _mask_dtype(step) != torch.bool,
    "with a mask of fewer than four dimensions": lambda step: _mask_rank(step) < 4,
    "with a mask (B, 1, 1, S)": lambda step: _mask_is(step, False, False),
    "with a mask per head (H, 1, S)": lambda step: _mask_is(step, True, False),
    "where weights are requested": lambda step: step.need_weights,
    "where no weights are requested": lambda step: not step.need_weights,
    "in training mode": lambda step: MODES[step.mode].training,
    "in evaluation mode": lambda step: not MODES[step.mode].training,
    "under `no_grad` or `inference_mode`": (
        lambda step: step.mode in ("no_grad", "inference", "train_no_grad")
    ),
    "in evaluation under `no_grad` or `inference_mode`": (
        lambda step: step.mode in ("no_grad", "inference")
    ),
    "under `inference_mode`": lambda step: step.mode == "inference",
    "where gradients are recorded": lambda step: step.mode in ("eval", "train"),
    "where L = S": lambda step: step.problem.shape[2] == step.problem.shape[3],
    "where L != S": lambda step: step.problem.shape[2] != step.problem.shape[3],
    "where L > S": lambda step: step.problem.shape[2] > step.problem.shape[3],
    "where S > L": lambda step: step.problem.shape[2] < step.problem.shape[3],
    "in self-attention": lambda step: step.problem.query is step.problem.key is step.problem.value,
    "where key and value are one tensor": lambda step: step.problem.key is step.problem.value,
    "where B = n_heads": lambda step: step.problem.shape[0] == step.problem.shape[1],
}


def condition(showing: Sequence[CallStep], others: Sequence[CallStep]) -> str | None:
    """Return what tells calls from others, in words: "" if there are no others, None if nothing."""
    if not others:
        return ""
    for text, holds in CONDITIONS.items():
        if all(map(holds, showing)) and not any(map(holds, others)):
            return text
    for name, size in SIZES.items():
        if found := _of_size(name, list(map(size, showing)), list(map(size, others))):
            return found
    return None


def _of_size(name: str, shown: Sequence[int], hidden: Sequence[int]) -> str | None:
    """Return the condition on one size that tells these from the others, None if none does."""
    if max(shown) == 1 < min(hidden):
        return f"where {name} = 1"
    if min(shown) > 1 == max(hidden):
        return f"where {name} > 1"
    if min(shown) <= max(hidden):
        return None
    if min(shown) <= SMALL:
        return f"where {name} >= {min(shown)}"
    return "in long sequences" if name in "SL" else f"where {name} is large"


def _mask_dtype(step: CallStep) -> torch.dtype | None:
    return None if step.problem.mask is None else step.problem.mask.dtype


def _mask_rank(step: CallStep) -> int:
    return 4 if step.problem.mask is None else step.problem.mask.ndim


def _mask_is(step: CallStep, per_head: bool, per_query: bool) -> bool:
    """Return whether a mask differs between heads and between queries as given."""
    mask = step.problem.mask
    if mask is None:
        return False
    *_, heads, queries, _ = (1, 1, 1, *mask.shape)
    return (heads > 1) is per_head and (queries > 1) is per_query
