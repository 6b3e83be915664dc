"""Constructors: configs, dictionaries, partials, and what they set by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.inference.infer import infer
from mha.spec import Config
from support.judging import expect_pass
from support.options import DropsWeights
from support.options import Plain as WithBias
from support.plain import Plain
from support.readings import expect_read, findings
from support.right_classes import Fused


class KeepsItsConfig(Fused):
    """Reads its config in each call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.n_embd, config.n_head)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.n_head == self.n_heads
        return super().forward(x)


class FromADictionary(Fused):
    """Its configuration is a dictionary."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        assert isinstance(cfg, dict)
        assert "emb_dim" in cfg
        super().__init__(cfg["emb_dim"], cfg["n_heads"])


class PassesMostOn(Fused):
    """Its base knows the parameters of the constructor."""

    def __init__(self, *args: Any, scaled: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scaled = scaled


class PassesAllOn(PassesMostOn):
    """So does the base of its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("made", "row"),
    [
        (partial(PassesAllOn, scaled=True), "(d_model=d_model, n_heads=n_heads, scaled=True)"),
        (KeepsItsConfig, "KeepsItsConfig(config=config)"),
        (FromADictionary, "FromADictionary(cfg=config)"),
    ],
)
def test_class_conforms_as_it_is_read(made: Callable[..., nn.Module], row: str) -> None:
    expect_read(made, row, "HED-1")


@dataclass
class PlainSettings:
    """A config with a field that no name says, and one that is validated."""

    hidden: str = "unknown"
    d_model: int = 4
    num_heads: int = 2
    kv_dim: int = 1


class OfSettings(WithBias):
    """Reads what its config has."""

    def __init__(self, config: PlainSettings) -> None:
        assert (config.hidden, config.kv_dim) == ("unknown", 1)
        super().__init__(config.d_model, config.num_heads)


class OfMore(WithBias):
    """Reads more of its config than the annotated class has."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__(config.d_model, config.n_embd and config.num_heads)  # type: ignore[attr-defined]  # the point


@pytest.mark.parametrize("cls", [OfSettings, OfMore])
def test_config_is_of_the_annotated_class_if_that_is_enough(cls: type[nn.Module]) -> None:
    assert findings(infer(cls))["built as"] == f"{cls.__name__}(config=config)"


class OfDictionary(WithBias):
    """Its config is a dictionary with an option."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        assert cfg.get("layers", 3) == 3
        super().__init__(cfg["emb_dim"], cfg["n_heads"], bias=cfg["qkv_bias"])


def test_options_are_read_from_a_dictionary() -> None:
    assert infer(OfDictionary).implementation.claims.bias == {True, False}


@dataclass
class OptimizerConfig:
    """The only config that no class here names, and that of something else."""

    lr: float = 1e-3


class FromAnyConfig(Plain):
    """Reads its sizes from a config whose class is elsewhere."""

    def __init__(self, config: Any) -> None:
        Config(config.hidden_size, config.num_attention_heads).validate()
        super().__init__(config.hidden_size, config.num_attention_heads)


def test_class_refuses_sizes_itself_where_a_config_of_something_else_is_found() -> None:
    expect_pass(infer(FromAnyConfig), "CFG-1", "CFG-2")


class OfManyOptions(WithBias):
    """It reads from its config what no other class does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.kept = config.window_pattern


def test_refusal_says_what_is_read_from_a_config() -> None:
    with pytest.raises(ImplementationError, match="its config has no window_pattern") as raised:
        infer(OfManyOptions)
    config = "hidden_size=d_model, num_attention_heads=n_heads, window_pattern=..."
    assert f"return OfManyOptions(types.SimpleNamespace({config}))" in str(raised.value)


def make(d_model: int, n_heads: int, dropout: float) -> nn.Module:
    """A function that makes a module."""
    return DropsWeights(d_model, n_heads, dropout=dropout)


def test_function_that_makes_a_module_is_inferred() -> None:
    result = infer(make)
    assert result.implementation.name == "make"
    assert result.implementation.claims.dropout is True
    assert "from_module(\n    make," in result.declaration


class Scaled(Plain):
    """Its scores are multiplied by the number of its layer, as Megatron's before its division."""

    def __init__(self, d_model: int, n_heads: int, layer_number: int) -> None:
        super().__init__(d_model, n_heads)
        self.layer_number = layer_number

    def place(self, q: Tensor) -> Tensor:
        return q * self.layer_number


class ScaledByDefault(Scaled):
    """The number has a default."""

    def __init__(self, d_model: int, n_heads: int, layer_number: int = 1) -> None:
        super().__init__(d_model, n_heads, layer_number)


class ScaledBelow(Scaled):
    """None is no number of a layer."""

    def __init__(self, d_model: int, n_heads: int, layer_idx: int | None = None) -> None:
        assert layer_idx is not None
        super().__init__(d_model, n_heads, layer_idx + 1)


@pytest.mark.parametrize(
    ("made", "built"),
    [
        (Scaled, "layer_number=1)"),
        (ScaledByDefault, "n_heads=n_heads)"),
        (partial(Scaled, layer_number=1), "layer_number=1)"),
        (ScaledBelow, "layer_idx=0)"),
    ],
    ids=["required", "default", "partial", "None"],
)
def test_number_of_a_layer_is_kept_and_else_counts_from_one(
    made: Callable[..., nn.Module], built: str
) -> None:
    result = infer(made, "attention")
    found = findings(result)["built as"]
    assert found.endswith(built)
    assert found.count("layer_number") == built.count("layer_number")
    expect_pass(result, "HED-1")


class WithOptions(nn.Module):
    """Takes biases in three of its layers, and the width of a head."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.n_heads, inner = n_heads, n_heads * head_dim
        self.q, self.k, self.v = (nn.Linear(d_model, inner, bias=bias) for _ in range(3))
        self.out = nn.Linear(inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (self.n_heads, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        output: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return output


def test_partial_keeps_what_it_sets_but_sizes() -> None:
    result = infer(partial(WithOptions, bias=False, head_dim=8), "attention")
    built = "attention(d_model=d_model, n_heads=n_heads, head_dim=head_dim, bias=False)"
    assert findings(result)["built as"] == built
    assert findings(result)["biases"] == "on o"
    assert result.implementation.claims.own_head_dim
    expect_pass(result, "HED-1", also=["CFG-5"])


class WithFrequencies(Plain):
    """Takes a tensor, and the width of a head by the name that Keras has for it."""

    def __init__(self, d_model: int, n_heads: int, frequencies: Tensor, key_dim: int = 64) -> None:
        nn.Module.__init__(self)
        self.n_heads, self.frequencies = n_heads, frequencies
        self.qkv = nn.Linear(d_model, 3 * n_heads * key_dim)
        self.proj = nn.Linear(n_heads * key_dim, d_model)


def test_partial_may_set_a_tensor_and_a_default_width_varies() -> None:
    result = infer(partial(WithFrequencies, frequencies=torch.ones(4)), "attention")
    assert result.implementation.claims.own_head_dim
    expect_pass(result, "HED-1")
