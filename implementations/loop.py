"""The definition: three small projections per head, and a loop over the heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha.implementations.adapters.module import from_module
from mha.spec import Claims, Config, Output, Rounding, validate_call
from mha.spec.claims import COMPOSITIONS, COMPUTE_DTYPES


class LoopAttention(nn.Module):
    """Concat(head_1, ..., head_h) W_o: Vaswani et al. 2017, section 3.2.2."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.config = Config(d_model, n_heads, bias=bias)
        self.config.validate()

        def one_per_head() -> nn.ModuleList:
            width = self.config.head_dim
            return nn.ModuleList(nn.Linear(d_model, width, bias=bias) for _ in range(n_heads))

        self.queries = one_per_head()
        self.keys = one_per_head()
        self.values = one_per_head()
        self.output = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        """Return the output (B, L, D) and the weights (B, H, L, S).

        query: (B, L, D); key, value: (B, S, D); mask: broadcastable to (B, H, L, S); boolean, True
        = may attend, or added to the scores.
        """
        validate_call(self.config, query, key, value, mask)
        shape = (query.shape[0], self.config.n_heads, query.shape[1], key.shape[1])
        # What is added to the scores, and which keys may be attended to, for all heads.
        bias = query.new_zeros(())
        allowed = torch.ones((), dtype=torch.bool, device=query.device)
        if mask is not None and mask.dtype == torch.bool:
            allowed = mask
        elif mask is not None:
            allowed = mask != float("-inf")
            bias = mask.masked_fill(~allowed, 0.0)
        if is_causal:
            allowed = allowed & torch.ones(shape[2:], dtype=torch.bool, device=query.device).tril()
        bias, allowed = bias.expand(shape), allowed.expand(shape)
        contexts, weights = [], []
        for head in range(self.config.n_heads):
            q, k, v = self.queries[head](query), self.keys[head](key), self.values[head](value)
            scores = q @ k.transpose(1, 2) / self.config.head_dim**0.5 + bias[:, head]
            weight = masked_softmax(scores, allowed[:, head])
            contexts.append(weight @ v)
            weights.append(weight)
        return Output(self.output(torch.cat(contexts, dim=-1)), torch.stack(weights, dim=1))


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over the allowed keys, the last axis.

    A row without an allowed key becomes zeros. It keeps its scores in the softmax, whose gradient
    would be NaN if all were -infinity.
    """
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), float("-inf"))
    return scores.softmax(-1).masked_fill(~allowed, 0.0)


implementation = from_module(
    LoopAttention,
    name="loop",
    parameters={"w_q": "queries", "w_k": "keys", "w_v": "values", "w_o": "output"},
    mask="keep",
    claims=Claims(
        masks={"bool", "float"},
        second_gradients=True,
        composes=COMPOSITIONS,
        dtypes=COMPUTE_DTYPES,
        rounding=Rounding(softmax_stored=False, log_normaliser=False, rescales=0),
    ),
)
