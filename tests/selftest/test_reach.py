"""Corners that only one property reaches: faults that the other properties of a clause miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mha.conformance.cases.case import Case
from mha.conformance.cases.reasons import NeedsClaim
from mha.conformance.engine.preconditions import MAY_REFUSE
from mha.conformance.engine.property_run import run_property
from mha.conformance.engine.search import PropertyResult
from mha.conformance.faults import registry as faults
from mha.conformance.faults.base import CLAIMS
from mha.conformance.harness.errors import Discard
from mha.conformance.harness.session import Session
from mha.conformance.properties.registry import properties
from mha.conformance.settings import Settings
from mha.implementations import resolve
from mha.spec import Implementation, Options, Output
from support import variants

QUICK = Settings(profile="quick", dtypes=("float32",))


def result_of(
    implementation: Implementation, clause: str, number: int, dtype: str = "float32"
) -> PropertyResult:
    """Return what the search for a failure of one property finds."""
    return run_property(implementation, properties()[clause][number - 1], dtype, "cpu", QUICK)


def fails(cls: type[faults.Complete], clause: str, number: int) -> bool:
    """Return whether a property fails for a class, where the others of its clause pass."""
    implementation = faults.implementation_of(cls)
    for prop in properties()[clause]:
        if prop.number != number and prop.requires != "HED-1":
            assert result_of(implementation, clause, prop.number).failure is None, prop.name
    return result_of(implementation, clause, number).failure is not None


def expanded_along(place: int, axis: int) -> type[faults.Complete]:
    """Return a class that reads one input wrong if it alone is expanded along an axis."""

    class Expanded(faults.Complete):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Output:
            inputs = [query, key, value]
            strides = [x.stride(axis) == 0 and x.shape[axis] > 1 for x in inputs]
            if strides[place] and sum(strides) == 1:
                inputs[place] = inputs[place].cumsum(1)
            return super().attend(*inputs, *rest)

    return Expanded


@pytest.mark.parametrize("axis", range(3), ids=["batch", "length", "width"])
@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_any_input_may_be_the_only_expanded_one(place: int, axis: int) -> None:
    assert fails(expanded_along(place, axis), "SHP-7", 2)


def stale_mask(axis: int, fill: Callable[[Tensor], Tensor]) -> type[faults.Complete]:
    """Return a class that keeps a larger mask where a call is smaller along one axis only.

    fill: what a call writes, of what it allows; False where the buffer shows.
    """

    class StaleMask(faults.Complete):
        held: Tensor | None = None

        def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            allowed, bias = super().allow(options, q, k)
            shape, held = list(allowed.shape), self.held
            fits = held is not None and held.shape[axis] > shape[axis]
            if fits and [*held.shape[:axis], *held.shape[axis + 1 :]] == [
                *shape[:axis],
                *shape[axis + 1 :],
            ]:
                allowed = allowed & (held.narrow(axis, 0, shape[axis]) | fill(allowed))
            with torch.inference_mode(False):
                self.held = (
                    allowed.clone()
                    if options.mask is not None
                    else torch.ones(shape, dtype=torch.bool)
                )
            return allowed, bias

    return StaleMask


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("axis", [0, 2, 3], ids=["items", "queries", "keys"])
def test_a_call_may_be_smaller_in_any_size(axis: int) -> None:
    assert result_of(
        faults.implementation_of(stale_mask(axis, torch.zeros_like)), "STA-3", 6
    ).failure, "the buffer of a larger call is read"
    assert not result_of(
        faults.implementation_of(stale_mask(axis, torch.ones_like)), "STA-3", 6
    ).failure


def in_turn(count: int) -> type[faults.Complete]:
    """Return a class whose outputs without gradients take turns in so many buffers."""

    class InTurn(faults.Complete):
        def attend(self, query: Tensor, *rest: Any) -> Output:
            output, weights, _ = super().attend(query, *rest)
            if torch.is_grad_enabled():
                return Output(output, weights)
            with torch.inference_mode(False):
                ring = [torch.empty(output.shape, dtype=output.dtype) for _ in range(count)]
            held = self.__dict__.setdefault("held", {}).setdefault(
                (output.shape, output.dtype), ring
            )
            held.append(held.pop(0))
            return Output(held[0].copy_(output), weights)

    return InTurn


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_stay_through_three_later_calls(count: int) -> None:
    failure = result_of(faults.implementation_of(in_turn(count)), "STA-2", 1).failure
    assert failure
    assert "a later call changed output_" in failure[1].message


@pytest.mark.parametrize("heads_first", [False, True])
def test_masks_of_more_than_256_heads_differ_in_either_order(heads_first: bool) -> None:
    class ByteIndex(faults.Complete):
        def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            allowed, bias = super().allow(options, q, k)
            joined = allowed.transpose(0, 1) if heads_first else allowed
            index = torch.arange(joined.shape[0] * joined.shape[1]) % 256
            joined = joined.flatten(0, 1)[index].unflatten(0, joined.shape[:2])
            return joined.transpose(0, 1) if heads_first else joined, bias

    assert fails(ByteIndex, "NUM-1", 5)


@pytest.mark.parametrize(("name", "message"), [("sdpa", "is not implemented"), ("tiled", "")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_backward_pass_that_cannot_be_differentiated_fails(
    name: str, message: str, dtype: str
) -> None:
    (resolved,) = resolve(name)
    claimed = replace(
        resolved.implementation,
        claims=replace(resolved.implementation.claims, second_gradients=True),
    )
    failure = result_of(claimed, "GRD-9", 2 if dtype == "float32" else 1, dtype).failure
    assert failure
    assert message in failure[1].message


class RefusesUnequal(faults.Complete):
    """Correct; a causal call with L != S raises, as CAU-3 allows."""

    def allow(self, options: Options, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if options.is_causal and q.shape[2] != k.shape[2]:
            raise ValueError("L != S")
        return super().allow(options, q, k)


@pytest.mark.parametrize("clause", ["GRD-2", "GRD-9"])
def test_gradcheck_does_not_fail_for_what_may_be_refused(clause: str) -> None:
    result = result_of(faults.implementation_of(RefusesUnequal), clause, 1, "float64")
    assert result.failure is None
    assert result.discard_reason == MAY_REFUSE
    assert result.cases


@pytest.mark.parametrize("clause", ["GRD-2", "GRD-9"])
def test_gradcheck_takes_no_rows_that_are_nan_by_policy(clause: str) -> None:
    claims = replace(CLAIMS, causal="bottom_right", empty_row="nan", returns_weights=False)
    implementation = faults.implementation_of(variants.DropsBottomRight, claims)
    case = Case(L=3, S=2, dtype="float64", causal=True, alignment="bottom_right")
    with pytest.raises(Discard, match="a row has no allowed key"):
        properties()[clause][0].function(Session(implementation, case), case)


def test_second_derivatives_are_judged_where_they_are_claimed_only() -> None:
    unclaimed = faults.implementation_of(faults.Complete, replace(CLAIMS, second_gradients=False))
    assert result_of(unclaimed, "GRD-9", 2).not_applicable == NeedsClaim("second_gradients")
