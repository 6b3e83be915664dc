"""More right classes in conventions that people use: each is read as it is, and conforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.conformance import check
from mha.implementations import ImplementationError, from_module
from mha.implementations.inference.infer import infer
from mha.spec import Claims, Config

CLAUSES = [
    "SHP-1",
    "SHP-4",
    "HED-1",
    "GRD-5",
    "DRP-3",
    "NUM-1",
    "MSK-2",
    "MSK-3",
    "PTH-3",
    "STA-4",
    "STA-6",
    "CFG-4",
]


def attend(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
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
        self.weight, self.bias = (
            nn.Parameter(torch.empty(rows, columns)),
            nn.Parameter(torch.empty(rows)),
        )

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
    """As in einsum code: W_qkv is (3, H, D, d_k), b_qkv (3, D), and W_o (H, d_k, D), under a name
    that says nothing.
    """

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
        return (
            torch.cat([self.qk(x), self.v(x)], -1)
            .unflatten(-1, (3, self.n_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )


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

    def forward(
        self, x: Tensor, start_pos: int, freqs_cis: Tensor | None, mask: Tensor | None
    ) -> Tensor:  # type: ignore[override]  # more inputs
        assert start_pos == 0
        assert freqs_cis is None
        output: Tensor = self.out(attend(*self.split(x), 0.0 if mask is None else mask)[0])
        return output


class ScoresBeforeWeights(Heads):
    """As in Uni-Mol: the output, the scores, and the weights."""

    def forward(self, x: Tensor, return_attn: bool = False) -> Any:
        context, scores, weights = attend(*self.split(x))
        return (self.out(context), scores, weights) if return_attn else self.out(context)


class KeepProbability(Heads):
    """Its attribute with dropout in the name is no probability of dropping."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.dropout_keep_prob = 1.0 - dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 1.0 - self.dropout_keep_prob, self.training)


class Flattened(ImageOfPixels):
    """Returns the pixels of an image in one axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1, 2)


class ScoresWeightsOutput(Heads):
    """The output is the last result, and the weights are before it."""

    def forward(self, x: Tensor) -> Any:
        context, scores, weights = attend(*self.split(x))
        return scores, weights, self.out(context)


class FlagCalledBias(Heads):
    """A flag of `forward` has a name that others give to a mask."""

    def forward(self, x: Tensor, bias: bool = True) -> Tensor:
        output = super().forward(x)
        return output if bias else output - self.out.bias


class KeepsItsConfig(Heads):
    """Reads its config in each call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.n_embd, config.n_head)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.n_head == self.n_heads
        return super().forward(x)


class OfLengths(Heads):
    """As in d2l: the number of keys that count, of each item."""

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        lengths = x.new_full((len(x),), x.shape[1]) if valid_lens is None else valid_lens
        hidden = torch.arange(x.shape[1], device=x.device) >= lengths[:, None, None, None]
        output: Tensor = self.out(
            attend(*self.split(x), x.new_zeros(hidden.shape).masked_fill(hidden, -1e6))[0]
        )
        return output


class BiasBesidePadding(Heads):
    """As in MPT: a bias that is added, and a mask of keys, True = may attend."""

    def forward(
        self, x: Tensor, attn_bias: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
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


class PassesMostOn(Heads):
    """Its base knows the parameters of the constructor."""

    def __init__(self, *args: Any, scaled: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scaled = scaled


class PassesAllOn(PassesMostOn):
    """So does the base of its base."""

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


@pytest.mark.mostly_slow(9)
@pytest.mark.usefixtures("fewest_cases")
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (
            StackedByHeads,
            "w_qkv: qkv.weight as (r h e) d -> (h r e) d, b_qkv: qkv.bias as (r h e) -> (h r e)",
        ),
        (OfFourAxes, "w_qkv: w_qkv as (r h e) d -> r h d e, b_qkv: b_qkv as (r h e) -> r (h e)"),
        (QueryBesideKey, "w_o: out, w_qk: qk, w_v: v"),
        (ImageOfPixels, "of shape (b, l, 1, d)"),
        (ChannelsFirst, "of shape (b, d, l)"),
        (FromTheStart, "start_pos=0, freqs_cis=None"),
        (ScoresBeforeWeights, "weights=2"),
        (KeepProbability, "drops the output in training"),
        (Flattened, "of shape (b, l, 1, d)"),
        (ScoresWeightsOutput, "weights=1"),
        (FlagCalledBias, "not judged   bias"),
        (KeepsItsConfig, "KeepsItsConfig(config=config)"),
        (OfLengths, "valid_lens: how many of the first keys a query may attend to, of shape 'b'"),
        (
            BiasBesidePadding,
            (
                "attn_bias: added to the scores, broadcastable to (b, h, l, s); attention_mask:"
                " True = may attend"
            ),
        ),
        (partial(PassesAllOn, scaled=True), "(d_model=d_model, n_heads=n_heads, scaled=True)"),
        (OfTokensInFrames, "of shape (b, 1, l, d)"),
        (FromADictionary, "FromADictionary(cfg=config)"),
        (
            UnknownNames,
            "UnknownNames(breadth=d_model, parts=n_heads)  [assumed, not by name: breadth, parts]",
        ),
    ],
)
def test_class_conforms_as_it_is_read(cls: Callable[..., nn.Module], row: str) -> None:
    result = infer(cls)
    assert row in result.report(400)
    report = check(result.implementation, "quick", clauses=CLAUSES, dtypes=["float32"])
    assert not {
        verdict.clause
        for verdict in report.verdicts
        if verdict.status not in ("pass", "not_claimed")
    }


class OfAFixedProbability(Heads):
    """The probability stands in the code."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class DropsInEvaluation(Heads):
    """Wrong: it drops in evaluation as well."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.dropout)


class OfOneHead(Heads):
    """A right class with one head, whose second parameter is no number of heads."""

    def __init__(self, d_model: int, length: int) -> None:
        super().__init__(d_model, 1)
        self.length = length


class OtherSizes(Heads):
    """Two unknown names that are not those of the sizes."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__(outer * inner, 1)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            OfAFixedProbability,
            "in training its outputs are random, .* let the constructor take that as dropout",
        ),
        (DropsInEvaluation, "needs a declaration"),
        (
            OfOneHead,
            (
                "none of the parameters of its constructor .d_model, length. has a known name of"
                " n_heads"
            ),
        ),
        (
            OtherSizes,
            "none of the parameters of its constructor .outer, inner. has a known name of d_model",
        ),
    ],
)
def test_class_is_refused(cls: type[nn.Module], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        infer(cls)


class OneKeyTooMany(OfLengths):
    """Wrong: one key more than the number given counts."""

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        return super().forward(x, None if valid_lens is None else valid_lens + 1)


def test_number_of_keys_that_is_read_wrong_fails() -> None:
    declared = from_module(
        OneKeyTooMany,
        parameters={"w_qkv": "qkv", "w_o": "out"},
        mask_shape="b",
        claims=Claims(
            cross_attention=False,
            prefix_masks=True,
            per_head_mask=False,
            per_query_mask=False,
            bias={True},
            causal=None,
            empty_row="uniform",
            returns_weights=False,
        ),
    )
    report = check(declared, "quick", clauses=["MSK-2", "MSK-3", "MSK-7"], dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} == {"fail"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": True},
            (
                "weights must be the name of an attribute or, without call=, a place from 0, but is"
                " True"
            ),
        ),
        (
            {"call": lambda *_, **options: None, "mask_shape": "b s"},
            "call=... is given masks as the contract has them",
        ),
        (
            {"mask": "drop", "mask_shape": "b"},
            "without s, is for the number of the keys that are kept",
        ),
        (
            {"mask": "additive", "claims": Claims(masks={"bool", "int"})},
            "no call of it can express .*masks=",
        ),
    ],
)
def test_contradiction_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        from_module(OfLengths, parameters={"w_qkv": "qkv", "w_o": "out"}, **options)
