"""Hostile problems for the directed tests, and correct backward passes of several forms."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.faults.base import Complete
from mha.spec import Options, Output, Problem

HALF = ("bfloat16", "float16")
KINDS = ("plain", "offset", "repeated", "expanded", "pairs", "mask", "large")
# `FormsOfBackward` by name: (whether it computes in float32, stores the scaled query, casts weights
# before they are divided by their sum, takes D as dC.o).
FORMS = {
    "Fused": (True, False, True, True),
    "FusedScaledQuery": (True, True, False, True),
    "FusedRowSum": (True, False, False, False),
    "Stored": (False, False, False, False),
    "StoredScaledQuery": (False, True, True, True),
}


def hostile_problem(rng: random.Random, seed: int) -> Problem:
    """A problem of repeated numbers, of a few units in the last place, or an ordinary one."""
    kind, length = KINDS[seed % 7], rng.randint(1, 40)
    sizes = {
        "n_heads": rng.choice((1, 2, 4)),
        "head_dim": rng.choice((2, 3, 16, 32, 96)),
        "B": rng.choice((1, 2)),
    }
    case = Case(
        **sizes,
        L=length,
        S=length,
        dtype=HALF[seed // 7 % 2],
        mask=rng.choice(("padding", "full", "items")) if kind == "mask" else "none",
        causal=rng.random() < 0.3,
        inputs="self" if rng.random() < 0.3 and kind in ("plain", "mask") else "cross",
        bias=rng.random() < 0.7,
        seed=seed,
    )
    problem = case.problem()
    query, key, value = problem.query, problem.key, problem.value
    pairs = torch.arange(length) % 2
    changes: dict[str, dict[str, Tensor]] = {
        "offset": {"value": value + 8},
        "repeated": {"query": query[:, :1].repeat(1, 128, 1)},
        "expanded": {
            name: x[:1].repeat(16, 1, 1)
            for name, x in (("query", query), ("key", key), ("value", value))
        },
        "pairs": {"key": key[:, pairs], "value": value[:, pairs]},
        "large": {"query": 4 * query},
    }
    return problem.change(**changes.get(kind, {}))


class _Core(torch.autograd.Function):
    """softmax(tau q k^T) v with a backward pass written by hand, in the form of `FORMS`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, form: tuple[bool, ...]
    ) -> Tensor:
        wide, scaled, before, _ = form
        dtype, tau = (torch.float32 if wide else q.dtype), q.shape[-1] ** -0.5
        query, rest = (q * tau, 1.0) if scaled else (q, tau)
        scores = (query.to(dtype) @ k.to(dtype).mT * rest).masked_fill(~allowed, -math.inf)
        shift = scores.float().logsumexp(-1, keepdim=True)
        if before:
            e = (scores - scores.amax(-1, keepdim=True)).exp()
            out = (e.to(q.dtype).to(dtype) @ v.to(dtype)) / e.sum(-1, keepdim=True)
        else:
            out = (scores.float() - shift).exp().to(q.dtype).to(dtype) @ v.to(dtype)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, scores, shift, out)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]  # of one argument
        (wide, scaled, _, of_output), (q, k, v, scores, shift, out) = ctx.form, ctx.saved_tensors
        dtype, tau = (torch.float32 if wide else q.dtype), q.shape[-1] ** -0.5
        p = (scores.float() - shift).exp().to(dtype)
        d_c, d_p = gradient, gradient.to(dtype) @ v.to(dtype).mT
        d = (d_c.to(dtype) * out.to(dtype)) if of_output else p * d_p
        d_s = (p * (d_p - d.sum(-1, keepdim=True))).to(q.dtype)
        d_v = p.to(q.dtype).mT @ d_c
        if scaled:
            return (d_s @ k) * tau, d_s.mT @ (q * tau), d_v, None, None
        d_s = d_s * tau if not wide else d_s
        factor = tau if wide else 1.0
        d_q, d_k = (
            (x.float() * factor).to(q.dtype)
            for x in (d_s.float() @ k.float(), d_s.float().mT @ q.float())
        )
        return d_q, d_k, d_v, None, None


class FormsOfBackward(Complete):
    """Attention with a backward pass that is written by hand."""

    form: tuple[bool, ...] = ()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        q, k, v = (
            self.split(self.project(x, role))
            for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        allowed, _ = self.allow(options, q, k)
        core = _Core.apply(q, self.repeat(k), self.repeat(v), allowed, self.form)  # type: ignore[no-untyped-call]  # of torch
        return Output(self.project(self.merge(core), "o"), None)


class MaximumDifferentiated(Complete):
    """The softmax step by step, through the maximum too."""

    def weigh(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -math.inf)
        raised = (scores - scores.max(-1, keepdim=True).values).exp()
        return raised / raised.sum(-1, keepdim=True)


class QueriesInParts(Complete):
    """Five queries at a time, so that autograd adds up gradients of keys and values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Output:
        q, k, v = (
            self.split(self.project(x, role))
            for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        allowed, bias = self.allow(options, q, k)
        k, v, size = self.repeat(k), self.repeat(v), max(5, -(-q.shape[2] // 8))
        parts = []
        for part in range(0, q.shape[2], size):
            rows = slice(part, part + size)
            weights = self.weigh(
                self.score(q[:, :, rows], k) + bias[:, :, rows], allowed[:, :, rows]
            )
            parts.append(self.combine(weights, v, allowed[:, :, rows]))
        return Output(self.project(self.merge(torch.cat(parts, 2)), "o"), None)


BACKWARD = {name: type(name, (FormsOfBackward,), {"form": form}) for name, form in FORMS.items()}
BACKWARD |= {cls.__name__: cls for cls in (MaximumDifferentiated, QueriesInParts)}
