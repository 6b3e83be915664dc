"""Biases, dtypes, gradients and functions: what inference claims, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mha.conformance.faults import registry
from mha.implementations import ImplementationError, from_module
from mha.implementations.discovery.frameworks import framework_of
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Output, Weights
from support.judging import expect_pass
from support.options import Plain
from support.readings import evidence, findings


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, H, L, d)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


class NeedsBias(Plain):
    """Can be built without biases, but not called."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + 0 * self.q.bias.sum())


class NotInHalf(Plain):
    """Computes in no dtype of 16 bits."""

    def weigh(self, weights: Tensor) -> Tensor:
        if weights.element_size() == 2:
            raise NotImplementedError("half")
        return weights


def test_biases_and_dtypes_that_cannot_be_called_are_not_claimed() -> None:
    assert infer(NeedsBias).implementation.claims.bias == {True}
    result = infer(NotInHalf)
    assert result.implementation.claims.dtypes == {"float64", "float32"}
    assert findings(result)["dtypes"].startswith("float64, float32; not in bfloat16 and float16: ")


class InSingle(Plain):
    """Computes in float32 alone."""

    def weigh(self, weights: Tensor) -> Tensor:
        return (
            weights * torch.ones((), dtype=torch.float32)
            if weights.dtype == torch.float32
            else weights[0, 0, 0, 99]
        )


def test_class_that_computes_in_float32_alone_is_inferred() -> None:
    assert infer(InSingle).implementation.claims.dtypes == {"float32"}


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


def test_biases_may_be_absent_rather_than_none() -> None:
    result = infer(BiasesIfAskedFor)
    assert findings(result)["biases"] == "with or without"
    assert evidence(result)["biases"] == "tested"
    expect_pass(result, "CFG-5", "GRD-1")


def attend_lengths_first(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, causal: bool = False
) -> Any:
    """(B, L, H, d), a mask (B, S) that is True where a key is masked, and the weights in a dict."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attn_mask is not None:
        assert attn_mask.shape == (len(k), k.shape[2])
        scores = scores.masked_fill(attn_mask[:, None, None], -torch.inf)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(future, -torch.inf)
    return {"out": (scores.softmax(-1) @ v).transpose(1, 2), "weights": scores.softmax(-1)}


def test_plain_functions_are_inferred_as_kernels() -> None:
    claims = infer_kernel(attend).implementation.claims
    assert (claims.empty_row, claims.returns_weights, claims.causal) == (
        "uniform",
        False,
        "top_left",
    )
    result = infer_kernel(attend_lengths_first)
    assert 'from_kernel(\n    attend_lengths_first,\n    mask="drop",' in result.declaration
    assert 'layout="b l h d"' in result.declaration
    assert findings(result)["mask"] == "attn_mask: True = may not attend, of shape 'b s'"
    assert result.implementation.claims.causal == "bottom_right"


def attend_in_numpy(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A tensor that requires a gradient has no `numpy`."""
    return attend(*(torch.from_numpy(x.numpy()) for x in (query, key, value)))


class InNumpy(Plain):
    def weigh(self, weights: Tensor) -> Tensor:
        return torch.from_numpy(weights.numpy())


def test_gradients_are_not_claimed_where_calls_raise_with_them() -> None:
    for result in (infer_kernel(attend_in_numpy), infer(InNumpy)):
        assert not result.implementation.claims.gradients
        assert findings(result)["gradients"] == "none: with them, calls raise"
    expect_pass(infer(InNumpy), "HED-1")


def test_function_that_computes_something_else_is_refused() -> None:
    with pytest.raises(
        ImplementationError, match=r"its output matches no formula of attention; .*from_kernel"
    ):
        infer_kernel(lambda q, k, v: attend(q, k, v.exp()))


def test_other_frameworks_are_named() -> None:
    for package, name in {
        "flax.linen": "Flax",
        "keras.src.layers": "Keras",
        "mlx.nn": "MLX",
    }.items():
        base = type("Module", (), {"__module__": package})
        assert framework_of(type("Attention", (base,), {"__module__": "mine"})) == name
    assert framework_of(Plain) is None


class Wrapped(registry.Correct):
    """Keyword `call=` returns a plain tuple."""


def test_call_may_return_a_plain_tuple_or_mapping() -> None:
    def call(module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        output, weights, _ = module(query, key, value, options["mask"])
        return (
            (output, weights, "a cache")
            if options["need_weights"]
            else {"attentions": weights, "output": output}
        )

    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    parameters = {f"w_{role}": name for role, name in names.items()}
    adapter = from_module(
        partial(Wrapped, bias=True), parameters=parameters, call=call, claims=Claims(bias={True})
    )
    config = Config(6, 2)
    attention = adapter.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")
    x = torch.ones(1, 3, 6, dtype=torch.float64)
    for need_weights in (False, True):
        result = attention(x, x, x, need_weights=need_weights)
        assert isinstance(result, Output)
        assert result.output.shape == x.shape
