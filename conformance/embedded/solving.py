"""A few rows of a call by a formula of their own, which a known defect changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mha.conformance.embedded.call import Call


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of one head, in float64, and what the call says of them.

    call, item, head, places: whose rows they are.
    q, k, v: (r, d_k), (S, d_k), (S, d_v).
    allowed, bias: (r, S).
    capped: whether the cap applies; it does before the bias, unless the claims say after.
    """

    call: Call
    item: int
    head: int
    places: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    allowed: Tensor
    bias: Tensor
    cap: float | None
    cap_after_bias: bool
    sink: float | None
    sink_in_lse: bool
    log_base: float

    def scores(self) -> Tensor:
        """Return the scores (r, S), -infinity where a row may not attend."""
        s, cap = self.scale * self.q @ self.k.mT, self.cap
        if cap and not self.cap_after_bias:
            s = cap * (s / cap).tanh()
        s = s + self.bias
        if cap and self.cap_after_bias:
            s = cap * (s / cap).tanh()
        return s.masked_fill(~self.allowed, -math.inf)

    def weights(self) -> Tensor:
        """Return the weights (r, S); those of a row without a key are 0."""
        s = self.scores()
        total = self._total(s, self.sink)
        return (s - total.masked_fill(total.isinf(), 0.0)).exp()

    def context(self) -> Tensor:
        """Return the contexts (r, d_v)."""
        return self.weights() @ self.v

    def lse(self) -> Tensor:
        """Return the log-sum-exp of the rows, (r, 1)."""
        sink = self.sink if self.sink_in_lse else None
        return self._total(self.scores(), sink) / self.log_base

    def _total(self, s: Tensor, sink: float | None) -> Tensor:
        total = s.logsumexp(-1, keepdim=True)
        if sink is None:
            return total
        return torch.logaddexp(total, torch.full_like(total, sink))

    @property
    def keys(self) -> Tensor:
        """The places of the keys."""
        return torch.arange(len(self.k), device=self.k.device)


def rows_of(call: Call, item: int, head: int, places: Sequence[int]) -> Rows:
    """Return the rows of one head at these places."""
    of_keys, in_group = divmod(head, call.group)
    rows = torch.tensor(places, device=call.query.device)
    part = (
        slice(item, item + 1),
        slice(of_keys, of_keys + 1),
        slice(in_group, in_group + 1),
        rows,
    )
    allowed = call.allowed(*part)[0, 0, 0]
    added = call.bias(*part)
    bias = torch.zeros_like(allowed, dtype=torch.float64)
    if added is not None:
        bias = added[0, 0, 0]
    sinks = call.options.sinks
    declared = call.claims.lse
    return Rows(
        call=call,
        item=item,
        head=head,
        places=rows,
        q=call.query[item, head, rows].double(),
        k=call.key[item, of_keys].double(),
        v=call.value[item, of_keys].double(),
        scale=call.scale,
        allowed=allowed,
        bias=bias,
        cap=call.options.softcap or None,
        cap_after_bias=call.claims.scores.softcap == "after_bias",
        sink=None if sinks is None else float(sinks[head]),
        sink_in_lse=declared is None or declared.sink,
        log_base=1.0 if declared is None else declared.log_base,
    )
