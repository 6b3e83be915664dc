"""Classes that rotate queries and keys: their configs, signatures and widths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import pytest
import torch
from torch import Tensor, nn

from mha.conformance.faults.base import Complete, complete, implementation_of
from mha.conformance.faults.positions import NORMED_HEADS
from mha.implementations import ImplementationError
from mha.implementations.adapters.converted import converted
from mha.implementations.adapters.names import NEUTRAL_NAMES
from mha.implementations.adapters.tables import tables_in
from mha.implementations.inference.infer import infer
from mha.spec import QkNorm, Sizes
from support.judging import expect_pass, judged, verdict_of
from support.readings import expect_read
from support.right_classes import Heads


@dataclass
class StrictConfig:
    """It refuses heads of an odd width, and one of its fields has the name of a width."""

    hidden_size: int = 64
    num_attention_heads: int = 4
    out_features: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.hidden_size} is not divisible by {self.num_attention_heads}")
        if self.hidden_size // self.num_attention_heads % 2:
            raise ValueError("heads must have an even width")


def rotated(x: Tensor, pair: tuple[Tensor, Tensor], n_heads: int) -> Tensor:
    """Rotate the halves of each head of (B, N, D), as in Llama."""
    cos, sin = (part.unsqueeze(2) for part in pair)
    heads = x.unflatten(-1, (n_heads, -1))
    first, second = heads[..., : heads.shape[-1] // 2], heads[..., heads.shape[-1] // 2 :]
    return (heads * cos + torch.cat((-second, first), -1) * sin).flatten(2)


class Rotary(Heads):
    """As in Llama: what sizes are valid is left to the config."""

    def __init__(self, config: StrictConfig) -> None:
        super().__init__(config.hidden_size, 1)
        self.n_heads = config.num_attention_heads

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
    ) -> Tensor:
        q, k = (
            rotated(layer(hidden_states), position_embeddings, self.n_heads)
            for layer in (self.w_q, self.w_k)
        )
        output: Tensor = self.w_o(self.attend(q, k, self.w_v(hidden_states), attention_mask))
        return output


class Interleaved(Heads):
    """As in Cohere: columns are rotated in pairs, so heads have an even width."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None
    ) -> Tensor:
        cos, sin = position_embeddings

        def rotated(x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (self.n_heads, -1))
            turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2)
            return (heads * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).flatten(2)

        q, k = rotated(self.w_q(hidden_states)), rotated(self.w_k(hidden_states))
        output: Tensor = self.w_o(self.attend(q, k, self.w_v(hidden_states), attention_mask))
        return output


class InFours(Interleaved):
    """The width of a head is a multiple of 4, as where two axes are rotated."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        if d_model // n_heads % 4:
            raise ValueError("there must be four parts")


class InTwelves(Interleaved):
    """The width of a head is a multiple of 12."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        if d_model // n_heads % 12:
            raise ValueError("there must be twelve parts")


class ModelInEights(Interleaved):
    """What must be a multiple of 8 is d_model, not the width of a head."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        if d_model % 8:
            raise ValueError("d_model is a multiple of 8")


class OptionalRotary(Rotary):
    """As in GPT-NeoX: the rotation has a default, but cannot be left out."""

    def forward(  # type: ignore[override]  # it is called by name
        self,
        hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert hidden_states is not None
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, sin), attention_mask)


class CosinesAndSines(Rotary):
    """As in LitGPT: two inputs, and a layer that knows its index."""

    def __init__(self, config: StrictConfig, block_idx: int) -> None:
        super().__init__(config)
        self.block_idx = block_idx

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # by name
        return super().forward(x, (cos, sin), mask)


class CosinesAndCache(CosinesAndSines):
    """As in nanochat: one pair, and a cache that may be None."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        Heads.__init__(self, d_model, n_heads)

    def forward(self, x: Tensor, cos_sin: Any, kv_cache: Any, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]  # by name
        cos, sin = cos_sin
        assert kv_cache is None
        return super().forward(x, cos, sin, mask)


class OptionalPair(Heads):
    """A pair of the same name is added to queries and keys."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        own, other = position_embeddings or (0.0, 0.0)
        return self.of(hidden_states + own, hidden_states + other, hidden_states, attention_mask)


class OptionalPositions(Heads):
    """As in DETR: what is added to queries and keys has the same name, but is one tensor."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
    ) -> Tensor:
        x = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        return self.of(x, x, hidden_states, attention_mask)


def test_a_name_has_one_meaning() -> None:
    names = [name for each in NEUTRAL_NAMES.values() for name in each]
    assert len(names) == len(set(names))
    assert tables_in(("x", "position_ids", "mask")) == ("position_ids",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_complex_tables_stay_complex_in_other_dtypes(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2)
    table = torch.polar(torch.ones(3), torch.arange(3.0))
    module.register_buffer("freqs_cis", table, persistent=False)
    converted(module, dtype, "cpu")
    assert module.weight.dtype == dtype
    assert torch.equal(module.get_buffer("freqs_cis"), table)
    assert "freqs_cis" not in module.state_dict()


GIVEN = "positions    rotary, half-split, by what each call is given  [tested]"


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (Rotary, GIVEN),
        (
            Rotary,
            (
                "head_dim     a multiple of 2: with 5, ValueError: heads must have an even width "
                " [tested]"
            ),
        ),
        (
            Interleaved,
            (
                "head_dim     a multiple of 2: with 5, RuntimeError: stack expects each tensor to"
                " be equal size"
            ),
        ),
        (
            InFours,
            "head_dim     a multiple of 4: with 5, ValueError: there must be four parts  [tested]",
        ),
        (OptionalRotary, GIVEN),
        (CosinesAndSines, GIVEN),
        (CosinesAndCache, GIVEN),
        (CosinesAndCache, "given        kv_cache=None  [by name]"),
        (Interleaved, GIVEN.replace("half-split", "interleaved")),
        (OptionalPair, "not judged   position_embeddings  [unless declared]"),
        (OptionalPositions, "not judged   position_embeddings  [unless declared]"),
    ],
)
def test_class_conforms_as_it_rotates(cls: type[nn.Module], row: str) -> None:
    expect_read(cls, row, "MSK-1")


def test_config_that_refuses_valid_sizes_still_refuses_others() -> None:
    expect_read(Rotary, "built as     Rotary(config=config)", "CFG-1")


@dataclass
class ConfigOfFourHeads(StrictConfig):
    """It refuses any other number."""

    def __post_init__(self) -> None:
        if self.num_attention_heads != 4:
            raise ValueError("there must be four heads")


class OfFourHeads(Rotary):
    def __init__(self, config: ConfigOfFourHeads) -> None:
        super().__init__(config)


@pytest.mark.parametrize(
    ("cls", "refusal"),
    [
        (OfFourHeads, "there must be four heads"),
        (
            InTwelves,
            (
                "there must be twelve parts [(]test_rotary_classes.py, line .*; name a function"
                " that builds it"
            ),
        ),
    ],
)
def test_class_that_takes_too_few_sizes_is_refused(cls: type[nn.Module], refusal: str) -> None:
    with pytest.raises(ImplementationError, match=refusal):
        infer(cls)


def test_class_that_restricts_d_model_is_judged_on_heads_that_give_it() -> None:
    result = infer(ModelInEights)
    assert (
        "a multiple of 8: with 5, ValueError: d_model is a multiple of 8  [tested]"
        in result.report(400)
    )
    expect_pass(result, "SHP-1", "HED", "NUM-1")


def test_inputs_are_not_listed_as_options() -> None:
    assert (
        "hidden_states"
        not in infer(OptionalRotary).report(400).partition("built as")[2].partition("same as")[0]
    )


def test_weights_are_read_from_values_of_claimed_widths() -> None:
    report = judged(infer(InFours), ["SMX-1", "SMX-2", "MSK-2"])
    assert {verdict.status for verdict in report.verdicts} == {"pass"}
    assert min(verdict.examples for verdict in report.verdicts) >= 15


def test_dropout_is_judged_in_as_many_cases_where_widths_are_claimed() -> None:
    claims = replace(complete.claims, sizes=Sizes(head_dim_multiple=4))
    every = verdict_of(complete, "DRP-2")
    verdict = verdict_of(implementation_of(Complete, claims), "DRP-2")
    assert (
        (verdict.status, verdict.examples)
        == (every.status, every.examples)
        == ("pass", every.examples)
    )


@dataclass
class ConfigOfWidths:
    """The width of a head has a default that follows from the others, which must then be valid."""

    d_model: int = 64
    n_heads: int = 4
    head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"d_model ({self.d_model}) is not divisible by n_heads ({self.n_heads})"
                )
            self.head_dim = self.d_model // self.n_heads


class OfAConfigOfWidths(nn.Module):
    """As in Qwen 3, Mistral and LitGPT."""

    def __init__(self, config: ConfigOfWidths) -> None:
        super().__init__()
        self.n_heads, inner_width = config.n_heads, config.n_heads * (config.head_dim or 0)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.d_model, inner_width) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner_width, config.d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (self.n_heads, -1))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (each.transpose(1, 2) for each in heads)
        context = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        output: Tensor = self.o_proj(context.transpose(1, 2).flatten(2))
        return output


def test_config_of_widths_may_have_an_indivisible_d_model() -> None:
    expect_read(OfAConfigOfWidths, "sizes        the width of a head  [tested]", "HED-1")


class TypedConfig(TypedDict):
    d_model: int
    n_heads: int


class OfADictionary(OfAConfigOfWidths):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(ConfigOfWidths(config["d_model"], config["n_heads"]))


def test_dictionary_is_not_a_config_of_another_class() -> None:
    expect_read(OfADictionary, "built as     OfADictionary(config=config)", "CFG-1")


def test_a_norm_with_weights_after_a_rotation_conforms() -> None:
    """Its scores depend on more than differences of positions."""
    claims = replace(NORMED_HEADS, qk_norm=QkNorm(before_rotary=False))
    expect_pass(implementation_of(Complete, claims), "ROT-1")
