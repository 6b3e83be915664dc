"""PTH-4 where a mask takes the place of the causal flag, as is claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Claims
from support.judging import RIGHT, verdict_of

# To look for causes and simpler cases takes longer than to judge.
pytestmark = pytest.mark.usefixtures("undiagnosed", "unshrunk")

CLAIMS = Claims(causal_with_mask="mask_alone", returns_weights=False)


def attended(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> Tensor:
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    for mask in masks:
        if mask is not None:
            allowed = allowed & mask
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


def mask_alone(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    flag = causal and custom_mask is None
    return attended(q, k, v, custom_mask, triangle(q, k) if flag else None)


def of_transformers(
    module: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
) -> Tensor:
    return mask_alone(q, k, v, attention_mask, bool(is_causal))


def flag_dropped(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool | None = None
) -> Tensor:
    return mask_alone(q, k, v, attn_mask, bool(is_causal))


def both(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    return attended(q, k, v, custom_mask, triangle(q, k) if causal else None)


def test_both_fail_where_the_mask_alone_is_claimed() -> None:
    verdict = verdict_of(from_kernel(both, mask="keep", claims=CLAIMS), "PTH-4")
    assert verdict.status == "fail"
    assert "the mask applies alone, as is claimed" in verdict.message


@pytest.mark.parametrize("kernel", [mask_alone, of_transformers])
def test_a_mask_in_the_place_of_the_flag_is_read_and_judged(kernel: Callable[..., Tensor]) -> None:
    inference = infer_kernel(kernel)
    rows = {row.topic: row.finding for row in inference.rows}
    assert rows["causal"].endswith("; beside a mask, the flag has no effect")
    assert inference.implementation.claims.causal_with_mask == "mask_alone"
    assert verdict_of(inference, "PTH-4", RIGHT).status == "pass"


def test_a_flag_that_is_none_by_default_is_not_meant_to_be_dropped_beside_a_mask() -> None:
    inference = infer_kernel(flag_dropped)
    rows = {row.topic: row.finding for row in inference.rows}
    assert rows["causal"].endswith('if that is meant, claim causal_with_mask="mask_alone"')
    assert verdict_of(inference, "PTH-4").status == "fail"


def test_both_are_not_claimed_to_apply() -> None:
    assert not CLAIMS.combines_causal
    assert Claims(always_causal=True, causal_with_mask=False).combines_causal
    with pytest.raises(ValueError, match="causal_with_mask must be one of True, False"):
        Claims(causal_with_mask="both")  # type: ignore[arg-type]  # no such value
