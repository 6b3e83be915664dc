"""What a partial says in a config is kept, and options that a class reads from one are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations.adapters.built_options import built_names
from mha.implementations.adapters.construction import construct
from mha.implementations.adapters.given_configs import with_options
from mha.implementations.inference.infer import infer
from mha.spec import Config
from support.plain import Plain

SIZES = Config(d_model=12, n_heads=3)


@dataclass
class Settings:
    """A config with options, one of them not None, and a width that follows from others."""

    hidden_size: int = 64
    num_attention_heads: int = 4
    softcap: float | None = 50.0
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = None
    backend: str = "eager"
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = self.hidden_size // self.num_attention_heads


class OfSettings(Plain):
    """Caps and scales its scores as its config says; of a window it makes nothing."""

    def __init__(self, config: Settings) -> None:
        assert config.width == config.hidden_size // config.num_attention_heads
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.config, self.window = config, config.sliding_window
        self.scale = config.query_pre_attn_scalar**-0.5

    def normed(self, q: Tensor) -> Tensor:
        return q

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = self.normed(q) @ self.normed(k).mT * self.scale
        if self.config.softcap is not None:
            scores = self.config.softcap * (scores / self.config.softcap).tanh()
        if self.config.backend == "causal":
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        output: Tensor = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class OfNormed(OfSettings):
    """Norms its queries and keys, so that a scale cannot be one of these."""

    def normed(self, q: Tensor) -> Tensor:
        return torch.rms_norm(q, q.shape[-1:], eps=1e-6)


def test_scale_multiplies_the_scores_of_normed_heads() -> None:
    claims = infer(OfNormed).implementation.claims
    assert claims.qk_norm is not None
    assert claims.scores.scale == "positive"


def config_of(constructor: Callable[..., nn.Module], name: str = "config") -> Any:
    """Return the config of the module that a constructor makes for sizes of ours."""
    module: Any = construct(constructor, {name: "config"}, SIZES)
    return module.config


def test_options_of_a_config_are_off_in_other_calls_and_claimed_as_they_act() -> None:
    result = infer(OfSettings)
    scores = result.implementation.claims.scores
    assert (scores.softcap, scores.scale, scores.window) == ("before_bias", "positive", None)
    found = {row.topic: row.finding for row in result.rows}
    assert found["formula"] == "softmax(q k^T / sqrt(d_k)) v W_o"
    assert found["softcap"].startswith("config.softcap: ")
    assert found["scale"].startswith("config.query_pre_attn_scalar ")
    assert result.not_covered == ("config.sliding_window",)


def test_config_of_a_partial_keeps_what_it_says_beside_sizes() -> None:
    given = Settings(hidden_size=16, backend="causal")
    given.note = "set later"  # type: ignore[attr-defined]  # as of a package's own
    made = config_of(partial(OfSettings, config=given))
    assert (made.hidden_size, made.num_attention_heads, made.width) == (12, 3, 4)
    assert (made.backend, made.note) == ("causal", "set later")
    assert made.softcap is None
    assert (given.hidden_size, given.softcap) == (16, 50.0)


def test_option_that_a_config_of_a_partial_says_is_kept() -> None:
    assert config_of(partial(OfSettings, config=Settings(softcap=2.0))).softcap == 2.0


class OfMissing(Plain):
    """Reads from its config what no other class does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config["hidden_size"], config["num_attention_heads"])
        self.config = config
        self.pattern = config["pattern"]


@pytest.mark.parametrize("given", [SimpleNamespace(pattern="x", hidden_size=1), {"pattern": "x"}])
def test_namespace_or_dictionary_of_a_partial_says_what_is_missing(given: Any) -> None:
    made = config_of(partial(OfMissing, config=given))
    assert (made["pattern"], made["hidden_size"]) == ("x", 12)


class Sized:
    """A config that cannot be made by the names of its attributes."""

    def __init__(self, size: str) -> None:
        self.hidden_size, self.num_attention_heads = 64, 4
        self.backend = size


class OfSized(Plain):
    """Reads a config of that class."""

    def __init__(self, config: Sized) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.config = config


def test_config_that_is_made_otherwise_is_copied() -> None:
    given = Sized("large")
    made = config_of(partial(OfSized, config=given))
    assert (made.hidden_size, made.backend, given.hidden_size) == (12, "large", 64)


class OfNoClass(Plain):
    """Reads an option from a config without a class."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.config = config
        self.softcap = config.softcap


def test_option_of_a_config_without_a_class_is_off() -> None:
    assert config_of(OfNoClass).softcap is None
    assert built_names(OfNoClass, None) == {"softcap": ("config.softcap",)}


def test_option_of_a_call_comes_before_what_a_config_says() -> None:
    said = partial(OfSettings, config=Settings(softcap=2.0))
    assert config_of(with_options(said, {"config.softcap": 1.0})).softcap == 1.0
    assert config_of(said).softcap == 2.0


class OfNamespace(nn.Module):
    """Reads a cap from a config of no class."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.softcap = config, config.softcap


def test_what_a_namespace_says_is_not_switched_off() -> None:
    assert config_of(OfNamespace).softcap is None
    assert config_of(partial(OfNamespace, config=SimpleNamespace(softcap=2.0))).softcap == 2.0
