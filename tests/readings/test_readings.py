"""Conventions that inference reads: what a constructor takes, what is dropped, what is refused, and
plain functions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance import check
from mha.conformance.faults import registry
from mha.implementations import ImplementationError, from_module
from mha.implementations.adapters.signature import memory_name
from mha.implementations.discovery.frameworks import framework_of
from mha.implementations.inference.infer import infer
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Config, Output, Weights
from support.options import DropsWeights, Plain, findings


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, H, L, d)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


class Stacked(Plain):
    """Its projections are one layer, in this order."""

    name, order = "c_attn", "qkv"

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.add_module(self.name, nn.Linear(d_model, 3 * d_model))
        del self.q, self.k, self.v

    def forward(self, x: Tensor) -> Any:
        heads = (
            self.get_submodule(self.name)(x)
            .unflatten(-1, (3, self.n_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = (heads[self.order.index(role)] for role in "qkv")
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("order", ["qkv", "kqv", "vkq"])
def test_stacked_projections_may_be_in_any_order(order: str) -> None:
    implementation = infer(type("Ordered", (Stacked,), {"order": order})).implementation
    assert implementation.parameters == {f"w_{order}": "c_attn", "w_o": "out"}
    (verdict,) = check(implementation, "quick", clauses=["HED-1"], dtypes=["float32"]).verdicts
    assert verdict.status == "pass"


def test_order_that_the_name_of_a_layer_does_not_say_is_assumed() -> None:
    rows = {
        row.topic: row
        for row in infer(type("Swapped", (Stacked,), {"name": "qkv", "order": "kqv"})).rows
    }
    assert "w_kqv: qkv" in rows["projections"].finding
    assert (
        rows["projections"].evidence
        == "assumed: the outputs show this order, though the layer is called qkv"
    )


class Smoothed(Stacked):
    """A wrong class, the name of whose layer gives the order."""

    name, order = "kqv", "kqv"

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 1.01


def test_order_in_a_name_is_that_of_a_wrong_class_too() -> None:
    assert infer(Smoothed).implementation.parameters == {"w_kqv": "kqv", "w_o": "out"}


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


@dataclass
class PlainSettings:
    """A config with a field that no name says, and one that is validated."""

    hidden: str = "unknown"
    d_model: int = 4
    num_heads: int = 2
    kv_dim: int = 1


class OfSettings(Plain):
    def __init__(self, config: PlainSettings) -> None:
        assert (config.hidden, config.kv_dim) == ("unknown", 1)
        super().__init__(config.d_model, config.num_heads)


class OfMore(Plain):
    """Reads more of its config than the annotated class has."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__(config.d_model, config.n_embd and config.num_heads)  # type: ignore[attr-defined]  # the point


class OfDictionary(Plain):
    """Its config is a dictionary."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        assert cfg.get("layers", 3) == 3
        super().__init__(cfg["emb_dim"], cfg["n_heads"], bias=cfg["qkv_bias"])


def test_config_may_be_a_dictionary() -> None:
    assert infer(OfDictionary).implementation.claims.bias == {True, False}


def test_config_is_of_the_annotated_class_if_that_is_enough() -> None:
    for cls in (OfSettings, OfMore):
        assert findings(infer(cls))["built as"] == f"{cls.__name__}(config=config)"


class TakesLayers(nn.Module):
    """Takes its projections, an index, and is causal unless it gets a mask, as in torchtune."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        layer_idx: int,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        assert layer_idx == 0
        self.heads, self.is_causal = num_heads, is_causal
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            q_proj,
            k_proj,
            v_proj,
            output_proj,
        )

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Any:
        layers = (self.q_proj, x), (self.k_proj, y), (self.v_proj, y)
        q, k, v = (f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, t in layers)
        if mask is None and self.is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return self.output_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))


def test_causal_default_is_switched_off_where_masks_replace_it() -> None:
    result = infer(TakesLayers)
    claims = result.implementation.claims
    assert (claims.cross_attention, claims.always_causal, claims.causal) == (
        "memory",
        False,
        "top_left",
    )
    assert "from functools import partial" in result.declaration
    assert "    partial(TakesLayers, is_causal=False)," in result.declaration


class Divides(Plain):
    """Takes the width of a head, and still requires that the number of heads divides d_model."""

    def __init__(self, d_model: int, n_heads: int, head_dim: int) -> None:
        assert d_model % n_heads == 0
        super().__init__(d_model, n_heads)
        self.q, self.k, self.v = (nn.Linear(d_model, n_heads * head_dim) for _ in range(3))
        self.out = nn.Linear(n_heads * head_dim, d_model)


def test_own_width_of_heads_is_claimed_only_for_every_width_of_the_model() -> None:
    assert not infer(Divides).implementation.claims.own_head_dim


class WidthsOfInputs(nn.Module):
    """Tells the widths of its inputs apart."""

    def __init__(self, query_dim: int, key_dim: int, num_heads: int) -> None:
        super().__init__()
        self.n_heads = num_heads
        self.q, self.out = (nn.Linear(query_dim, query_dim) for _ in range(2))
        self.k, self.v = (nn.Linear(key_dim, query_dim) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Any:
        layers = ((self.q, x), (self.k, context), (self.v, context))
        q, k, v = (
            layer(each).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer, each in layers
        )
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class WidthOfKeysByDefault(WidthsOfInputs):
    def __init__(self, d_model: int, num_heads: int, key_dim: int | None = None) -> None:
        super().__init__(d_model, key_dim or d_model, num_heads)


def of_inputs_and_keys(inputs: Tensor, keys: Tensor) -> None:
    """Its second input is the memory, though the first has the name of one, too."""


def test_memory_is_not_the_first_input() -> None:
    assert memory_name(inspect.signature(of_inputs_and_keys).parameters) == "keys"


@pytest.mark.parametrize("cls", [WidthsOfInputs, WidthOfKeysByDefault])
def test_width_of_keys_is_not_that_of_heads(cls: type[nn.Module]) -> None:
    result = infer(cls)
    assert not result.implementation.claims.own_head_dim
    assert check(
        result.implementation, "quick", clauses=["SHP-1", "HED-1"], dtypes=["float32"]
    ).conforms


def make(d_model: int, n_heads: int, dropout: float) -> nn.Module:
    """A function that makes a module."""
    return DropsWeights(d_model, n_heads, dropout=dropout)


def test_function_that_makes_a_module_is_inferred() -> None:
    result = infer(make)
    assert result.implementation.name == "make"
    assert result.implementation.claims.dropout is True
    assert "from_module(\n    make," in result.declaration


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
    (verdict,) = check(
        infer(InNumpy).implementation, "quick", clauses=["HED-1"], dtypes=["float32"]
    ).verdicts
    assert verdict.status == "pass"


def test_function_that_computes_something_else_is_refused() -> None:
    with pytest.raises(
        ImplementationError, match=r"its output matches no formula of attention; .*from_kernel"
    ):
        infer_kernel(lambda q, k, v: attend(q, k, v.exp()))


class NeedsPositions(Plain):
    """Requires what has no known name."""

    def forward(self, x: Tensor, positions: Any) -> Any:  # type: ignore[override]  # another signature
        return super().forward(x + positions.sum())


def test_refusal_names_what_was_given_none_and_the_parameters() -> None:
    with pytest.raises(ImplementationError) as raised:
        infer(NeedsPositions)
    assert "AttributeError: 'NoneType' object has no attribute 'sum'" in str(raised.value)
    assert "forward also requires positions, of no known meaning, and was given None" in str(
        raised.value
    )
    assert '"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}' in str(raised.value)


class OfManyOptions(Plain):
    """It reads from its config what no other class does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads)
        self.kept = config.window_pattern


def test_refusal_says_what_is_read_from_a_config() -> None:
    with pytest.raises(ImplementationError, match="its config has no window_pattern") as raised:
        infer(OfManyOptions)
    config = "hidden_size=d_model, num_attention_heads=n_heads, window_pattern=..."
    assert f"return OfManyOptions(types.SimpleNamespace({config}))" in str(raised.value)


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
