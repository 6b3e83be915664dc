"""Options about the scores that a call cannot leave out, or whose default is that of one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.implementations.inference.kernels import infer_kernel
from mha.spec import Alibi, Scores, Window
from mha.spec.scores import NO_BOUND


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of queries (L, 1), of which the last one is the last key's, and of keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    return torch.arange(keys - queries, keys)[:, None], torch.arange(keys)


def attend(scores: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def capped_by_default(q: Tensor, k: Tensor, v: Tensor, softcap: float = 50.0) -> Tensor:
    return attend(softcap * torch.tanh(scores_of(q, k) / softcap), v)


def always_capped(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    return attend(softcap * torch.tanh(scores_of(q, k) / softcap), v)


def capped_in_single(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    return always_capped(q.float(), k.float(), v.float(), softcap).to(q.dtype)


def in_a_window(q: Tensor, k: Tensor, v: Tensor, window_size: int) -> Tensor:
    p, t = places(q, k)
    return attend(scores_of(q, k), v, (t > p) | (t <= p - window_size))


def in_a_window_by_default(
    q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int] = (127, 0)
) -> Tensor:
    p, t = places(q, k)
    left, right = window_size
    return attend(scores_of(q, k), v, (t < p - left) | (t > p + right))


def in_a_window_of_sides(
    q: Tensor, k: Tensor, v: Tensor, window_left: int, window_right: int
) -> Tensor:
    p, t = places(q, k)
    return attend(scores_of(q, k), v, (t < p - window_left) | (t > p + window_right))


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    p, t = places(q, k)
    return attend(scores_of(q, k) - slopes.view(1, -1, 1, 1) * (p - t).abs(), v)


def scaled_by_default(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.125) -> Tensor:
    return attend(q @ k.mT * scale, v)


# By function: what it claims, and what its calls are given where an option is left out.
READINGS: dict[Callable[..., Tensor], tuple[Scores, str]] = {
    capped_by_default: (Scores(softcap="before_bias"), "softcap=2.0**60"),
    always_capped: (Scores(softcap="before_bias"), "softcap=2.0**60"),
    in_a_window: (
        Scores(window=Window("count", unbounded=NO_BOUND)),
        f"window_size={NO_BOUND}",
    ),
    in_a_window_by_default: (
        Scores(window=Window("left_right", unbounded=NO_BOUND), alignment="bottom_right"),
        f"window_size=({NO_BOUND}, {NO_BOUND})",
    ),
    in_a_window_of_sides: (
        Scores(window=Window("left_right", unbounded=NO_BOUND), alignment="bottom_right"),
        f"window_left={NO_BOUND}, window_right={NO_BOUND}",
    ),
    sloped: (
        Scores(alibi=Alibi("symmetric"), alignment="bottom_right"),
        "slopes=0 of each head",
    ),
    scaled_by_default: (Scores(scale="any"), "scale=1/sqrt(d_k)"),
}


@pytest.mark.parametrize("kernel", READINGS, ids=lambda kernel: kernel.__name__)
def test_an_option_of_every_call_is_read_and_given_what_stands_for_none(
    kernel: Callable[..., Tensor],
) -> None:
    claimed, given = READINGS[kernel]

    found = infer_kernel(kernel)

    assert found.implementation.claims.scores == claimed
    assert [row.finding for row in found.rows if row.topic == "given"] == [given]
    assert not found.not_covered


def test_a_mask_that_calls_require_is_found_beside_a_cap_of_every_call() -> None:
    def gemma(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float = 50.0
    ) -> Any:
        scores = softcap * torch.tanh(scores_of(query, key) / softcap)
        return attend(scores.masked_fill(~mask, -torch.inf), value)

    found = infer_kernel(gemma)

    assert found.implementation.claims.scores == Scores(softcap="before_bias")
    assert "mask_required=True" in found.declaration


@pytest.mark.parametrize(
    ("kernel", "is_claimed"), [(always_capped, False), (capped_in_single, True)]
)
def test_float16_is_claimed_only_where_scores_survive_what_stands_for_no_cap(
    kernel: Callable[..., Tensor], is_claimed: bool
) -> None:
    found = infer_kernel(kernel)

    assert ("float16" in found.implementation.claims.dtypes) is is_claimed
    assert ("not in float16: calls raise, or results differ" in found.report()) is not is_claimed


def switched(q: Tensor, k: Tensor, v: Tensor, alibi: Any) -> Tensor:
    p, t = places(q, k)
    distances = (p - t).abs() if alibi else 0 * t
    return attend(scores_of(q, k) - distances, v)


def test_a_required_switch_of_slopes_is_said_to_be_none_and_not_covered() -> None:
    found = infer_kernel(switched)
    assert [row.finding for row in found.rows if row.topic == "given None"] == ["alibi"]
    assert not [row for row in found.rows if row.topic == "given"]
    assert "alibi=None" in found.not_covered


def test_how_many_queries_share_a_key_head_is_given_by_its_name() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor, n_rep: int) -> Tensor:
        k, v = (x.repeat_interleave(n_rep, 1) for x in (k, v))
        return attend(scores_of(q, k), v)

    assert infer_kernel(grouped).implementation.claims.grouped_query


def test_what_is_written_to_a_given_tensor_is_the_context() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, o: Tensor, sm_scale: float) -> None:
        o.copy_(attend(q @ k.mT * sm_scale, v))

    found = infer_kernel(written)

    given = [row.finding for row in found.rows if row.topic == "given"]
    assert given == ["o=a tensor of NaN to write to, sm_scale=1/sqrt(d_k)"]
    assert found.implementation.claims.scores == Scores(scale="any")


def test_a_bias_is_read_that_is_added_to_scores_of_float32() -> None:
    def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = scores_of(q.float(), k.float())
        if bias is not None:  # of float64 too, whose product with float32 raises
            scores = scores + bias
        return attend(scores, v.float()).to(q.dtype)

    found = infer_kernel(cudnn)

    assert found.implementation.claims.masks == {"bool", "float"}
    assert 'mask="additive"' in found.declaration


def test_no_bound_is_a_number_beyond_every_length() -> None:
    assert Window("count", unbounded=NO_BOUND).numbers((None, 0)) == (NO_BOUND,)
    with pytest.raises(ValueError, match=r"Window\.unbounded must be -1, None, or 1048576 or more"):
        Window("count", unbounded=512)
