"""What the table says about a class is true: about caches, absent biases, empty rows, configs and
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.conformance import check
from mha.implementations.inference.infer import infer
from mha.spec import Config
from support.plain import Plain, refusal_of, verdict


def row(cls: type[nn.Module], topic: str) -> tuple[str, str]:
    """Return what the table says about a topic, and how that was found."""
    (found,) = [each for each in infer(cls).rows if each.topic == topic]
    return found.finding, found.evidence


class ReturnsCache(Plain):
    """Returns a cache of twice its input, as GPT-2 does of key and value."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.attend(x, mask), torch.stack((x, x))


class ReturnsIntegers(Plain):
    """Quantises its output."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self.attend(x, mask) * 127).to(torch.int8)


class ReturnsNamespace(Plain):
    """Returns a namespace."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return SimpleNamespace(out=self.attend(x, mask))


class ReturnsObject(Plain):
    """Takes sizes of other names, and returns what holds no output."""

    def __init__(self, wide: int, many: int) -> None:
        super().__init__(wide, many)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return object()


class TakesMasks(Plain):
    """Its mask has a name in the plural, and its dropout another one than usual."""

    def __init__(self, d_model: int, n_heads: int, p_drop: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.drop = nn.Dropout(p_drop)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        weights: Tensor = self.drop(super().weigh(scores, mask))
        return weights

    def forward(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        return self.attend(x, masks)


class DropsScores(Plain):
    """Drops scores, and not weights."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, n_heads)
        self.drop = nn.Dropout(dropout)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(self.drop(scores), mask)


class BiasesIfAskedFor(nn.Module):
    """Has parameters for biases only with biases, as code after Flax has."""

    def __init__(self, d_model: int, n_heads: int, use_bias: bool = True) -> None:
        super().__init__()
        Config(d_model, n_heads).validate()
        self.n_heads, self.use_bias = n_heads, use_bias
        for role in "qkvo":
            self.register_parameter(f"w_{role}", nn.Parameter(torch.randn(d_model, d_model)))
            if use_bias:
                self.register_parameter(f"b_{role}", nn.Parameter(torch.zeros(d_model)))

    def project(self, x: Tensor, role: str) -> Tensor:
        return F.linear(
            x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}") if self.use_bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.project(x, role).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for role in "qkv"
        )
        return self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), "o")


class HidesTwice(Plain):
    """Causal with -infinity, and hides padding with the least number: without a key, a query may
    get either.
    """

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        return (
            scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        ).softmax(-1)


@dataclass
class OptimizerConfig:
    """The only config in this file, and that of something else."""

    lr: float = 1e-3


class FromAnyConfig(Plain):
    """Reads its sizes from a config whose class is elsewhere."""

    def __init__(self, config: Any) -> None:
        Config(config.hidden_size, config.num_attention_heads).validate()
        super().__init__(config.hidden_size, config.num_attention_heads)


def test_cache_beside_the_output_is_not_called_weights() -> None:
    assert row(ReturnsCache, "weights") == ("not returned", "tested")


def test_output_of_integers_is_read_and_fails() -> None:
    assert verdict(infer(ReturnsIntegers), "SHP-3")[0] == "fail"


def test_output_is_read_in_a_namespace() -> None:
    assert row(ReturnsNamespace, "formula")[1] == "tested"


def test_refusal_says_what_follows_if_the_sizes_are_those_assumed() -> None:
    message = refusal_of(ReturnsObject)
    assert (
        "none of the parameters of its constructor (wide, many) has a known name of d_model"
        in message
    )
    assert (
        ". If wide is d_model and many is n_heads, ReturnsObject needs a declaration: its output"
        " was not found" in message
    )


def test_masks_and_dropout_of_other_names_are_tested() -> None:
    assert row(TakesMasks, "mask")[0].startswith("masks: True = may attend")
    assert row(TakesMasks, "dropout") == ("drops the weights in training", "tested")


def test_other_dropout_is_not_judged_and_named() -> None:
    result = infer(DropsScores)
    assert not result.implementation.claims.dropout
    assert row(DropsScores, "dropout")[0].startswith(
        "not judged: in training it drops something other"
    )


def test_biases_may_be_absent_rather_than_none() -> None:
    result = infer(BiasesIfAskedFor)
    assert row(BiasesIfAskedFor, "biases") == ("with or without", "tested")
    report = check(result.implementation, "quick", clauses=["CFG-5", "GRD-1"], dtypes=["float32"])
    assert {verdict.status for verdict in report.verdicts} == {"pass"}


def test_two_policies_for_empty_rows_are_none() -> None:
    assert row(HidesTwice, "empty rows")[1] == "assumed: it gets something else"


def test_class_refuses_sizes_itself_where_a_config_of_something_else_is_found() -> None:
    report = check(
        infer(FromAnyConfig).implementation, "quick", clauses=["CFG-1", "CFG-2"], dtypes=["float32"]
    )
    assert {verdict.status for verdict in report.verdicts} == {"pass"}
