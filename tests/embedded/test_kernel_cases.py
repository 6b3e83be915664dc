"""What the cases of `judge_kernel` try: sizes that few tests have, chunks, and no other claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance import judge_kernel, kernel_cases
from mha.conformance.embedded.calling import Kernel
from mha.conformance.embedded.cases import KernelCase
from mha.conformance.embedded.order import ORDER
from mha.conformance.embedded.trial import Trial
from mha.spec import Claims, Lse, Packed, Scores
from support.gallery_kernels import CANDIDATES_CLAIM, RIGHT, kernel_of_fault

SINGLE = Claims(projections=False, returns_weights=False, masks=(), causal=None, dtypes={"float32"})


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The right context, in float32."""
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


def without_last_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Wrong where the keys are whole tiles of 128."""
    if key.shape[2] % 128 == 0:
        return attend(query, key[:, :, :-1], value[:, :, :-1])
    return attend(query, key, value)


def without_later_items(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Wrong beyond 256 items times heads."""
    context = attend(query, key, value)
    context.flatten(0, 1)[256:] = 0.0
    return context


def with_other_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Wrong where several groups have more than four heads each."""
    group = query.shape[1] // key.shape[1]
    if key.shape[1] > 1 and group > 4:
        return attend(query, key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1))
    return attend(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))


@pytest.mark.parametrize("kernel", [without_last_key, without_later_items, with_other_groups])
def test_sizes_that_few_tests_have_are_tried(kernel: Callable[..., Tensor]) -> None:
    claims = replace(SINGLE, grouped_query=kernel is with_other_groups)
    assert not judge_kernel(kernel, claims, seconds=60, until_failure=True).conforms


def of_dense_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Read inputs as if they were dense."""
    read = []
    for x in (query, key, value):
        is_shorter = x.untyped_storage().nbytes() < x.numel() * x.element_size()
        strides = torch.empty(x.shape, device="meta").stride()
        read.append(x if is_shorter else x.as_strided(x.shape, strides))
    return attend(*read)


def refuses_strides(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Right, for dense inputs only."""
    if not all(x.is_contiguous() for x in (query, key, value)):
        raise RuntimeError("inputs must be contiguous")
    return attend(query, key, value)


def test_strides_are_read_or_refused() -> None:
    report = judge_kernel(of_dense_rows, SINGLE, seconds=60)
    assert report.failing == "SHP-7"
    assert judge_kernel(refuses_strides, SINGLE, seconds=60).conforms


def in_chunks(query: Tensor, key: Tensor, value: Tensor, size: int, late: int) -> Tensor:
    """The context where queries that are `late` by some places are in chunks."""
    queries, keys = torch.arange(query.shape[2]).unsqueeze(-1), torch.arange(key.shape[2])
    allowed = (queries + late) // size == keys // size
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ value


@pytest.mark.parametrize(("late", "conforms"), [(0, True), (1, False)])
def test_chunks_are_tried(late: int, conforms: bool) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, chunk_size: int = 1 << 20) -> Tensor:
        return in_chunks(query, key, value, chunk_size, late if chunk_size < 1 << 20 else 0)

    claims = replace(SINGLE, scores=Scores(chunk=True, alignment="top_left"))
    report = judge_kernel(kernel, claims, seconds=60)
    assert report.conforms == conforms, report
    assert "CHK-1" in {verdict.clause for verdict in report.verdicts}


@pytest.mark.parametrize("claim", [{"lengths": "keys"}, {"packed": Packed()}])
def test_claims_that_no_case_tries_are_refused(claim: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="would pass unseen"):
        judge_kernel(attend, replace(SINGLE, **claim))


# Faults of the gallery, and what the only cases try that they fail.
RARE = {
    "MaskForgottenBesideWindow": ("beside", "share keys"),
    "SinkOfTheKeyHead": ("beside", "share keys"),
    "WholeHeadsUnmasked": ("whole heads",),
    "MaskOnQueries": ("row of keys",),
    "FirstItemForAll": ("row of keys",),
    "UnguardedPaddingOfNumbers": ("row of keys",),
    "FirstHeadOfItems": ("row of keys",),
    "FlatMaskForgotten": ("a mask of",),
    "MaskOf64Heads": ("66 heads",),
    "CausalForgottenBesideWindow": ("window of later keys",),
    "UnboundedIsLength": ("without a bound",),
    "ZeroScaleIsNone": ("scale of 0",),
    "GroupsTiledInLongRows": ("longer rows",),
    "TriangleOfSoManyQueries": ("fewer keys than",),
    "TriangleOf2048": ("2048",),
    "WindowForgottenBesideChunks": ("beside",),
    "CapForgottenBesideWindow": ("beside",),
    "KeylessRowsSeeAll": ("rows without a key too",),
    "WindowOfOneLessForOneQuery": ("one query with a window",),
}


def cases_about(*words: str) -> list[KernelCase]:
    """The cases of all claims of the gallery that try one of these."""
    cases = kernel_cases(CANDIDATES_CLAIM)
    return [case for case in cases if any(word in case.about for word in words)]


def failing(name: str, cases: Iterable[KernelCase]) -> set[str]:
    """The clauses that a fault of the gallery fails in these cases, without other probes."""
    kernel = Kernel.read(kernel_of_fault(name), CANDIDATES_CLAIM, "b h l d")
    trial = Trial(kernel, CANDIDATES_CLAIM, torch.device("cpu"))
    for case in cases:
        trial.judge(case)
    return {verdict.clause for verdict in trial.findings.verdicts(name, "cpu") if verdict.message}


@pytest.mark.parametrize("name", RARE)
def test_calls_that_programs_seldom_make_are_tried(name: str) -> None:
    assert len(failing(name, cases_about(*RARE[name]))) == 1


def test_a_right_kernel_keeps_all_of_them() -> None:
    words = [word for words in RARE.values() for word in words]
    assert failing(RIGHT, cases_about(*words)) == set()


def shapes_of_masks(claims: Claims) -> set[tuple[int, bool]]:
    """Of all masks, how many dimensions they have, and whether they differ between heads."""
    found = set[tuple[int, bool]]()
    for case in kernel_cases(claims):
        mask = case.build("cpu").options.mask if case.mask != "none" else None
        if mask is not None:
            found.add((mask.ndim, mask.ndim > 2 and mask.shape[-3] > 1))
    return found


def test_masks_have_the_shapes_that_are_claimed() -> None:
    claims = replace(SINGLE, masks={"bool", "float"})
    assert shapes_of_masks(claims) == {(2, False), (3, True), (4, False), (4, True)}
    assert shapes_of_masks(replace(claims, mask_ranks={4}, per_head_mask=False)) == {(4, False)}


def without_empty_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Give NaN for rows without a key, in inference only."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is None:
        return scores.softmax(-1) @ value
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    if torch.is_grad_enabled():
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ value


def test_calls_without_gradients_are_tried() -> None:
    claims = replace(SINGLE, masks={"bool"})
    cases = [case for case in kernel_cases(claims) if case.no_grad]
    report = judge_kernel(without_empty_rows, claims, cases=cases, seconds=60)
    assert report.failing == "MSK-8"


def refuses_whole_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Right, and a mask must have an entry for each key."""
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise ValueError("the mask must have the length of the keys")
    shown = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    return weights.masked_fill(~shown.any(-1, keepdim=True), 0.0) @ value


def test_a_mask_of_one_key_may_be_refused() -> None:
    claims = replace(SINGLE, masks={"bool"})
    cases = [case for case in kernel_cases(claims) if "whole heads" in case.about]
    assert len(cases) == 1
    assert judge_kernel(refuses_whole_heads, claims, cases=cases, seconds=60).conforms


def test_cases_come_in_the_order_that_was_measured() -> None:
    claims = replace(CANDIDATES_CLAIM, dtypes={"bfloat16", "float32"}, lse=Lse(), value_width=True)
    cases = kernel_cases(claims)
    assert cases[0].about == "plain: more keys than a tile"
    titles = [f"{case.clause}: {case.about}" for case in cases]
    # Long cases are tried in one dtype.
    assert list(dict.fromkeys(titles))[: len(ORDER)] == list(ORDER)
    first, second = (
        [title for title, case in zip(titles, cases, strict=True) if case.dtype == dtype]
        for dtype in ("bfloat16", "float32")
    )
    assert set(second) < set(first)
    assert cases[1] == replace(cases[0], dtype="float32")
    assert {case.dtype for case in cases[-len(second) // 2 :]} == {"float32"}
