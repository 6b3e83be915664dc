"""What constructors take: widths of heads, epsilons; and functions that always drop."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha.implementations import ImplementationError
from mha.implementations.adapters.construction import construct, constructor_arguments
from mha.implementations.discovery.errors import UnsupportedCallError
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Config, Weights
from support.judging import expect_pass, verdict_of
from support.readings import findings, refusal_of


class Sdpa(nn.Module):
    """Self-attention of heads of a width, with one matrix for query, key and value."""

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * heads * width, bias=False)
        self.to_out = nn.Linear(heads * width, dim, bias=False)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        return self.to_out(self.weigh(q, k, v).transpose(1, 2).reshape(x.shape))


class ByWidth(Sdpa):
    """Takes the width of a head, from which the number of heads follows."""

    def __init__(self, dim: int, dim_heads: int = 64) -> None:
        super().__init__(dim, dim // dim_heads, dim_heads)


class NeedsEpsilon(Sdpa):
    def __init__(self, d_model: int, n_heads: int, q_norm_eps: float) -> None:
        Config(d_model, n_heads).validate()
        super().__init__(d_model, n_heads, d_model // n_heads)
        self.eps = q_norm_eps


class OneWidth(Sdpa):
    """Is given a width of heads, and works with one only."""

    def __init__(self, dim: int, num_heads: int = 8, attn_head_dim: int | None = None) -> None:
        Config(dim, num_heads).validate()
        super().__init__(dim, num_heads, attn_head_dim or dim // num_heads)


def test_number_of_heads_follows_from_their_width() -> None:
    result = infer(ByWidth)
    assert findings(result)["built as"] == "ByWidth(dim=d_model, dim_heads=head_dim)"
    expect_pass(result, "HED-1", also=("CFG-1", "CFG-4"))
    config = Config(d_model=6, n_heads=2, d_head=2)
    with pytest.raises(UnsupportedCallError, match="takes no number of heads"):
        result.implementation.build(
            config, Weights.random(config, 0), dtype=torch.float32, device="cpu"
        )


def test_required_epsilon_is_supplied() -> None:
    built = "NeedsEpsilon(d_model=d_model, n_heads=n_heads, q_norm_eps=1e-5)"
    assert findings(infer(NeedsEpsilon))["built as"] == built


def test_width_of_heads_that_never_works_is_named() -> None:
    raises = "attn_head_dim raises for every other width than d_model // n_heads: RuntimeError"
    assert findings(infer(OneWidth))["head width"].startswith(raises)


class AlwaysDrops(Sdpa):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads, d_model // n_heads)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), 0.2) @ v


def always_drops(q: Any, k: Any, v: Any) -> Tensor:
    return AlwaysDrops(4, 2).weigh(q, k, v)


def test_dropout_in_evaluation_is_named() -> None:
    said = "cannot be judged as it is: two equal calls in evaluation return different outputs"
    assert said in refusal_of(AlwaysDrops)
    with pytest.raises(ImplementationError, match=re.escape(said)):
        infer_kernel(always_drops)


class BiasOfTwo(Sdpa):
    """An argument `bias` is about query and key, as in some tutorials."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        Config(d_model, n_heads).validate()
        nn.Module.__init__(self)
        self.heads = n_heads
        self.q, self.k = nn.Linear(d_model, d_model, bias=bias), nn.Linear(d_model, d_model, bias)
        self.v, self.to_out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.to_out(self.weigh(q, k, v).transpose(1, 2).reshape(x.shape))


def test_argument_for_some_biases_is_known_by_what_it_builds() -> None:
    result = infer(BiasOfTwo)
    assert findings(result)["biases"] == "always or on v, o"
    assert 'arguments={"bias": "qk_bias"}' in result.declaration
    expect_pass(result, "HED-1", also=("CFG-5",))


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def test_missing_scale_of_a_kernel_is_asked_for_with_both_answers() -> None:
    with pytest.raises(ImplementationError) as raised:
        infer_kernel(unscaled)
    _, _, answers = str(raised.value).partition("judge that: ")
    meant, _, fault = answers.partition(". If not, multiply the scores by d_k ** -0.5; ")
    for code, status in ((meant, "pass"), (fault.partition("until then: ")[2], "fail")):
        variables = dict[str, Any](globals())
        exec(code, variables)  # as if it were pasted
        assert verdict_of(variables["implementation"], "HED-1").status == status


class OfTwoWidths(nn.Module):
    """Its own width, and that of the memory."""

    def __init__(self, tgt_dim: int, mem_dim: int, n_h: int) -> None: ...


def test_widths_of_a_target_and_of_a_memory_are_known_by_name() -> None:
    assert constructor_arguments("OfTwoWidths", OfTwoWidths) == {
        "tgt_dim": "d_model",
        "mem_dim": "kdim",
        "n_h": "n_heads",
    }


class RotatesAPart(nn.Module):
    """After GPT-J: its config says how much of each head is rotated, or None for all of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size // config.num_attention_heads
        self.rotary_dim = config.rotary_dim or int(width * config.partial_rotary_factor)


def test_config_that_nothing_describes_rotates_the_whole_head() -> None:
    arguments = constructor_arguments("RotatesAPart", RotatesAPart)
    assert construct(RotatesAPart, arguments, Config(12, 2)).rotary_dim == 6


class NormedByDefault(Sdpa):
    """Wants a norm unless a flag is False."""

    def __init__(self, dim: int, heads: int, scale_norm: bool = True, norm: Any = None) -> None:
        assert not scale_norm or norm is not None, "norm must be given if scale_norm is True"
        super().__init__(dim, heads, dim // heads)


def test_flag_without_which_a_class_can_be_built_is_named() -> None:
    advice = "or judge functools.partial(NormedByDefault, scale_norm=False)"
    assert refusal_of(NormedByDefault).endswith(advice)
