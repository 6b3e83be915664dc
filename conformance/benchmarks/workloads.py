"""Workloads: what is timed, and the least arithmetic and traffic that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mha.conformance.cases.case import Case
from mha.conformance.reports.layout import counted
from mha.conformance.sharding.gathered import runs_on_ranks_only
from mha.spec import Claims, Implementation, Problem

SHAPES: dict[str, dict[str, Any]] = {
    "encoder": {
        "B": 8,
        "n_heads": 8,
        "head_dim": 64,
        "L": 128,
        "S": 128,
        "mask": "padding",
        "inputs": "self",
    },
    "long": {
        "B": 1,
        "n_heads": 8,
        "head_dim": 64,
        "L": 2048,
        "S": 2048,
        "causal": True,
        "inputs": "self",
    },
    "huge": {
        "B": 1,
        "n_heads": 8,
        "head_dim": 64,
        "L": 8192,
        "S": 8192,
        "causal": True,
        "inputs": "self",
    },
    # The last of 1024 tokens: one step of `decode` on a cache of the others, or one query against
    # all of them.
    "token": {"B": 8, "n_heads": 8, "head_dim": 64, "L": 1, "S": 1024, "inputs": "memory"},
}
# Of kernels only, whose inputs are heads: a prompt, a token against a cache of 4096, the prompt in
# a window of 256 tokens, and with a key and value head for every four heads.
_PROMPT = {
    "B": 1,
    "n_heads": 8,
    "head_dim": 64,
    "L": 2048,
    "S": 2048,
    "causal": True,
    "projected": False,
}
KERNEL_SHAPES: dict[str, dict[str, Any]] = {
    "prefill": _PROMPT,
    "decode": _PROMPT | {"B": 8, "L": 1, "S": 4096, "causal": False},
    "window": _PROMPT | {"window": (255, 0)},
    "grouped": _PROMPT | {"n_kv_heads": 2},
}
EVERY_SHAPE = SHAPES | KERNEL_SHAPES
CUDA_SIZES: dict[str, dict[str, Any]] = {"huge": {"L": 32768, "S": 32768}}
# The inputs of two seeds alternate at the same addresses, so that results cached by address are
# incorrect.
SEEDS = (0, 1)


@dataclass(frozen=True)
class Workload:
    """A case to be timed.

    training: whether the backward pass is timed too. threads: of torch on a CPU.
    """

    name: str
    case: Case
    training: bool
    threads: int = 1

    @property
    def title(self) -> str:
        """What is timed, in words."""
        mode = "training" if self.training else "inference"
        title = f"{self.name}, {mode}, {self.case.dtype} on {self.case.device}"
        if self.case.device == "cuda":
            return title
        return f"{title}, {counted(self.threads, 'thread')}"

    def unclaimed(self, implementation: Implementation) -> str:
        """Return what it needs and an implementation does not claim, as a phrase; or ""."""
        case, claims = self.case, implementation.claims
        if runs_on_ranks_only(implementation):
            return "it runs on ranks only"
        if case.dtype not in claims.dtypes or case.device not in claims.devices:
            return f"{case.dtype} on {case.device} is not claimed"
        if claims.scale is not None:
            return (
                "it claims a scale, and the plain formula that it is compared with scales by"
                " 1/sqrt(d_k)"
            )
        if claims.changes_heads:
            return (
                "it norms or rotates queries and keys, and the plain formula that it is compared"
                " with does not"
            )
        if claims.projections and not case.projected:
            return "it is a module, and this is a workload of kernels"
        missing = self._missing(claims)
        return f"it does not claim {missing[0]}" if missing else ""

    def _missing(self, claims: Claims) -> list[str]:
        """Return the claims that it needs and that are not made."""
        case = self.case
        missing = {
            "cross_attention": case.inputs != "self" and not claims.cross_attention,
            "masks": case.mask != "none" and "bool" not in claims.masks,
            "causal": case.causal and claims.causal is None,
            "a window": case.window is not None and claims.scores.window is None,
            "grouped_query": case.n_kv_heads is not None and not claims.grouped_query,
            "gradients": self.training and not claims.gradients,
        }
        return [claim for claim, is_missing in missing.items() if is_missing]

    @property
    def decodes(self) -> bool:
        """Whether one token attends to the tokens before it: in a cache, where there is one."""
        return self.case.L == 1

    @property
    def operations(self) -> float:
        """The operations of its matrix products, without masked pairs and what a cache holds."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        pairs = float(case.L * case.S)
        if case.causal:
            pairs /= 2
        if case.window is not None:
            allowed = case.problem().allowed(case.alignment)
            pairs = float(allowed[0, 0].sum())
        forward = 4.0 * case.B * case.n_heads * pairs * case.head_dim
        if case.projected:
            projected_keys = 1 if self.decodes else case.S
            rows = 2 * case.B * (case.L + projected_keys)
            forward += 2.0 * rows * width**2
        return 3 * forward if self.training else forward

    @property
    def bytes_moved(self) -> int:
        """The bytes of inputs, weights and output: the least memory traffic of a forward pass."""
        case, width = self.case, self.case.n_heads * self.case.head_dim
        key_width = (case.n_kv_heads or case.n_heads) * case.head_dim
        tensors = {"self": 1, "memory": 2}.get(case.inputs, 3)
        numbers = case.B * (width * case.L * 2 + key_width * (tensors - 1) * case.S)
        if case.projected:
            numbers += 4 * width**2
        return numbers * int(torch.finfo(getattr(torch, case.dtype)).bits // 8)

    def problems(self) -> list[Problem]:
        """Return a problem for each of `SEEDS`; both have the weights of the first."""
        first, second = (Case(**vars(self.case) | {"seed": seed}).problem() for seed in SEEDS)
        return [first, second.change(weights=first.weights)]


def workload_of(
    shape: str, dtype: str, device: str, *, training: bool, threads: int = 1
) -> Workload:
    """Return the workload of one of `EVERY_SHAPE`, with its larger sizes on CUDA if it has them."""
    sizes = dict(EVERY_SHAPE[shape])
    if device == "cuda":
        sizes |= CUDA_SIZES.get(shape, {})
    return Workload(shape, Case(**sizes, dtype=dtype, device=device), training, threads)


def workloads_of(
    shapes: Sequence[str], dtype: str, device: str, *, threads: int = 1
) -> list[Workload]:
    """Return the workloads of some shapes: in inference and, unless they decode, in training."""
    workloads = []
    for shape in shapes:
        inference = workload_of(shape, dtype, device, training=False, threads=threads)
        workloads.append(inference)
        if not inference.decodes:
            workloads.append(replace(inference, training=True))
    return workloads
