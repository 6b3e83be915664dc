"""Windows: how an argument counts, and what is read otherwise fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mha.implementations import from_kernel
from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.declared import DeclaredKernel
from mha.implementations.inference.kernels import infer_kernel
from mha.implementations.inference.windows import WINDOW
from mha.spec import Claims, Scores, Window, causal_mask, window_mask
from mha.spec.scores import Bounds, WindowForm
from support.judging import expect_conforms, expect_fail, judged

ALL: tuple[Bounds, ...] = ((0, 0), (2, 1), (None, 1), (3, None), (None, None))


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return the context of heads (B, H, L, d_k); zeros where no key is allowed."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
    return weights @ v


def causal_part(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Return the causal mask from the end, or what allows all."""
    lengths = q.shape[2], k.shape[2]
    return (
        causal_mask(*lengths, "bottom_right")
        if is_causal
        else torch.ones(lengths, dtype=torch.bool)
    )


def flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    left, right = (None if bound < 0 else bound for bound in window_size)
    seen = window_mask(q.shape[2], k.shape[2], (left, right), "bottom_right")
    return attend(q, k, v, seen & causal_part(q, k, causal))


def of_flashinfer(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_left: int = -1
) -> Tensor:
    left = None if window_left < 0 else window_left
    seen = window_mask(q.shape[2], k.shape[2], (left, None), "bottom_right")
    return attend(q, k, v, seen & causal_part(q, k, causal))


def of_transformers(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, sliding_window: int | None = None
) -> Tensor:
    left = None if sliding_window is None else sliding_window - 1
    seen = window_mask(q.shape[2], k.shape[2], (left, None), "bottom_right")
    return attend(q, k, v, seen & causal_part(q, k, is_causal))


def of_sglang(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, sliding_window_size: int = -1
) -> Tensor:
    left = None if sliding_window_size < 0 else sliding_window_size
    seen = window_mask(q.shape[2], k.shape[2], (left, None), "bottom_right")
    return attend(q, k, v, seen & causal_part(q, k, is_causal))


def of_onnx(
    q: Tensor, k: Tensor, v: Tensor, left_window_size: int = -1, right_window_size: int = -1
) -> Tensor:
    left, right = (None if bound < 0 else bound for bound in (left_window_size, right_window_size))
    return attend(q, k, v, window_mask(q.shape[2], k.shape[2], (left, right), "top_left"))


def of_jax(q: Tensor, k: Tensor, v: Tensor, local_window_size: int | None = None) -> Tensor:
    seen = window_mask(q.shape[2], k.shape[2], (local_window_size, local_window_size), "top_left")
    return attend(q, k, v, seen)


def of_cudnn(
    q: Tensor, k: Tensor, v: Tensor, left_bound: int | None = None, right_bound: int | None = None
) -> Tensor:
    left = None if left_bound is None else left_bound - 1
    return attend(q, k, v, window_mask(q.shape[2], k.shape[2], (left, right_bound), "top_left"))


def exclusive(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """The last key of each side is left out, so that no window has only its own key."""
    left, right = (None if bound < 0 else max(bound - 1, 0) for bound in window_size)
    seen = window_mask(q.shape[2], k.shape[2], (left, right), "bottom_right")
    return attend(q, k, v, seen & causal_part(q, k, causal))


def ignoring(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    return attend(q, k, v, causal_part(q, k, causal))


READINGS: dict[Callable[..., Tensor], tuple[Scores, str]] = {
    flash: (Scores(window=Window("left_right")), "both inclusive; -1 for no bound"),
    of_flashinfer: (Scores(window=Window("left")), "keys before its own; -1 for no bound"),
    of_transformers: (
        Scores(window=Window("count", unbounded=None)),
        "its own among them; None for no bound",
    ),
    of_sglang: (Scores(window=Window("left")), "keys before its own; -1 for no bound"),
    of_onnx: (
        Scores(window=Window("left_right"), alignment="top_left"),
        "-1 for no bound, aligned top-left",
    ),
    of_jax: (
        Scores(window=Window("symmetric", unbounded=None), alignment="top_left"),
        "on either side of its own",
    ),
    of_cudnn: (
        Scores(window=Window("count_right", unbounded=None), alignment="top_left"),
        "its own among them",
    ),
}


@pytest.mark.parametrize("bounds", ALL)
@pytest.mark.parametrize("lengths", [(3, 3), (2, 5), (5, 2), (1, 4)])
def test_a_window_is_what_its_docstring_says(lengths: tuple[int, int], bounds: Bounds) -> None:
    queries, keys = lengths
    left, right = bounds
    for alignment, offset in (("top_left", 0), ("bottom_right", keys - queries)):
        mask = window_mask(queries, keys, bounds, alignment)  # type: ignore[arg-type]  # of two words
        for query in range(queries):
            for key in range(keys):
                place = query + offset
                after_start = left is None or key >= place - left
                before_end = right is None or key <= place + right
                assert bool(mask[query, key]) == (after_start and before_end)


@pytest.mark.parametrize("form", get_args(WindowForm))
def test_what_a_form_says_is_what_it_can_say(form: WindowForm) -> None:
    declared = Window(form)
    for bounds in ALL:
        nearest = declared.nearest(bounds)
        assert declared.nearest(nearest) == nearest
        assert len(declared.numbers(nearest)) == (2 if form in ("left_right", "count_right") else 1)


@pytest.mark.parametrize("fields", [{"form": "right"}, {"form": "left", "unbounded": 0}])
def test_unknown_windows_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Window\.(form|unbounded) must be"):
        Window(**fields)


def test_a_window_needs_an_alignment() -> None:
    with pytest.raises(ValueError, match="need an alignment"):
        Claims(causal=None, scores=Scores(window=Window("left")))
    assert (
        Claims(causal=None, scores=Scores(window=Window("left"), alignment="top_left")).alignment
        == "top_left"
    )


@pytest.mark.parametrize("kernel", READINGS, ids=lambda kernel: kernel.__name__)
def test_window_is_found_and_conforms(kernel: Callable[..., Tensor]) -> None:
    scores, text = READINGS[kernel]
    inference = infer_kernel(kernel)
    assert inference.implementation.claims.scores == scores
    assert text in " ".join(inference.report().split())
    expect_conforms(inference, ["WIN-1", "WIN-2", "EFF-1"])
    declared: dict[str, Any] = {}
    exec(inference.declaration, {kernel.__name__: kernel}, declared)
    assert declared["implementation"].claims == inference.implementation.claims


def with_causal_alone(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    if window_size != (-1, -1) and not causal:
        raise NotImplementedError("a window needs causal=True")
    return flash(q, k, v, causal, window_size)


def test_window_may_be_refused_without_the_causal_flag() -> None:
    inference = infer_kernel(with_causal_alone)
    assert inference.implementation.claims.scores == Scores(window=Window("left_right"))
    expect_conforms(inference, ["WIN-1", "WIN-2", "EFF-1"])


def test_window_of_another_edge_fails_as_declared() -> None:
    claims = Claims(masks=(), causal="bottom_right", scores=Scores(window=Window("left_right")))
    declared = from_kernel(exclusive, mask=None, claims=claims)
    inference = infer_kernel(exclusive)
    assert inference.implementation.claims.scores == claims.scores
    assert "assumed by its name" in " ".join(inference.report().split())
    verdict = expect_fail(declared, "WIN-1")
    assert "the window has one key too few" in (verdict.diagnosis or "")


def strict(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, window_left: int = -1
) -> Tensor:
    """The last queries have no key where there are fewer keys; raises for such rows."""
    left = None if window_left < 0 else window_left
    seen = window_mask(q.shape[2], k.shape[2], (left, None), "top_left")
    seen = seen if mask is None else seen & mask
    if not seen.any(-1).all():
        raise ValueError("a query has no key")
    return attend(q, k, v, seen)


def test_windows_that_leave_a_query_no_key_may_raise_where_masks_do() -> None:
    claims = {"causal": None, "empty_row": "error"}
    declared = DeclaredKernel(strict, "strict", mask="keep", claims=claims)
    candidate = Candidate(declared, explained=True, empty_row="error")
    found = WINDOW.find(candidate)
    assert found.claimed("scores") == Scores(window=Window("left"), alignment="top_left")
    assert found.rows["window"].evidence == "tested"


def strict_without_masks(q: Tensor, k: Tensor, v: Tensor, window_left: int = -1) -> Tensor:
    return strict(q, k, v, window_left=window_left)


def nan_without_masks(q: Tensor, k: Tensor, v: Tensor, window_left: int = -1) -> Tensor:
    left = None if window_left < 0 else window_left
    seen = window_mask(q.shape[2], k.shape[2], (left, None), "top_left")
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("kernel", "policy"), [(strict_without_masks, "error"), (nan_without_masks, "nan")]
)
def test_windows_show_what_a_query_without_a_key_gets(
    kernel: Callable[..., Tensor], policy: str
) -> None:
    candidate = Candidate(DeclaredKernel(kernel, "", claims={"causal": None}), explained=True)
    found = WINDOW.find(candidate)
    assert found.rows["window"].evidence == "tested"
    assert (found.claimed("empty_row"), found.empty_row) == (policy, policy)


def test_window_without_an_effect_is_said() -> None:
    inference = infer_kernel(ignoring)
    assert "window_size has no effect" in inference.report()
    report = judged(inference, ["EFF-1"])
    (verdict,) = report.verdicts
    assert verdict.status == "fail"
    assert "window=" in verdict.message
    assert "has no effect here" in verdict.message
