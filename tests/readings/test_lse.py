"""A log-sum-exp beside the context, and values of their own width: how they are found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims, Lse, Sizes
from support.judging import expect_conforms, expect_fail, expect_pass, verdict_of

Results = tuple[Tensor, Tensor]


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    found = q @ k.mT / math.sqrt(q.shape[-1])
    found = found.to(torch.promote_types(q.dtype, torch.float32))
    return found if mask is None else found.masked_fill(~mask, -math.inf)


def natural(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Results:
    s = scores(q, k, mask)
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)


def base_two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Results:
    context, lse = natural(q, k, v, mask)
    return context, lse / math.log(2)


def infinite_if_empty(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Results:
    context, lse = natural(q, k, v, mask)
    return context, lse.masked_fill(lse == -math.inf, math.inf)


def filled_low(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Results:
    s = scores(q, k, None)
    s = s if mask is None else s.masked_fill(~mask, torch.finfo(s.dtype).min)
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)


def in_the_dtype(q: Tensor, k: Tensor, v: Tensor) -> Results:
    context, lse = natural(q, k, v)
    return context, lse.to(q.dtype)


def asked_for(
    q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool = False
) -> Tensor | Results:
    context, lse = natural(q, k, v)
    return (context, lse.transpose(1, 2).detach()) if return_softmax_lse else context


def as_a_column(q: Tensor, k: Tensor, v: Tensor) -> Results:
    context, lse = natural(q, k, v)
    return context, lse.unsqueeze(-1)


def of_tokens(q: Tensor, k: Tensor, v: Tensor) -> Results:
    context, lse = natural(q, k, v)
    return context, lse.transpose(1, 2).flatten(0, 1)


def of_heads_and_tokens(q: Tensor, k: Tensor, v: Tensor) -> Results:
    context, lse = natural(q, k, v)
    return context, lse.transpose(0, 1).flatten(1)


def without_scale(q: Tensor, k: Tensor, v: Tensor) -> Results:
    return natural(q, k, v)[0], (q @ k.mT).logsumexp(-1)


def asked_without_maximum(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False
) -> Tensor | Results:
    context, lse = natural(q, k, v)
    return (context, lse - scores(q, k, None).amax(-1)) if return_lse else context


FOUND = {
    natural: Lse(gradient=True),
    base_two: Lse(base="2", gradient=True),
    infinite_if_empty: Lse(empty="+inf", gradient=True),
    filled_low: Lse(empty="undefined", gradient=True),
    in_the_dtype: Lse(dtype="input", gradient=True),
    asked_for: Lse(layout="b l h"),
    as_a_column: Lse(layout="b h l 1", gradient=True),
    of_tokens: Lse(layout="t h", gradient=True),
    of_heads_and_tokens: Lse(layout="h t", gradient=True),
    without_scale: None,
}


@pytest.mark.parametrize("kernel", FOUND, ids=lambda kernel: kernel.__name__)
def test_log_sum_exp_is_claimed_as_trial_runs_show(kernel: Callable[..., Results]) -> None:
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.lse == FOUND[kernel]
    expect_conforms(inference, ["HED-1", "LSE"])
    rows = {row.topic: row.finding for row in inference.rows}
    assert ("no log-sum-exp: not judged" in rows["weights"]) == (kernel is without_scale)


def test_result_that_is_asked_for_as_a_log_sum_exp_must_be_one() -> None:
    implementation = infer_kernel(asked_without_maximum).implementation
    assert implementation.claims.lse == Lse()
    expect_fail(implementation, "LSE-1")


@pytest.mark.parametrize(
    ("kernel", "claimed", "reading"),
    [(base_two, Lse(), "it is that to base 2"), (natural, Lse(base="2"), "it is the natural one")],
)
def test_log_sum_exp_to_another_base_is_named(
    kernel: Callable[..., Results], claimed: Lse, reading: str
) -> None:
    claims = Claims(returns_weights=False, lse=claimed, empty_row="nan")
    implementation = from_kernel(kernel, claims=claims)
    verdict = verdict_of(implementation, "LSE-1")
    assert verdict.message.endswith(reading)


def test_log_sum_exp_of_another_shape_is_named() -> None:
    claims = Claims(masks=(), causal=None, returns_weights=False, lse=Lse(layout="(b h) l"))
    verdict = verdict_of(
        from_kernel(lambda q, k, v: natural(q, k, v), mask=None, name="mine", claims=claims),
        "LSE-1",
    )
    assert "the call returned no log-sum-exp, though it was asked for" in verdict.message


def test_what_a_module_cannot_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an Lse, or None"):
        Claims(lse=True)  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match=r"Lse.base must be one of 'e', '2', but is '10'"):
        Lse(base="10")  # type: ignore[arg-type]  # refused


def takes_own_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return natural(q, k, v)[0]


def scaled_by_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(v.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize("kernel", [takes_own_width, scaled_by_the_values])
def test_values_of_their_own_width_are_claimed_as_trial_runs_show(
    kernel: Callable[..., Tensor],
) -> None:
    claims = infer_kernel(kernel).implementation.claims
    assert claims.value_width == (kernel is takes_own_width)
    declared = from_kernel(
        kernel,
        mask=None,
        claims=Claims(masks=(), causal=None, returns_weights=False, value_width=True),
    )
    verdict = verdict_of(declared, "VAL-1")
    assert verdict.status == ("pass" if kernel is takes_own_width else "fail")


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        (Sizes(head_dims={8, 16}), {(8, 16), (16, 8)}),
        (Sizes(head_dim_multiple=4, max_head_dim=8), {(4, 8), (8, 4)}),
        (Sizes(head_dim_pairs={(8, 4), (24, 16)}), {(8, 4), (24, 16)}),
    ],
)
def test_values_have_widths_that_are_claimed(sizes: Sizes, pairs: set[tuple[int, int]]) -> None:
    called = set()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        called.add((q.shape[-1], v.shape[-1]))
        return natural(q, k, v)[0]

    claims = Claims(masks=(), causal=None, returns_weights=False, value_width=True, sizes=sizes)
    implementation = from_kernel(attend, mask=None, claims=claims)
    expect_pass(implementation, "VAL-1")
    assert {(d_k, d_v) for d_k, d_v in called if d_k != d_v} <= pairs
    assert called & pairs
