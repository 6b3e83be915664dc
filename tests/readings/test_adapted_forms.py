"""Adapters give a class inputs, masks, biases and widths in its own form, if it has one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha.conformance.cases.reference import plain_formula
from mha.implementations import ImplementationError, UnsupportedCallError, from_kernel, from_module
from mha.implementations.adapters.module import ModuleImplementation
from mha.implementations.inference.infer import infer
from mha.spec import Claims, Config, Implementation, Options, Problem, Weights
from mha.spec.claims import COMPUTE_DTYPES
from support.judging import expect_pass

PROJECTIONS = {f"w_{role}": role for role in "qkvo"}


class Attend(nn.Module):
    """Attention whose heads may have their own width, and each projection a bias."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        if n_heads <= 0 or d_model <= 0:
            raise ValueError(f"d_model ({d_model}) and n_heads ({n_heads}) must be positive")
        inner, self.n_heads = n_heads * (head_dim or d_model // n_heads), n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, inner, bias=qkv_bias) for _ in range(3))
        self.o = nn.Linear(inner, d_model, bias=out_bias)

    def project(self, x: Tensor, role: str) -> Tensor:
        return getattr(self, role)(x)  # type: ignore[no-any-return]  # a layer

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """mask: boolean, True = may attend, or added to the scores."""
        inputs = {"q": query, "k": key, "v": value}
        heads = (self.n_heads, -1)
        q, k, v = (
            self.project(x, role).unflatten(-1, heads).transpose(1, 2) for role, x in inputs.items()
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        mask = torch.zeros(()) if mask is None else mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        scores = scores + mask
        kept = (scores > -torch.inf).any(-1, keepdim=True)
        weights = scores.masked_fill(~kept, 0.0).softmax(-1) * kept
        return self.o((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # of nn.Module


class FromMemory(Attend):
    """Key and value are one input, by default the query."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        return self.attend(x, context, context)


class NoKeyBias(Attend):
    """The key has no bias, as in Whisper."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.k = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)


class Stacked(Attend):
    """One layer for all inputs, with biases."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def project(self, x: Tensor, role: str) -> Tensor:
        part = slice("qkv".index(role) * x.shape[-1], ("qkv".index(role) + 1) * x.shape[-1])
        return nn.functional.linear(x, self.qkv.weight[part], self.qkv.bias[part])

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)


def problem_of(config: Config, inputs: str = "self", mask: Tensor | None = None) -> Problem:
    """Return a small problem in float64: B = 3, L = 4, and S = 4 ("self") or 5 ("memory")."""
    generator = torch.Generator().manual_seed(0)
    query, memory = (
        torch.randn(3, n, config.d_model, generator=generator, dtype=torch.float64) for n in (4, 5)
    )
    key = query if inputs == "self" else memory
    return Problem(config, Weights.random(config, 0), query, key, key, Options(mask))


def expect_formula(implementation: Implementation, problem: Problem) -> None:
    """Output and gradients of the weights are those of the plain formula."""
    attention: Any = implementation.build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    output = attention(problem.query, problem.key, problem.value, mask=problem.mask).output
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.weights.named()}
    expected = plain_formula(problem.change(**leaves), problem.allowed(None))
    torch.testing.assert_close(output, expected)
    upstream = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    output.backward(upstream)
    expected.backward(upstream)
    gradients = attention.weight_gradients()
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(gradients[name], leaf.grad)


SELF = {"masks": (), "causal": None, "cross_attention": False, "returns_weights": False}


@pytest.mark.parametrize(
    ("cls", "parameters", "biases"),
    [
        (NoKeyBias, PROJECTIONS, {"qvo"}),
        (NoKeyBias, PROJECTIONS, {"vo", False}),
        (Stacked, {"w_qkv": "qkv", "w_o": "o"}, {True, "qvo", "k", False}),
        (
            Stacked,
            {"w_qkv": "qkv.weight", "b_qkv": "qkv.bias", "w_o": "o"},
            {True, "qvo", "k", False},
        ),
    ],
)
def test_each_projection_may_have_a_bias(
    cls: Any, parameters: Any, biases: set[bool | str]
) -> None:
    implementation = from_module(
        cls, parameters=parameters, mask=None, claims=Claims(**SELF, bias=biases)
    )
    for bias in biases:
        expect_formula(implementation, problem_of(Config(6, 2, bias=bias)))


def test_arguments_for_biases_are_true_if_one_of_their_projections_has_one() -> None:
    adapter = from_module(FromMemory, parameters=PROJECTIONS, mask=None)
    built = {}
    for bias in (True, "qkv", "k", "o", False):
        config = Config(6, 2, bias=bias)
        module: Any = adapter.build(
            config, Weights.random(config, 0), dtype=torch.float64, device="cpu"
        ).module
        built[bias] = (module.q.bias is not None, module.o.bias is not None)
    both = (True, True)
    assert built == {
        True: both,
        "qkv": (True, False),
        "k": (True, False),
        "o": (False, True),
        False: (False, False),
    }


def test_missing_bias_is_named() -> None:
    adapter = from_module(NoKeyBias, parameters=PROJECTIONS, mask=None, claims=Claims(**SELF))
    config = Config(6, 2)
    with pytest.raises(
        ImplementationError, match=r"w_k \(k\).bias is missing, .*; see Claims.bias"
    ):
        adapter.build(config, Weights.random(config, 0), dtype=torch.float64, device="cpu")


@pytest.mark.parametrize("n_heads", [1, 3])
def test_heads_may_have_a_width_of_their_own(n_heads: int) -> None:
    config = Config(4, n_heads, d_head=5)
    module = from_module(
        FromMemory, parameters=PROJECTIONS, mask=None, claims=Claims(**SELF, own_head_dim=True)
    )
    kernel = from_kernel(
        lambda q, k, v: torch.softmax(q @ k.mT / 5**0.5, -1) @ v,
        mask=None,
        claims=Claims(masks=(), causal=None, returns_weights=False, own_head_dim=True),
    )
    for implementation in (module, kernel):
        expect_formula(implementation, problem_of(config))


def test_width_of_heads_needs_an_argument() -> None:
    with pytest.raises(
        ImplementationError,
        match="claims own_head_dim, but none of the parameters of its constructor",
    ):
        from_module(
            NoKeyBias, parameters=PROJECTIONS, mask=None, claims=Claims(**SELF, own_head_dim=True)
        )


def test_one_input_is_key_and_value() -> None:
    claims = Claims(**SELF | {"cross_attention": "memory"})
    adapter = from_module(FromMemory, parameters=PROJECTIONS, mask=None, claims=claims)
    problem = problem_of(Config(6, 2), "memory")
    expect_formula(adapter, problem)
    attention = adapter.build(problem.config, problem.weights, dtype=torch.float64, device="cpu")
    with pytest.raises(
        UnsupportedCallError, match="FromMemory takes key and value as one input, context"
    ):
        attention(problem.query, problem.key, problem.value.clone())
    with pytest.raises(
        ImplementationError, match="the claims cross_attention=True; claim cross_attention='memory'"
    ):
        from_module(
            FromMemory, parameters=PROJECTIONS, mask=None, claims=Claims(masks=(), causal=None)
        )


def test_class_of_all_these_forms_is_inferred() -> None:
    inferred = infer(FromMemory).implementation
    expected = {
        **SELF,
        "cross_attention": "memory",
        "own_head_dim": True,
        "bias": {True, "qkv", "o", False},
        "dtypes": COMPUTE_DTYPES,
    }
    assert inferred.claims == Claims(**expected)
    assert infer(NoKeyBias).implementation.claims.bias == {"qvo"}


class TwoMasks(Attend):
    """Takes a mask (B * H, L, S) and one of keys (B, S), True = masked, and remembers both."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.given: tuple[Tensor | None, Tensor | None] = (None, None)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        self.given = (attn_mask, key_padding_mask)
        allowed = (
            torch.ones(x.shape[:2], dtype=torch.bool)
            if key_padding_mask is None
            else ~key_padding_mask
        )
        if allowed.shape != x.shape[:2] or allowed.dtype != torch.bool:
            raise ValueError("the mask of keys must be boolean, and have the shape (B, S)")
        allowed = allowed[:, None, None]
        if attn_mask is not None:
            if attn_mask.dtype != torch.bool or attn_mask.shape != (
                len(x) * self.n_heads,
                x.shape[1],
                x.shape[1],
            ):
                raise ValueError("the mask must be boolean, and have the shape (B * H, L, S)")
            allowed = allowed & ~attn_mask.unflatten(0, (-1, self.n_heads))
        return self.attend(x, x, x, allowed)


class SharedMask(Attend):
    """Adds a mask (L, S) to the scores; a mask of keys (B, S) is True where one may attend."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        added = x.new_zeros(x.shape[1], x.shape[1]) if attn_mask is None else attn_mask
        kept = torch.ones(x.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
        if added.shape != (x.shape[1],) * 2 or added.dtype != x.dtype or kept.shape != x.shape[:2]:
            raise ValueError(
                "attn_mask must have the shape (L, S) and the dtype of x, and padding_mask (B, S)"
            )
        return self.attend(x, x, x, added.masked_fill(~kept[:, None, None], -torch.inf))


TWO_MASKS: dict[str, ModuleImplementation] = {
    "(b h) l s": from_module(
        TwoMasks,
        parameters=PROJECTIONS,
        mask="drop",
        mask_shape="(b h) l s",
        padding="drop",
        claims=Claims(cross_attention=False, returns_weights=False, bias={True}),
    ),
    "l s": from_module(
        SharedMask,
        parameters=PROJECTIONS,
        mask="additive",
        mask_shape="l s",
        padding="keep",
        claims=Claims(
            cross_attention=False,
            returns_weights=False,
            bias={True},
            per_head_mask=False,
            joint_masks=False,
        ),
    ),
}


KEYS = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None]


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


HEADS = torch.stack([CAUSAL, CAUSAL.new_ones(4, 4)])


@pytest.mark.parametrize(
    ("mask", "is_causal", "given"),
    [
        (None, False, (None, None)),
        (KEYS, False, (None, ~KEYS)),
        (CAUSAL, False, (~CAUSAL, None)),
        (None, True, (~CAUSAL, None)),
        (KEYS, True, (~CAUSAL, ~KEYS)),
        (HEADS & KEYS, False, (~(HEADS | ~KEYS), ~KEYS)),
    ],
    ids=["none", "keys", "queries", "causal", "keys and causal", "heads and keys"],
)
def test_mask_is_split_into_padding_and_the_rest(
    mask: Tensor | None, is_causal: bool, given: tuple[Tensor | None, Tensor | None]
) -> None:
    problem = problem_of(Config(6, 2), mask=mask)
    attention = TWO_MASKS["(b h) l s"].build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    output = attention(
        problem.query, problem.key, problem.value, mask=mask, is_causal=is_causal
    ).output
    expected = plain_formula(problem, problem.change(is_causal=is_causal).allowed("top_left"))
    torch.testing.assert_close(output, expected)
    rest, padding = attention.module.given
    assert (rest is None) == (given[0] is None)
    assert (padding is None) == (given[1] is None)
    if given[0] is not None and rest is not None:
        assert torch.equal(rest, given[0].expand(3, 2, 4, 4).flatten(0, 1))
    if given[1] is not None and padding is not None:
        assert torch.equal(padding, given[1][:, 0, 0])


def test_mask_for_all_items_is_split_from_the_padding() -> None:
    problem = problem_of(Config(6, 2), mask=CAUSAL & KEYS)
    attention = TWO_MASKS["l s"].build(
        problem.config, problem.weights, dtype=torch.float64, device="cpu"
    )
    inputs = problem.query, problem.key, problem.value
    torch.testing.assert_close(
        attention(*inputs, mask=problem.mask).output, plain_formula(problem, problem.allowed(None))
    )
    with pytest.raises(
        UnsupportedCallError, match="a padding mask and a mask for all items, whose AND this is not"
    ):
        attention(*inputs, mask=torch.stack([CAUSAL, CAUSAL.mT, CAUSAL])[:, None])
    with pytest.raises(
        UnsupportedCallError, match="takes numbers in the mask for all items, and not as padding"
    ):
        attention(*inputs, mask=torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("shape", TWO_MASKS)
def test_class_with_two_masks_is_inferred_and_conforms(shape: str) -> None:
    declared = TWO_MASKS[shape]
    inferred = infer(declared.constructor).implementation
    assert (inferred.call, inferred.claims.masks) == (
        replace(declared.call, claims=inferred.claims),
        declared.claims.masks,
    )
    clauses = ["SHP-1", "MSK-1", "MSK-2", "MSK-6", "MSK-8", "MSK-12", "CAU-1", "PTH-3", "NUM-1"]
    expect_pass(declared, "NUM-1", also=clauses)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a shape without heads": (
        {"mask_shape": "b l s"},
        "can express the claims per_head_mask=True; claim per_head_mask=False",
    ),
    "a shape of keys": (
        {"mask_shape": "b s", "claims": Claims(per_head_mask=False, cross_attention=False)},
        (
            "the claims per_query_mask=True, causal='top_left'; claim per_query_mask=False,"
            " causal=None"
        ),
    ),
    "padding apart from a shared mask": (
        {
            "mask_shape": "l s",
            "padding": "drop",
            "claims": Claims(per_head_mask=False, cross_attention=False),
        },
        "the claims joint_masks=True; claim joint_masks=False",
    ),
    "numbers that are booleans": (
        {"mask_numbers": True, "claims": Claims(cross_attention=False, masks={"bool", "float"})},
        "claim masks={'bool'}",
    ),
    "padding without a parameter": (
        {"padding": "drop"},
        "padding='drop', but none of its parameters .* a padding mask",
    ),
    "padding without another mask": (
        {"mask": None, "padding": "drop"},
        "pass mask='drop' and mask_shape='b s'",
    ),
}


class OneMask(Attend):
    """Takes one mask."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, x, attn_mask)


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_declaration_that_contradicts_itself_is_explained_in_one_line(contradiction: str) -> None:
    options, message = CONTRADICTIONS[contradiction]
    cls = TwoMasks if "apart" in contradiction else OneMask
    with pytest.raises(ImplementationError, match=message) as raised:
        from_module(
            cls, parameters=PROJECTIONS, **{"claims": Claims(cross_attention=False), **options}
        )
    assert "\n" not in str(raised.value)


def test_claims_by_default_are_those_that_can_be_expressed() -> None:
    claims = from_module(OneMask, parameters=PROJECTIONS, mask_shape="b s").claims
    assert claims == Claims(
        cross_attention=False, per_head_mask=False, per_query_mask=False, causal=None
    )
