"""More right classes in conventions that people use: each is read as it is, and conforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from mha.spec import Config

CLAUSES = ["SHP-1", "HED-1", "GRD-5", "DRP-3", "NUM-1", "MSK-2", "MSK-3", "PTH-3", "STA-6", "CFG-4"]


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contexts (B, L, D), the scores and the weights of heads (B, H, L, d_k)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + added
    weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), scores, weights


class Heads(nn.Module):
    """One fused layer; self-attention."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(attend(*self.split(x))[0])
        return output


class Matrix(nn.Module):
    """A linear layer of one's own."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class StackedByHeads(Heads):
    """As in Megatron and GPT-NeoX: each head has its query, key and value side by side, biases too."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.qkv = Matrix(d_model, 3 * d_model)  # type: ignore[assignment]  # called in the same way

    def split(self, x: Tensor) -> Any:
        return self.qkv(x).unflatten(-1, (self.n_heads, 3, -1)).permute(3, 0, 2, 1, 4)


class OfFourAxes(nn.Module):
    """As in einsum code: W_qkv is (3, H, D, d_k), b_qkv (3, D), and W_o (H, d_k, D), under a name that says nothing."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.w_qkv = nn.Parameter(torch.empty(3, n_heads, d_model, d_model // n_heads))
        self.b_qkv = nn.Parameter(torch.empty(3, d_model))
        self.vectors = nn.Parameter(torch.empty(n_heads, d_model // n_heads, d_model))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bld,rhde->rbhle", x, self.w_qkv)
        biases = self.b_qkv.unflatten(1, self.vectors.shape[:2])[:, None, :, None]
        return attend(*(heads + biases))[0] @ self.vectors.flatten(0, 1)


class QueryBesideKey(Heads):
    """As in ConViT: one layer of query and key, and one of values."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        del self.qkv
        self.qk, self.v = nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)

    def split(self, x: Tensor) -> Any:
        return torch.cat([self.qk(x), self.v(x)], -1).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)


class ImageOfPixels(Heads):
    """(B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        return super().forward(x.reshape(batch, height * width, channels)).view(x.shape)


class ChannelsFirst(Heads):
    """(B, C, N), though no layer is a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class FromTheStart(Heads):
    """What decoders require, without a cache and rotary positions."""

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor | None, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        assert start_pos == 0
        assert freqs_cis is None
        output: Tensor = self.out(attend(*self.split(x), 0.0 if mask is None else mask)[0])
        return output


class ScoresBeforeWeights(Heads):
    """As in Uni-Mol: the output, the scores, and the weights."""

    def forward(self, x: Tensor, return_attn: bool = False) -> Any:
        context, scores, weights = attend(*self.split(x))
        return (self.out(context), scores, weights) if return_attn else self.out(context)


class OptionOfFunction(Heads):
    """Its probability of dropout is an attribute that the constructor does not set."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout, self.training)


class BiasBesidePadding(Heads):
    """As in MPT: a bias that is added, and a mask of keys, True = may attend."""

    def forward(self, x: Tensor, attn_bias: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        added = torch.zeros((), dtype=x.dtype) if attn_bias is None else attn_bias
        if attention_mask is not None:
            added = added.masked_fill(~attention_mask[:, None, None], -math.inf)
        output: Tensor = self.out(attend(*self.split(x), added)[0])
        return output


class FromADictionary(Heads):
    """Its configuration is a dictionary."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        assert isinstance(cfg, dict)
        assert "emb_dim" in cfg
        super().__init__(cfg["emb_dim"], cfg["n_heads"])


class PassesAllOn(Heads):
    """Its base knows the parameters of the constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class OfTokensInFrames(Heads):
    """(B, T, N, D): attention between the N tokens of a frame."""

    def split(self, x: Tensor) -> Any:
        batch, frames, tokens, _ = x.shape
        return self.qkv(x).view(batch * frames, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(attend(*self.split(x))[0])
        return output.view(x.shape)


class UnknownNames(Heads):
    """Names that nobody knows, in the usual order."""

    def __init__(self, breadth: int, parts: int) -> None:
        super().__init__(breadth, parts)


@pytest.mark.usefixtures("fewer_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (StackedByHeads, "w_qkv: qkv.weight as (r h e) d -> (h r e) d, b_qkv: qkv.bias as (r h e) -> (h r e)"),
        (OfFourAxes, "w_qkv: w_qkv as (r h e) d -> r h d e, b_qkv: b_qkv as (r h e) -> r (h e)"),
        (QueryBesideKey, "w_o: out, w_qk: qk, w_v: v"),
        (ImageOfPixels, "of shape (b, l, 1, d)"),
        (ChannelsFirst, "of shape (b, d, l)"),
        (FromTheStart, "start_pos=0, freqs_cis=None"),
        (ScoresBeforeWeights, "returned per head"),
        (OptionOfFunction, "of a fixed probability, which is set to 0"),
        (
            BiasBesidePadding,
            "attn_bias: added to the scores, broadcastable to (b, h, l, s); attention_mask: True = may attend",
        ),
        (PassesAllOn, "PassesAllOn(d_model=d_model, n_heads=n_heads)"),
        (OfTokensInFrames, "of shape (b, 1, l, d)"),
        (FromADictionary, "FromADictionary(cfg=config)"),
        (UnknownNames, "UnknownNames(breadth=d_model, parts=n_heads)  [assumed, not by name: breadth, parts]"),
    ],
)
def test_class_conforms_as_it_is_read(cls: type[nn.Module], row: str) -> None:
    result = infer(cls)
    assert row in result.report(400)
    report = check(result.implementation, "quick", clauses=CLAUSES, dtypes=["float32"])
    assert not {verdict.clause for verdict in report.verdicts if verdict.status not in ("pass", "not_claimed")}


class OfAFixedProbability(Heads):
    """The probability stands in the code."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def test_probability_in_the_code_is_refused() -> None:
    with pytest.raises(
        ImplementationError, match=r"in training its outputs are random, .* take the probability as dropout"
    ):
        infer(OfAFixedProbability)
