"""X, X_KV and M, as in lecture notes: the mask M is added, and X_KV is left out in self-attention."""

from __future__ import annotations

from typing import Any

from torch import nn


class Attention(nn.Module):
    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        if D % H:
            raise ValueError(f"{H} heads do not divide {D}")
        self.H = H
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, X: Any, X_KV: Any = None, M: Any = None) -> Any:
        X_KV = X if X_KV is None else X_KV
        Q, K, V = (
            W(Y).unflatten(-1, (self.H, -1)).transpose(1, 2)
            for W, Y in ((self.Wq, X), (self.Wk, X_KV), (self.Wv, X_KV))
        )
        S = Q @ K.mT / Q.shape[-1] ** 0.5
        if M is not None:
            S = S + M
        return self.Wo((S.softmax(-1) @ V).transpose(1, 2).flatten(2))
