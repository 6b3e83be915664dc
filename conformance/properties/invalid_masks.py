"""MSK-12 and MSK-14: masks of a wrong shape, of an unclaimed dtype, and of another precision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.domain import BOTH, DENSE, MODERATE, Domain
from mha.conformance.cases.mask_kinds import FLOAT
from mha.conformance.cases.transforms import as_claimed
from mha.conformance.harness.assertions import assume, expect_close, expect_each_raises
from mha.conformance.harness.errors import AdapterError, CallRaised
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import property_of
from mha.conformance.properties.support.shared_assertions import has_empty_row
from mha.implementations import UnsupportedCallError
from mha.spec import Claims, Problem
from mha.spec.dtypes import TRAITS, torch_dtype
from mha.spec.masks import INTEGERS

SMALL = Domain(layouts=DENSE, values=("normal",), max_length=5)


@property_of(
    "MSK-12",
    replace(SMALL, min_B=2, min_heads=2, min_L=2, min_S=2),
    needs=("masks", "per_item_mask"),
    must_reject=("unmasked",),
)
def masks_of_other_conventions_are_refused_or_read_as_meant(session: Session, case: Case) -> None:
    """A mask in a shape of other libraries, such as (B, S), raises, or is read as it is meant."""
    problem, claims = case.problem(), session.claims
    masks = _of_other_conventions(claims, problem, case.generator)
    assume(bool(masks), "all of these shapes are broadcastable, or mean something else")
    for name, (given, meant) in masks.items():
        try:
            output = session(as_claimed(claims, problem, given)).output
        except CallRaised:
            continue
        except AdapterError as failed:
            if not isinstance(failed.error, UnsupportedCallError):
                raise
            continue  # its adapter cannot express the call
        expected = session.expected(as_claimed(claims, problem, meant)).output
        because = (
            f"a mask {name} = {tuple(given.shape)} is accepted, so this is the result for what it"
            " means"
        )
        expect_close(output, expected, because=because)


def _of_other_conventions(
    claims: Claims, problem: Problem, generator: torch.Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return boolean masks of shapes that do not broadcast, by name, each with its meaning."""
    batch, heads, queries, keys = problem.shape
    device = problem.query.device

    def drawn(*shape: int) -> Tensor:
        mask = torch.rand(*shape, generator=generator) < 0.5
        mask[..., 0] = True  # no row is empty
        mask[..., -1] = False  # nor does one allow all, which shows nothing
        return mask.to(device)

    if claims.prefix_masks:
        return {}
    padding = drawn(batch, keys)
    masks = {"(B, S)": (padding, padding[:, None, None])}
    if claims.per_query_mask and claims.joint_masks:
        per_query, per_head = drawn(batch, queries, keys), drawn(batch, heads, queries, keys)
        masks["(B, L, S)"] = per_query, per_query[:, None]
        masks["(L, S, B)"] = per_query.permute(1, 2, 0), per_query[:, None]
        if claims.per_head_mask:
            masks["(B * H, L, S)"] = per_head.flatten(0, 1), per_head
    unambiguous = {}  # a mask of a claimed rank, or one that broadcasts, may mean something else
    for name, (given, meant) in masks.items():
        if given.ndim in claims.mask_ranks and not _broadcasts(tuple(given.shape), problem.shape):
            unambiguous[name] = given, meant
    return unambiguous


@property_of("MSK-12", SMALL, needs="masks", must_reject=("never_refuses",), number=3)
def masks_of_a_wrong_shape_are_refused(session: Session, case: Case) -> None:
    """A mask that is not broadcastable to (B, H, L, S) raises."""
    problem, calls = case.problem(), {}
    for shape in _shapes_that_do_not_broadcast(problem.shape):
        if len(shape) < 4 and len(shape) not in session.claims.mask_ranks:
            continue  # it may mean something else
        for form in sorted(session.claims.masks):
            dtype = {"bool": torch.bool, "float": problem.query.dtype, "int": torch.int64}[form]
            mask = torch.ones(shape, dtype=dtype, device=problem.query.device)
            because = (
                f"a {form} mask of shape {shape} is not broadcastable to (B, H, L, S) ="
                f" {problem.shape}"
            )
            calls[because] = partial(session, problem.change(mask=mask))
    expect_each_raises(calls)


def _shapes_that_do_not_broadcast(sizes: tuple[int, int, int, int]) -> list[tuple[int, ...]]:
    """Return shapes of masks that are wrong for these sizes, (B, H, L, S)."""
    keys = sizes[3]
    shapes: list[tuple[int, ...]] = []
    for axis, size in enumerate(sizes):
        one_axis = [1, 1, 1, 1]
        one_axis[axis] = size + 1
        shapes.append(tuple(one_axis))
    shapes += [
        (*sizes[:3], keys + 1),
        (*sizes[:3], keys + 2),
        (*sizes[:3], keys - 1),
        (1, *sizes),
        (keys + 1,),
    ]
    return [shape for shape in shapes if 0 not in shape and not _broadcasts(shape, sizes)]


def _broadcasts(shape: tuple[int, ...], sizes: tuple[int, int, int, int]) -> bool:
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    return len(shape) <= 4 and all(size in (1, full) for size, full in pairs)


# Kernels convert masks in vectors of up to 16 numbers.
@property_of(
    "MSK-14",
    Domain(masks=FLOAT, causal=BOTH, layouts=DENSE, values=MODERATE, min_S=16, max_length=33),
    max_cases=24,
)
def masks_of_another_precision_are_added_or_refused(session: Session, case: Case) -> None:
    """A float mask of another dtype than the inputs is added to the scores, or raises."""
    problem = case.problem()
    assert problem.mask is not None
    own, companions = problem.query.dtype, TRAITS[case.dtype].companions
    assume(bool(companions), f"torch promotes no other dtype with {case.dtype}")
    dtype = torch_dtype(companions[case.seed % 2])
    mask = problem.mask.to(dtype)
    rounded = problem.change(mask=mask.to(own))
    assume(
        not has_empty_row(session, rounded),
        "rounded to the other dtype, the mask leaves a row empty",
    )
    try:
        output = session(
            problem.change(mask=mask), dtypes=(own, torch.promote_types(own, dtype))
        ).output
    except CallRaised:
        return
    expected = session.expected(rounded).output
    expect_close(
        output, expected, because=f"a {mask.dtype} mask is added to the scores, or the call raises"
    )


@property_of(
    "MSK-12",
    SMALL,
    needs="masks",
    must_reject=("never_refuses",),
    number=2,
)
def masks_of_an_unclaimed_dtype_are_refused(session: Session, case: Case) -> None:
    """A mask of a dtype that is not claimed raises, instead of being reinterpreted."""
    problem = case.problem()
    dtypes = set() if "int" in session.claims.masks else {*INTEGERS}
    dtypes |= set() if "bool" in session.claims.masks else {torch.bool}
    dtypes |= set() if "float" in session.claims.masks else {problem.query.dtype}
    assume(bool(dtypes), "every dtype is claimed")
    calls = {}
    # One of the two may hide every key.
    for dtype, numbers in product(sorted(dtypes, key=str), ("ones", "zeros")):
        mask = getattr(torch, numbers)(problem.shape, dtype=dtype, device=problem.query.device)
        advice = _advice(dtype, session.claims.masks)
        because = f"a mask of {numbers} of dtype {dtype} is not claimed: {advice}"
        calls[because] = partial(session, problem.change(mask=mask))
    expect_each_raises(calls)


def _advice(dtype: torch.dtype, claimed: Collection[str]) -> str:
    """Return what to do about a mask that is accepted though its dtype is not claimed."""
    if dtype is torch.bool:
        return (
            'claim masks={"bool", "float"} if True means that a query may attend to the key, and'
            " otherwise refuse it"
        )
    if dtype.is_floating_point:
        return 'claim masks={"bool", "float"} if it is added to the scores, and otherwise refuse it'
    names = {"bool": "booleans", "float": "floats"}
    forms = " or ".join(names[form] for form in sorted(claimed))
    refuse = f"refuse it, so that callers convert it to {forms} themselves"
    if "bool" in claimed:
        return f'claim "int" if 1 and 0 count as True and False, and otherwise {refuse}'
    return refuse
