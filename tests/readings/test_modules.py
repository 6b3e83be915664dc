"""Modules that store their weights in unusual ways conform; what cannot be loaded is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mha.conformance.cases.case import Case
from mha.conformance.faults import registry as faults
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.implementations import ImplementationError, from_module, preflight
from mha.spec import Claims, Config, Options, Output, Weights, validate_call
from support.judging import expect_conforms, expect_fail, expect_pass

LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")


class Convolution(nn.Conv1d):
    """A linear layer whose weight is (out, in, 1)."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, width, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Convolutions(faults.Correct):
    """The projections are convolutions of width one."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        for name in LAYERS:
            setattr(self, name, Convolution(d_model, bias))


class Packed(faults.Correct):
    """One parameter has all matrices and one all biases; weights are loaded into their views."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.matrices = nn.Parameter(torch.zeros(4, d_model, d_model))
        self.biases = nn.Parameter(torch.zeros(4, d_model)) if bias else None
        for name in LAYERS:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        kind, _, role = name.partition("_")
        if kind in ("w", "b") and role in ("q", "k", "v", "o"):
            stacked = self.matrices if kind == "w" else self.biases
            return None if stacked is None else stacked["qkvo".index(role)]
        if name in LAYERS:
            role = "o" if name == "out_proj" else name[0]
            return lambda x: nn.functional.linear(
                x, getattr(self, f"w_{role}"), getattr(self, f"b_{role}")
            )
        return super().__getattr__(name)


class ScaleParameter(faults.Correct):
    """The scale is a parameter, which is moved with the module."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.scale = nn.Parameter(torch.tensor(self.config.head_dim**-0.5), requires_grad=False)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.scale


class WeightsInBuffers(faults.Correct):
    """The weights are buffers."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        for name in LAYERS:
            layer = getattr(self, name)
            for part, tensor in list(layer.named_parameters()):
                delattr(layer, part)
                layer.register_buffer(part, tensor.detach())


class NoKeyBias(faults.Correct):
    """The key has no bias, which the softmax would cancel."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)


class Whisper(NoKeyBias):
    """As in transformers: no key bias, a query that is scaled first, and SDPA."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        validate_call(self.config, query, key, value, mask, masks=("bool",))
        q, k, v = (
            self.split(x) for x in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        q, allowed = q * self.config.head_dim**-0.5, self.allow(Options(mask, is_causal), q, k)
        return Output(
            self.out_proj(
                self.merge(nn.functional.scaled_dot_product_attention(q, k, v, allowed, scale=1.0))
            )
        )


class OneKey(faults.Correct):
    """A single key gets all of the weight, so neither it nor the query is read."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Output:
        output, weights, _ = super().forward(query, key, value, mask, is_causal)
        if mask is None and key.shape[1] == 1:
            output = self.out_proj(self.v_proj(value)).expand(query.shape)
        return Output(output + 0.0, weights)


class CausalTable(faults.Correct):
    """The first causal call builds a table, which is part of the state from then on."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.register_load_state_dict_pre_hook(self.forget)

    @staticmethod
    def forget(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.pop(f"{prefix}table", None)
        module._buffers.pop("table", None)

    def allow(self, options: Options, q: Tensor, k: Tensor) -> Tensor:
        allowed, size = (
            super().allow(options.change(is_causal=False), q, k),
            max(q.shape[2], k.shape[2]),
        )
        if not options.is_causal:
            return allowed
        if len(self._buffers.get("table", ())) < size:  # type: ignore[arg-type]  # it is never None
            self.register_buffer("table", torch.ones(size, size, dtype=torch.bool).tril())
        return allowed & self.table[: q.shape[2], : k.shape[2]]  # type: ignore[index]  # it is a tensor


class VersionedTable(CausalTable):
    """Its state also has an entry that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class Lazy(faults.Correct):
    """W_v has no shape before the first call."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.v_proj = nn.LazyLinear(d_model, bias=bias)


NAMES = {f"{kind}_{role}": f"{kind}_{role}" for kind in "wb" for role in "qkvo"}
WITHOUT_KEY_BIAS = faults.PARAMETERS | {"w_k": "k_proj.weight", "b_k": None}
MODULES: dict[type[faults.Correct], tuple[dict[str, Any], Claims]] = {
    Convolutions: (faults.PARAMETERS, Claims()),
    Packed: (NAMES, Claims()),
    ScaleParameter: (faults.PARAMETERS, Claims()),
    WeightsInBuffers: (faults.PARAMETERS, Claims(weight_gradients=False)),
    NoKeyBias: (WITHOUT_KEY_BIAS, Claims()),
    OneKey: (faults.PARAMETERS, Claims()),
    CausalTable: (faults.PARAMETERS, Claims()),
    VersionedTable: (faults.PARAMETERS, Claims(weight_gradients=False)),
    Lazy: (faults.PARAMETERS, Claims()),
}
ABOUT_WEIGHTS = ("CFG-5", "HED-1", "GRD-1", "STA-3", "STA-4", "STA-6")


@pytest.mark.mostly_slow(4)
@pytest.mark.parametrize("cls", MODULES)
def test_module_conforms(cls: type[faults.Correct]) -> None:
    parameters, claims = MODULES[cls]
    expect_pass(from_module(cls, parameters=parameters, claims=claims), *ABOUT_WEIGHTS)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_class_without_key_bias_conforms(dtype: str) -> None:
    whisper = from_module(
        Whisper, parameters=WITHOUT_KEY_BIAS, claims=Claims(returns_weights=False)
    )
    clauses = (
        "SMX-3",
        "SMX-4",
        "SMX-6",
        "HED-1",
        "EQV-5",
        "EQV-6",
        "NUM-1",
        "GRD-1",
        "GRD-5",
        "GRD-7",
        "STA-3",
    )
    expect_pass(whisper, *clauses, dtypes=[dtype])


@pytest.mark.parametrize(
    "name", ["one_module_is_correct_throughout_its_life", "gradients_are_within_the_bound"]
)
def test_key_bias_may_cancel_whole_keys(name: str) -> None:
    """The gradient of w_q was 9.5e-7 off; the bound of keys with a bias allowed 1.04e-7."""
    (prop,) = (prop for members in properties().values() for prop in members if prop.name == name)
    whisper = from_module(
        Whisper, parameters=WITHOUT_KEY_BIAS, claims=Claims(returns_weights=False)
    )
    case = Case(n_heads=9, L=3, S=3, inputs="self", values="integers")
    prop.function(Session(whisper, case), case)


class Normalised(faults.Correct):
    """W_q is computed from a direction and a length each time it is read."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        weight_norm(self.q_proj)


class LazyConvolution(faults.Correct):
    """W_v has no shape before the first call, and it is not a linear layer."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.v_proj = nn.LazyConv1d(d_model, 1, bias=bias)


UNLOADABLE = [
    (Normalised, "w_q .*is computed each time it is read"),
    (LazyConvolution, "w_v .*has no shape before"),
]


@pytest.mark.parametrize(("cls", "message"), UNLOADABLE)
def test_weights_that_cannot_be_loaded_are_named(cls: type[faults.Correct], message: str) -> None:
    with pytest.raises(ImplementationError, match=message):
        preflight(from_module(cls, parameters=faults.PARAMETERS))


def test_layout_of_the_output_layer_leaves_its_bias_alone() -> None:
    config = Config(d_model=6, n_heads=2)
    weights = Weights.random(config, 0)
    parameters = faults.PARAMETERS | {"w_o": ("out_proj", "d (h e) -> d (e h)")}
    built = from_module(faults.Correct, parameters=parameters).build(
        config, weights, dtype=torch.float64, device="cpu"
    )
    out: Any = built.module.out_proj
    assert torch.equal(out.bias, weights.b_o)  # type: ignore[arg-type]  # it has one
    assert torch.equal(out.weight, weights.w_o.unflatten(1, (2, 3)).mT.flatten(1))


class ProjectedElsewhere(faults.Correct):
    """Returns the contexts of its heads, as BERT's self-attention does."""

    def __init__(self, d_model: int, n_heads: int, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, bias)
        self.out_proj = nn.Identity()  # type: ignore[assignment]  # called in the same way


@pytest.mark.slow
def test_output_projection_that_is_elsewhere_is_added() -> None:
    parameters = {name: path for name, path in faults.PARAMETERS.items() if name != "w_o"}
    adapted = from_module(ProjectedElsewhere, parameters=parameters)
    clauses = ["CFG-5", "HED-1", "HED-5", "NUM-1", "GRD-5", "STA-4"]
    expect_conforms(adapted, clauses)
    expect_fail(from_module(ProjectedElsewhere, parameters=parameters | {"w_o": None}), "HED-1")
