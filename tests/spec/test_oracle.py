"""The oracle against plain loops at 50 digits, `exact_attention.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.values import VALUES, make_inputs
from mha.spec import Claims, Config, Problem, oracle
from mha.spec.claims import Alignment
from support.exact_attention import assert_within, kv_heads, solve

# A radius above this part of the largest value, and above this number, would let an incorrect value
# pass.
INFORMATIVE, TINY = 1e-8, 1e-290
PLAIN = Config(d_model=15, n_heads=3)
CONFIGS = {
    "plain": PLAIN,
    "no-bias": Config(d_model=15, n_heads=3, bias=False),
    "smallest": Config(d_model=1, n_heads=1),
    "kdim-vdim": Config(d_model=10, n_heads=2, kdim=3, vdim=11),
    "two-for-four": Config(d_model=12, n_heads=4, n_kv_heads=2),
    "two-for-six": Config(d_model=12, n_heads=6, n_kv_heads=2),
    "three-for-six": Config(d_model=12, n_heads=6, n_kv_heads=3, bias=False),
    "one-for-three": Config(d_model=15, n_heads=3, n_kv_heads=1),
    "grouped-kdim-vdim": Config(d_model=12, n_heads=4, n_kv_heads=2, kdim=5, vdim=7),
    "narrow-heads": Config(d_model=7, n_heads=3, d_head=2),
    "wide-heads": Config(d_model=4, n_heads=2, d_head=5, kdim=3),
    "grouped-wide-heads": Config(d_model=3, n_heads=4, n_kv_heads=2, d_head=3, vdim=2),
    **{
        f"bias-{roles}": Config(d_model=6, n_heads=2, bias=roles)
        for roles in ("q", "k", "v", "o", "qvo", "kv")
    },
}
# B, L, S
LENGTHS = [(2, 5, 7), (2, 7, 7), (2, 7, 5), (2, 1, 7), (2, 7, 1), (1, 1, 1)]
NARROW = Config(d_model=3, n_heads=3)
# For B=2, H=3, L=5, S=7: each way to leave axes out or at 1.
MASKS = [(7,), (1,), (5, 7), (5, 1), (3, 5, 7), (3, 1, 1), (1, 1, 1, 7), (2, 1, 1, 7), (1, 1, 5, 7)]
MASKS += [(2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7), (2, 1, 5, 1), (2, 3, 5, 7)]
ALIGNMENTS: tuple[Alignment, ...] = ("top_left", "bottom_right")
EMPTY_ROWS = ("zeros", "nan", "uniform")

Sizes = tuple[int, int, int]


def assert_solved(problem: Problem, claims: Claims) -> None:
    """Assert that oracle and loops agree within the rounding of float64, in any dtype."""
    expected, solved = oracle(problem, claims), solve(problem, claims)
    float64 = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    radii = oracle(problem.change(weights=problem.weights.to(torch.float64), **float64), claims)
    for name, numbers in solved.items():
        mid, rad = getattr(expected, name).mid, getattr(radii, name).rad
        assert_within(name, mid.tolist(), rad.tolist(), numbers)
        largest = mid.nan_to_num(nan=0.0).abs().max() if mid.numel() else 0.0
        assert (rad[~mid.isnan()] <= INFORMATIVE * largest + TINY).all(), (
            f"{name}: a radius of {rad.max()}"
        )
    if claims.empty_row != "uniform":
        rows = [row for item in solved["weights"] for head in item for row in head]
        assert expected.empty.flatten().tolist() == [is_empty(row) for row in rows]


def is_empty(weights: list[Any]) -> bool:
    """Return whether a row has no positive weight; it may be NaN, or without keys."""
    return not any(weight > 0 for weight in weights)


def make(
    config: Config, sizes: Sizes, values: str = "normal", dtype: Any = torch.float64, **call: Any
) -> Problem:
    """A problem with these values, rounded to the dtype; call: its mask and its causal flag."""
    weights, *inputs = make_inputs(values, config, sizes, torch.Generator().manual_seed(0))
    return Problem(config, weights.to(dtype), *(x.to(dtype) for x in inputs)).change(**call)


def boolean(shape: tuple[int, ...]) -> Tensor:
    """A mask without a period in any axis; of several rows, the last allows no key."""
    mask = torch.tensor([i * i % 11 < 5 for i in range(math.prod(shape))]).view(shape)
    rows = mask.view(-1, shape[-1])
    if len(rows) > 1:
        rows[-1] = False
    return mask


def additive(shape: tuple[int, ...]) -> Tensor:
    """Numbers from -2 to 2, and -infinity where `boolean` does not allow."""
    numbers = (
        torch.tensor([(i * 5 % 13 - 6) / 3 for i in range(math.prod(shape))]).view(shape).double()
    )
    return numbers.masked_fill(~boolean(shape), -math.inf)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configurations(config: Config) -> None:
    assert_solved(make(config, (1, 2, 5)), Claims())


@pytest.mark.parametrize(
    "mask", [None, boolean((5, 7)), additive((2, 1, 5, 7))], ids=["none", "boolean", "additive"]
)
@pytest.mark.parametrize(
    "extras", [{"bias_kv": True}, {"zero_key": True}, {"bias_kv": True, "zero_key": True}], ids=str
)
@pytest.mark.parametrize("config", ["plain", "three-for-six"])
def test_extra_keys(config: str, extras: Any, mask: Tensor | None) -> None:
    assert_solved(
        make(replace(CONFIGS[config], **extras), (2, 5, 7), mask=mask, is_causal=mask is None),
        Claims(),
    )


@pytest.mark.parametrize("empty_row", ["zeros", "uniform"])
@pytest.mark.parametrize(
    "config", [NARROW, replace(NARROW, bias=False), replace(NARROW, zero_key=True)], ids=str
)
def test_no_keys(config: Config, empty_row: Any) -> None:
    assert_solved(make(config, (2, 3, 0)), Claims(empty_row=empty_row))


@pytest.mark.parametrize(
    ("values", "config"),
    [
        *((values, config) for values in VALUES for config in ("plain", "narrow-heads")),
        ("selection", "wide-heads"),
    ],
)
def test_values(values: str, config: str) -> None:
    assert_solved(make(CONFIGS[config], (1, 2, 7), values), Claims())


@pytest.mark.parametrize("sizes", LENGTHS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
def test_causal(sizes: Sizes, is_causal: bool, alignment: Any, empty_row: Any) -> None:
    assert_solved(
        make(NARROW, sizes, is_causal=is_causal), Claims(causal=alignment, empty_row=empty_row)
    )


@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("form", [boolean, additive])
def test_masks(form: Any, shape: tuple[int, ...], empty_row: Any) -> None:
    assert_solved(make(NARROW, (2, 5, 7), mask=form(shape)), Claims(empty_row=empty_row))


@pytest.mark.parametrize("value", [False, -math.inf])
@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
@pytest.mark.parametrize("config", ["no-bias", "two-for-four"])
def test_nothing_allowed(config: str, empty_row: Any, value: Any) -> None:
    assert_solved(
        make(CONFIGS[config], (1, 3, 5), mask=torch.full((1,), value)), Claims(empty_row=empty_row)
    )


@pytest.mark.parametrize("form", [boolean, additive])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("config", ["plain", "two-for-six", "grouped-kdim-vdim"])
def test_mask_and_causal_flag(config: str, alignment: Any, form: Any) -> None:
    problem = make(
        CONFIGS[config], (2, 3, 5), mask=form((2, CONFIGS[config].n_heads, 3, 5)), is_causal=True
    )
    assert_solved(problem, Claims(causal=alignment))


@pytest.mark.parametrize("values", ["large", "offset", "tiny", "heavy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_problems_in_low_precision_are_solved_in_float64(dtype: torch.dtype, values: str) -> None:
    assert_solved(make(PLAIN, (1, 3, 5), values, dtype, mask=additive((3, 5)).to(dtype)), Claims())


@pytest.mark.parametrize("scale", [1.0, 0.3, 1 / 15, -0.5, 40.0])
@pytest.mark.parametrize("config", ["plain", "wide-heads", "bias-qvo"])
def test_claimed_scale(config: str, scale: float) -> None:
    assert_solved(make(CONFIGS[config], (1, 2, 3)), Claims(scale=scale))


@pytest.mark.parametrize(
    ("n_kv_heads", "shared"), [(1, "000000"), (2, "000111"), (3, "001122"), (6, "012345")]
)
def test_neighbouring_heads_share_keys_and_values(n_kv_heads: int, shared: str) -> None:
    assert kv_heads(Config(d_model=6, n_heads=6, n_kv_heads=n_kv_heads)) == [
        int(head) for head in shared
    ]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_radii_only(low: torch.dtype) -> None:
    problem = make(PLAIN, (2, 5, 7), dtype=torch.float32, mask=boolean((5, 7)))
    plain, cast = oracle(problem, Claims()), oracle(problem, Claims(), autocast=low)
    for name in ("output", "weights", "context", "query", "key", "value"):
        assert torch.equal(getattr(plain, name).mid, getattr(cast, name).mid)
        assert (getattr(plain, name).rad <= getattr(cast, name).rad).all()
    assert (cast.output.rad > 100 * plain.output.rad).all()


def test_causal_problems_need_an_alignment() -> None:
    with pytest.raises(ValueError, match="alignment"):
        oracle(make(PLAIN, (1, 2, 2), is_causal=True), Claims(causal=None))
